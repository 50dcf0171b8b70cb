"""What the kernel killed for want of memory, as near to a process as it says.

A bare SIGKILL may come from anybody: vLLM ends its own tree of processes with
one. The kernel counts its own kills by control group, and for the whole
machine, where many a process of others is among them. So the count of a
process's own group is looked at again and again while it runs, and only a rise
between the last look and its end is taken as the reason for that end.
"""

import re
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class Kills(NamedTuple):
    """A page of the kernel, and how many it had killed when that was read."""

    page: Path
    killed: int

    def has_risen(self) -> bool:
        """Say whether it has killed since."""
        now = _count_in(self.page)
        return now is not None and now > self.killed


def kills_around(pid: int) -> Kills | None:
    """Return the count of the group that ``pid`` is in, the machine's where groups are not counted; None: of nobody."""
    for page in (*_pages_of(pid), _PROC / "vmstat"):
        if (count := _count_in(page)) is not None:
            return Kills(page, count)
    return None


def _pages_of(pid: int) -> list[Path]:
    """Return where the count may stand, the nearest first: in a container the group's path may be the host's own."""
    try:
        lines = (_PROC / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return []
    pages = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            pages += [place / "memory.oom_control" for place in _places("memory", path)]
        elif not controllers:
            pages += [
                place / name
                for mount in ("", "unified")
                for place in _places(mount, path)
                for name in ("memory.events.local", "memory.events")
            ]
    return pages


def _places(mount: str, path: str) -> tuple[Path, Path]:
    root = _GROUPS / mount
    return root / path.lstrip("/"), root


def _count_in(page: Path) -> int | None:
    try:
        found = _COUNT.search(page.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None
