"""Answers about an endpoint pick the reasons that were left, and end in a step that fits them."""

from pathlib import Path

import msgspec
import pytest

import modelyard.control
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress, Release, Scaling, Stage, Tier
from modelyard.domain.nodes import Part, Placement
from modelyard.policy.accelerator_quota import refusal
from modelyard.policy.why import TROUBLES, Happened, Known, explain

CONTROL = Path(modelyard.control.__file__ or "").parent


def endpoint(status: EndpointStatus = EndpointStatus.SCALING, reason: str = "", stage: Stage = Stage.READY) -> Endpoint:
    scaling = Scaling(min_replicas=0, max_replicas=2, scale_to_zero=True)
    progress = Progress(stage=stage, reason=reason)
    return Endpoint("ep-1", "ten-1", "demo", (Release("ver-1"),), scaling, 0, status=status, progress=progress)


def known(*events: Happened) -> Known:
    return Known(now_s=1000.0, wanted=2, ready=1, size_reason="2 is the configured least", events=events)


PAIR = Placement((Part("a", (0, 1), 1),))
OVER = refusal(2, [PAIR], PAIR, {})


@pytest.mark.parametrize(
    ("reason", "step"),
    [
        (OVER, "modelyard tenants limit"),
        ("the largest free piece is 3 GiB on local", "modelyard nodes"),
        ("there is no room for it", "modelyard nodes"),
        ("exit code 137: out of memory", "context_length"),
        ("artifact_corrupt: the uploaded file is damaged or gone; upload it again", "modelyard models upload FILE"),
        ("the GGUF file is truncated", "a good artifact"),
        ("exit code 3", "modelyard logs demo"),
    ],
)
def test_the_next_step_is_about_the_reason(reason: str, step: str) -> None:
    state = explain(endpoint(reason=reason), known())[0]
    assert reason in state.answer
    assert step in state.next_step


def test_a_replica_that_fails_its_requests_is_told_though_it_is_ready() -> None:
    told = "rp-1 fails them: the provider refused: it knows no such model (status 404)"
    ill = msgspec.structs.replace(known(), failing=(told,))
    _, answer, *_ = explain(endpoint(EndpointStatus.RUNNING), ill)
    assert (answer.question, answer.answer) == ("Why do requests fail?", told)
    assert "modelyard endpoints add-release demo" in answer.next_step


@pytest.mark.parametrize(
    ("failure", "step"),
    [
        ("its host is gone: deploy it on another one", "modelyard deploy model:demo --on HOST --name demo"),
        ("the engine refused it (400): it is for another base.", "--base"),
        ("the engine refused it (400): too many ranks", "modelyard endpoints add-release demo"),
    ],
)
def test_a_guest_that_cannot_be_loaded_is_not_sent_to_a_log_that_it_does_not_have(failure: str, step: str) -> None:
    guest = msgspec.structs.replace(endpoint(EndpointStatus.FAILED), host_id="ep-2", failure=failure)
    refused = Happened(990.0, "guest_failed", failure, "rp-1")
    answers = explain(guest, known(refused))
    assert step in answers[0].next_step
    [trouble] = [one for one in answers if one.question == "Why was it not loaded?"]
    assert (trouble.answer, step in trouble.next_step) == (failure, True)
    assert not any("modelyard logs" in one.next_step for one in answers)


def test_what_sleeps_and_what_runs_need_no_log() -> None:
    asleep, *_ = explain(endpoint(EndpointStatus.STOPPED, "asleep: no request for 6 s"), known())
    assert (asleep.answer, "--scale 1" in asleep.next_step) == ("asleep: no request for 6 s", True)
    guest = msgspec.structs.replace(endpoint(EndpointStatus.STOPPED), host_id="ep-2")
    assert explain(guest, known())[0].next_step == "send it a request", "it has no size of its own"
    runs, *_ = explain(endpoint(EndpointStatus.RUNNING), known())
    assert (runs.answer, runs.next_step) == ("1 of 2 replicas are ready", "")


def test_the_replica_that_loads_behind_one_that_is_ready_is_told_with_its_progress() -> None:
    grows = endpoint(reason="1 of 2 replicas are ready")
    plain = explain(grows, known())[0]
    assert (plain.answer, plain.next_step) == ("1 of 2 replicas are ready", "")
    loading = Progress(Stage.LOADING, percent=45, eta_s=6.0)
    state = explain(grows, msgspec.structs.replace(known(), loading=loading))[0]
    assert state.answer == "1 of 2 replicas are ready; the next is loading (45 %); about 6 s are left"
    assert state.next_step == ""


def test_what_is_nearly_loaded_is_not_said_to_have_no_time_left() -> None:
    nearly = Progress(Stage.LOADING, percent=99, eta_s=0.4)
    state = explain(endpoint(), msgspec.structs.replace(known(), loading=nearly))[0]
    assert state.answer.endswith("about 1 s are left")


def test_more_than_are_wanted_are_not_said_to_be_of_them() -> None:
    state, *_ = explain(endpoint(EndpointStatus.RUNNING), Known(now_s=1.0, wanted=1, ready=2))
    assert state.answer == "2 replicas are ready"


