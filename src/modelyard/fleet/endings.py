"""How a replica's process ended, in our words."""

import os
import signal

STOPPED = "stopped"
_UNSEEN = "exited (its exit code was not seen)"


def exit_code(pid: int) -> int | None:
    """Reap a child of ours and return its exit code as ``subprocess`` counts; None for somebody else's child."""
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if reaped else None


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
