"""The state of all deployments as columns, and which of them must be looked at in a tick."""

import numpy as np

from modelyard.policy.idleness import BIN_S
from modelyard.policy.steadiness import Steady
from modelyard.sim.fleet.population import Floats, Ints, Population

WINDOW_S = 60.0
"""Rates are of the last minute, as ``control/sizing.py`` has them."""
_LITTLE = 0.05
"""Of a request that is still running: with exponential lengths something always is."""


class Columns:
    """One entry a deployment. What is of its profile never changes, the rest does in every tick."""

    def __init__(self, population: Population, tick_s: float) -> None:
        profiles = [one.profile for one in population.deployments]
        number = len(profiles)

        def of(name: str) -> Floats:
            return np.array([float(getattr(one, name)) for one in profiles])

        self.number = number
        self.slots = of("slots")
        self._alone = of("fixed_s"), of("shared_s"), of("prompt_s"), of("step_s"), of("requests_s")
        self.fixed_s, self.shared_s, self.prompt_s, self.step_s, self.capacity = self._alone
        self.is_shared = np.array([one.is_shared for one in profiles])
        self.alone_requests_s = self._alone[4]
        self.accelerators, self.completion = of("accelerators"), of("completion_tokens")
        self.is_llm = np.array([one.is_llm for one in profiles])
        self.is_static = np.array([one.is_static for one in profiles])
        self.tick_s = tick_s

        self.ready = np.zeros(number)
        self.live = np.zeros(number)
        """Ready, loading and asleep."""
        self.asleep = np.zeros(number)
        self.waking = np.zeros(number)
        self.running = np.zeros(number)
        self.waiting = np.zeros(number)
        self.flying = np.zeros(number)
        """Whole requests on replicas, as a gateway counts them."""
        self.batched = np.zeros(number)
        """Lines of batches on replicas that count as demand; they are among ``flying``."""
        self.arrived = np.zeros(number)
        self.rate = np.zeros(number)
        """Requests/s of the last minute."""
        self.asked_s = np.full(number, -np.inf)
        """When there was last a request, in line or running."""
        self.before_s = np.full(number, -np.inf)
        """The same at the look before."""
        self.ttft99_s = np.zeros(number)
        self._recent = np.zeros((max(1, round(WINDOW_S / tick_s)), number))
        self._at = 0

        self._unbounded()

    def _unbounded(self) -> None:
        """Begin without a decision, so that everybody is asked."""
        number = self.number
        self.must = np.ones(number, dtype=bool)
        """Something happened that bounds know nothing of."""
        self.until_s = np.full(number, -np.inf)
        self.demand_most = np.zeros(number)
        self.busy_above = np.zeros(number)
        self.busy_below = np.zeros(number)
        self.is_slow = np.zeros(number, dtype=bool)
        self.sleeps_s = np.full(number, np.inf)
        self.active_s = np.full(number, -np.inf)

    def slow(self, times: Floats) -> None:
        """Note by how much others on the same accelerators slow each deployment down."""
        fixed_s, shared_s, prompt_s, step_s, capacity = self._alone
        self.fixed_s, self.shared_s = fixed_s * times, shared_s * times
        self.prompt_s, self.step_s, self.capacity = prompt_s * times, step_s * times, capacity / times

    @property
    def there(self) -> Floats:
        """Replicas that are ready, or will be in a moment since they sleep."""
        there: Floats = self.ready + self.asleep + self.waking
        return there

    @property
    def busy(self) -> Floats:
        """How busy ready replicas are, as ``scaling.Seen.busy`` has it."""
        there = self.there
        served = np.maximum(there, 1.0)
        by_slots = self.flying / (served * self.slots)
        by_load = np.minimum(self.rate / (served * self.capacity), 1.0)
        demand = self.flying + self.waiting > 0
        return np.where(there > 0, np.maximum(by_slots, by_load), demand.astype(np.float64))

    def arrive(self, arrived: Floats) -> None:
        """Note what came in this tick."""
        self.arrived = arrived
        self.rate += (arrived - self._recent[self._at]) / (len(self._recent) * self.tick_s)
        self._recent[self._at] = arrived
        self._at = (self._at + 1) % len(self._recent)
        if self._at == 0:  # sums of differences drift
            self.rate = self._recent.sum(axis=0) / (len(self._recent) * self.tick_s)

    def settle(self, now_s: float) -> None:
        """Round what is left, and note who has requests."""
        self.running[self.running < _LITTLE] = 0.0
        self.waiting[self.waiting < 1e-6] = 0.0
        self.flying = np.ceil(self.running - _LITTLE) + self.batched
        self.before_s = self.asked_s.copy()
        self.asked_s[(self.flying + self.waiting > 0) | (self.arrived > 0)] = now_s

    def to_ask(self, now_s: float, slow_s: float) -> Ints:
        """Return the deployments whose bounds do not hold any more (``steadiness.holds``, for all at once)."""
        demand = self.flying + np.ceil(self.waiting)
        busy = self.busy
        quiet_s = now_s - self.before_s
        some = (demand > 0) | (self.arrived > 0)
        sleepy = np.minimum(now_s - self.asked_s, now_s - self.active_s) >= self.sleeps_s
        must = self.must | (now_s >= self.until_s) | (self.waiting > 0) | (demand > self.demand_most)
        must |= (busy < self.busy_above) | (busy >= self.busy_below)
        must |= (self.ttft99_s > slow_s) != self.is_slow
        must |= np.where(some, quiet_s >= BIN_S, sleepy)
        return np.flatnonzero(must)

    def bound(self, at: int, bounds: Steady | None) -> None:
        """Keep the bounds of one; None: it is asked again in the next tick."""
        if bounds is None:
            self.must[at] = True
            return
        self.must[at] = False
        self.until_s[at] = bounds.until_s
        self.demand_most[at] = bounds.demand_most
        self.busy_above[at] = bounds.busy_above
        self.busy_below[at] = bounds.busy_below
        self.is_slow[at] = bounds.is_slow
        self.sleeps_s[at] = bounds.sleeps_s
        self.active_s[at] = bounds.active_s
