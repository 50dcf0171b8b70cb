"""Forecasts of the deployments that one endpoint has to itself, by ``policy/forecast.py`` and ``policy/prewarming.py``.

Hosts have none (ADR 0032: forecasts do not count guests' requests for their host). ``prewarming.expect`` is a fold
that says the same until a slot begins, a slot comes within reach, or its deployment changes; it is asked then.
"""

import math
import random
from typing import TYPE_CHECKING

import numpy as np

from modelyard.domain.endpoints import Autoscale
from modelyard.policy import forecast, prewarming, scaling
from modelyard.policy.forecast import Profile
from modelyard.policy.prewarming import Memory, Situation
from modelyard.sim.fleet.population import Floats, Population
from modelyard.sim.rates import SLOT_S

if TYPE_CHECKING:
    from modelyard.sim.fleet.world import World

LEARN_DAYS = 7


class Prewarm:
    """The profiles of deployments, and what is expected of each."""

    def __init__(self, population: Population, rules: Autoscale, *, begin_s: float, seed: int) -> None:
        self._rules = rules
        number = len(population.deployments)
        self._own = [at for at, one in enumerate(population.deployments) if not one.is_host]
        self._memories: dict[int, Memory] = {}
        self._next_s = np.full(number, np.inf)
        self._next_s[self._own] = -np.inf
        self._counted = np.zeros(number)
        self._slot = math.floor(begin_s / SLOT_S)
        for at, profile in zip(self._own, self._learned(population, seed), strict=True):
            self._memories[at] = Memory(profile)

    def _learned(self, population: Population, seed: int) -> list[Profile]:
        """Return what the days before have taught, up to the slot where the run begins."""
        first = max(self._slot - LEARN_DAYS * forecast.DAY, 0)
        counts = np.zeros((self._slot - first, len(population.deployments)), dtype=np.int64)
        for slot in range(first, self._slot):
            chance = np.random.Generator(np.random.PCG64([seed, slot]))
            rate, burst = population.rate(slot), population.burst(slot)
            excess = np.maximum(burst - 1.0, 1e-3)
            drawn = chance.poisson(chance.gamma(rate * SLOT_S / excess) * excess)
            counts[slot - first] = np.bincount(population.deployment, weights=drawn, minlength=counts.shape[1])
        return [forecast.learned(Profile(), first, counts[:, at].tolist()) for at in self._own]

    def count(self, world: "World", arrived: Floats, now_s: float) -> None:
        """Count what came; at the end of a slot profiles learn it."""
        # The end of a tick at the edge of a slot belongs to the slot that ends.
        slot = math.ceil(now_s / SLOT_S) - 1
        if slot != self._slot:
            counts = self._counted.tolist()
            for at in self._own:
                memory = self._memories[at]
                profile = forecast.observe(memory.profile, self._slot, round(counts[at]))
                self._memories[at] = Memory(profile, memory.looked_s, memory.waiting, memory.is_cold)
            self._slot = slot
            self._counted[:] = 0.0
        self._counted += arrived

    def look(self, world: "World", now_s: float) -> None:
        """Ask about the deployments of which something else may be expected now."""
        columns = world.columns
        is_due = now_s >= self._next_s
        # Who waited for requests that come, or comes unforeseen, is counted as it happens.
        is_due |= (self._next_s < np.inf) & (columns.arrived > 0) & (columns.rate * 60.0 <= columns.arrived + 0.5)
        for at in np.flatnonzero(is_due).tolist():
            self._look(world, at, now_s)

    def _look(self, world: "World", at: int, now_s: float) -> None:
        columns, rules = world.columns, self._rules
        load_s = world.events.expected_load_s(world.population.deployments[at].profile)
        idle_s = now_s - float(columns.asked_s[at])
        is_awake = scaling.is_kept_awake(
            world.memories[at], world.specs[at], rules, idle_s, int(columns.accelerators[at])
        )
        load = float(columns.flying[at] / columns.slots[at])
        rate, capacity = float(columns.rate[at]), float(columns.capacity[at])
        situation = Situation(
            now_s=now_s,
            ready=int(columns.there[at]),
            demand=int(columns.flying[at] + math.ceil(columns.waiting[at])),
            needed=max(world.spec.floor, int(is_awake), math.ceil(max(load, rate / capacity))),
            load_s=load_s,
            accelerators=int(columns.accelerators[at]),
            capacity=capacity if rate > 0 else None,
        )
        answer = prewarming.expect(rules, self._memories[at], situation)
        self._memories[at] = answer.memory
        slot = math.floor(now_s / SLOT_S)
        ahead_s = load_s + rules.prewarm_s
        reach_s = (math.floor((now_s + ahead_s) / SLOT_S) + 1) * SLOT_S - ahead_s
        self._next_s[at] = min((slot + 1) * SLOT_S, reach_s)
        if answer.replicas != world.expected[at]:
            world.expected[at] = answer.replicas
            columns.must[at] = True


def for_world(world: "World", chance: random.Random) -> Prewarm:
    """Return the forecasts of a world that begins."""
    return Prewarm(world.population, world.rules, begin_s=world.begin_s, seed=chance.getrandbits(63))
