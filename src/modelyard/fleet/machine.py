"""This machine, and the nodes that are declared beside it, as a fleet shows them."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from modelyard.domain.nodes import NodeSeen
from modelyard.fleet import accelerators
from modelyard.fleet.accelerators import Found
from modelyard.fleet.declared import LOCAL, NONE, Declared

RESERVE_BYTES = 512 * 1024 * 1024
LOOK_TIMEOUT_S = 2.0
"""Longest wait for a GPU's driver; one that hangs costs the round no more than this."""

Cached = Callable[[], dict[str, int]]
"""Sizes of the artifacts in a weight cache by digest; called in a thread."""


class Machine:
    """This machine's node and the declared ones. ``cached`` tells what weights lie here."""

    def __init__(
        self,
        declared: Declared = NONE,
        *,
        cached: Cached = dict,
        reserve_bytes: int = RESERVE_BYTES,
        look: Callable[..., Found] = accelerators.look,
    ) -> None:
        self._declared = declared
        self._cached = cached
        self._reserve_bytes = reserve_bytes
        self._look = look
        self._looking: asyncio.Task[tuple[Found, dict[str, int]]] | None = None
        self._last: tuple[Found, dict[str, int]] = (Found(()), {})

    async def nodes(self) -> list[NodeSeen]:
        """Return this machine, then the declared nodes in their order."""
        reason = await self._refresh()
        found, cached = self._last
        local = msgspec.structs.replace(self._declared.local, accelerators=found.accelerators)
        here = NodeSeen(
            node=local,
            cached=frozenset(cached),
            cache_used_bytes=sum(cached.values()),
            is_ready=bool(found.accelerators),
            reason=reason or found.reason,
            used_bytes=found.used_bytes,
        )
        return [here, *(NodeSeen(node=node) for node in self._declared.nodes)]

    async def close(self) -> None:
        """Wait for a look that is under way."""
        if self._looking is not None:
            await asyncio.wait([self._looking], timeout=LOOK_TIMEOUT_S)

    async def _refresh(self) -> str:
        """Look again; where that hangs, keep the last look and say so. No second look begins before the first ended."""
        looking = self._looking
        if looking is None:
            looking = asyncio.create_task(asyncio.to_thread(self._see), name="a look at this machine")
            self._looking = looking
        done, _ = await asyncio.wait([looking], timeout=LOOK_TIMEOUT_S)
        if not done:
            return f"its accelerators were not seen for {LOOK_TIMEOUT_S:.0f} s: the driver does not answer"
        if self._looking is looking:  # of several who waited for this look, the first ends it
            self._looking = None
        if looking.cancelled():
            return ""
        self._last = looking.result()
        return ""

    def _see(self) -> tuple[Found, dict[str, int]]:
        return self._look(reserve_bytes=self._reserve_bytes), self._cached()


def weights_in(folder: Path) -> dict[str, int]:
    """Return what a folder of artifacts by content (``sha256/<hex>``) holds, complete ones only. Blocks."""
    sizes: dict[str, int] = {}
    try:
        for entry in (folder / "sha256").iterdir():
            if len(entry.name) == 64 and entry.is_file():
                sizes[f"sha256:{entry.name}"] = entry.stat().st_size
    except OSError:
        return sizes
    return sizes


__all__ = ["LOCAL", "Cached", "Machine", "weights_in"]
