"""How a replica's process ended, in our words."""

import os
import signal

from modelyard.fleet.processes import wait_for

STOPPED = "stopped"
_THREADS_LEAVE_S = 1.0
_UNSEEN = "exited (its exit code was not seen)"


def exit_code(pid: int) -> int | None:
    """Reap a child of ours and return its exit code as ``subprocess`` counts; None for somebody else's child."""
    status = 0

    def is_reaped() -> bool:
        nonlocal status
        reaped, status = os.waitpid(pid, os.WNOHANG)
        return reaped != 0

    try:
        # A process of several threads is a zombie before the last of them has left, and can be reaped only then.
        return os.waitstatus_to_exitcode(status) if wait_for(is_reaped, _THREADS_LEAVE_S) else None
    except ChildProcessError:
        return None


def reason_of(code: int | None, *, is_stopping: bool) -> str:
    """Return how a process ended, in our words."""
    if is_stopping:
        return STOPPED
    if code is None:
        return _UNSEEN
    if code >= 0:
        return f"exited with code {code}"
    if -code == signal.SIGKILL:
        return "killed by SIGKILL"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
