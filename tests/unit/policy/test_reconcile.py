"""What a pass does in each situation, one by one; the state machine beside it does them all at once."""

from collections.abc import Mapping

import msgspec
import pytest

from modelyard.domain.fleet import Replica, ReplicaState, replica_id
from modelyard.policy.actions import (
    Action,
    DrainReplica,
    ForgetEndpoint,
    ForgetProcess,
    ForgetReplica,
    KillReplica,
    MarkEnded,
    MarkFailed,
    MarkLoading,
    MarkReady,
    StartReplica,
    StopReplica,
    Wait,
)
from modelyard.policy.reconcile import FAILURES_KEPT, Pace, ReplicaSeen, Situation, Stray, Vital, plan

NOW = 10_000.0
PACE = Pace(backoff_s=1, backoff_max_s=60, drain_timeout_s=120)
S = ReplicaState


def replica(state: S, ordinal: int = 0, generation: int = 0, version: str = "ver-a", **changes: object) -> Replica:
    usual = {"state_since": NOW - 10, "ready_at": NOW - 10 if state in (S.READY, S.DRAINING) else None}
    return Replica(
        id=replica_id("ep-1", version, ordinal, generation),
        endpoint_id="ep-1",
        version_id=version,
        ordinal=ordinal,
        generation=generation,
        state=state,
        **{**usual, **changes},  # type: ignore[arg-type]
    )


def running(record: Replica, **changes: object) -> ReplicaSeen:
    return msgspec.structs.replace(ReplicaSeen(record=record, is_known=True, is_running=True), **changes)


def exited(record: Replica, why: str = "exited with code 1") -> ReplicaSeen:
    return ReplicaSeen(record=record, is_known=True, exit_reason=why)


def absent(record: Replica) -> ReplicaSeen:
    return ReplicaSeen(record=record)


def look(*replicas: ReplicaSeen, wanted: Mapping[str, int] | None = None, **changes: object) -> list[Action]:
    situation = Situation(
        endpoint_id="ep-1",
        now_s=NOW,
        wanted={"ver-a": 1} if wanted is None else wanted,
        replicas=replicas,
        **changes,  # type: ignore[arg-type]
    )
    return plan(situation, PACE)


def kinds(actions: list[Action]) -> list[type]:
    assert all(action.reason for action in actions), "every action says why"
    return [type(action) for action in actions]


ONE_REPLICA = {
    "nothing yet": ([], [StartReplica]),
    "recorded but not started": ([absent(replica(S.STARTING))], [StartReplica]),
    "started but not marked": ([running(replica(S.STARTING))], [MarkLoading]),
    "start that ended at once": ([exited(replica(S.STARTING))], [MarkFailed]),
    "loading": ([running(replica(S.LOADING), vital=Vital.LOADING)], []),
    "loading, answers": ([running(replica(S.LOADING), vital=Vital.READY)], [MarkReady]),
    "loading for ever": ([running(replica(S.LOADING), vital=Vital.HUNG)], [KillReplica]),
    "ready": ([running(replica(S.READY), vital=Vital.READY)], []),
    "ready, not probed yet": ([running(replica(S.READY))], []),
    "ready, crashed": ([exited(replica(S.READY))], [MarkFailed]),
    "ready, process records lost": ([absent(replica(S.READY))], [MarkFailed]),
    "ready, hangs": ([running(replica(S.READY), vital=Vital.HUNG)], [KillReplica]),
    "hung, busy being killed": ([running(replica(S.FAILED), is_busy=True)], [Wait]),
    "hung, kill was interrupted": ([running(replica(S.FAILED))], [KillReplica, Wait]),
    "failed, dead process still on record": ([exited(replica(S.FAILED))], [ForgetProcess, StartReplica]),
    "stop was interrupted": ([running(replica(S.STOPPED))], [StopReplica, Wait]),
    "needed again while it drains": ([running(replica(S.DRAINING), in_flight=1)], [MarkReady]),
    "evicted though it is wanted": ([running(replica(S.READY), is_evicted=True)], [DrainReplica]),
    "evicted, and does not come back": ([running(replica(S.DRAINING), in_flight=1, is_evicted=True)], [Wait]),
    "falling asleep": ([running(replica(S.FALLING_ASLEEP), in_flight=1)], []),
    "asleep": ([running(replica(S.ASLEEP), vital=Vital.READY)], []),
    "waking": ([running(replica(S.WAKING), vital=Vital.READY)], []),
    "died asleep": ([exited(replica(S.ASLEEP))], [MarkFailed]),
    "died waking": ([exited(replica(S.WAKING))], [MarkFailed]),
    "hangs asleep": ([running(replica(S.ASLEEP), vital=Vital.HUNG)], [KillReplica]),
    "hangs, told to wake": ([running(replica(S.WAKING), vital=Vital.HUNG, is_busy=True)], []),
    "asleep, and its room is needed": ([running(replica(S.ASLEEP), is_evicted=True)], [StopReplica]),
    "needed again but already drained": ([running(replica(S.DRAINING, ready_at=None))], [StopReplica, Wait]),
}


