"""What people are told of an endpoint."""

import msgspec

from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress, Release, Scaling, Stage
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.policy.progress import Fetch, Outlook, View, outlook
from modelyard.policy.takeovers import settled

ENDPOINT = Endpoint("ep-1", "platform", "m", (Release("ver-a"),), Scaling(), 1)
S = ReplicaState


def replica(state: S, generation: int = 0, **changes: object) -> Replica:
    return Replica(f"rep-{generation}", "ep-1", "ver-a", 0, generation, state, 100.0, **changes)  # type: ignore[arg-type]


def look(*replicas: Replica, now_s: float = 110.0, wanted: int = 1, **changes: object) -> Outlook:
    return outlook(ENDPOINT, View(now_s=now_s, wanted=wanted, replicas=replicas, load_s=40.0, **changes))  # type: ignore[arg-type]


def test_fresh_deployment_goes_through_its_stages() -> None:
    assert look().progress == Progress(Stage.QUEUED, 0, 40.0)
    assert look(fetch=Fetch(Stage.DOWNLOADING, 42, 5.0)).progress == Progress(Stage.DOWNLOADING, 21, 45.0)
    paced = look(fetch=Fetch(Stage.DOWNLOADING, 42, 5.0, 1e6)).progress
    assert paced == Progress(Stage.DOWNLOADING, 21, 45.0, bytes_per_s=1e6)
    assert look(replica(S.STARTING)).progress == Progress(Stage.LOADING, 0, 40.0)
    assert look(replica(S.LOADING, started_at=100.0)).progress == Progress(Stage.LOADING, 25, 30.0)
    assert look(replica(S.READY)) == Outlook(EndpointStatus.RUNNING, Progress(Stage.READY, 100, 0.0))


def test_load_that_takes_too_long_stays_just_short_of_ready() -> None:
    progress = look(replica(S.LOADING, started_at=100.0), now_s=500.0).progress
    assert (progress.percent, progress.eta_s) == (99, 0.5)


def test_first_start_provisions_and_later_ones_scale() -> None:
    assert look(replica(S.STARTING)).status is EndpointStatus.PROVISIONING
    assert look(replica(S.STARTING), is_proven=True).status is EndpointStatus.SCALING
    told = look(replica(S.READY), wanted=2, size_reason="17 queued")
    assert (told.status, told.progress.reason) == (EndpointStatus.SCALING, "1 of 2 replicas are ready")


def test_a_move_is_told_while_nothing_else_is_to_be_said() -> None:
    told = look(replica(S.READY), moving="a replica moves to gpu-2")
    assert told == Outlook(EndpointStatus.RUNNING, Progress(Stage.READY, 100, 0.0, "a replica moves to gpu-2"))
    told = look(replica(S.READY), wanted=2, moving="a replica moves to gpu-2")
    assert told.progress.reason == "1 of 2 replicas are ready"


def test_sleep_is_told_with_its_reason() -> None:
    told = look(wanted=0, size_reason="no request for 300 s")
    assert told.status is EndpointStatus.STOPPED
    assert told.progress.reason == "asleep: no request for 300 s"


def test_third_crash_in_a_row_is_a_failure_and_a_ready_replica_ends_it() -> None:
    crashed = [replica(S.FAILED, number, reason="exited with code 1") for number in range(3)]
    assert look(*crashed[:2], waiting="it pauses").failure == ""
    assert look(*crashed[:2], waiting="it pauses").progress.reason == "it pauses"
    told = look(*crashed)
    assert told.status is EndpointStatus.FAILED
    assert told.failure == "it failed 3 times in a row, the last time: exited with code 1"
    assert look(*crashed, replica(S.READY, 3)).failure == ""


def test_trouble_fails_what_has_no_replica_and_is_mentioned_where_there_is_one() -> None:
    assert look(troubles={"ver-a": "no engine"}).failure == "no engine"
    assert look(replica(S.READY), troubles={"ver-a": "no engine"}) == Outlook(
        EndpointStatus.RUNNING, Progress(Stage.READY, 100, 0.0, "no engine")
    )


def test_a_release_that_cannot_start_is_no_failure_while_another_may() -> None:
    both = msgspec.structs.replace(ENDPOINT, releases=(Release("ver-a", 90), Release("ver-b", 10)))
    crashed = [msgspec.structs.replace(replica(S.FAILED, number), version_id="ver-b") for number in range(3)]
    view = View(now_s=1000.0, wanted=2, replicas=[*crashed, replica(S.LOADING)], load_s=40.0)
    assert outlook(both, view).failure == ""
    assert outlook(both, msgspec.structs.replace(view, troubles={"ver-b": "no engine"})).failure == ""
    assert outlook(both, msgspec.structs.replace(view, troubles={"ver-a": "no engine"})).failure == "no engine"


def test_a_shadow_is_neither_waited_for_nor_taken_for_a_replica_that_answers() -> None:
    shadowed = msgspec.structs.replace(ENDPOINT, releases=(Release("ver-a"), Release("ver-b", 0, shadow=50)))
    shadow = msgspec.structs.replace(replica(S.READY), id="rep-shadow", version_id="ver-b")
    view = View(now_s=1000.0, wanted=1, replicas=[shadow, replica(S.LOADING)], load_s=40.0)
    assert outlook(shadowed, view).progress.stage is Stage.LOADING
    view = msgspec.structs.replace(view, replicas=[replica(S.READY)], troubles={"ver-b": "no engine"})
    told = outlook(shadowed, view)
    assert (told.status, told.progress.reason) == (EndpointStatus.RUNNING, "no engine")


def test_one_whose_engine_sleeps_runs_and_says_how_soon_it_answers() -> None:
    told = look(replica(S.ASLEEP), wake_s=3.0)
    assert (told.status, told.progress.stage) == (EndpointStatus.RUNNING, Stage.WARMING)
    assert told.progress.reason == "asleep: its engine sleeps beside its weights, and wakes within about 3 s"
    assert told.progress.eta_s == 3.0
    assert look(replica(S.FALLING_ASLEEP), wake_s=3.0) == told
    waking = look(replica(S.WAKING), now_s=101.0, wake_s=4.0)
    assert (waking.status, waking.progress) == (
        EndpointStatus.RUNNING,
        Progress(Stage.WARMING, 25, 3.0, "its engine wakes"),
    )
    waits = look(replica(S.ASLEEP), wake_s=3.0, waiting="it wakes once those on its accelerators sleep")
    assert (waits.status, waits.progress.stage) == (EndpointStatus.SCALING, Stage.PLACING)
    turn = look(replica(S.ASLEEP), wake_s=3.0, waiting="it wakes once those on its accelerators sleep", is_coming=True)
    assert (turn.status, turn.progress) == (EndpointStatus.RUNNING, waits.progress), "a turn is no event"
    both = look(replica(S.ASLEEP), replica(S.READY, 1), wanted=2)
    assert (both.status, both.progress.reason) == (EndpointStatus.RUNNING, "")


def test_moves_that_came_to_nothing_are_no_failure_of_what_served_meanwhile() -> None:
    tried = [replica(S.FAILED, number, reason="no such device", takes_over="rep-9") for number in range(3)]
    cold = msgspec.structs.replace(replica(S.LOADING, 5), ordinal=1)
    assert look(*settled([*tried, cold])).status is EndpointStatus.PROVISIONING
    served = [msgspec.structs.replace(one, ready_at=50.0) for one in tried]
    assert look(*settled([*served, cold])).status is EndpointStatus.FAILED, "it took over, and crashed then"
