"""How long a version takes from start to ready: the median of what was measured, else the engine's estimate."""

import asyncio
import statistics

from modelyard.stores import ControlStore

MEASURES_KEPT = 10


class LoadTimes:
    """Measured load times, read once and kept in step with the store."""

    __slots__ = ("_measured", "_store", "_turn")

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._measured: dict[str, list[float]] | None = None

    async def expected_s(self, version_id: str, estimate_s: float) -> float:
        """Return the seconds to expect."""
        if self._measured is None:
            async with self._turn:  # thousands of passes come here at once
                if self._measured is None:
                    read = await self._store.observed_loads()
                    self._measured = {one: list(seconds) for one, seconds in read.items()}
        measured = self._measured
        seconds = measured.get(version_id)
        return statistics.median(seconds) if seconds else estimate_s

    def known(self) -> dict[str, float]:
        """Return the median seconds of each version that was measured."""
        measured = self._measured or {}
        return {version_id: statistics.median(seconds) for version_id, seconds in measured.items() if seconds}

    async def add(self, version_id: str, seconds: float) -> None:
        """Remember one measurement."""
        await self._store.add_observed_load(version_id, seconds)
        if self._measured is not None:
            self._measured[version_id] = [*self._measured.get(version_id, ()), seconds][-MEASURES_KEPT:]
