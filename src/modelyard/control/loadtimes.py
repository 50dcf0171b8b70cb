"""How long a version takes from start to ready: the median of what was measured, else the engine's estimate."""

import statistics

from modelyard.stores import ControlStore

MEASURES_KEPT = 10


class LoadTimes:
    """Measured load times, read once a version and kept in step with the store."""

    __slots__ = ("_measured", "_store")

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self._measured: dict[str, list[float]] = {}

    async def expected_s(self, version_id: str, estimate_s: float) -> float:
        """Return the seconds to expect."""
        if version_id not in self._measured:
            self._measured[version_id] = await self._store.observed_load_s(version_id)
        measured = self._measured[version_id]
        return statistics.median(measured) if measured else estimate_s

    def known(self) -> dict[str, float]:
        """Return the median seconds of each version that was measured and asked for."""
        return {version_id: statistics.median(measured) for version_id, measured in self._measured.items() if measured}

    async def add(self, version_id: str, seconds: float) -> None:
        """Remember one measurement."""
        await self._store.add_observed_load(version_id, seconds)
        if version_id in self._measured:
            self._measured[version_id] = [*self._measured[version_id], seconds][-MEASURES_KEPT:]
