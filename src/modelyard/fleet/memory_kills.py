"""What the kernel killed for want of memory, as near to a process as it says.

A bare SIGKILL may come from anybody: vLLM ends its own tree of processes with
one. The kernel counts its own kills by control group, and for the whole
machine, where many a process of others is among them. So the count of a
process's own group is looked at again and again while it runs, and only a rise
shortly before its end is taken as the reason for that end: a process that is
being killed is counted first, and lives on while it unmaps its memory.
"""

import re
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
DYING_S_MAX = 10.0
"""Longest that a process is thought to live on after the kernel counted it as killed."""
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class Kills(NamedTuple):
    """A page of the kernel, and how many it had killed when that was read."""

    page: Path
    killed: int

    def has_risen(self) -> bool:
        """Say whether it has killed since."""
        now = _count_in(self.page)
        return now is not None and now > self.killed


class _Looks(NamedTuple):
    older: Kills
    newer: Kills
    since_s: float
    last_s: float


class KillWatch:
    """The looks at one process's group, and at one that it was in until just now: at its end it leaves its own."""

    def __init__(self, look: Kills | None, now_s: float) -> None:
        self._looks: dict[Path, _Looks] = {}
        self.look(look, now_s)

    def look(self, look: Kills | None, now_s: float) -> None:
        """Take a new look."""
        for page, (_, _, _, last_s) in list(self._looks.items()):
            if now_s - last_s > DYING_S_MAX and (look is None or page != look.page):
                del self._looks[page]
        if look is None:
            return
        known = self._looks.get(look.page, _Looks(look, look, now_s, now_s))
        if now_s - known.since_s >= DYING_S_MAX:
            known = _Looks(known.newer, look, now_s, now_s)
        self._looks[look.page] = known._replace(last_s=now_s)

    def has_risen(self) -> bool:
        """Say whether the kernel has killed there of late."""
        return any(looks.older.has_risen() for looks in self._looks.values())


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
