"""A wall clock that can be set while a platform runs (``fakeclock.c``); the monotonic clocks go on."""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("fakeclock.c")


@dataclass
class WallClock:
    """The date of every process that gets ``environment``."""

    folder: Path

    def __post_init__(self) -> None:
        """Build the library; a compiler is needed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.library = self.folder / "fakeclock.so"
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(self.library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        self.file = self.folder / "shift"
        self.shift_s = 0
        self.set(0)

    @property
    def environment(self) -> dict[str, str]:
        """What a process must be started with."""
        return {"LD_PRELOAD": str(self.library), "FAKECLOCK": str(self.file)}

    def set(self, shift_s: int) -> None:
        """Put the date ``shift_s`` from the true one."""
        # In place and of one length: whoever reads at this moment reads the old or the new one.
        with self.file.open("r+b" if self.file.exists() else "wb", buffering=0) as file:
            file.write(b"%-20d\n" % shift_s)
        self.shift_s = shift_s

    def unix_s(self) -> float:
        """Return the date as those processes read it."""
        return time.time() + self.shift_s
