"""How fast engines were seen to be, kept beyond the life of a controller: stored now and then, and at the end.

What is learned is ``Speeds``, which ``control/sizing.py`` feeds. A controller
that starts goes on with what the last one knew, gateways are told it at once,
and ``modelyard sim --replay`` begins with it. A fit that cannot be read is
logged and learned anew.
"""

import asyncio
import logging

from modelyard.clock import Clock
from modelyard.control.tasks import boundary
from modelyard.policy import engine_model
from modelyard.policy.speeds import Speeds
from modelyard.stores import ControlStore, StoreUnavailableError

SAVE_S = 180.0
LAST_SAVE_S = 3.0
"""Longest that a stopping controller waits for its store."""

_log = logging.getLogger(__name__)


class Fits:
    """The speeds of all versions whose engines were ever seen busy."""

    def __init__(self, *, store: ControlStore, clock: Clock) -> None:
        self.speeds = Speeds()
        self._store = store
        self._clock = clock
        self._is_loaded = False
        self._saved: dict[str, int] = {}
        """Samples that a version's stored fit has."""

    def __repr__(self) -> str:
        return f"<Fits of {len(self.speeds.models)} versions>"

    async def run(self) -> None:
        """Load, then store until cancelled, and once more then."""
        try:
            while True:
                with boundary("engines' speeds"):
                    await self.look()
                await asyncio.sleep(SAVE_S)
        finally:
            try:
                async with asyncio.timeout(LAST_SAVE_S):
                    await self.save()
            except (StoreUnavailableError, TimeoutError) as error:
                _log.warning("engines' speeds are as of some minutes ago: %s", str(error) or "the store did not answer")

    async def look(self) -> None:
        """Load what an earlier controller knew, once; then store what is new."""
        if not self._is_loaded:
            await self._load()
        await self.save()

    async def save(self) -> None:
        """Store the fits that can be trusted and have changed.

        Raises:
            StoreUnavailableError: nothing was stored; it is tried again.
        """
        changed = {
            version_id: model
            for version_id, model in self.speeds.models.items()
            if model.is_known and model.samples != self._saved.get(version_id)
        }
        if not self._is_loaded or not changed:
            return
        encoded = {version_id: engine_model.encode(model) for version_id, model in changed.items()}
        await self._store.put_engine_fits(encoded, at=self._clock.unix_s())
        self._saved |= {version_id: model.samples for version_id, model in changed.items()}

    async def _load(self) -> None:
        for version_id, text in (await self._store.engine_fits()).items():
            try:
                model = engine_model.decode(text)
            except ValueError as error:
                _log.warning("the speed of %s is learned anew: %s", version_id, error)
                continue
            # What was seen while the store was away is newer.
            self.speeds.models.setdefault(version_id, model)
            self._saved[version_id] = model.samples
        self._is_loaded = True
