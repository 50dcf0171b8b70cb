"""The engine as the guard's child: prepared, started, told to stop, and its end taken over.

The child stays in the guard's process group, so that what ends the replica ends
all of it; the kernel sends it SIGTERM when the guard is killed. It gets SIGTERM
from the guard too, which it may see twice then: engines take that for once.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from modelyard.engines.guard import Plan
from modelyard.fleet import processes


class Filling:
    """Puts ports and key in the place of ``@name@``."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = {f"@{name}@": value for name, value in values.items()}

    def __call__(self, text: str) -> str:
        """Return ``text`` with every name that is known replaced."""
        for name, value in self._values.items():
            text = text.replace(name, value)
        return text


def prepare(plan: Plan, fill: Filling) -> None:
    """Write the engine's files, each readable by this user only, and make its links.

    Raises:
        OSError: the disk fails, or something that is no file of ours stands in the way.
    """
    Path(plan.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, target in plan.links.items():
        _free(Path(plan.folder) / name).symlink_to(target)
    for name, text in plan.files.items():
        file = _free(Path(plan.folder) / name)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as writer:
            writer.write(fill(text))


def _free(place: Path) -> Path:
    """Return ``place`` after taking away what an earlier start left there."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        place.unlink()
    return place


def start(plan: Plan, words: Sequence[str], env: Mapping[str, str], fill: Filling) -> "subprocess.Popen[bytes]":
    """Start the engine; what it prints goes where the guard's own output goes.

    Raises:
        OSError: there is no such program, or it cannot run.
    """
    return subprocess.Popen(
        [fill(word) for word in words],
        env={name: fill(value) for name, value in env.items()},
        cwd=plan.folder,
        stdin=subprocess.DEVNULL,
        preexec_fn=partial(processes.die_with_parent, os.getpid()),  # noqa: PLW1509 - nothing else runs here yet
    )


def end_like(code: int) -> int:
    """Return the exit code that says what the engine's says; ends this process by the signal that ended the engine."""
    if code >= 0:
        return code
    sys.stdout.flush()
    number = signal.Signals(-code)
    with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 - code  # where the signal is one that does not end a process