@pytest.mark.parametrize(("replicas", "expected"), ONE_REPLICA.values(), ids=ONE_REPLICA.keys())
def test_one_wanted_replica(replicas: list[ReplicaSeen], expected: list[type]) -> None:
    assert kinds(look(*replicas)) == expected


SURPLUS = {
    "starting": ([absent(replica(S.STARTING))], [MarkEnded]),
    "loading": ([running(replica(S.LOADING))], [StopReplica]),
    "ready": ([running(replica(S.READY))], [DrainReplica]),
    "draining with requests": ([running(replica(S.DRAINING), in_flight=3)], []),
    "draining, and not all gateways know": ([running(replica(S.DRAINING), in_flight=None)], []),
    "drained": ([running(replica(S.DRAINING))], [StopReplica]),
    "drains for too long": ([running(replica(S.DRAINING, state_since=NOW - 120), in_flight=3)], [StopReplica]),
    "drains and hangs": ([running(replica(S.DRAINING), in_flight=3, vital=Vital.HUNG)], [StopReplica]),
    "ended while draining": ([exited(replica(S.DRAINING))], [MarkEnded]),
    "falling asleep with requests": ([running(replica(S.FALLING_ASLEEP), in_flight=1)], []),
    "falling asleep, and not all gateways know": ([running(replica(S.FALLING_ASLEEP), in_flight=None)], []),
    "falling asleep without requests": ([running(replica(S.FALLING_ASLEEP))], [StopReplica]),
    "falls asleep for too long": (
        [running(replica(S.FALLING_ASLEEP, state_since=NOW - 120), in_flight=3)],
        [StopReplica],
    ),
    "asleep": ([running(replica(S.ASLEEP))], [StopReplica]),
    "waking": ([running(replica(S.WAKING))], [StopReplica]),
    "waking with requests from before": ([running(replica(S.WAKING), in_flight=1)], []),
    "gone": ([absent(replica(S.STOPPED))], []),
    "busy": ([running(replica(S.READY), is_busy=True)], []),
}


@pytest.mark.parametrize(("replicas", "expected"), SURPLUS.values(), ids=SURPLUS.keys())
def test_one_replica_that_is_not_wanted(replicas: list[ReplicaSeen], expected: list[type]) -> None:
    assert kinds(look(*replicas, wanted={"ver-a": 0})) == expected


def test_each_generation_has_its_own_id() -> None:
    (first,) = look()
    assert isinstance(first, StartReplica)
    (second,) = look(absent(replica(S.STOPPED, generation=4)))
    assert isinstance(second, StartReplica)
    assert second.replica.generation == 5
    assert second.replica.id != first.replica.id


def test_what_is_gone_at_the_first_look_is_no_crash() -> None:
    assert kinds(look(exited(replica(S.READY), "killed by SIGTERM"), is_first=True))[0] is MarkEnded


