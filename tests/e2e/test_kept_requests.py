"""Requests that nobody waits for, and requests that are sent twice, against real processes."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook
from tests.support.ledger import gather, violations
from tests.support.load import Load, Outcome, chat
from tests.support.receivers import Receiver, receiving
from tests.support.refusals import assert_refused, post
from tests.support.waiting import eventually, eventually_async
from tests.support.wire import Answer
from tests.support.yard import Yard

from modelyard.cli.main import main

CHAT = "/v1/chat/completions"
ASYNC = ("Prefer", "respond-async")
SLOW = "[[sim: tokens=40 slow=20]] "


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder: Path = tmp_path_factory.mktemp("yard")
    settings = folder / "modelyard.toml"
    settings.write_text('[fetch]\nprivate_networks = ["127.0.0.0/8"]\n')
    with Yard(folder, {"gateway.load_wait_s": 30}, options=("--config", str(settings))) as running:
        yield running


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options={"slots": 4, "ttft_ms": 1, "itl_ms": 1})
    return "sim"


def cold(yard: Yard, name: str, *, load_s: float = 1.0) -> str:
    """Deploy a model that nobody has asked for yet, and wait until nothing of it runs."""
    yard.deploy(
        name,
        options={"slots": 4, "ttft_ms": 1, "itl_ms": 1, "load_s": load_s},
        scaling={"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 1},
        wait=False,
    )
    yard.wait_asleep(name)
    return name


def ended(yard: Yard, request_id: str, within_s: float = 40.0) -> dict[str, Any]:
    """Poll as a caller does, and return the request at its end; a poll never says 404."""

    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = yard.get(f"/v1/requests/{request_id}")
        return found if found["status"] not in ("queued", "running") else None

    return eventually(look, within_s, f"the end of {request_id}")


def detach(yard: Yard, body: dict[str, Any], *headers: tuple[str, str], path: str = CHAT) -> Answer:
    answer = post(yard, path, body, headers=[ASYNC, *headers])
    assert answer.status == 202, bytes(answer.body)
    return answer


def check_books(yard: Yard) -> None:
    """Check the ledger as ``check_ledger`` does, but for whose requests they were: callers here came and went."""

    def agree() -> bool:
        found = [one for one in violations(gather(yard, [])) if "rows of unknown requests" not in one]
        assert not found, found
        return True

    eventually(agree, 20, "the histories agree")


# --- Prefer ---------------------------------------------------------------------------------------------------------


def test_a_detached_request_is_answered_later_and_billed_once(yard: Yard, model: str) -> None:
    answer = detach(yard, chat(model, SLOW + "later"))
    request_id = answer.json()["id"]
    assert answer.header("x-request-id") == request_id
    assert answer.header("location") == f"/v1/requests/{request_id}"
    assert answer.header("preference-applied") == "respond-async"
    assert answer.json()["status"] in ("queued", "running")
    assert answer.json()["object"] == "request"
    end = ended(yard, request_id)
    assert end["status"] == "succeeded"
    assert end["response"]["status_code"] == 200
    assert end["response"]["body"]["object"] == "chat.completion"
    assert end["finished_at"] >= end["created_at"]
    raw = yard.call("GET", f"/v1/requests/{request_id}/response")
    assert (raw.status, raw.json()) == (200, end["response"]["body"])
    row = yard.row_of(request_id)
    assert row["status"] == "success"
    assert row["completion_tokens"] == end["response"]["body"]["usage"]["completion_tokens"]
    assert request_id in [one["id"] for one in yard.get("/v1/requests")["data"]]


def test_a_cold_model_is_loaded_for_a_caller_who_does_not_wait(yard: Yard) -> None:
    name = cold(yard, "cold-async")
    answer = detach(yard, chat(name, "good morning"))
    assert answer.json()["status"] == "queued"
    assert ended(yard, answer.json()["id"])["status"] == "succeeded"


def test_a_quick_answer_comes_within_the_wait(yard: Yard, model: str) -> None:
    answer = post(yard, CHAT, chat(model, "quick"), headers=[("Prefer", "respond-async, wait=10")])
    assert answer.status == 200
    assert answer.json()["object"] == "chat.completion"
    kept = ended(yard, str(answer.header("x-request-id")))
    assert kept["response"]["body"] == answer.json()


def test_a_slow_answer_comes_after_the_wait(yard: Yard) -> None:
    name = cold(yard, "cold-wait", load_s=3.0)
    answer = detach(yard, chat(name, "slow"), ("Prefer", "wait=1"))
    assert answer.header("preference-applied") == "respond-async, wait=1"
    assert ended(yard, answer.json()["id"])["status"] == "succeeded"


def test_wait_alone_bounds_how_long_a_cold_model_is_waited_for(yard: Yard) -> None:
    name = cold(yard, "cold-bound", load_s=4.0)
    answer = post(yard, CHAT, chat(name, "hello"), headers=[("Prefer", "wait=1")])
    assert_refused(answer, status=503, code="model_loading")
    assert int(answer.header("retry-after") or 0) >= 1
    eventually(lambda: yard.times_ready(name) == 2, 60, "and the load went on")


def test_what_cannot_be_kept_is_refused_by_name(yard: Yard, model: str) -> None:
    stream = chat(model, "x", stream=True)
    assert_refused(post(yard, CHAT, stream, headers=[ASYNC]), param="stream", code="unsupported_parameter")
    assert_refused(post(yard, CHAT, stream, headers=[("Idempotency-Key", "k")]), param="stream")
    body = chat(model, "x")
    assert_refused(post(yard, CHAT, body, headers=[("Idempotency-Key", "")]), param="Idempotency-Key")
    for url in ("http://169.254.169.254/", "https://10.0.0.1/", "ftp://127.0.0.1/", "https://no-such-host.invalid/"):
        refused = post(yard, CHAT, body, headers=[ASYNC, ("X-Modelyard-Webhook", url)])
        assert_refused(refused, param="X-Modelyard-Webhook")
    assert_refused(post(yard, CHAT, chat("no-such-model", "x"), headers=[ASYNC]), status=404)


def test_a_refusal_before_the_start_is_told_at_once_and_leaves_nothing(yard: Yard, model: str) -> None:
    key = yard.new_key(name="small", limits={"tokens_per_minute": 20_000})
    before = [one["id"] for one in yard.get("/v1/requests?limit=100")["data"]]
    first = post(yard, CHAT, chat(model, SLOW, max_tokens=9_000), key=key, headers=[ASYNC])
    answers = [post(yard, CHAT, chat(model, SLOW, max_tokens=9_000), key=key, headers=[ASYNC]) for _ in range(3)]
    assert first.status == 202
    assert any(answer.status == 429 for answer in answers), "limits hold for detached requests, too"
    refused = {answer.header("x-request-id") for answer in answers if answer.status == 429}
    after = {one["id"] for one in yard.get("/v1/requests?limit=100")["data"]}
    assert not refused & after
    assert after > set(before)


def test_a_failed_request_shows_its_error(yard: Yard, model: str) -> None:
    answer = detach(yard, chat(model, "[[sim: http_error=400]]"))
    end = ended(yard, answer.json()["id"])
    assert end["status"] == "failed"
    assert end["response"]["status_code"] == 400
    assert set(end["response"]["body"]["error"]) == {"message", "type", "param", "code"}


def test_a_cancelled_request_stops_its_engine(yard: Yard, model: str) -> None:
    answer = detach(yard, chat(model, "[[sim: tokens=4000 slow=20]] on and on", max_tokens=5000))
    request_id = answer.json()["id"]
    eventually(lambda: yard.events_of(request_id, "begin"), 20, "the engine has it")
    eventually(lambda: yard.get(f"/v1/requests/{request_id}")["status"] == "running", 20, "it is known to run")
    cancelled = yard.call("DELETE", f"/v1/requests/{request_id}")
    assert (cancelled.status, cancelled.json()["status"]) == (200, "cancelled")
    eventually(lambda: yard.events_of(request_id, "abort"), 20, "the engine is told to stop")
    assert yard.row_of(request_id)["status"] == "client_closed"
    assert yard.get(f"/v1/requests/{request_id}")["status"] == "cancelled"
    assert yard.call("GET", f"/v1/requests/{request_id}/response").status == 409
    assert yard.call("DELETE", f"/v1/requests/{request_id}").status == 200
    assert yard.call("GET", f"/v1/requests/{request_id}").status == 404, "forgotten"


def test_internal_routes_are_not_reachable_from_outside(yard: Yard) -> None:
    for path in ("/internal/requests/claim", "/v1/../internal/requests/claim", "/console/../internal/requests/claim"):
        answer = post(yard, path, b"\x80")
        assert answer.status in (400, 404), path


# --- Idempotency-Key ------------------------------------------------------------------------------------------------


def test_the_same_request_runs_once(yard: Yard, model: str) -> None:
    body, header = chat(model, "once"), ("Idempotency-Key", "once")
    first = post(yard, CHAT, body, headers=[header])
    again = post(yard, CHAT, body, headers=[header])
    assert (first.status, again.status) == (200, 200)
    assert bytes(again.body) == bytes(first.body)
    assert first.header("idempotency-replayed") is None
    assert again.header("idempotency-replayed") == "true"
    assert again.header("x-request-id") == first.header("x-request-id")
    assert len(yard.events_of(first.header("x-request-id"), "begin")) == 1
    assert yard.call("GET", f"/v1/requests/{first.header('x-request-id')}").status == 404, (
        "only detached ones are listed"
    )
    check_books(yard)


def test_another_body_route_or_key_is_not_the_same(yard: Yard, model: str) -> None:
    header = ("Idempotency-Key", "mine")
    first = post(yard, CHAT, chat(model, "one"), headers=[header])
    assert first.status == 200
    for other in (
        post(yard, CHAT, chat(model, "two"), headers=[header]),
        post(yard, "/v1/completions", {"model": model, "prompt": "one"}, headers=[header]),
        post(yard, CHAT, chat(model, "one"), headers=[header, ASYNC]),
    ):
        assert_refused(other, status=400, param="Idempotency-Key", code="idempotency_key_reused")
    theirs = post(yard, CHAT, chat(model, "one"), key=yard.new_key(name="another"), headers=[header])
    assert theirs.status == 200
    assert theirs.header("idempotency-replayed") is None


async def test_many_at_once_run_once_and_all_get_the_answer(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        for _ in range(20):
            load.start(chat(model, SLOW + "together"), headers=[("Idempotency-Key", "together")])
        await load.finish(30)
    assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
    assert len({bytes(exchange.reader.answer.body) for exchange in load.exchanges}) == 1
    assert len({exchange.request_id for exchange in load.exchanges}) == 1
    assert sum(exchange.header("idempotency-replayed") == "true" for exchange in load.exchanges) == 19
    (request_id,) = {exchange.request_id for exchange in load.exchanges}
    assert len(yard.events_of(request_id, "begin")) == 1
    check_books(yard)


async def test_a_caller_that_leaves_finds_its_answer(yard: Yard, model: str) -> None:
    header, known = ("Idempotency-Key", "left"), set(yard.generated())
    async with Load(yard.port, yard.admin_key) as load:
        exchange = load.start(chat(model, SLOW + "leaving"), headers=[header])
        await eventually_async(lambda: set(yard.generated()) - known, 20, "the engine has it")
        exchange.leave()
        again = await load.send(chat(model, SLOW + "leaving"), headers=[header])
    assert again.outcome is Outcome.COMPLETE
    assert again.header("idempotency-replayed") == "true"
    assert len(set(yard.generated()) - known) == 1
    check_books(yard)


def test_a_repetition_costs_no_tokens(yard: Yard, model: str) -> None:
    key = yard.new_key(name="counted", limits={"tokens_per_minute": 10_000, "requests_per_minute": 5})
    body, header = chat(model, SLOW, max_tokens=4000), ("Idempotency-Key", "counted")
    left = []
    for _ in range(3):
        answer = post(yard, CHAT, body, key=key, headers=[header])
        assert answer.status == 200
    other = post(yard, CHAT, chat(model, "x", max_tokens=1), key=key)
    left = [int(other.header(f"x-ratelimit-remaining-{kind}") or 0) for kind in ("requests", "tokens")]
    assert left[0] <= 2, "each counts as a request"
    assert left[1] > 9_500, "only the first counts its tokens"


def test_a_failure_leaves_the_key_to_the_next_try(yard: Yard, model: str) -> None:
    header = ("Idempotency-Key", "failing")
    body = chat(model, "[[sim: http_error=500]]")
    first, second = post(yard, CHAT, body, headers=[header]), post(yard, CHAT, body, headers=[header])
    assert first.status == second.status == 502
    assert first.header("x-request-id") != second.header("x-request-id"), "it was tried anew"
    bad = chat(model, "[[sim: http_error=400]]")
    header = ("Idempotency-Key", "bad")
    first, second = post(yard, CHAT, bad, headers=[header]), post(yard, CHAT, bad, headers=[header])
    assert first.status == second.status == 400
    assert second.header("idempotency-replayed") == "true", "the request's own fault stays"


def test_a_detached_request_that_is_sent_again_is_the_same(yard: Yard, model: str) -> None:
    header = ("Idempotency-Key", "detached")
    first = detach(yard, chat(model, SLOW + "again"), header)
    again = detach(yard, chat(model, SLOW + "again"), header)
    assert again.json()["id"] == first.json()["id"]
    assert ended(yard, first.json()["id"])["status"] == "succeeded"
    later = detach(yard, chat(model, SLOW + "again"), header)
    assert later.json()["status"] == "succeeded"


# --- every route, the command line, a restart ---


def test_other_routes_are_kept_in_their_own_shape(yard: Yard, model: str) -> None:
    said = [{"role": "user", "content": "hello"}]
    for path, body, kind in (
        ("/v1/messages", {"model": model, "max_tokens": 5, "messages": said}, ("type", "message")),
        ("/v1/responses", {"model": model, "input": "hello"}, ("object", "response")),
        ("/v1/completions", {"model": model, "prompt": "hello"}, ("object", "text_completion")),
        ("/v1/embeddings", {"model": model, "input": "hello"}, ("object", "list")),
    ):
        end = ended(yard, detach(yard, body, path=path).json()["id"])
        assert end["status"] == "succeeded", (path, end)
        assert end["route"] == path
        assert end["response"]["body"][kind[0]] == kind[1]


def test_the_command_line_shows_and_cancels(yard: Yard, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> str:
        assert main(["requests", *arguments, "--data-dir", str(yard.data)]) == 0
        return capsys.readouterr().out

    request_id = detach(yard, chat(model, "[[sim: tokens=4000 slow=20]] cli", max_tokens=5000)).json()["id"]
    assert request_id in run("--last", "100")
    assert run("cancel", request_id, "-q").strip() == "cancelled"
    assert "cancelled" in run(request_id)
    assert main(["requests", "show", "req_none", "--data-dir", str(yard.data)]) == 3
    assert main(["requests", "replay", request_id, "--data-dir", str(yard.data)]) == 1
    assert "has no webhook" in capsys.readouterr().err


def test_a_rolling_restart_finishes_what_was_detached(yard: Yard, model: str) -> None:
    before = yard.plane_pids("gateway")
    request_id = detach(yard, chat(model, "[[sim: tokens=200 slow=20]] through")).json()["id"]
    assert main(["restart", "--data-dir", str(yard.data)]) == 0
    assert set(yard.plane_pids("gateway")) - set(before), "another worker serves"
    end = ended(yard, request_id)
    assert end["status"] == "succeeded"
    assert len(yard.events_of(request_id, "begin")) == 1
    eventually(lambda: not set(before) & set(yard.plane_pids("gateway")), 60, "the one before has gone")
    check_books(yard)


# --- failures -------------------------------------------------------------------------------------------------------


def test_without_the_controller_nothing_runs_that_must_be_kept(yard: Yard, model: str) -> None:
    assert post(yard, CHAT, chat(model, "so that the gateway knows the replica")).status == 200
    (control,) = yard.plane_pids("control")
    known, header = set(yard.generated()), ("Idempotency-Key", "away")
    yard.signal(control, signal.SIGSTOP)
    try:
        answer = post(yard, CHAT, chat(model, "away"), headers=[header])
        assert_refused(answer, status=503, code="control_unavailable")
        assert post(yard, CHAT, chat(model, "others go on")).status == 200
    finally:
        yard.signal(control, signal.SIGCONT)
    assert len(set(yard.generated()) - known) == 1

    def again() -> bool:
        return post(yard, CHAT, chat(model, "away"), headers=[header, ("Prefer", "wait=2")]).status == 200

    eventually(again, 60, "the claim that came too late stands in nobody's way")
    open_ones = "SELECT request_id FROM kept_requests WHERE status IN ('queued', 'running')"
    eventually(lambda: not yard.query(open_ones), 20, "none is left open")
    check_books(yard)


def test_an_answer_outlives_a_killed_controller(yard: Yard, model: str) -> None:
    request_id = detach(yard, chat(model, "[[sim: tokens=50 slow=20]] patience")).json()["id"]
    (control,) = yard.plane_pids("control")
    yard.kill(control)
    eventually(lambda: yard.plane_pids("control") not in ([], [control]), 40, "another controller runs")
    eventually(lambda: yard.call("GET", "/v1/requests").status == 200, 40, "it answers")
    assert ended(yard, request_id)["status"] == "succeeded"
    check_books(yard)


def test_a_killed_gateway_interrupts_its_requests(yard: Yard, model: str) -> None:
    header = ("Idempotency-Key", "interrupted")
    body = chat(model, "[[sim: tokens=4000 slow=20]] for ever", max_tokens=5000)
    request_id = detach(yard, body, header).json()["id"]
    eventually(lambda: yard.events_of(request_id, "begin"), 20, "the engine has it")
    for pid in yard.plane_pids("gateway"):
        yard.kill(pid)
    eventually(lambda: yard.call("GET", "/readyz", key="").status == 200, 40, "a gateway is back")
    end = ended(yard, request_id, within_s=60)
    assert end["status"] == "failed"
    assert end["error"]["code"] == "interrupted"
    again = detach(yard, body, header).json()["id"]
    assert again != request_id, "the key is free"
    assert yard.call("DELETE", f"/v1/requests/{again}").status == 200
    check_books(yard)


# --- webhooks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


def test_a_webhook_tells_of_the_end_and_can_be_verified(yard: Yard, model: str, receiver: Receiver) -> None:
    receiver.answers, receiver.retry_after = [503, 302], "600"  # so that none but those asked for are tried again
    answer = detach(yard, chat(model, "tell me"), ("X-Modelyard-Webhook", receiver.url))
    request_id = answer.json()["id"]
    assert answer.json()["webhook"]["status"] == "waiting"
    eventually(lambda: len(receiver.got) == 1, 30, "it came")
    secret = yard.get("/v1/webhooks/secret")["secret"]
    headers, body = receiver.got[0]
    event = Webhook(secret).verify(body, headers)
    assert event["type"] == "request.succeeded"
    assert event["data"]["id"] == request_id
    assert "tell me" not in body.decode()
    kept = eventually(lambda: (w := yard.get(f"/v1/requests/{request_id}")["webhook"])["tries"] and w, 20, "noted")
    assert kept["status"] == "pending"
    assert kept["attempts"][0]["status_code"] == 503
    assert kept["next_attempt_at"] > kept["attempts"][0]["at"]

    assert yard.call("POST", "/v1/webhooks/secret/rotate", {"overlap_seconds": 600}).status == 200
    new = yard.get("/v1/webhooks/secret")["secret"]
    assert new != secret
    for tries in (2, 3):
        assert yard.call("POST", f"/v1/requests/{request_id}/webhook/replay").status == 202
        eventually(lambda tries=tries: len(receiver.got) == tries, 30, "it came again")
    eventually(lambda: yard.get(f"/v1/requests/{request_id}")["webhook"]["status"] == "delivered", 20, "delivered")
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1, "one event"
    headers, body = receiver.got[-1]
    for one in (secret, new):
        Webhook(one).verify(body, headers)
    assert len(receiver.got) == 3


def test_secrets_and_prompts_of_webhooks_are_in_no_log(yard: Yard) -> None:
    secret = yard.get("/v1/webhooks/secret")["secret"]
    for file in (yard.data / "logs").glob("*.log"):
        text = file.read_text()
        assert secret not in text
        assert "tell me" not in text