def test_a_replica_that_drains_is_no_trouble() -> None:
    state = explain(endpoint(reason="a replica drains"), known())[0]
    assert (state.answer, state.next_step) == ("1 of 2 replicas are ready; a replica drains", "")


@pytest.mark.parametrize(
    ("running", "rest"),
    [
        (0, "no request runs any more; its replicas are being stopped"),
        (
            1,
            "1 request still runs; it ends with the last of them, or after 120 s of draining (control.drain_timeout_s)",
        ),
        (
            3,
            "3 requests still run; it ends with the last of them, or after 120 s of draining (control.drain_timeout_s)",
        ),
    ],
)
def test_what_is_being_deleted_says_what_still_runs_and_what_ends_it(running: int, rest: str) -> None:
    deleted = msgspec.structs.replace(endpoint(EndpointStatus.RUNNING), is_deleted=True)
    drains = Known(now_s=1.0, running=running, drain_timeout_s=120.0, tier=Tier.COLD, tier_reason="nothing runs")
    state, *others = explain(deleted, drains)
    assert (state.question, state.answer) == ("Why is it still there?", f"it is being deleted; {rest}")
    assert not any("cold" in one.question for one in others)


def test_the_same_trouble_is_told_once_with_its_number_and_the_last_lines() -> None:
    crash = Happened(990.0, "replica_failed", "exit code 3", "rep-1", {"last_lines": "no such layer"})
    old = Happened(990.0 - 2 * 86_400, "replica_killed", "hung", "rep-0")
    answers = explain(endpoint(), known(old, crash, crash))
    (trouble,) = [one for one in answers if one.question == "Why did rep-1 end?"]
    assert trouble.answer == 'exit code 3 (2 times). It said: "no such layer"'
    assert not any("rep-0" in one.question for one in answers)


def test_the_tier_is_told_where_it_is_known() -> None:
    hot = Known(now_s=0.0, tier=Tier.HOT, tier_reason="1 ready; at least 1 is kept")
    assert ("Why is it hot?", hot.tier_reason) in [(one.question, one.answer) for one in explain(endpoint(), hot)]
    assert not any("Why is it cold" in one.question for one in explain(endpoint(), known()))


def test_who_was_evicted_can_be_kept_and_what_was_rolled_back_can_be_looked_up() -> None:
    evicted = Happened(990.0, "evicted", "`b` needs the room: evicting idle `demo` frees 3 GiB", "rep-1")
    back = Happened(995.0, "rollout_rolled_back", "from v2 to v1: 12 of 20 requests failed")
    found = {one.question: one.next_step for one in explain(endpoint(), known(evicted, back))}
    assert found["Why was rep-1 evicted?"].startswith("keep it with: modelyard endpoints set demo --tier warm")
    assert found["Why was a version rolled back?"] == "see what was compared: modelyard rollout status demo"


def test_every_trouble_is_an_event_that_is_told() -> None:
    told = "\n".join(file.read_text("utf-8") for file in CONTROL.rglob("*.py"))
    assert not [kind for kind in TROUBLES if f'"{kind}"' not in told]


def test_nobody_has_to_do_anything_while_others_move_away() -> None:
    waiting = endpoint(reason="largest free 50.0 on n1; a replica moves away from n1 to make room", stage=Stage.PLACING)
    assert explain(waiting, known())[0].next_step == ""
    full = endpoint(reason="largest free 50.0 on n1", stage=Stage.PLACING)
    assert "modelyard nodes" in explain(full, known())[0].next_step


MOVE = Happened(900.0, "replica_started", "moving it to gpu-2 helps to open 1 x 60.0 GiB on gpu-1", "r-new",
                {"takes_over": "r-old"})  # fmt: skip


@pytest.mark.parametrize(
    ("events", "question", "end"),
    [
        ([], "Why does r-old move?", "r-new takes over once it is ready"),
        ([Happened(910.0, "moved", "it moved", "r-old")], "Why did r-old move?", "r-new took over"),
        (
            [Happened(910.0, "replica_failed", "exited with code 1", "r-new")],
            "Why did r-old not move?",
            "r-new was to take over, but exited with code 1; it is tried again after a pause",
        ),
        (
            [Happened(910.0, "moved", "it moved", "r-old"), Happened(990.0, "replica_failed", "killed", "r-new")],
            "Why did r-old move?",
            "r-new took over",
        ),
    ],
)
def test_a_move_is_explained_by_its_start(events: list[Happened], question: str, end: str) -> None:
    (answer,) = [one for one in explain(endpoint(), known(MOVE, *events)) if " move?" in one.question]
    assert answer.question == question
    assert answer.answer == f"{MOVE.reason}; {end}"


def test_a_move_whose_old_replica_ended_first_is_not_told_as_going_on() -> None:
    begun = Happened(980.0, "replica_started", "it helps others", "rep-new", {"takes_over": "rep-old"})
    crashed = Happened(985.0, "replica_failed", "exited with code 1", "rep-old")
    ready = Happened(990.0, "replica_ready", "it answers", "rep-new")
    (answer,) = [one for one in explain(endpoint(), known(begun, crashed, ready)) if " move?" in one.question]
    assert answer.question == "Why did rep-old not move?"
    assert "exited with code 1; rep-new has its place" in answer.answer
