"""What the kernel knows of processes: who lives, since when, whose child it is.

A pid alone names nobody, because pids are used again; a pid with its start
time does. Linux only, as is everything that starts engines on this machine.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_PROC = Path("/proc")
_POLL_S = 0.02


def start_time(pid: int) -> int:
    """Return when ``pid`` started, in clock ticks since boot, also of a zombie; 0 when there is no such process."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Say whether the process that had ``pid`` and start time ``started`` still runs; a zombie does not."""
    fields = _stat(pid) if pid > 0 else None
    return fields is not None and fields[0] not in ("Z", "X") and int(fields[19]) == started


def is_free_or(pid: int, started: int) -> bool:
    """Say whether ``pid`` belongs to nobody now, or to that process or its zombie: then its group is no stranger's."""
    return start_time(pid) in (0, started)


@cache
def boot_id() -> str:
    """Return the id of this boot: start times of another boot mean nothing."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def identity() -> str:
    """Return what tells this process from every other one of any machine and boot, for ``is_gone``."""
    pid = os.getpid()
    return f"{os.uname().nodename}/{boot_id()}/{pid}/{start_time(pid)}"


def is_gone(identity: str) -> bool:
    """Say whether the process of an ``identity`` has certainly ended; of another machine's nobody here can tell."""
    try:
        node, boot, pid, started = identity.rsplit("/", 3)
        if node != os.uname().nodename:
            return False
        return boot != boot_id() or not is_alive(int(pid), int(started))
    except ValueError:
        return False


def find_by_environment(variables: Mapping[str, str]) -> int:
    """Return the pid of the oldest process of ours that was started with all these ``variables``, or 0."""
    wanted = {os.fsencode(f"{name}={value}") for name, value in variables.items()}
    found: list[tuple[int, int]] = []
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            if wanted <= set((_PROC / str(pid) / "environ").read_bytes().split(b"\0")):
                started = start_time(pid)
                if started:
                    found.append((started, pid))
    return min(found)[1] if found else 0


def signal_group(pid: int, number: signal.Signals) -> bool:
    """Signal the process group that ``pid`` leads; say whether anybody was there."""
    assert pid > 1, "group 0 is our own, 1 is init's"
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def die_with_parent(parent: int) -> None:
    """Make the kernel send SIGTERM to this process when its parent dies; called early in a child.

    ``parent`` is the pid that the parent told: if it died before this call, nothing would ever be sent.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def become_subreaper() -> None:
    """Make this process the parent of descendants whose own parent dies, so that they can be reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]  # noqa: PTH208 - names only, 10 times cheaper


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on; the command before it may hold blanks and brackets."""
    try:
        text = (_PROC / str(pid) / "stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def wait_for(is_done: Callable[[], bool], limit_s: float) -> bool:
    """Look again and again, in this thread, until something is done; False when it is not within ``limit_s``."""
    deadline_s = time.monotonic() + limit_s  # noqa: TID251 - the supervisor has no clock to pass
    while not is_done():
        if time.monotonic() >= deadline_s:  # noqa: TID251 - as above
            return False
        time.sleep(_POLL_S)
    return True
