"""Warm pools of a simulated fleet: replicas of stock models that wait for whoever needs one (``policy/warm_pool.py``).

Only endpoints without weights of their own can take one: here these are the encoders, which many teams run as they are
published. A pool's replicas have a negative deployment, so that no column counts them.
"""

from collections import deque
from typing import TYPE_CHECKING

from modelyard.policy import warm_pool
from modelyard.policy.warm_pool import Base, Pool, Resident
from modelyard.sim.fleet.models import Profile
from modelyard.sim.fleet.population import Population
from modelyard.sim.fleet.stock import Replica, State

if TYPE_CHECKING:
    from modelyard.sim.fleet.world import World

COUNTED_S = 3600.0
"""Time over which cold starts are counted, as ``control/pools.py`` has it."""
LOOK_S = 60.0
BUDGET = 64
"""Replicas that all pools together may have; one needs a fiftieth of an accelerator."""


class Pools:
    """The pools, and the cold starts that they could have served."""

    def __init__(self, population: Population) -> None:
        self.digests: dict[int, str] = {}
        """The weights of deployments that others have, too."""
        self._base: dict[int, Base] = {}
        self._profiles: dict[Base, Profile] = {}
        self._starts: dict[Base, deque[float]] = {}
        self._replicas: dict[Base, list[Replica]] = {}
        self.stolen = 0
        for at, one in enumerate(population.deployments):
            profile = one.profile
            if not profile.is_llm:
                self.digests[at] = profile.name
                options = (("count", profile.accelerators), ("kind", profile.kind), ("slots", profile.slots))
                base = self._base[at] = Base("vllm", profile.name, options)
                self._profiles.setdefault(base, profile)
                self._starts.setdefault(base, deque())
                self._replicas.setdefault(base, [])

    def look(self, world: "World", now_s: float) -> None:
        """Give each pool its size."""
        for starts in self._starts.values():
            while starts and starts[0] <= now_s - COUNTED_S:
                starts.popleft()
        pools = self._pools(world)
        bases = list(self._profiles)
        for plan in warm_pool.sizes(list(pools.values()), BUDGET):
            number = int(plan.pool_id)
            base = bases[number]
            mine = self._replicas[base] = [one for one in self._replicas[base] if one.state is not State.GONE]
            while len(mine) > plan.size:
                world.stock.stop(mine.pop())
            while len(mine) < plan.size:
                replica = world.stock.start(-1 - number, self._profiles[base], base.digest, now_s)
                if replica is None:
                    break
                world.events.load(replica, now_s)
                mine.append(replica)

    def take(self, world: "World", at: int, now_s: float) -> bool:
        """Let a deployment that nothing of runs have a pool's replica; say whether there was one."""
        base = self._base.get(at)
        if base is None or world.columns.live[at] > 0:
            return False
        self._starts[base].append(now_s)
        residents = [
            Resident(str(one.number), one_id, of, one.since_s if one.state is State.READY else None)
            for one_id, of in ((str(number), of) for number, of in enumerate(self._profiles))
            for one in self._replicas[of]
            if one.state in (State.READY, State.LOADING)
        ]
        found = warm_pool.steal(base, residents, self._pools(world), rules=world.rules)
        if found.replica_id is None:
            return False
        replica = world.stock.replicas[int(found.replica_id)]
        self._replicas[base].remove(replica)
        world.stock.hand_over(replica, at, now_s)
        self.stolen += world.recorder.is_counting
        return True

    def _pools(self, world: "World") -> dict[str, Pool]:
        return {
            str(number): Pool(
                id=str(number),
                base=base,
                activations_s=len(self._starts[base]) / COUNTED_S,
                refill_s=world.events.expected_load_s(profile) + LOOK_S / 2,
                accelerators=profile.accelerators,
            )
            for number, (base, profile) in enumerate(self._profiles.items())
        }
