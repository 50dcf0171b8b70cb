"""How much each tenant may store, with what is on its way counted already.

Uploads are judged by what they announce, before any of them is written: ten at
once cannot each take the place that is left for one. What a tenant has is told
by the store; this remembers only what was promised and is not there yet.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Bounds(NamedTuple):
    """What one tenant may have."""

    files: int
    size_bytes: int
    open: int
    """Uploads at the same time."""


class Refusal(Enum):
    """Why there is no room."""

    OPEN = "open"
    FILES = "files"
    BYTES = "bytes"


@dataclass(slots=True)
class _Promise:
    tenant_id: str
    size_bytes: int
    written_bytes: int = 0


class FileRoom:
    """Promises to uploads that are under way."""

    __slots__ = ("_is_judging", "_kept_back", "_promised")

    def __init__(self) -> None:
        self._promised: dict[str, _Promise] = {}
        self._is_judging = False
        self._kept_back: list[str] = []

    def __repr__(self) -> str:
        return f"<FileRoom: {len(self._promised)} uploads, {self.to_come_bytes} bytes to come>"

    @property
    def to_come_bytes(self) -> int:
        """Return what all uploads under way may still write, at most."""
        return sum(max(0, promise.size_bytes - promise.written_bytes) for promise in self._promised.values())

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Be open from before the store is asked what a tenant has until ``take``; one upload at a time.

        An upload that ends meanwhile may be missing in what the store told, so its promise counts until then.
        """
        assert not self._is_judging, "one upload is judged at a time"
        self._is_judging = True
        try:
            yield
        finally:
            self._is_judging = False
            for file_id in self._kept_back:
                self.give_back(file_id)
            self._kept_back.clear()

    def take(
        self, file_id: str, tenant_id: str, size_bytes: int, *, held_files: int, held_bytes: int, bounds: Bounds
    ) -> Refusal | None:
        """Promise room to an upload, or say why not; ``held_…`` is what the tenant has by the store."""
        assert self._is_judging, "what the store told is up to date"
        mine = [promise for promise in self._promised.values() if promise.tenant_id == tenant_id]
        if len(mine) >= bounds.open:
            return Refusal.OPEN
        if held_files + len(mine) >= bounds.files:
            return Refusal.FILES
        if held_bytes + sum(promise.size_bytes for promise in mine) + size_bytes > bounds.size_bytes:
            return Refusal.BYTES
        self._promised[file_id] = _Promise(tenant_id, size_bytes)
        return None

    def wrote(self, file_id: str, written_bytes: int) -> None:
        """Note how much of an upload is on the disk by now."""
        if (promise := self._promised.get(file_id)) is not None:
            promise.written_bytes = written_bytes

    def give_back(self, file_id: str) -> None:
        """Take a promise back: the file is there, or never will be. May be called twice."""
        if self._is_judging:
            self._kept_back.append(file_id)
        else:
            self._promised.pop(file_id, None)
