"""Room is promised once, promises and claims end, and nobody is evicted below what its endpoint keeps."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.towns import GIB, Town, ask, endpoint, node, replica

from modelyard.control.asking import residents_of
from modelyard.control.flow import counted, without
from modelyard.control.holding import HOLDING
from modelyard.control.placing import Placer
from modelyard.control.promises import Need
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint, Release
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import Accelerator, Node, NodeSeen, Part, Placement
from modelyard.domain.rollouts import Rollout, RolloutKind, RolloutState
from modelyard.policy import scaling
from modelyard.policy.asks import Ask, NoRoom
from modelyard.policy.eviction import Resident, Rule

HALF = Placement((Part("n1", (0,), 40 * GIB),))
RULE = Rule(min_residency_s=0.0, patience_s=0.0)
"""Whoever waits gets room at once: the races matter here, not who is worth more."""


def need(name: str = "new", **more: object) -> Need:
    return replace(Need(name, queued=1, reload_s=10.0), **more)  # type: ignore[arg-type]


def nobody() -> list[Resident]:
    return []


def evictable(town: Town, but: str = "ep-new") -> list[str]:
    return [one.replica_id for one in residents_of(town.look(), {}, but=but)]


# --- who may be evicted -----------------------------------------------------------------


def rollout(kind: RolloutKind, state: RolloutState = RolloutState.RUNNING) -> Rollout:
    return Rollout("ver-old", "ver-cand", began_at=0.0, kind=kind, state=state, kept_until=9e9)


@pytest.mark.parametrize("floor", [0, 1])
def test_a_candidate_is_never_evicted_alone(floor: int) -> None:
    town, one = Town(), endpoint("one", "ver-old", "ver-cand", floor=floor, rollout=rollout(RolloutKind.CANARY))
    town.settle(one)
    stable = town.run(replica(one), HALF)
    town.run(replica(one, version_id="ver-cand", ready_at=5.0), HALF)
    assert evictable(town) == ([] if floor else [stable.id])


def test_what_is_kept_to_go_back_to_is_not_evicted_while_the_new_version_serves() -> None:
    kept = rollout(RolloutKind.CANARY, RolloutState.PROMOTED)
    releases = (Release("ver-old", 0), Release("ver-cand", 100))
    town, one = Town(), endpoint("one", floor=1, rollout=kept, releases=releases)
    town.settle(one)
    town.run(replica(one, version_id="ver-old", ready_at=9.0), HALF)
    town.run(replica(one, version_id="ver-cand", ready_at=5.0), HALF)
    assert evictable(town) == []


def test_a_shadow_does_not_count_as_one_that_answers() -> None:
    releases = (Release("ver-old", 100), Release("ver-shadow", 0, shadow=50))
    town, one = Town(), endpoint("one", floor=1, releases=releases)
    town.settle(one)
    town.run(replica(one, version_id="ver-old", ready_at=9.0), HALF)
    town.run(replica(one, version_id="ver-shadow", ready_at=5.0), HALF)
    assert evictable(town) == []


def test_a_rolling_change_keeps_both_versions() -> None:
    town, one = Town(), endpoint("one", "ver-old", "ver-cand", rollout=rollout(RolloutKind.ROLLING))
    town.settle(one)
    town.run(replica(one), HALF)
    town.run(replica(one, version_id="ver-cand", ready_at=5.0), HALF)
    assert evictable(town) == []


def test_a_replica_that_loads_is_none_that_could_stay_in_place_of_one_that_answers() -> None:
    town, one = Town(), endpoint("one", floor=1)
    town.settle(one)
    town.run(replica(one), HALF)
    town.run(msgspec.structs.replace(replica(one, 1, ready_at=None), state=ReplicaState.LOADING), HALF)
    assert evictable(town) == []


def test_every_release_with_traffic_keeps_one_where_any_is_kept() -> None:
    releases = (Release("ver-a", 50), Release("ver-b", 50))
    town, one = Town(), endpoint("one", floor=1, releases=releases)
    town.settle(one)
    town.run(replica(one, version_id="ver-a"), HALF)
    town.run(replica(one, version_id="ver-b"), HALF)
    assert evictable(town) == []


def test_a_warm_pool_of_a_fixed_size_makes_room_first() -> None:
    town, pool = Town(), endpoint("pool", floor=1, pool="fast")
    town.settle(pool)
    waiting = town.run(replica(pool), HALF)
    (resident,) = residents_of(town.look(), {}, but="ep-new")
    assert (resident.replica_id, resident.pin) == (waiting.id, "cold")


def test_a_replica_that_was_taken_from_a_pool_has_its_least_residency_too() -> None:
    town, one = Town(), endpoint("one")
    town.settle(one)
    town.run(msgspec.structs.replace(replica(one, ready_at=5.0), state_since=town.now_s - 3), HALF)
    (resident,) = residents_of(town.look(), {}, but="ep-new")
    assert resident.resident_s == 3


def decision(replicas: int) -> scaling.Decision:
    return scaling.Decision(replicas, "as asked", scaling.Memory(replicas, 0.0))


def seen(replicas: int) -> scaling.Seen:
    return scaling.Seen(now_s=0.0, replicas=replicas, ready=replicas, slots=1, gateways=1)


def test_a_repeated_pass_takes_an_evicted_replica_off_once() -> None:
    one = endpoint("one")
    first = without(decision(3), one, seen(3), ["a"], "room")
    assert first.replicas == first.memory.replicas == 2
    assert without(decision(2), one, seen(3), ["a"], "room").replicas == 2


def test_what_drains_already_and_what_became_spare_meanwhile_take_nothing_off() -> None:
    promoted = rollout(RolloutKind.CANARY, RolloutState.PROMOTED)
    one = endpoint("one", rollout=promoted, releases=(Release("ver-old", 0), Release("ver-cand", 100)))
    kept, serving = replica(one, version_id="ver-old"), replica(one, version_id="ver-cand")
    draining = msgspec.structs.replace(replica(one, 1, version_id="ver-cand"), state=ReplicaState.DRAINING)
    replicas = [kept, serving, draining]
    assert counted(replicas, {each.id for each in replicas}, one) == [serving.id]


def test_evictions_leave_the_floor_and_put_an_endpoint_of_several_releases_to_sleep_whole() -> None:
    assert without(decision(2), endpoint("one", floor=2), seen(3), ["a", "b"], "room").replicas == 2
    halves = endpoint("one", releases=(Release("ver-a", 50), Release("ver-b", 50)))
    assert without(decision(2), halves, seen(2), ["a"], "room").replicas == 0
    shares = (Release("ver-old", 90), Release("ver-cand", 10))
    canary = endpoint("one", releases=shares, rollout=rollout(RolloutKind.CANARY))
    assert without(decision(2), canary, seen(2), ["a"], "room").replicas == 1, "the candidate's come on top"


# --- promises ---------------------------------------------------------------------------


def test_what_makes_room_counts_for_the_quota_of_its_tenant() -> None:
    town, first, second = Town(nodes={"n1": node("n1", 2)}), endpoint("first"), endpoint("second")
    idle = endpoint("idle", tenant_id="ten-b")
    town.settle(first, second, idle)
    for index in (0, 1):
        town.run(replica(idle, index), Placement((Part("n1", (index,), 80 * GIB),)))
    placer = Placer(RULE)
    placer.see(town.look(), town.nodes.values(), {"ten-a": 1})
    reasons = []
    for one in (first, second):
        placer.begin(one.id)
        found = placer.place(
            replica(one, ready_at=None), ask(80), need(), lambda: residents_of(town.look(), {}, but=first.id)
        )
        assert isinstance(found, NoRoom)
        reasons.append(found.reason)
    assert len(placer.claimed) == 1
    assert "may have 1 accelerators" in reasons[1]
    # And neither tenant reads the other's names.
    assert "evicting idle a model of another tenant frees" in reasons[0]
    (said,) = placer.evicted(placer.claimed, "ten-b").values()
    assert said == "a model of another tenant needs the room of idle ones on n1"
    (told,) = placer.evicted(placer.claimed, "ten-a").values()
    assert told.startswith("`new` needs the room")


def test_a_replica_that_was_handed_over_counts_for_the_quota_at_once() -> None:
    town, one, pool = Town(nodes={"n1": node("n1", 2)}), endpoint("one"), endpoint("pool", tenant_id="ten-p", pool="p")
    town.settle(one, pool)
    waiting = town.run(replica(pool), Placement((Part("n1", (0,), 80 * GIB),)))
    placer = Placer(RULE)
    placer.see(town.look(), town.nodes.values(), {"ten-a": 1})
    assert not placer.over_quota("ten-a", waiting.placement)
    placer.hand_over(waiting, "ten-a")
    assert "may have 1 accelerators" in placer.over_quota("ten-a", waiting.placement)


def test_a_warm_pool_makes_nobody_go() -> None:
    town, idle = Town(nodes={"n1": node("n1")}), endpoint("idle")
    town.settle(idle)
    town.run(replica(idle), Placement((Part("n1", (0,), 80 * GIB),)))
    placer = Placer(RULE)
    placer.see(town.look(), town.nodes.values(), {})
    pool = replica(endpoint("pool", pool="p"), ready_at=None)
    placer.begin(pool.endpoint_id)
    found = placer.place(pool, ask(), need(may_evict=False), lambda: residents_of(town.look(), {}, but=""))
    assert isinstance(found, NoRoom)
    assert not placer.claimed


def test_what_runs_suits_whoever_may_be_there() -> None:
    town, one = Town(nodes={"n1": node("n1", 2)}), endpoint("one")
    town.settle(one)
    placer = Placer()
    placer.see(town.look(), town.nodes.values(), {})
    assert placer.suits(ask(), HALF)
    assert not placer.suits(ask(count=2), HALF)
    assert not placer.suits(ask(pool="other"), HALF)
    assert not placer.suits(msgspec.structs.replace(ask(), kinds=frozenset({"l4"})), HALF)
    assert not placer.suits(ask(), Placement((Part("gone", (0,), GIB),)))


def test_nobody_takes_the_room_that_is_being_made_for_another() -> None:
    """Neither what was free beside the victims, nor what the first of two victims leaves."""
    town, idle, large, small = Town(nodes={"n1": node("n1")}), endpoint("idle"), endpoint("large"), endpoint("small")
    town.settle(idle, large, small)
    first = town.run(replica(idle, 0), Placement((Part("n1", (0,), 30 * GIB),)))
    town.run(replica(idle, 1), Placement((Part("n1", (0,), 30 * GIB),)))
    placer = Placer(RULE)

    def take(one: Endpoint, gib: int) -> Placement | NoRoom:
        placer.begin(one.id)
        world = town.look()
        wanted = replica(one, ready_at=None)
        found = placer.place(wanted, ask(gib), need(), lambda: residents_of(world, {}, but=one.id))
        placer.end(one.id, ())
        return found

    placer.see(town.look(), town.nodes.values(), {})
    assert isinstance(take(large, 80), NoRoom)
    assert len(placer.claimed) == 2
    assert isinstance(take(small, 20), NoRoom)
    town.running.discard(first.id)
    del town.replicas[first.id]
    placer.see(town.look(), town.nodes.values(), {})
    assert isinstance(take(small, 20), NoRoom)
    town.running.clear()
    town.replicas.clear()
    placer.see(town.look(), town.nodes.values(), {})
    assert isinstance(take(small, 20), NoRoom)
    assert isinstance(take(large, 80), Placement)


def test_what_strangers_use_of_an_accelerator_is_not_hidden_by_what_is_promised() -> None:
    busy = msgspec.structs.replace(node("n1"), used_bytes={0: 30 * GIB})
    town, first, second = Town(nodes={"n1": busy}), endpoint("first"), endpoint("second")
    town.settle(first, second)
    placer = Placer(RULE)
    placer.see(town.look(), town.nodes.values(), {})
    assert isinstance(placer.place(replica(first, ready_at=None), ask(40), need(), nobody), Placement)
    placer.see(town.look(), town.nodes.values(), {})
    assert isinstance(placer.place(replica(second, ready_at=None), ask(40), need(), nobody), NoRoom)


def test_what_runs_since_before_there_were_placements_counts_on_the_cpu() -> None:
    host = NodeSeen(node=Node("local", (Accelerator(0, "cpu", 16 * GIB),)))
    town, old, new = Town(nodes={"local": host}), endpoint("old"), endpoint("new")
    town.settle(old, new)
    town.versions["ver-old"] = msgspec.structs.replace(town.versions["ver-old"], memory_bytes=10 * GIB)
    town.run(replica(old))
    placer = Placer(RULE)
    placer.see(town.look(), town.nodes.values(), {})
    found = placer.place(replica(new, ready_at=None), ask(8), need(), nobody)
    assert isinstance(found, NoRoom)
    assert "largest free 6.0" in found.reason
    town.running.clear()
    placer.see(town.look(), town.nodes.values(), {})
    assert isinstance(placer.place(replica(new, ready_at=None), ask(8), need(), nobody), Placement)


# --- all of it at once --------------------------------------------------------------------


class Rooms(RuleBasedStateMachine):
    """Passes of endpoints between looks that may be older than what passes did, nodes that come and go."""

    @initialize(nodes=st.integers(1, 2), accelerators=st.sampled_from([1, 2]), data=st.data())
    def begin(self, nodes: int, accelerators: int, data: st.DataObject) -> None:
        self.town = Town()
        self.away: dict[str, object] = {}
        for number in range(nodes):
            pool = data.draw(st.sampled_from(["default", "default", "extra"]))
            self.town.nodes[f"n{number}"] = node(f"n{number}", accelerators, pool=pool)
        self.asks: dict[str, Ask] = {}
        for number in range(5):
            one = endpoint(f"e{number}", tenant_id=f"ten-{number % 2}", floor=int(number == 0))
            self.town.settle(one)
            size, count = data.draw(st.sampled_from([(20, 1), (40, 1), (60, 1), (80, 1), (40, 2)]))
            self.asks[one.id] = ask(size, count=count, tenant_id=one.tenant_id)
        self.placer = Placer(RULE)
        self.world = self.town.look()
        self.stale: set[str] = set()
        """Endpoints that had a pass since the newest look began: they get none before the next one."""
        self.generations: dict[str, int] = {}
        self.wanting: set[str] = set()
        self.see(self.world)

    def see(self, world: World) -> None:
        self.world = world
        self.placer.see(world, self.town.nodes.values(), {})
        held = {one.id for replicas in world.replicas.values() for one in replicas if self.holds(one)}
        claims = self.placer._claims.values()
        assert all(claim.victims & held for claim in claims), "a claim whose victims are gone is a promise"

    def holds(self, one: Replica) -> bool:
        return one.state in HOLDING or one.id in self.town.running

    def want(self, one: Endpoint) -> Replica:
        generation = self.generations.setdefault(one.id, 0)
        return replica(one, generation=generation, ready_at=None)

    @rule(number=st.integers(0, 4), record=st.booleans(), wants=st.booleans(), drains=st.booleans())
    def pass_over(self, number: int, record: bool, wants: bool, drains: bool) -> None:
        one = self.town.endpoints.get(f"ep-e{number}")
        if one is None or one.id in self.stale:
            return
        self.one_pass(one, record=record, wants=wants, drains=drains)

    def one_pass(self, one: Endpoint, *, record: bool, wants: bool, drains: bool = True) -> None:
        town, placer = self.town, self.placer
        mine = [each for each in self.world.replicas.get(one.id, ()) if each.id in town.replicas]
        for id in placer.evicted((each.id for each in mine), one.tenant_id) if drains else ():
            # In one go what takes several passes: drained, stopped, its process gone.
            town.running.discard(id)
            town.replicas[id] = msgspec.structs.replace(town.replicas[id], state=ReplicaState.STOPPED)
        placer.begin(one.id)
        recorded = []
        if wants and not any(self.holds(each) for each in mine):
            wanted = self.want(one)
            world = self.world
            found = placer.place(wanted, self.asks[one.id], need(one.name), lambda: residents_of(world, {}, but=one.id))
            if isinstance(found, Placement) and record:
                self.generations[one.id] += 1
                ready = msgspec.structs.replace(wanted, state=ReplicaState.READY, ready_at=town.now_s)
                town.run(ready, found)
                recorded.append(wanted.id)
        placer.end(one.id, recorded)
        self.wanting = self.wanting | {one.id} if wants else self.wanting - {one.id}
        self.stale.add(one.id)

    @rule()
    def a_look(self) -> None:
        self.town.now_s += 1
        self.stale.clear()
        self.see(self.town.look())

    @rule(order=st.permutations(range(5)), idle=st.integers(0, 4), drains=st.booleans())
    def a_round(self, order: list[int], idle: int, drains: bool) -> None:
        """Everybody but one wants something."""
        self.a_look()
        for number in order:
            self.pass_over(number, True, number != idle, drains)

    @rule(number=st.integers(0, 4), record=st.booleans(), wants=st.booleans())
    def a_round_whose_look_is_older_than_a_pass(self, number: int, record: bool, wants: bool) -> None:
        """The pass was under way when the look began, so its endpoint is left out of the round."""
        self.town.now_s += 1
        world = self.town.look()
        self.pass_over(number, record, wants, drains=True)
        self.stale = {f"ep-e{number}"}
        self.see(world)

    @precondition(lambda self: self.town.running)
    @rule(data=st.data())
    def a_process_ends(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.town.running)))
        self.town.running.discard(id)
        self.town.replicas[id] = msgspec.structs.replace(self.town.replicas[id], state=ReplicaState.FAILED)

    @precondition(lambda self: self.town.nodes)
    @rule(data=st.data())
    def a_node_leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.town.nodes)))
        self.away[name] = self.town.nodes.pop(name)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def a_node_comes_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.away)))
        self.town.nodes[name] = self.away.pop(name)  # type: ignore[assignment]

    @precondition(lambda self: len(self.town.endpoints) > 2)
    @rule(number=st.integers(0, 4))
    def an_endpoint_is_deleted(self, number: int) -> None:
        one = self.town.endpoints.get(f"ep-e{number}")
        if one is None or one.id in self.stale:
            return
        self.one_pass(one, record=False, wants=False)
        del self.town.endpoints[one.id]
        for id in [id for id, each in self.town.replicas.items() if each.endpoint_id == one.id]:
            del self.town.replicas[id]
            self.town.running.discard(id)

    @invariant()
    def no_room_is_given_twice(self) -> None:
        held = [one.placement for one in self.town.replicas.values() if self.holds(one)]
        promised = [promise.placement for id, promise in self.placer._promised.items() if id not in self.town.replicas]
        nodes = {**self.town.nodes, **self.away}
        taken = self.town.taken_bytes([*held, *promised])
        for (name, index), size in taken.items():
            assert size <= nodes[name].node.accelerators[index].memory_bytes, f"{name}/{index}: {size / GIB} GiB"  # type: ignore[attr-defined]
        whole = [part for one in [*held, *promised] if one.is_exclusive for part in one.parts]
        users = self.town.taken_bytes(
            Placement(tuple(msgspec.structs.replace(part, memory_bytes=1) for part in one.parts))
            for one in [*held, *promised]
        )
        assert all(users[part.node_id, index] == 1 for part in whole for index in part.accelerators)

    @invariant()
    def only_who_wants_is_promised_anything(self) -> None:
        for promises in (self.placer._promised, self.placer._claims):
            assert all(
                one.endpoint_id in self.wanting or one.replica_id in self.town.replicas for one in promises.values()
            )

    def teardown(self) -> None:
        if not hasattr(self, "placer"):
            return
        for wants in (True, True, False):
            self.a_look()
            for one in list(self.town.endpoints.values()):
                self.one_pass(one, record=True, wants=wants)
        self.a_look()
        assert repr(self.placer).endswith("0 promises, 0 claims>"), self.placer
        assert not self.placer.claimed


Rooms.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestRooms = Rooms.TestCase
