"""How a move goes on from each state that it may be found in; the state machine of reconcile has them all at once."""

from collections.abc import Mapping

import msgspec
import pytest

from modelyard.domain.fleet import Replica, ReplicaState, replica_id
from modelyard.domain.nodes import Part, Placement
from modelyard.policy.actions import (
    Action,
    DrainReplica,
    KillReplica,
    MarkEnded,
    MarkFailed,
    MarkReady,
    StartReplica,
    StopReplica,
    Wait,
)
from modelyard.policy.reconcile import Pace, ReplicaSeen, Situation, Vital, plan
from modelyard.policy.takeovers import START_S, settled, takeovers, told

NOW = 10_000.0
PACE = Pace(backoff_s=1, backoff_max_s=60, drain_timeout_s=120)
S = ReplicaState


def replica(state: S, ordinal: int = 0, generation: int = 0, **changes: object) -> Replica:
    usual = {"state_since": NOW - 10, "ready_at": NOW - 10 if state in (S.READY, S.DRAINING) else None}
    return Replica(
        id=replica_id("ep-1", "ver-a", ordinal, generation),
        endpoint_id="ep-1",
        version_id="ver-a",
        ordinal=ordinal,
        generation=generation,
        state=state,
        **{**usual, **changes},  # type: ignore[arg-type]
    )


OLD = replica(S.READY)


def old(state: S = S.READY, **changes: object) -> ReplicaSeen:
    record = msgspec.structs.replace(OLD, state=state)
    return msgspec.structs.replace(ReplicaSeen(record=record, is_known=True, is_running=True), **changes)


def new(state: S, *, since_s: float = 10, **changes: object) -> ReplicaSeen:
    record = replica(state, 1, takes_over=OLD.id, state_since=NOW - since_s, placement=at("gpu-2"))
    is_there = state in (S.LOADING, S.READY, S.DRAINING)
    usual = {"is_known": is_there, "is_running": is_there}
    return msgspec.structs.replace(ReplicaSeen(record=record), **{**usual, **changes})


def at(node: str) -> Placement:
    return Placement((Part(node, (0,), 1),))


def look(*replicas: ReplicaSeen, wanted: Mapping[str, int] | None = None, **changes: object) -> list[Action]:
    wanted = {"ver-a": 1} if wanted is None else wanted
    return plan(Situation(endpoint_id="ep-1", now_s=NOW, wanted=wanted, replicas=replicas, **changes), PACE)  # type: ignore[arg-type]


def test_another_one_starts_in_a_place_of_its_own_with_the_reason() -> None:
    (action,) = look(old(moves_because="it helps others"))
    assert isinstance(action, StartReplica)
    assert (action.replica.ordinal, action.replica.takes_over, action.reason) == (1, OLD.id, "it helps others")


MOVES = {
    "recorded, and the controller died": ([old(), new(S.STARTING)], {StartReplica: 1}),
    "recorded long ago, never started": ([old(), new(S.STARTING, since_s=START_S)], {MarkEnded: 1}),
    "loading": ([old(), new(S.LOADING)], {}),
    "loading, answers": ([old(), new(S.LOADING, vital=Vital.READY)], {MarkReady: 1}),
    "ready": ([old(), new(S.READY)], {DrainReplica: 0}),
    "ready, hangs": ([old(), new(S.READY, vital=Vital.HUNG)], {KillReplica: 1}),
    "failed": ([old(), new(S.FAILED)], {}),
    "its engine ended while it loaded": ([old(), new(S.LOADING, is_running=False)], {MarkFailed: 1}),
    "the old one drains": ([old(S.DRAINING, in_flight=1), new(S.READY)], {}),
    "the old one drained": ([old(S.DRAINING), new(S.READY)], {StopReplica: 0}),
    "the new one died while the old one drains": ([old(S.DRAINING, in_flight=1), new(S.FAILED)], {MarkReady: 0}),
    "the old one is gone": ([old(S.STOPPED, is_known=False, is_running=False), new(S.READY)], {}),
    "the old one died while the new one loads": ([old(S.FAILED, is_known=False, is_running=False), new(S.LOADING)], {}),
    "the place of the old one is needed": ([old(is_evicted=True), new(S.LOADING)], {DrainReplica: 0, StopReplica: 1}),
    "the place of the new one is needed": ([old(), new(S.LOADING, is_evicted=True)], {StopReplica: 1}),
}


