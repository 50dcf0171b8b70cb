"""Moves under every fault at once, in any order (Hypothesis): looks that are old, crashes, controllers that are killed.

Reconcile, the placer and who moves replicas are the real ones; what they do is written into a town of records. No
accelerator ever holds more than it has, an endpoint that answers goes on to answer whatever moves, and left in peace
all that is wanted runs once, or has no room.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.towns import GIB, Town, ask, endpoint, node, replica

from modelyard.clock import ManualClock
from modelyard.control.asking import residents_of
from modelyard.control.holding import HOLDING
from modelyard.control.moving import Moving
from modelyard.control.placing import Placer
from modelyard.control.promises import Need
from modelyard.control.views import situation_of, with_moves
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import Part, Placement
from modelyard.engines.simulated import SimulatedEngine
from modelyard.policy import actions as act
from modelyard.policy.asks import Ask, NoRoom
from modelyard.policy.eviction import Rule
from modelyard.policy.reconcile import Pace, Vital, plan

PACE = Pace(backoff_s=1, backoff_max_s=8, drain_timeout_s=30)
SIZES = (10, 20, 30, 40, 60)


class Moves(RuleBasedStateMachine):
    """A town, and a controller that sees it late and may be cut off between any two actions."""

    @initialize(
        where=st.lists(st.sampled_from(["", "n1", "n2"]), min_size=5, max_size=5),
        sizes=st.permutations(SIZES),
        mode=st.sampled_from(["room", "all"]),
    )
    def begin(self, where: list[str], sizes: list[int], mode: Any) -> None:
        """Have some that lie in pieces already: ``where`` each is, "" for nowhere."""
        self.town = Town(nodes={one: node(one) for one in ("n1", "n2")})
        self.clock = ManualClock(self.town.now_s)
        self.mode = mode
        self.vitals: dict[str, Vital] = {}
        self.asks: dict[str, Ask] = {}
        self.wanted: dict[str, int] = {}
        self.excused: set[str] = set()
        """Endpoints of which something crashed, was evicted or is not wanted: they may be without a replica."""
        for number, size in enumerate(sizes):
            one = endpoint(f"e{number}")
            self.town.settle(one)
            self.asks[one.id] = ask(size)
            self.wanted[one.id] = 1
            taken = sum(other for other, at in zip(sizes[:number], where, strict=False) if at == where[number])
            if where[number] and taken + size <= 80:
                here = self.town.run(replica(one), Placement((Part(where[number], (0,), size * GIB),)))
                self.vitals[here.id] = Vital.READY
            else:
                self.excused.add(one.id)
        self.start_anew()

    @rule()
    def start_anew(self) -> None:
        """Kill the controller and start another one."""
        self.placer = Placer(Rule(min_residency_s=0.0, patience_s=0.0))
        engines: Any = {"simulated": SimulatedEngine()}
        sizing = cast("Any", SimpleNamespace(decisions={}))
        self.moving = Moving(self.placer, sizing, engines, self.clock, self.mode, 2, 0.0)
        self.passed: set[str] = set()
        self.firsts = set(self.town.endpoints)
        self.look()

    @rule()
    def look(self) -> None:
        """Have a round begin."""
        self.see(self.seen())

    def seen(self) -> World:
        self.advance(0.1)
        return self.town.look()

    def see(self, world: World, passed: Iterable[str] = ()) -> None:
        self.world = world
        self.placer.see(world, self.town.nodes.values(), {})
        self.moving.see(world)
        self.passed = set(passed)

    @rule(number=st.integers(0, 4))
    def a_look_that_is_older_than_a_pass(self, number: int) -> None:
        """The pass was under way when the look began, so its endpoint is left out of the round."""
        world = self.seen()
        self.one_pass(number, 99)
        self.see(world, [f"ep-e{number}"])

    def advance(self, seconds: float) -> None:
        self.town.now_s += seconds
        self.clock.advance(seconds)

    @rule(number=st.integers(0, 4), cut=st.sampled_from([99, 99, 0, 1, 2]))
    def one_pass(self, number: int, cut: int) -> None:
        """Have a pass by the last look, or the first actions of it."""
        one = self.town.endpoints[f"ep-e{number}"]
        if one.id in self.passed:
            return  # the next one is by a newer look
        self.passed.add(one.id)
        evicted = self.placer.evicted([each.id for each in self.world.replicas.get(one.id, ())], one.tenant_id)
        if evicted:
            self.excused.add(one.id)
        situation = situation_of(
            one,
            {one.releases[0].version_id: self.wanted[one.id]},
            "as asked",
            self.world,
            cast("Any", SimpleNamespace(vital=lambda one: (self.vitals.get(one, Vital.LOADING), ""))),
            is_first=one.id in self.firsts,
            evicted=evicted.keys(),
        )
        self.firsts.discard(one.id)
        situation = with_moves(situation, self.moving.because(one.id))
        self.placer.begin(one.id)
        recorded: list[str] = []
        for action in plan(situation, PACE)[:cut]:
            self.advance(0.001)
            self.do(one, action, recorded)
        self.placer.end(one.id, recorded)

    def do(self, one: Endpoint, action: act.Action, recorded: list[str]) -> None:
        match action:
            case act.StartReplica(replica=new):
                self.start(one, new, recorded)
            case act.MarkLoading(replica_id=id):
                self.put(id, ReplicaState.LOADING)
            case act.MarkReady(replica_id=id):
                self.put(id, ReplicaState.READY)
                if id in self.town.running and self.wanted[one.id]:
                    self.excused.discard(one.id)
            case act.DrainReplica(replica_id=id):
                self.put(id, ReplicaState.DRAINING)
            case act.MarkFailed(replica_id=id) | act.KillReplica(replica_id=id):
                self.put(id, ReplicaState.FAILED)
                self.town.running.discard(id)
            case act.StopReplica(replica_id=id) | act.MarkEnded(replica_id=id):
                self.put(id, ReplicaState.STOPPED)
                self.town.running.discard(id)
            case act.ForgetReplica(replica_id=id):
                del self.town.replicas[id]
            case _:
                pass

    def start(self, one: Endpoint, new: Replica, recorded: list[str]) -> None:
        if new.takes_over:
            found: Any = self.placer.move(new)
        else:
            needed, world = Need(one.name, queued=1, reload_s=10.0), self.world
            found = self.placer.place(new, self.asks[one.id], needed, lambda: residents_of(world, {}, but=one.id))
        if found is None or isinstance(found, NoRoom):
            return
        self.town.run(msgspec.structs.replace(new, placement=found, state=ReplicaState.LOADING))
        recorded.append(new.id)
        if new.takes_over:
            self.moving.begun(new)

    def put(self, id: str, state: ReplicaState) -> None:
        record = self.town.replicas[id]
        ready_at = self.town.now_s if state is ReplicaState.READY and record.ready_at is None else record.ready_at
        self.town.replicas[id] = msgspec.structs.replace(
            record, state=state, state_since=self.town.now_s, ready_at=ready_at
        )

    # --- what may happen -----------------------------------------------------------------

    @rule(number=st.integers(0, 4), replicas=st.integers(0, 1))
    def want(self, number: int, replicas: int) -> None:
        self.wanted[f"ep-e{number}"] = replicas
        self.excused.add(f"ep-e{number}")

    @rule(seconds=st.sampled_from([1.0, 15.0, 70.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.advance(seconds)

    @rule(which=st.integers(0, 9))
    def get_ready(self, which: int) -> None:
        for id in sorted(self.town.running)[which : which + 1]:
            self.vitals[id] = Vital.READY

    @rule()
    def get_all_ready(self) -> None:
        self.vitals.update(dict.fromkeys(self.town.running, Vital.READY))

    @rule(which=st.integers(0, 9))
    def crash(self, which: int) -> None:
        for id in sorted(self.town.running)[which : which + 1]:
            self.town.running.discard(id)
            self.excused.add(self.town.replicas[id].endpoint_id)

    @rule(rounds=st.integers(1, 3))
    def some_rounds(self, rounds: int) -> None:
        for _ in range(rounds):
            self.look()
            for number in range(5):
                self.one_pass(number, 99)

    # --- what must hold --------------------------------------------------------------------

    @invariant()
    def no_accelerator_has_more_than_it_can_hold(self) -> None:
        town = self.town
        held = [one.placement for one in town.replicas.values() if one.state in HOLDING or one.id in town.running]
        assert all(taken <= 80 * GIB for taken in town.taken_bytes(held).values()), town.taken_bytes(held)

    @invariant()
    def whoever_answered_goes_on_to_answer(self) -> None:
        for endpoint_id in self.wanted.keys() - self.excused:
            mine = [one for one in self.town.replicas.values() if one.endpoint_id == endpoint_id]
            assert any(one.state is ReplicaState.READY and one.id in self.town.running for one in mine), endpoint_id

    def teardown(self) -> None:
        """Left in peace everything that has room runs once."""
        for _ in range(60):
            self.get_all_ready()
            self.advance(5.0)
            self.some_rounds(1)
            self.no_accelerator_has_more_than_it_can_hold()
        for endpoint_id, number in self.wanted.items():
            live = [one for one in self.town.replicas.values() if one.id in self.town.running]
            mine = [one for one in live if one.endpoint_id == endpoint_id]
            assert len(mine) <= number
        assert not self.placer._moves.keys() - self.moving._meant.keys()


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
