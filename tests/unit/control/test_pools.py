"""A replica of a warm pool is one endpoint's at a time, whatever passes of both do between two looks."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.towns import Town, endpoint, replica, version

from modelyard.control.pools import Pools
from modelyard.domain.endpoints import Autoscale, Endpoint, Tier
from modelyard.domain.fleet import Replica, ReplicaState

POOL = endpoint("pool", "ver-pool", floor=2, pool="fast")
MINE = endpoint("mine", "ver-mine")


def town_with(*ready: Replica) -> Town:
    town = Town(versions={"ver-pool": version("pool"), "ver-mine": version("mine")})
    town.settle(POOL, MINE)
    for one in ready:
        town.run(one)
    return town


def seeing(town: Town, budget: int = 8) -> Pools:
    pools = Pools(budget)
    pools.look_begins()
    pools.see(town.look(), {})
    return pools


def take(pools: Pools, town: Town, one: Endpoint = MINE, generation: int = 0) -> Replica | None:
    wanted = replica(one, generation=generation, ready_at=None)
    found = pools.take(one, town.versions[one.releases[0].version_id], town.versions, wanted)
    return None if found is None else found[0]


def test_a_replica_is_taken_once() -> None:
    town = town_with(replica(POOL))
    pools = seeing(town)
    taken = take(pools, town)
    assert taken is not None
    assert (taken.endpoint_id, taken.version_id, taken.model_name) == (MINE.id, "ver-mine", "pool")
    assert take(pools, town, generation=1) is None
    pools.see(town.look(), {})  # a look from before the record was moved
    assert take(pools, town, generation=1) is None
    assert pools.taken_from(POOL.id) == {taken.id}


def test_what_was_not_stored_is_the_pools_again() -> None:
    town = town_with(replica(POOL))
    pools = seeing(town)
    taken = take(pools, town)
    assert taken is not None
    pools.give_back(taken)
    assert take(pools, town) is not None


def test_one_that_a_pass_of_the_pool_acts_on_is_not_taken_until_a_look_that_began_afterwards() -> None:
    town = town_with(replica(POOL))
    pools = seeing(town)
    pools.touch({replica(POOL).id})
    assert take(pools, town) is None
    pools.look_begins()
    before = town.look()
    pools.let_go({replica(POOL).id})
    assert take(pools, town) is None, "it may have been drained or killed"
    pools.see(before, {})
    assert take(pools, town) is None, "and that look does not know"
    pools.look_begins()
    pools.see(town.look(), {})
    assert take(pools, town) is not None


def test_a_pool_that_is_changed_gives_nothing_of_the_version_before() -> None:
    town = town_with(msgspec.structs.replace(replica(POOL), version_id="ver-old"))
    assert take(seeing(town), town) is None, "other weights are in it"


def test_versions_that_were_not_fetched_yet_are_one_base_only_where_they_come_from_one_place() -> None:
    def unknown(name: str, uri: str) -> Town:
        town = town_with(replica(POOL))
        for one, where in (("pool", "file:///a.gguf"), (name, uri)):
            plain = version(one, "", framework="llamacpp")
            artifact = msgspec.structs.replace(plain.artifact, uri=where)
            town.versions[f"ver-{one}"] = msgspec.structs.replace(plain, artifact=artifact)
        return town

    other, same = unknown("mine", "file:///b.gguf"), unknown("mine", "file:///a.gguf")
    assert take(seeing(other), other) is None
    assert take(seeing(same), same) is not None


def test_who_may_not_run_there_or_is_pinned_cold_takes_nothing() -> None:
    town = town_with(replica(POOL))
    pools = seeing(town)
    wanted = replica(MINE, ready_at=None)
    assert pools.take(MINE, town.versions["ver-mine"], town.versions, wanted, suits=lambda _: False) is None
    cold = msgspec.structs.replace(MINE, autoscale=Autoscale(tier=Tier.COLD))
    assert take(pools, town, cold) is None


def test_one_start_that_waits_is_one_activation() -> None:
    popular = msgspec.structs.replace(POOL, scaling=msgspec.structs.replace(POOL.scaling, min_replicas=0))
    town = town_with()
    town.settle(popular)
    pools = seeing(town, budget=50)
    for _ in range(500):
        assert take(pools, town) is None
    pools.see(town.look(), {"ver-pool": 60.0})
    plan = pools.plan_of(POOL.id)
    assert plan is not None
    assert plan.size <= 1, plan.reason
    town.now_s += 7200
    pools.see(town.look(), {"ver-pool": 60.0})
    assert not pools._activations


class Wells(RuleBasedStateMachine):
    """Two pools' replicas, endpoints that take them, passes of the pools, and looks that are older than either."""

    @initialize()
    def begin(self) -> None:
        self.town = Town(versions={f"ver-{one}": version(one) for one in ("pool", "other", "mine", "yours")})
        self.pools = [POOL, endpoint("other", "ver-other", floor=2, pool="slow")]
        self.takers = [MINE, endpoint("yours", "ver-yours")]
        self.town.settle(*self.pools, *self.takers)
        self.wells = Pools(8)
        self.owners: dict[str, str] = {}
        """Who took a replica, for as long as it lives."""
        self.gone: set[str] = set()
        """Replicas that a pass of their pool drained or killed."""
        self.generations = 0
        self.world = self.town.look()
        self.stale: set[str] = set()
        self.look()

    @rule()
    def look(self) -> None:
        self.wells.look_begins()
        self.world = self.town.look()
        self.stale = set()
        self.wells.see(self.world, {})

    @rule(pool=st.integers(0, 1), taker=st.integers(0, 1), is_pool_first=st.booleans(), kills=st.booleans())
    def look_while_passes_run(self, pool: int, taker: int, is_pool_first: bool, kills: bool) -> None:
        self.wells.look_begins()
        world = self.town.look()
        if is_pool_first:
            self.pass_of_a_pool(pool, kills=kills)
        self.take(taker, stores=True)
        if not is_pool_first:
            self.pass_of_a_pool(pool, kills=kills)
        self.world = world
        self.stale = {self.pools[pool].id, self.takers[taker].id}
        self.wells.see(world, {})

    @rule(number=st.integers(0, 1))
    def a_pool_starts_one(self, number: int) -> None:
        self.generations += 1
        self.town.run(replica(self.pools[number], generation=self.generations))

    @rule(number=st.integers(0, 1), kills=st.booleans())
    def pass_of_a_pool(self, number: int, kills: bool) -> None:
        """It acts on what it sees as its own."""
        pool = self.pools[number]
        if pool.id in self.stale:
            return
        self.stale.add(pool.id)
        taken = self.wells.taken_from(pool.id)
        mine = [one for one in self.world.replicas.get(pool.id, ()) if one.id not in taken]
        acted_on = {one.id for one in mine if kills and one.id in self.town.replicas}
        self.wells.touch(acted_on)
        for id in acted_on:
            assert id not in self.owners, f"{id} is {self.owners[id]}'s"
            self.gone.add(id)
            self.town.replicas[id] = msgspec.structs.replace(self.town.replicas[id], state=ReplicaState.DRAINING)
        self.wells.let_go(acted_on)

    @rule(number=st.integers(0, 1), stores=st.booleans())
    def take(self, number: int, stores: bool) -> None:
        one = self.takers[number]
        if one.id in self.stale:
            return
        self.stale.add(one.id)
        self.generations += 1
        taken = take(self.wells, self.town, one, self.generations)
        if taken is None:
            return
        assert taken.id not in self.owners, f"{taken.id} is {self.owners[taken.id]}'s already"
        assert taken.id not in self.gone, "its pool has ended it"
        if stores:
            self.owners[taken.id] = one.id
            self.town.replicas[taken.id] = taken
        else:
            self.wells.give_back(taken)

    @rule(data=st.data())
    def one_ends(self, data: st.DataObject) -> None:
        ids = sorted(self.town.replicas.keys() - self.world_ids())
        if ids:
            id = data.draw(st.sampled_from(ids))
            del self.town.replicas[id]
            self.town.running.discard(id)
            self.owners.pop(id, None)

    def world_ids(self) -> set[str]:
        return {one.id for pool in self.pools for one in self.world.replicas.get(pool.id, ())}

    @invariant()
    def what_was_taken_is_its_takers(self) -> None:
        for id, owner in getattr(self, "owners", {}).items():
            assert self.town.replicas[id].endpoint_id == owner
            assert any(id in self.wells.taken_from(pool.id) for pool in self.pools)

    @invariant()
    def a_controller_that_starts_anew_knows_who_was_taken(self) -> None:
        if hasattr(self, "town"):
            fresh = seeing(self.town)
            assert {id for pool in self.pools for id in fresh.taken_from(pool.id)} == set(self.owners)


Wells.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestWells = Wells.TestCase
