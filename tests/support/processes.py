"""What /proc says of processes, what files hold, and signals by pid. Linux only, as the fault tests are."""

import contextlib
import os
import signal
from pathlib import Path

PROC = Path("/proc")


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    return state(pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    """Return the one-letter state of a process, "" when it is gone."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def command_of(pid: int) -> list[str]:
    """Return the arguments of a process, [] when it is gone."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    except OSError:
        return []


def children_of(pid: int) -> list[int]:
    """Return the pids of the living children of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if is_alive(child)]


def descendants_of(pid: int) -> list[int]:
    """Return children, grandchildren and so on."""
    found: list[int] = []
    for child in children_of(pid):
        found += [child, *descendants_of(child)]
    return found


def touching(root: Path) -> list[int]:
    """Return every living process (but this one) whose command line, folder or environment names ``root``."""
    needle, found = str(root).encode(), []
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            texts = [
                (entry / "cmdline").read_bytes(),
                (entry / "environ").read_bytes(),
                bytes((entry / "cwd").readlink()),
            ]
            if any(needle in text for text in texts) and is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def holders_of(secret: bytes, root: Path) -> list[Path]:
    """Return every file below ``root`` that holds ``secret``; what goes away meanwhile holds nothing."""
    found: list[Path] = []
    for folder, _, names in os.walk(root):
        for file in (Path(folder) / name for name in names):
            with contextlib.suppress(FileNotFoundError):
                if file.is_file() and secret in file.read_bytes():
                    found.append(file)
    return sorted(found)


def environment_of(pid: int) -> bytes:
    """Return the environment that a process was started with, nothing when it is gone."""
    try:
        return (PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def send_signal(pid: int, number: signal.Signals) -> None:
    """Signal one process; nothing happens when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def memory_of(pid: int) -> int:
    """Return the resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no memory of process {pid}")
