"""Which models are in memory: bytes accounted, the longest unused guest leaves first. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Resident:
    """A model in memory. ``uses``: requests that need it now; ``is_pinned``: never evicted."""

    name: str
    memory_bytes: int
    used_s: float = 0.0
    uses: int = 0
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """Whom to evict so that a model fits; ``lacking_bytes`` is what is missing even then."""

    evict: tuple[str, ...] = ()
    lacking_bytes: int = 0


def make_room(residents: list[Resident], *, needed_bytes: int, limit_bytes: int, base_bytes: int) -> Room:
    """Say how ``needed_bytes`` fit beside ``residents`` in ``limit_bytes`` (0: no limit), of which the process itself
    has ``base_bytes``.

    A model that computes, or for which requests wait, stays. Nobody is evicted when that would not be enough.
    """
    if not limit_bytes:
        return Room()
    lacking = base_bytes + sum(one.memory_bytes for one in residents) + needed_bytes - limit_bytes
    evicted: list[str] = []
    for one in sorted(residents, key=lambda resident: resident.used_s):
        if lacking <= 0:
            break
        if not one.is_pinned and not one.uses:
            evicted.append(one.name)
            lacking -= one.memory_bytes
    return Room(tuple(evicted)) if lacking <= 0 else Room((), lacking)