@pytest.mark.parametrize(("replicas", "expected"), MOVES.values(), ids=MOVES.keys())
def test_a_move_goes_on(replicas: list[ReplicaSeen], expected: dict[type, int]) -> None:
    """Expected is what happens to which: 0 the old, 1 the new one."""
    ids = {seen.record.id: seen.record.ordinal for seen in replicas}
    found = {}
    for action in look(*replicas):
        if isinstance(action, Wait):
            continue
        id = action.replica.id if isinstance(action, StartReplica) else action.replica_id  # type: ignore[union-attr]
        found[type(action)] = ids[id]
    assert found == expected


def test_the_old_one_drains_as_moved_and_says_where_to() -> None:
    assert look(old(), new(S.READY)) == [
        DrainReplica(OLD.id, f"it moved: {replica(S.READY, 1).id} is ready on gpu-2", is_move=True)
    ]


def test_a_move_begins_only_once() -> None:
    assert look(old(moves_because="it helps"), new(S.LOADING)) == []


def test_who_moves_away_while_nobody_needs_it_goes_with_its_successor() -> None:
    actions = look(old(), new(S.LOADING), wanted={"ver-a": 0})
    assert [(type(one), one.reason) for one in actions] == [
        (DrainReplica, "fewer replicas are needed"),
        (StopReplica, "its move is given up"),
    ]
    assert [type(one) for one in look(old(), new(S.READY), wanted={"ver-a": 0})] == [DrainReplica, DrainReplica]


def test_one_more_that_is_wanted_meanwhile_gets_a_place_of_its_own() -> None:
    for state in (S.LOADING, S.READY):
        started = [one.replica for one in look(old(), new(state), wanted={"ver-a": 2}) if isinstance(one, StartReplica)]
        assert [(one.ordinal, one.takes_over) for one in started] == [(2, "")]


def test_one_that_was_left_does_not_come_back_for_one_more_that_is_wanted() -> None:
    actions = look(old(S.DRAINING, in_flight=1), new(S.READY), wanted={"ver-a": 2})
    assert [type(one) for one in actions] == [StartReplica]


def test_a_place_that_crashed_pauses_before_it_is_moved_to_again() -> None:
    crashed = ReplicaSeen(record=replica(S.FAILED, 1, state_since=NOW))
    assert look(old(moves_because="it helps"), crashed) == []
    crashed = ReplicaSeen(record=replica(S.FAILED, 1, state_since=NOW - 1))
    (action,) = look(old(moves_because="it helps"), crashed)
    assert isinstance(action, StartReplica)
    assert action.replica.generation == 1


def test_what_is_under_way_is_told_from_the_records() -> None:
    loading, ready = new(S.LOADING).record, new(S.READY).record
    assert takeovers([OLD, loading]) == {loading.id: OLD.id}
    assert takeovers([replica(S.DRAINING), ready]) == {}
    assert settled([OLD, loading]) == [OLD]
    assert settled([OLD, ready]) == [OLD], "until the old one drains it is the one that counts"
    assert settled([replica(S.DRAINING), ready]) == [ready]
    failed = new(S.FAILED).record
    assert settled([OLD, failed]) == [OLD], "callers never knew of it"
    failed = msgspec.structs.replace(failed, ready_at=NOW - 5)
    assert settled([failed]) == [failed], "it had taken over"
    assert "moves to gpu-2" in told([OLD, loading])
    assert "moved to gpu-2" in told([replica(S.DRAINING), ready])
    assert told([OLD]) == told([replica(S.STOPPED), ready]) == ""


def test_one_more_that_is_wanted_does_not_wait_for_the_pause_of_a_place_that_a_move_failed_at() -> None:
    tries = [
        ReplicaSeen(record=replica(S.FAILED, 1, generation, takes_over=OLD.id, state_since=NOW))
        for generation in range(4)
    ]
    (action,) = [one for one in look(old(), *tries, wanted={"ver-a": 2}) if not isinstance(one, Wait)]
    assert isinstance(action, StartReplica)
    assert action.replica.generation == 4


def test_one_that_moves_is_not_two_that_an_older_version_may_go_for() -> None:
    before = msgspec.structs.replace(OLD, version_id="ver-0", id=replica_id("ep-1", "ver-0", 0, 0))
    actions = look(old(), new(S.READY), ReplicaSeen(record=before, is_known=True, is_running=True), wanted={"ver-a": 2})
    assert [one.replica_id for one in actions if isinstance(one, DrainReplica)] == [OLD.id]
