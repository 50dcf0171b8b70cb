"""Who makes room: what costs least, never what is pinned, busy or new; and the herd takes turns (F27)."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.clusters import ask, at, node, state

from modelyard.domain.endpoints import Tier
from modelyard.domain.nodes import Placement
from modelyard.policy.asks import Ask
from modelyard.policy.cluster import Cluster
from modelyard.policy.eviction import (
    Eviction,
    NoEviction,
    Resident,
    Rule,
    Waiting,
    Wanted,
    eta_s,
    evict,
    kept_because,
    turns,
)
from modelyard.policy.packing import find

RULE = Rule(min_residency_s=60, horizon_s=600, patience_s=120)


def resident(name: str, placement: Placement, **more: object) -> Resident:
    given: dict[str, object] = {
        "is_idle": True,
        "resident_s": 1000.0,
        "idle_s": 500.0,
        "reload_s": 10.0,
        "rate_per_s": 0.001,
    }
    return Resident(replica_id=f"r-{name}", name=name, tenant_id="t", placement=placement, **(given | more))  # type: ignore[arg-type]


def wanted(of: Ask, **more: object) -> Wanted:
    given: dict[str, object] = {"reload_s": 30.0, "queued": 1}
    return Wanted(ask=of, name="new", **(given | more))  # type: ignore[arg-type]


def evicted(of: Wanted, cluster: Cluster, *residents: Resident) -> Eviction:
    found = evict(of, cluster, residents, RULE)
    assert isinstance(found, Eviction), found
    return found


def kept(of: Wanted, cluster: Cluster, *residents: Resident) -> NoEviction:
    found = evict(of, cluster, residents, RULE)
    assert isinstance(found, NoEviction), found
    return found


def cluster_of(*residents: Resident, nodes: int = 1, count: int = 1, memory: int = 80) -> Cluster:
    seen = [node(f"n{number}", count, memory=memory) for number in range(nodes)]
    return Cluster.of(seen, [one.placement for one in residents])


def test_the_one_that_is_asked_for_least_goes() -> None:
    rare = resident("rare", at("n0", 0, memory=40), rate_per_s=0.0001)
    often = resident("often", at("n0", 0, memory=40), rate_per_s=0.01)
    found = evicted(wanted(ask(40)), cluster_of(rare, often), rare, often)
    assert found.replica_ids == ("r-rare",)
    assert found.placement == at("n0", 0, memory=40)
    assert found.reason == "evicting idle `rare` frees 40.0 GiB on n0; back in 10 s"


def test_one_that_loads_fast_goes_before_one_that_loads_slowly() -> None:
    fast = resident("fast", at("n0", 0, memory=40), reload_s=2.0)
    slow = resident("slow", at("n0", 0, memory=40), reload_s=60.0)
    assert evicted(wanted(ask(40)), cluster_of(fast, slow), fast, slow).replica_ids == ("r-fast",)


def test_no_more_go_than_are_needed() -> None:
    small = [resident(f"small-{number}", at("n0", 0, memory=10), rate_per_s=0.00001) for number in range(4)]
    large = resident("large", at("n0", 0, memory=40), rate_per_s=0.0001)
    found = evicted(wanted(ask(20)), cluster_of(*small, large), *small, large)
    assert len(found.replica_ids) == 2
    assert "r-large" not in found.replica_ids


def test_whole_accelerators_are_cleared_where_that_costs_least() -> None:
    busy = resident("busy", at("n0", 0, memory=8), is_idle=False)
    idle = [resident(f"idle-{number}", at("n0", number, memory=8)) for number in (1, 2)]
    cluster = cluster_of(busy, *idle, count=3)
    found = evicted(wanted(ask(60, 2)), cluster, busy, *idle)
    assert found.replica_ids == ("r-idle-1", "r-idle-2")
    assert found.placement.parts[0].accelerators == (1, 2)


def test_pinned_busy_and_new_ones_stay_and_the_reason_names_them() -> None:
    for why, more in {
        "has requests": {"is_idle": False},
        "pinned hot": {"pin": Tier.HOT},
        "pinned warm": {"pin": Tier.WARM},
        "ready for 20 of at least 60 s": {"resident_s": 20.0},
    }.items():
        one = resident("one", at("n0", 0, memory=80), **more)
        assert kept_because(one, RULE) == why
        found = kept(wanted(ask(40), waiting_s=10_000), cluster_of(one), one)
        assert found.reason == f"`one` {why}"
        assert found.retry_s == (40.0 if "resident_s" in more else None)


def test_one_that_is_pinned_cold_goes_first() -> None:
    cold = resident("cold", at("n0", 0, memory=40), rate_per_s=1.0, pin=Tier.COLD)
    rare = resident("rare", at("n0", 0, memory=40), rate_per_s=0.0001)
    assert evicted(wanted(ask(40)), cluster_of(cold, rare), cold, rare).replica_ids == ("r-cold",)


def test_what_will_be_asked_for_sooner_stays_until_patience_ends() -> None:
    hot = resident("hot", at("n0", 0, memory=80), rate_per_s=1.0, reload_s=60.0)
    found = kept(wanted(ask(40)), cluster_of(hot), hot)
    assert found.reason == "idle `hot` will be asked for sooner: evicting costs 60.0 s, gains 30.0 s"
    assert evicted(wanted(ask(40), waiting_s=120), cluster_of(hot), hot).replica_ids == ("r-hot",)


def test_nobody_goes_where_there_is_room() -> None:
    one = resident("one", at("n0", 0, memory=40))
    assert evicted(wanted(ask(40)), cluster_of(one), one).replica_ids == ()


def test_turns_go_round_the_tenants_the_longest_wait_first() -> None:
    waiting = [Waiting(f"a{number}", "a", float(number)) for number in range(4)] + [Waiting("b0", "b", 9.0)]
    assert [one.endpoint_id for one in turns(waiting, {})] == ["a0", "b0", "a1", "a2", "a3"]
    assert [one.endpoint_id for one in turns(waiting, {"a": 2.0})] == ["b0", "a0", "a1", "a2", "a3"]
    hot = Waiting("b1", "b", 99.0, Tier.HOT)
    assert turns([*waiting, hot], {})[0] == hot


@st.composite
def towns(draw: st.DrawFn) -> tuple[Cluster, list[Resident]]:
    """Draw a cluster with replicas on it."""
    seen = [
        node(f"n{number}", draw(st.sampled_from([1, 2, 4])), island=2 if draw(st.booleans()) else None)
        for number in range(2)
    ]
    seen = [one if one.node.accelerators else node("n9") for one in seen]
    cluster = Cluster.of(seen)
    residents = []
    for number in range(draw(st.integers(0, 10))):
        found = find(ask(draw(st.sampled_from([5, 20, 40, 80])), draw(st.sampled_from([1, 1, 1, 2]))), cluster)
        if found is None:
            continue
        cluster.take(found)
        residents.append(
            resident(
                str(number),
                found,
                is_idle=draw(st.booleans()),
                resident_s=draw(st.sampled_from([10.0, 1000.0])),
                reload_s=draw(st.sampled_from([1.0, 30.0])),
                rate_per_s=draw(st.sampled_from([0.0, 0.001, 1.0])),
                pin=draw(st.sampled_from([None, None, Tier.HOT, Tier.COLD])),
            )
        )
    return cluster, residents


@settings(max_examples=100, deadline=None)
@given(town=towns(), memory=st.sampled_from([10, 40, 80]), count=st.sampled_from([1, 1, 2, 4]))
def test_what_goes_is_enough_allowed_and_none_too_many(
    town: tuple[Cluster, list[Resident]], memory: int, count: int
) -> None:
    cluster, residents = town
    before = state(cluster)
    of = wanted(ask(memory, count), waiting_s=1e6)
    found = evict(of, cluster, residents, RULE)
    assert state(cluster) == before, "deciding changes nothing"
    free = [one for one in residents if not kept_because(one, RULE)]
    if isinstance(found, NoEviction):
        for one in free:
            cluster.give_back(one.placement)
        assert find(of.ask, cluster) is None, "nothing would have helped"
        return
    gone = [one for one in residents if one.replica_id in found.replica_ids]
    assert all(one in free for one in gone)
    for one in gone:
        cluster.give_back(one.placement)
    assert find(of.ask, cluster) == found.placement
    for one in gone:
        cluster.take(one.placement)
        assert find(of.ask, cluster) is None, "one less would have done"
        cluster.give_back(one.placement)


# --- F27: a herd on 200 cold models with room for 4 ------------------------------


@dataclass
class Herd:
    """Virtual seconds: 200 endpoints of uneven tenants, each with one request that takes a second."""

    tenants: dict[str, int]
    room: int = 4
    reload_s: float = 5.0
    now_s: float = 0.0
    waiting: dict[str, Waiting] = field(default_factory=dict)
    running: dict[str, tuple[Waiting, Placement, float]] = field(default_factory=dict)
    loads: list[tuple[float, str, str]] = field(default_factory=list)
    evictions: list[tuple[str, float]] = field(default_factory=list)
    served: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        cluster = Cluster.of([node("n", self.room, memory=24)])
        for tenant, models in self.tenants.items():
            for number in range(models):
                endpoint = f"{tenant}-{number}"
                self.waiting[endpoint] = Waiting(endpoint, tenant, 0.0)
        while self.waiting and self.now_s < 100_000:
            self.step(cluster)
            self.now_s += 1.0

    def step(self, cluster: Cluster) -> None:
        per_tenant: dict[str, float] = {}
        for _, tenant, _ in self.loads:
            per_tenant[tenant] = per_tenant.get(tenant, 0.0) + 1.0
        for waiting in turns(list(self.waiting.values()), per_tenant):
            of = Wanted(
                ask=ask(20),
                name=waiting.endpoint_id,
                reload_s=self.reload_s,
                queued=1,
                waiting_s=self.now_s - waiting.since_s,
            )
            residents = [self.resident(name) for name in self.running]
            found = evict(of, cluster, residents, RULE)
            if isinstance(found, NoEviction):
                return  # the next in line would take its room
            for replica_id in found.replica_ids:
                name = replica_id.removeprefix("r-")
                _, placement, ready_s = self.running.pop(name)
                cluster.give_back(placement)
                self.evictions.append((name, self.now_s - ready_s))
            cluster.take(found.placement)
            del self.waiting[waiting.endpoint_id]
            ready_s = self.now_s + self.reload_s
            self.running[waiting.endpoint_id] = (waiting, found.placement, ready_s)
            self.loads.append((self.now_s, waiting.tenant_id, waiting.endpoint_id))
            self.served[waiting.endpoint_id] = ready_s + 1.0

    def resident(self, name: str) -> Resident:
        _, placement, ready_s = self.running[name]
        since_s = self.now_s - ready_s
        return resident(
            name, placement, is_idle=since_s >= 1.0, resident_s=since_s, reload_s=self.reload_s, rate_per_s=0.0005
        )


def test_a_herd_on_200_cold_models_takes_turns_without_thrash_or_starvation() -> None:
    herd = Herd({"large": 120, "middle": 60, "small": 15, "tiny": 5})
    herd.run()
    assert len(herd.served) == 200, "everybody was served"
    assert len(herd.evictions) <= len(herd.loads)
    assert len(herd.loads) == 200, "nothing was loaded twice for one request"
    assert all(stayed_s >= RULE.min_residency_s for _, stayed_s in herd.evictions)
    assert len({name for name, _ in herd.evictions}) == len(herd.evictions)
    # While all four tenants wait, each gets the same: the tiny one is through in five rounds of its own.
    first = [tenant for _, tenant, _ in herd.loads[:20]]
    assert {tenant: first.count(tenant) for tenant in herd.tenants} == dict.fromkeys(herd.tenants, 5)
    # The estimate that its place in the turns gives holds, within the rounding of the simulation's second.
    last = max(herd.served.values())
    assert last <= eta_s(199, room=4, reload_s=herd.reload_s, rule=RULE) + 50