@pytest.mark.parametrize(("failures", "pause_s"), [(1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (9, 60)])
def test_pause_between_starts_doubles_up_to_the_longest(failures: int, pause_s: float) -> None:
    def history(ago_s: float) -> list[ReplicaSeen]:
        return [
            absent(replica(S.FAILED, generation=index, state_since=NOW - ago_s, reason="exited with code 1"))
            for index in range(failures)
        ]

    (wait,) = look(*history(ago_s=pause_s - 0.5))
    assert isinstance(wait, Wait)
    assert wait.until_s == pytest.approx(NOW + 0.5)
    assert "exited with code 1" in wait.reason
    assert kinds(look(*history(ago_s=pause_s))) == [StartReplica]


def test_clock_set_back_does_not_lengthen_a_pause() -> None:
    assert kinds(look(absent(replica(S.FAILED, state_since=NOW + 3600)))) == [StartReplica]


def test_crashes_are_forgiven_once_a_replica_was_ready_for_long() -> None:
    old = absent(replica(S.FAILED, generation=0))
    assert look(old, running(replica(S.READY, generation=1, ready_at=NOW - 59))) == []
    assert kinds(look(old, running(replica(S.READY, generation=1, ready_at=NOW - 60)))) == [ForgetReplica]


def test_crash_history_is_bounded() -> None:
    history = [absent(replica(S.FAILED, generation=index, state_since=NOW)) for index in range(FAILURES_KEPT + 3)]
    forgotten = [action.replica_id for action in look(*history) if isinstance(action, ForgetReplica)]
    assert forgotten == [history[1].record.id, history[0].record.id]


def test_only_the_newest_tombstone_is_kept() -> None:
    actions = look(*(absent(replica(S.STOPPED, generation=index)) for index in range(3)), wanted={"ver-a": 0})
    assert [action.replica_id for action in actions] == [  # type: ignore[union-attr]
        replica(S.STOPPED, generation=1).id,
        replica(S.STOPPED, generation=0).id,
    ]


def test_shrinking_keeps_what_serves() -> None:
    actions = look(
        absent(replica(S.FAILED, ordinal=0, state_since=NOW)),
        running(replica(S.LOADING, ordinal=1)),
        running(replica(S.READY, ordinal=2)),
    )
    assert actions == [StopReplica(replica(S.LOADING, ordinal=1).id, "fewer replicas are needed")]


def test_shrinking_keeps_who_is_awake_then_who_sleeps_then_who_loads() -> None:
    group = [
        running(replica(S.LOADING, ordinal=0)),
        running(replica(S.ASLEEP, ordinal=1)),
        running(replica(S.READY, ordinal=2)),
    ]
    for wanted, gone in ((2, [0]), (1, [0, 1])):
        ids = [action.replica_id for action in look(*group, wanted={"ver-a": wanted})]  # type: ignore[union-attr]
        assert ids == [group[ordinal].record.id for ordinal in gone]


def test_one_that_sleeps_is_not_let_go_before_its_successor_is_there() -> None:
    old = running(replica(S.ASLEEP, version="ver-a"))
    loading = running(replica(S.LOADING, version="ver-b"))
    assert look(old, loading, wanted={"ver-b": 1}) == []
    asleep = running(replica(S.ASLEEP, version="ver-b"))
    assert kinds(look(old, asleep, wanted={"ver-b": 1})) == [StopReplica]


def test_crashing_place_does_not_dodge_its_pause_by_taking_another() -> None:
    (wait,) = look(absent(replica(S.FAILED, state_since=NOW)), absent(replica(S.STOPPED, ordinal=1)))
    assert isinstance(wait, Wait)
    assert wait.ordinal == 0


def test_old_version_serves_until_the_new_one_is_ready() -> None:
    old = running(replica(S.READY, version="ver-a"))
    assert kinds(look(old, wanted={"ver-b": 1})) == [StartReplica]
    loading = running(replica(S.LOADING, version="ver-b"))
    assert look(old, loading, wanted={"ver-b": 1}) == []
    ready = running(replica(S.READY, version="ver-b"))
    assert kinds(look(old, ready, wanted={"ver-b": 1})) == [DrainReplica]


def test_version_that_lost_its_traffic_serves_until_the_others_can() -> None:
    old = running(replica(S.READY), vital=Vital.READY)
    wanted = {"ver-a": 0, "ver-b": 1}
    assert kinds(look(old, wanted=wanted)) == [StartReplica]
    loading = running(replica(S.LOADING, version="ver-b"), vital=Vital.LOADING)
    assert look(old, loading, wanted=wanted) == []
    ready = running(replica(S.READY, version="ver-b"), vital=Vital.READY)
    (action,) = look(old, ready, wanted=wanted)
    assert isinstance(action, DrainReplica)
    assert action.reason == "its version gets no traffic"
    assert kinds(look(old, wanted={"ver-a": 0, "ver-b": 0})) == [DrainReplica], "all of it sleeps"


@pytest.mark.parametrize(("stable", "candidate"), [("ver-a", "ver-b"), ("ver-b", "ver-a")])
def test_one_that_takes_over_starts_after_the_one_that_leaves(stable: str, candidate: str) -> None:
    """Otherwise a rolling change has two more than needed for a moment, whichever id sorts first."""
    olds = [running(replica(S.READY, ordinal, version=stable), vital=Vital.READY) for ordinal in range(3)]
    new = running(replica(S.READY, version=candidate), vital=Vital.READY)
    assert kinds(look(*olds, new, wanted={stable: 2, candidate: 2})) == [DrainReplica, StartReplica]


def test_deleted_endpoint_is_forgotten_when_nothing_of_it_runs() -> None:
    def deleted(*replicas: ReplicaSeen, **changes: object) -> list[type]:
        return kinds(look(*replicas, wanted={"ver-a": 0}, is_deleted=True, **changes))

    assert deleted(running(replica(S.READY))) == [DrainReplica]
    assert deleted(running(replica(S.STOPPED), is_busy=True)) == []
    assert deleted(strays=[Stray("rep-x", is_running=True)]) == [StopReplica]
    assert deleted(absent(replica(S.STOPPED)), absent(replica(S.FAILED, ordinal=1))) == [ForgetEndpoint]
    assert deleted() == [ForgetEndpoint]


def test_process_without_a_record_is_ended_and_forgotten() -> None:
    strays = [Stray("rep-x", is_running=True), Stray("rep-y", is_running=False)]
    assert kinds(look(wanted={"ver-a": 0}, strays=strays)) == [StopReplica, ForgetProcess]
