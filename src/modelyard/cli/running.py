"""Who runs in a data directory: the lock and the note that ``modelyard up`` keeps.

The lock is a ``flock`` that the supervisor takes and its planes inherit, so it
is free only when the last of them is gone, however they ended. The note beside
it says where the platform listens.
"""

import fcntl
import os
from typing import IO

import msgspec

from modelyard.cli.exits import Failure
from modelyard.config import DataDirectory
from modelyard.errors import StartupError


class Running(msgspec.Struct, frozen=True):
    """What a running ``up`` says of itself; ``url`` is empty until it is ready. ``planes`` are their process ids.

    ``restarts`` counts the rolling restarts that are over (-1: this ``up`` knows none); ``trouble`` is why the last one
    failed. ``certificate`` is the file that the URL's certificate is in, with TLS.
    """

    pid: int
    url: str
    planes: list[int] = []
    restarts: int = -1
    trouble: str = ""
    certificate: str = ""


def read_running(data: DataDirectory) -> Running | None:
    """Return the note of the ``up`` of this data directory, or None."""
    try:
        return msgspec.json.decode(data.running.read_bytes(), type=Running)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise Failure(f"Cannot read {data.running}: {error}. Restart 'modelyard up'.") from error


def write_running(data: DataDirectory, running: Running) -> None:
    """Write the note, whole or not at all."""
    draft = data.running.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(running) + b"\n")
    draft.replace(data.running)


def open_lock(data: DataDirectory) -> IO[bytes]:
    """Open the lock file.

    Raises:
        StartupError: it cannot be opened.
    """
    try:
        return data.lock.open("ab")
    except OSError as error:
        raise StartupError(f"Cannot write {data.lock}: {error.strerror}. Choose another with --data-dir.") from error


def take_lock(lock: IO[bytes]) -> bool:
    """Say whether the lock is now ours."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(data: DataDirectory) -> bool:
    """Say whether anything of an ``up`` still runs in this data directory."""
    if not data.lock.exists():
        return False
    with open_lock(data) as lock:
        return not take_lock(lock)


def is_alive(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123 - a kernel file
            return stat.read().rpartition(b")")[2].split()[0] != b"Z"
    except FileNotFoundError:
        return os.path.isdir("/proc/self") is False  # noqa: PTH112 - without /proc the signal alone has to do
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
