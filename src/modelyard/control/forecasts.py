"""Forecast profiles of endpoints: fed from what gateways count, stored every few minutes and at the end.

Nothing here decides: ``policy/forecast.py`` learns and ``policy/prewarming.py``
says what to have for requests to come. A profile that cannot be read is logged
and learned anew; a store that is away costs at most what came since the last
time it was written.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import msgspec

from modelyard.clock import Clock
from modelyard.control.arrivals import Arrivals
from modelyard.control.tasks import boundary
from modelyard.domain.demand import Report
from modelyard.domain.endpoints import Autoscale
from modelyard.policy import forecast, prewarming
from modelyard.policy.forecast import Profile
from modelyard.policy.idleness import Gaps
from modelyard.stores import ControlStore, StoreUnavailableError

LOOK_S = 2.0
COUNT_S = 30.0
"""Profiles are counted on this often; they know slots of ten minutes."""
SAVE_S = 180.0
LAST_SAVE_S = 3.0
"""Longest that a stopping controller waits for its store."""

_log = logging.getLogger(__name__)


class Forecasts:
    """The profiles of all endpoints that ever had a request."""

    def __init__(self, *, store: ControlStore, reports: Callable[[], Mapping[str, Report]], clock: Clock) -> None:
        self._store = store
        self._reports = reports
        self._clock = clock
        self._arrivals = Arrivals(clock.monotonic_s())
        self._memories: dict[str, prewarming.Memory] = {}
        self._changed: set[str] = set()
        self._is_loaded = False
        # What was counted since profiles were last counted on.
        self._counted: dict[str, int] = defaultdict(int)
        self._slot = forecast.slot_of(clock.unix_s())
        self._counted_s = clock.monotonic_s()
        self._looked_s = 0.0
        """Seconds of that time in which a gateway was there to tell."""
        self._saved_s = clock.monotonic_s()

    def __repr__(self) -> str:
        return f"<Forecasts of {len(self._memories)} endpoints, {len(self._changed)} to be stored>"

    # --- what others ask -------------------------------------------------------------

    def rate(self, endpoint_id: str, seconds: float = 60.0) -> float | None:
        """Return the requests/s of late; None while that is not known."""
        return self._arrivals.rate(endpoint_id, self._clock.monotonic_s(), seconds)

    def profile(self, endpoint_id: str) -> Profile | None:
        """Return what is known of an endpoint; None: it never had a request."""
        memory = self._memories.get(endpoint_id)
        return None if memory is None else memory.profile

    def expect(self, endpoint_id: str, rules: Autoscale, seen: prewarming.Situation) -> tuple[int, str]:
        """Return the replicas to have for requests to come, and why."""
        memory = self._memories.get(endpoint_id)
        if memory is None:
            return 0, "no requests to learn from"
        answer = prewarming.expect(rules, memory, seen)
        self._memories[endpoint_id] = answer.memory
        if answer.memory.profile.score != memory.profile.score:
            self._changed.add(endpoint_id)
        return answer.replicas, answer.reason

    def keep_gaps(self, endpoint_id: str, gaps: Gaps) -> None:
        """Remember the idle times that the scaling policy has seen."""
        memory = self._memories.get(endpoint_id)
        if memory is not None and memory.profile.gaps is not gaps and memory.profile.gaps != gaps:
            self._put(endpoint_id, msgspec.structs.replace(memory.profile, gaps=gaps))

    def keep(self, endpoint_ids: Iterable[str]) -> None:
        """Forget all other endpoints."""
        for endpoint_id in self._memories.keys() - set(endpoint_ids):
            del self._memories[endpoint_id]
            self._changed.discard(endpoint_id)

    # --- the loop --------------------------------------------------------------------

    async def run(self) -> None:
        """Count and store until cancelled, and once more then."""
        try:
            while True:
                with boundary("a look at arrivals"):
                    await self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            self._count(self._clock.unix_s())
            try:
                async with asyncio.timeout(LAST_SAVE_S):
                    await self.save()
            except (StoreUnavailableError, TimeoutError) as error:
                _log.warning("forecasts of the last minutes are lost: %s", str(error) or "the store did not answer")

    async def look(self) -> None:
        """Take what gateways counted; now and then count profiles on, and store them."""
        if not self._is_loaded:
            await self._load()
        now_s, unix_s = self._clock.monotonic_s(), self._clock.unix_s()
        if forecast.slot_of(unix_s) != self._slot:
            self._count((self._slot + 1) * forecast.SLOT_S - 0.001)  # what came so far belongs to the slot that ended
            self._slot = forecast.slot_of(unix_s)
        reports = self._reports()
        for endpoint_id, number in self._arrivals.take(reports, now_s).items():
            self._counted[endpoint_id] += number
        if reports:
            self._looked_s += LOOK_S
        if now_s - self._counted_s >= COUNT_S:
            self._count(unix_s)
        if now_s - self._saved_s >= SAVE_S:
            self._saved_s = now_s
            await self.save()

    async def save(self) -> None:
        """Store what changed.

        Raises:
            StoreUnavailableError: nothing was stored; it is tried again.
        """
        changed = {endpoint_id for endpoint_id in self._changed if endpoint_id in self._memories}
        if not changed:
            return
        profiles = {endpoint_id: self._memories[endpoint_id].profile for endpoint_id in changed}
        self._changed -= changed
        try:
            encoded = await asyncio.to_thread(_encoded, profiles)
            await self._store.put_forecasts(encoded, at=self._clock.unix_s())
        except BaseException:
            self._changed |= changed
            raise

    async def _load(self) -> None:
        for endpoint_id, text in (await self._store.forecasts()).items():
            try:
                profile = forecast.decode(text)
            except ValueError as error:
                _log.warning("the forecast of %s is learned anew: %s", endpoint_id, error)
                continue
            # What was counted while the store was away comes on top.
            self._memories.setdefault(endpoint_id, prewarming.Memory(profile))
        self._is_loaded = True

    def _count(self, unix_s: float) -> None:
        """Count profiles on, those without new requests too: that nobody came is what they learn."""
        looked_s, counted = self._looked_s, self._counted
        self._looked_s, self._counted, self._counted_s = 0.0, defaultdict(int), self._clock.monotonic_s()
        if looked_s == 0.0 and not counted:
            return
        for endpoint_id in self._memories.keys() | counted.keys():
            memory = self._memories.get(endpoint_id, prewarming.Memory())
            self._put(endpoint_id, forecast.count(memory.profile, unix_s, counted.get(endpoint_id, 0), looked_s))

    def _put(self, endpoint_id: str, profile: Profile) -> None:
        memory = self._memories.get(endpoint_id, prewarming.Memory())
        self._memories[endpoint_id] = msgspec.structs.replace(memory, profile=profile)
        self._changed.add(endpoint_id)


def _encoded(profiles: Mapping[str, Profile]) -> dict[str, bytes]:
    return {endpoint_id: forecast.encode(profile) for endpoint_id, profile in profiles.items()}
