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
from modelyard.policy.engine_model import EngineModel
from modelyard.policy.speeds import Speeds
from modelyard.stores import ControlStore, StoreUnavailableError

SAVE_S = 180.0
LAST_SAVE_S = 3.0
"""Longest that a stopping controller waits for its store."""
TOGETHER = 500
"""So many are stored in one transaction, so that who has something to write does not wait for ten thousand."""
_NEWS = 0.03
"""A fit whose iterations are less off from the stored one is not stored again: a busy engine's changes every second."""
_LOOKED_AT = ((1.0, 0.0, 500.0), (4.0, 500.0, 4000.0), (32.0, 100.0, 40_000.0))
"""Iterations that tell: requests, tokens of prompts, tokens held."""

_log = logging.getLogger(__name__)


class Fits:
    """The speeds of all versions whose engines were ever seen busy."""

    def __init__(self, *, store: ControlStore, clock: Clock) -> None:
        self.speeds = Speeds()
        self._store = store
        self._clock = clock
        self._is_loaded = False
        self._saved: dict[str, EngineModel] = {}
        """What is stored, by version."""

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
            # Whatever happens here would take the place of the cancellation, and end the controller as a failure.
            with boundary("engines' speeds"):
                try:
                    async with asyncio.timeout(LAST_SAVE_S):
                        await self.save()
                except (StoreUnavailableError, TimeoutError) as error:
                    reason = str(error) or "the store did not answer"
                    _log.warning("engines' speeds are as of some minutes ago: %s", reason)

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
        if not self._is_loaded:
            return
        for gone in self._saved.keys() - self.speeds.models.keys():
            del self._saved[gone]
        changed = [
            (version_id, model)
            for version_id, model in self.speeds.models.items()
            if model.is_known and _is_news(self._saved.get(version_id), model)
        ]
        for start in range(0, len(changed), TOGETHER):
            some = dict(changed[start : start + TOGETHER])
            encoded = {version_id: engine_model.encode(model) for version_id, model in some.items()}
            await self._store.put_engine_fits(encoded, at=self._clock.unix_s())
            self._saved |= some

    async def _load(self) -> None:
        for version_id, text in (await self._store.engine_fits()).items():
            try:
                model = engine_model.decode(text)
            except ValueError as error:
                _log.warning("the speed of %s is learned anew: %s", version_id, error)
                continue
            # What was seen while the store was away is newer, once it is enough to go by.
            seen = self.speeds.models.get(version_id)
            if seen is None or not seen.is_known:
                self.speeds.models[version_id] = model
            self._saved[version_id] = model
        self._is_loaded = True


def _is_news(stored: EngineModel | None, model: EngineModel) -> bool:
    """Say whether the next controller would miss anything."""
    if stored is None or model.samples >= 2 * stored.samples:
        return True
    return any(
        abs(model.iteration_s(*given) - before) > _NEWS * before
        for given in _LOOKED_AT
        if (before := stored.iteration_s(*given))
    )
