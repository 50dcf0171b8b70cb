"""Warm pools: replicas of popular bases that run for nobody, until a cold endpoint of the same base takes one.

A pool is an endpoint that answers nobody (``Endpoint.pool``): the reconciler
keeps its replicas like any other's. To take one is to write its record anew
under the endpoint that needs it, in one write: before it the replica is the
pool's, after it the endpoint's, whatever is cut off when. The pool then lacks
one, and starts another in the background.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from modelyard.control.world import World
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.policy import scaling, warm_pool
from modelyard.policy.releases import main_release
from modelyard.policy.tiers import may_be_expected

ACTIVATIONS_S = 3600.0
"""Time over which cold starts are counted for the size of a pool."""


class Pools:
    """Which replicas are for whoever needs one; ``budget``: accelerators that all pools together may hold."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._plans: dict[str, warm_pool.Plan] = {}
        self._pools: dict[str, warm_pool.Pool] = {}
        self._residents: list[warm_pool.Resident] = []
        self._records: dict[str, Replica] = {}
        self._names: dict[str, str] = {}
        self._taken: dict[str, str] = {}
        """Replicas that were taken, with the pool that they came from."""
        self._touched: set[str] = set()
        """Replicas on which a pass of their pool acts right now."""
        self._left: set[str] = set()
        """Replicas on which a pass acted since the last look began: what that look says of them may be over."""
        self._activations: dict[warm_pool.Base, dict[str, float]] = defaultdict(dict)
        """Cold starts by the replica that was to be started: one that waits asks again in every pass."""
        self._now_s = 0.0

    def __repr__(self) -> str:
        return f"<Pools: {len(self._pools)}, {len(self._residents)} replicas wait>"

    def look_begins(self) -> None:
        """What passes do from now on may be missing in the world that the next ``see`` is shown."""
        self._left.clear()

    def see(self, world: World, load_s: Mapping[str, float]) -> None:
        """Take stock; ``load_s`` are seconds that versions take to load."""
        self._now_s = world.monotonic_s
        for base, starts in list(self._activations.items()):
            recent = {id: at for id, at in starts.items() if self._now_s - at < ACTIVATIONS_S}
            if recent:
                self._activations[base] = recent
            else:
                del self._activations[base]
        everyone = {replica.id: id for id, replicas in world.replicas.items() for replica in replicas}
        self._taken = {id: pool for id, pool in self._taken.items() if id in everyone}
        for endpoint_id, replicas in world.replicas.items():
            # A controller that starts anew knows by the name: who answers under a pool's was taken from it.
            for replica in replicas:
                if replica.model_name and (pool_id := self._pool_of(replica.id, world)) != endpoint_id and pool_id:
                    self._taken[replica.id] = pool_id
        self._pools, self._residents, self._records, self._names = {}, [], {}, {}
        for endpoint in world.endpoints.values():
            if endpoint.pool and endpoint.releases and not endpoint.is_deleted:
                self._see_pool(endpoint, world, load_s)
        self._plans = {plan.pool_id: plan for plan in warm_pool.sizes(list(self._pools.values()), self._budget)}

    def decide(self, endpoint: Endpoint, decision: scaling.Decision) -> scaling.Decision:
        """Return the size of a pool in place of what its (missing) traffic asks for."""
        plan = self._plans.get(endpoint.id)
        size, reason = (plan.size, plan.reason) if plan and not endpoint.is_deleted else (0, "the pool is deleted")
        memory = msgspec.structs.replace(decision.memory, replicas=size)
        return scaling.Decision(size, f"warm pool: {reason}", memory)

    def plan_of(self, endpoint_id: str) -> warm_pool.Plan | None:
        """Return the size that a pool should have, and why."""
        return self._plans.get(endpoint_id)

    def taken_from(self, endpoint_id: str) -> frozenset[str]:
        """Return the replicas that were taken from this pool and live."""
        return frozenset(id for id, pool in self._taken.items() if pool == endpoint_id)

    def touch(self, replica_ids: Iterable[str]) -> None:
        """A pass of a pool is about to act on these: nobody takes them meanwhile."""
        self._touched.update(replica_ids)

    def let_go(self, replica_ids: Collection[str]) -> None:
        """The pass is over; who is to take one of these must look anew."""
        self._touched.difference_update(replica_ids)
        self._left.update(replica_ids)
        self._residents = [one for one in self._residents if one.replica_id not in self._left]

    def take(
        self,
        endpoint: Endpoint,
        version: ModelVersion,
        versions: Mapping[str, ModelVersion],
        wanted: Replica,
        suits: Callable[[Replica], bool] = lambda _: True,
    ) -> tuple[Replica, str] | None:
        """Return the record of a pool's replica as it will be ``wanted``'s, with the reason; None where there is none.

        ``suits`` says of a replica whether the endpoint may run where it does, and nobody else needs its place. The
        caller stores what is returned; from now on the replica is nobody else's.
        """
        base = warm_pool.base_of(version, versions.get(version.base_id))
        self._activations[base].setdefault(wanted.id, self._now_s)
        if not may_be_expected(endpoint.autoscale) or version.base_id:
            return None  # an adapter must be loaded into it first; no engine of ours can do that while it runs
        busy = self._taken.keys() | self._touched
        free = [one for one in self._residents if one.replica_id not in busy and suits(self._records[one.replica_id])]
        found = warm_pool.steal(base, free, self._pools, rules=endpoint.autoscale)
        if found.replica_id is None:
            return None
        record = self._records[found.replica_id]
        self._taken[record.id] = record.endpoint_id
        taken = msgspec.structs.replace(
            record,
            endpoint_id=endpoint.id,
            version_id=version.id,
            ordinal=wanted.ordinal,
            generation=wanted.generation,
            model_name=record.model_name or self._names[record.endpoint_id],
        )
        return taken, found.reason

    def give_back(self, replica: Replica) -> None:
        """Undo ``take`` where nothing was stored."""
        self._taken.pop(replica.id, None)

    def _see_pool(self, endpoint: Endpoint, world: World, load_s: Mapping[str, float]) -> None:
        version = world.versions.get(main_release(endpoint).version_id)
        if version is None:
            return
        base = warm_pool.base_of(version, None)
        scale = endpoint.scaling
        self._pools[endpoint.id] = warm_pool.Pool(
            id=endpoint.id,
            name=endpoint.pool,
            base=base,
            activations_s=len(self._activations.get(base, ())) / ACTIVATIONS_S,
            refill_s=load_s.get(version.id, 1.0),
            accelerators=version.gpu_count,
            # A pool without a size of its own is as large as its base is popular.
            size=scale.min_replicas if scale.min_replicas else None,
        )
        self._names[endpoint.id] = endpoint.name
        running = {process.replica_id for process in world.processes.get(endpoint.id, ()) if process.is_running}
        for replica in world.replicas.get(endpoint.id, ()):
            # One of another version has other weights in it: the pool is being changed.
            is_of_base = replica.version_id == version.id and replica.id not in self._left
            if is_of_base and replica.id in running and replica.state in (ReplicaState.READY, ReplicaState.LOADING):
                since_s = replica.ready_at if replica.state is ReplicaState.READY else None
                self._residents.append(warm_pool.Resident(replica.id, endpoint.id, base, since_s))
                self._records[replica.id] = replica

    @staticmethod
    def _pool_of(replica_id: str, world: World) -> str:
        """Return the pool that a replica was started for, by its id; "" for none."""
        for endpoint in world.endpoints.values():
            if endpoint.pool and replica_id.startswith(f"rep-{endpoint.id.removeprefix('ep-')[:12]}-"):
                return endpoint.id
        return ""
