"""Whose prompts the slots of a llama.cpp process hold, and which slot a request gets. Pure.

llama.cpp keeps the KV cache of a slot's last prompt and compares tokens only:
what was computed with an adapter is read for the base, and between adapters by
way of the base (issue #26207: base logprob -0.066, after an adapter on the same
slot -0.234). So a request names its slot, a slot belongs to one adapter (or the
base) at a time, and who takes it over does not read what is there.
"""

from dataclasses import dataclass
from typing import NamedTuple

BASE = ""
"""The owner that is no adapter."""
COMPARED_BYTES = 16 * 1024
_LIKE = 0.1
"""Share of a prompt that a slot must have in common with it to be chosen for that, as llama.cpp itself asks."""


class Grant(NamedTuple):
    """The slot a request runs on; ``may_read``: what its cache holds was computed for the same owner."""

    slot: int
    may_read: bool


@dataclass(slots=True)
class _Slot:
    owner: str | None = None
    """Whose KV cache it is for certain; None: nobody's, or unknown."""
    taken_by: str | None = None
    prompt: bytes = b""
    used: int = 0

    @property
    def is_free(self) -> bool:
        return self.taken_by is None


class Slots:
    """The slots of one process."""

    def __init__(self, count: int) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._uses = 0
        self.takeovers = 0

    def __repr__(self) -> str:
        told = ("free" if one.is_free else "busy" for one in self._slots)
        owners = ("-" if one.owner is None else one.owner or "base" for one in self._slots)
        return f"<Slots {', '.join(f'{owner} {state}' for owner, state in zip(owners, told, strict=True))}>"

    @property
    def running(self) -> int:
        """Return how many are taken."""
        return sum(not one.is_free for one in self._slots)

    def take(self, owner: str, prompt: bytes) -> Grant | None:
        """Return a slot for a request of ``owner``, None when all are taken. In this order:

        1. its own whose last prompt begins alike, the most alike;
        2. one that was never used;
        3. the one that was not used for longest, whosever it was.
        """
        free = [index for index, one in enumerate(self._slots) if one.is_free]
        if not free:
            return None
        prompt = prompt[:COMPARED_BYTES]
        chosen = self._most_alike(free, owner, prompt)  # (1)
        if chosen is None:
            # (2) and (3): what was never used has been used least.
            chosen = min(free, key=lambda index: self._slots[index].used)
        slot = self._slots[chosen]
        may_read = slot.owner == owner
        if slot.owner is not None and not may_read:
            self.takeovers += 1
        self._uses += 1
        slot.taken_by, slot.used, slot.prompt = owner, self._uses, prompt
        if not may_read:
            # Until it has run nobody may read it: it may hold the one's cache, or the other's, or some of both.
            slot.owner = None
        return Grant(chosen, may_read)

    def release(self, grant: Grant, *, has_run: bool) -> None:
        """Free a slot; ``has_run``: llama.cpp has begun to answer, so that the cache is this owner's."""
        slot = self._slots[grant.slot]
        assert slot.taken_by is not None, "a slot is given back once"
        if has_run:
            slot.owner = slot.taken_by
        elif not grant.may_read:
            slot.prompt = b""
        slot.taken_by = None

    def _most_alike(self, free: list[int], owner: str, prompt: bytes) -> int | None:
        def alike(index: int) -> int:
            return _common(self._slots[index].prompt, prompt)

        own = [index for index in free if self._slots[index].owner == owner]
        best = max(own, key=alike, default=None)
        return best if best is not None and alike(best) >= _LIKE * max(len(prompt), 1) else None


def _common(one: bytes, other: bytes) -> int:
    """Return how many bytes two prompts have in common at their beginning: a search, not a walk in Python."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
