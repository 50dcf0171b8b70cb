"""Reconcile under every fault at once, in any order (Hypothesis).

The machine holds a store and a fleet as plain values and carries actions out
in the order that ``control/executor.py`` writes. It may be cut off after any
single write, as ``kill -9`` of a controller does. Whatever happened before,
never do two processes of one place run, never is an id used twice, and left in
peace it converges to what was asked.
"""

from collections.abc import Callable, Iterator

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.policy import actions as act
from modelyard.policy.reconcile import LIVE, Pace, ReplicaSeen, Situation, Stray, Vital, plan

PACE = Pace(backoff_s=1, backoff_max_s=8, drain_timeout_s=30)
VERSIONS = ("ver-a", "ver-b")


class Process(msgspec.Struct):
    is_running: bool = True
    vital: Vital = Vital.LOADING
    in_flight: int = 0
    exit_reason: str = ""


class ReconcileMachine(RuleBasedStateMachine):
    """``records`` is the store, ``processes`` the fleet."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.records: dict[str, Replica] = {}
        self.processes: dict[str, Process] = {}
        self.ever_started: set[str] = set()
        self.wanted = {"ver-a": 1}
        self.is_deleted = False
        self.is_forgotten = False
        self.is_first = True
        self.evicted: set[str] = set()
        self.taken: set[str] = set()
        self.moving: set[str] = set()

    # --- the pass -----------------------------------------------------------

    def look(self) -> Situation:
        replicas = []
        for record in self.records.values():
            process = self.processes.get(record.id)
            replicas.append(
                ReplicaSeen(
                    record=record,
                    is_known=process is not None,
                    is_running=process is not None and process.is_running,
                    exit_reason=process.exit_reason if process else "",
                    vital=process.vital if process else Vital.UNKNOWN,
                    in_flight=process.in_flight if process else 0,
                    is_evicted=record.id in self.evicted,
                    moves_because="it helps others" if record.id in self.moving else "",
                )
            )
        return Situation(
            endpoint_id="ep-1",
            now_s=self.now_s,
            wanted={version: 0 if self.is_deleted else number for version, number in self.wanted.items()},
            replicas=replicas,
            strays=[Stray(id, process.is_running) for id, process in self.processes.items() if id not in self.records],
            taken_ids=self.taken,
            is_deleted=self.is_deleted,
            is_first=self.is_first,
        )

    def writes(self, action: act.Action) -> Iterator[Callable[[], object]]:
        match action:
            case act.StartReplica(replica=replica):
                yield lambda: self.put(msgspec.structs.replace(replica, port=1))
                yield lambda: self.start(replica.id)
                yield lambda: self.set_state(replica.id, ReplicaState.LOADING)
            case act.MarkLoading(replica_id=id):
                yield lambda: self.set_state(id, ReplicaState.LOADING)
            case act.MarkReady(replica_id=id):
                yield lambda: self.set_state(id, ReplicaState.READY)
            case act.MarkFailed(replica_id=id):
                yield lambda: self.set_state(id, ReplicaState.FAILED)
                yield lambda: self.processes.pop(id, None)
            case act.MarkEnded(replica_id=id):
                yield lambda: self.set_state(id, ReplicaState.STOPPED)
                yield lambda: self.processes.pop(id, None)
            case act.DrainReplica(replica_id=id):
                yield lambda: self.set_state(id, ReplicaState.DRAINING)
            case act.StopReplica(replica_id=id) | act.KillReplica(replica_id=id):
                failed = isinstance(action, act.KillReplica)
                yield lambda: self.set_state(id, ReplicaState.FAILED if failed else ReplicaState.STOPPED)
                yield lambda: self.end(id, "killed by SIGTERM")
                yield lambda: self.processes.pop(id, None)
            case act.ForgetProcess(replica_id=id):
                assert not self.processes[id].is_running, "a running process must never be forgotten"
                yield lambda: self.processes.pop(id, None)
            case act.ForgetReplica(replica_id=id):
                assert id not in self.processes, "its process would become a stray"
                yield lambda: self.records.pop(id)
            case act.ForgetEndpoint():
                assert not self.processes
                yield self.forget
            case act.Wait():
                pass

    def put(self, record: Replica) -> None:
        self.records[record.id] = record

    def set_state(self, id: str, state: ReplicaState) -> None:
        if record := self.records.get(id):
            ready_at = self.now_s if state is ReplicaState.READY and record.ready_at is None else record.ready_at
            self.put(msgspec.structs.replace(record, state=state, state_since=self.now_s, ready_at=ready_at))

    def start(self, id: str) -> None:
        assert id not in self.ever_started, "an id was given twice"
        self.ever_started.add(id)
        self.processes[id] = Process()

    def end(self, id: str, reason: str) -> None:
        process = self.processes[id]
        process.is_running, process.exit_reason, process.in_flight = False, reason, 0

    def forget(self) -> None:
        self.is_forgotten = True
        self.records.clear()

    def make_pass(self, cut_after: int | None = None) -> int:
        """Carry out one pass, or the first ``cut_after`` writes of it; return the number of writes."""
        if self.is_forgotten:
            return 0
        done = 0
        actions = plan(self.look(), PACE)
        self.whoever_is_needed_stays(actions)
        for action in actions:
            assert action.reason
            if isinstance(action, act.MarkReady) and action.replica_id in self.evicted:
                assert self.records[action.replica_id].state is not ReplicaState.DRAINING, "an evicted one came back"
            for write in self.writes(action):
                if done == cut_after:
                    self.is_first = True
                    return done
                write()
                done += 1
                self.no_place_runs_twice()
        self.is_first = False
        return done

    # --- what may happen ------------------------------------------------------

    @rule()
    def run_a_pass(self) -> None:
        self.make_pass()

    @rule(after=st.integers(0, 8))
    def kill_the_controller_in_a_pass(self, after: int) -> None:
        self.make_pass(cut_after=after)

    @rule(numbers=st.dictionaries(st.sampled_from(VERSIONS), st.integers(0, 3), min_size=1))
    def ask_for_another_size(self, numbers: dict[str, int]) -> None:
        self.wanted = numbers

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 10.0, 40.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(which=st.integers(0, 9), vital=st.sampled_from(Vital), in_flight=st.integers(0, 2))
    def change_a_process(self, which: int, vital: Vital, in_flight: int) -> None:
        for process in list(self.processes.values())[which : which + 1]:
            process.vital, process.in_flight = vital, in_flight

    @rule(which=st.integers(0, 9))
    def crash_a_process(self, which: int) -> None:
        for id in list(self.processes)[which : which + 1]:
            self.end(id, "killed by SIGKILL")

    @rule(which=st.integers(0, 9))
    def somebody_needs_the_place_of_one(self, which: int) -> None:
        self.evicted.update(self.ready()[which : which + 1])

    @rule(which=st.integers(0, 9))
    def one_is_to_move(self, which: int) -> None:
        self.moving.update(self.ready()[which : which + 1])

    @rule()
    def nothing_is_to_move_any_more(self) -> None:
        self.moving.clear()

    @rule(which=st.integers(0, 9))
    def another_endpoint_takes_one(self, which: int) -> None:
        for id in self.ready()[which : which + 1]:
            self.taken.add(id)
            del self.records[id], self.processes[id]

    def ready(self) -> list[str]:
        return [
            id
            for id, process in self.processes.items()
            if process.is_running and id in self.records and self.records[id].state is ReplicaState.READY
        ]

    @rule()
    def lose_the_fleets_records_of_ended_processes(self) -> None:
        for id, process in self.processes.items():
            record = self.records.get(id)
            if not process.is_running and record is not None and record.state is ReplicaState.STARTING:
                self.ever_started.discard(id)  # neither store nor fleet knows of this start: its id is as good as new
        self.processes = {id: process for id, process in self.processes.items() if process.is_running}

    @rule()
    def delete_the_endpoint(self) -> None:
        self.is_deleted = len(self.ever_started) > 5  # rarely, so that there is something to delete

    # --- what must hold ---------------------------------------------------------

    def whoever_is_needed_stays(self, actions: list[act.Action]) -> None:
        """Check that no pass lets go of one that answers below the number, and what moves only for one that answers."""
        gone = {action.replica_id for action in actions if isinstance(action, act.MarkFailed | act.KillReplica)}
        able = [self.records[id] for id in self.ready() if id not in gone]
        drained = [action for action in actions if isinstance(action, act.DrainReplica) and not action.is_eviction]
        for action in drained:
            if action.is_move:
                assert any(one.takes_over == action.replica_id for one in able), "nobody took over"
        for version, number in self.wanted.items():
            before = {one.id for one in able if one.version_id == version}
            left = before - {action.replica_id for action in drained}
            assert self.is_deleted or len(left) >= min(number, len(before)), "one that was needed was let go"
        started = [action.replica for action in actions if isinstance(action, act.StartReplica)]
        assert sum(bool(one.takes_over) for one in started) <= len(VERSIONS), "one move at a time"

    @invariant()
    def each_version_has_at_most_one_replica_that_is_to_take_over(self) -> None:
        live = {id: record for id, record in self.records.items() if record.state in LIVE}
        moving = [record.version_id for record in live.values() if record.takes_over in live]
        assert len(moving) == len(set(moving))

    @invariant()
    def no_place_runs_twice(self) -> None:
        places = [
            (record.version_id, record.ordinal)
            for id, process in self.processes.items()
            if process.is_running and (record := self.records.get(id))
        ]
        assert len(places) == len(set(places)), "two generations of one place run"

    @invariant()
    def never_more_live_replicas_of_a_place_than_one(self) -> None:
        places = [(record.version_id, record.ordinal) for record in self.records.values() if record.state in LIVE]
        assert len(places) == len(set(places))

    def teardown(self) -> None:
        """Left in peace, with engines that load, it converges and then has nothing more to do."""
        for _ in range(60):
            self.now_s += 5
            for process in self.processes.values():
                process.vital, process.in_flight = Vital.READY, 0
            self.make_pass()
        if self.is_deleted:
            assert self.is_forgotten
            assert not self.processes
            return
        ready = [record for record in self.records.values() if record.state is ReplicaState.READY]
        counts = {version: sum(record.version_id == version for record in ready) for version in VERSIONS}
        assert counts == {version: self.wanted.get(version, 0) for version in VERSIONS}
        assert {record.id for record in ready} == set(self.processes), "nothing else is left running"
        assert all(process.is_running for process in self.processes.values())
        assert not self.evicted & self.processes.keys(), "whoever needed the place waits for ever"
        assert not self.moving & self.processes.keys(), "what was to move stayed"
        assert self.make_pass() == 0


TestReconcile = ReconcileMachine.TestCase
TestReconcile.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
