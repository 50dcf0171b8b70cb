"""Batches through OpenAI's own client: made, followed, fetched, cancelled, expired, and refused as OpenAI does."""

import json
from pathlib import Path

import openai
import pytest
from tests.e2e.test_cli_commands import run
from tests.support.batches import CHAT, chat_line, check_whole, client_of, lines_of, look, submit, until
from tests.support.waiting import eventually
from tests.support.yard import Yard

SETTINGS = {
    "batch.completion_windows": "24h,8s",
    "batch.lease_s": 2,
    "batch.concurrency": 16,
    "batch.shard_lines": 50,
}
SLOW = "[[sim: tokens=400 slow=20]]"
"""Eight seconds of an answer."""


@pytest.fixture(scope="module", autouse=True)
def _models(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1})
    yard.deploy("other", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1})


def test_a_batch_is_answered_and_its_object_and_files_are_openais(yard: Yard) -> None:
    client = client_of(yard)
    ids = [f"line-{at}" for at in range(120)]
    lines = [chat_line(one, f"say {one}", max_tokens=5) for one in ids]
    lines[7] = chat_line("line-7", "x", temperature=99)  # what a model makes of it is that line's error
    lines.insert(3, "")
    made = submit(client, ["\ufeff" + lines[0] + "\r", *lines[1:]], metadata={"job": "nightly"})
    assert (made.object, made.endpoint, made.completion_window) == ("batch", CHAT, "24h")
    assert made.expires_at == made.created_at + 86_400
    assert made.id.startswith("batch_")
    batch = until(client, made.id)
    assert batch.status == "completed"
    assert (batch.model, batch.metadata, batch.errors) == ("sim", {"job": "nightly"}, None)
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert list(times) == sorted(times)
    assert (batch.failed_at, batch.expired_at, batch.cancelled_at, batch.cancelling_at) == (None, None, None, None)
    output, errors = check_whole(client, batch, ids)
    assert set(output[0]) == {"id", "custom_id", "response", "error"}
    assert output[0]["id"].startswith("batch_req_")
    body = output[0]["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "sim")
    (bad,) = errors
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("line-7", 400)
    assert bad["response"]["body"]["error"]["message"] == bad["error"]["message"]
    usage = batch.usage
    assert usage is not None
    assert usage.total_tokens == sum(line["response"]["body"]["usage"]["total_tokens"] for line in output)
    file = client.files.retrieve(batch.output_file_id or "")
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.expires_at is not None
    forecast = batch.model_dump()["modelyard"]["forecast"]
    assert forecast["cost_usd"] > 0
    assert forecast["basis"].startswith("the text alone")


def test_batches_cost_what_their_price_factor_says(yard: Yard) -> None:
    client = client_of(yard)
    client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "the very same"}])
    batch = until(client, submit(client, [chat_line("a", "the very same")]).id)
    line = lines_of(client, batch.output_file_id)[0]
    row = yard.row_of(line["response"]["request_id"])
    plain = (row["prompt_tokens"] - row["cached_tokens"]) * 150_000 + row["cached_tokens"] * 75_000
    plain += row["completion_tokens"] * 600_000
    assert row["cost_nanousd"] * 2 == plain > 0


@pytest.mark.parametrize(
    ("endpoint", "body", "what"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3}, "text_completion"),
        ("/v1/embeddings", {"input": ["a", "b"]}, "list"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, "response"),
    ],
)
def test_other_endpoints_are_answered_too(yard: Yard, endpoint: str, body: dict[str, object], what: str) -> None:
    client = client_of(yard)
    line = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "sim", **body}})
    batch = until(client, submit(client, [line], endpoint).id)
    output, _ = check_whole(client, batch, ["a"])
    assert output[0]["response"]["body"]["object"] == what
    assert batch.usage is not None
    assert batch.usage.input_tokens > 0


def test_what_generates_no_text_is_answered_too(yard: Yard) -> None:
    client = client_of(yard)
    for endpoint, body in (
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v1/classify", {"input": "hello"}),
        ("/v1/moderations", {"input": "hello"}),
        ("/v1/images/generations", {"prompt": "hello", "n": 2}),
    ):
        line = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "sim", **body}})
        batch = until(client, submit(client, [line], endpoint).id)
        assert batch.status == "completed"
        assert check_whole(client, batch, ["a"])[1] == []


def test_a_price_of_its_own_is_what_lines_pay_and_what_the_batch_says(yard: Yard) -> None:
    yard.deploy("ranker", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1})
    price = {"model": "ranker", "input": "0", "output": "0", "unit": "0.01", "request": "0.001", "batch_factor": "0.25"}
    reply = yard.call("PUT", "/v1/prices", price)
    assert reply.status in (200, 201), reply.body
    client, url = client_of(yard), "/v1/rerank"
    body = {"model": "ranker", "query": "a", "documents": ["b", "c", "d"]}
    lines = [json.dumps({"custom_id": str(at), "method": "POST", "url": url, "body": body}) for at in range(6)]
    batch = until(client, submit(client, lines, url).id)
    output, _ = check_whole(client, batch, [str(at) for at in range(6)])
    assert batch.model_dump()["modelyard"]["price_factor"] == 0.25
    rows = [yard.row_of(line["response"]["request_id"]) for line in output]
    assert {(row["unit"], row["units_micro"], row["cost_nanousd"]) for row in rows} == {
        ("searches", 1_000_000, 2_750_000)
    }
    again = until(client, submit(client, lines, url).id).model_dump()["modelyard"]["forecast"]
    assert again["cost_usd"] == pytest.approx(6 * 0.00275)


def test_a_bad_file_fails_as_a_whole_and_nothing_of_it_is_run(yard: Yard) -> None:
    client = client_of(yard)
    before = len(list(yard.journal()))
    lines = [chat_line("a"), "{", chat_line("a"), chat_line("b", stream=True), chat_line("c", model="other")]
    batch = until(client, submit(client, lines).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    found = [(error.line, error.code, error.param) for error in batch.errors.data or []]
    assert found == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "streaming_unsupported", "body.stream"),
        (5, "model_mismatch", "body.model"),
    ]
    assert (batch.output_file_id, batch.error_file_id, batch.in_progress_at) == (None, None, None)
    assert batch.failed_at is not None
    unknown = until(client, submit(client, [chat_line("a", model="none")]).id)
    assert unknown.errors is not None
    assert [(one.line, one.code) for one in unknown.errors.data or []] == [(1, "model_not_found")]
    missing = client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    failed = until(client, missing.id)
    assert failed.errors is not None
    assert [(one.param, one.code) for one in failed.errors.data or []] == [("file_id", "invalid_request")]
    assert len(list(yard.journal())) == before


def test_what_is_wrong_with_the_request_is_refused_at_once(yard: Yard) -> None:
    client = client_of(yard)
    for fields, param in (
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"completion_window": "12h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(at): "" for at in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 10}}, "output_expires_after.seconds"),
    ):
        wanted = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **fields}
        with pytest.raises(openai.BadRequestError) as refused:
            client.post("/batches", body=wanted, cast_to=object)
        assert str(refused.value.param).startswith(param)
    with pytest.raises(openai.NotFoundError, match="No batch found with id 'batch_none'"):
        client.batches.retrieve("batch_none")


def test_batches_are_listed_newest_first_and_an_idempotency_key_makes_one(yard: Yard) -> None:
    client = client_of(yard)
    made = [submit(client, [chat_line("a")]) for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [one.id for one in page.data] == [made[2].id, made[1].id]
    assert page.has_more
    assert client.batches.list(limit=1, after=made[1].id).data[0].id == made[0].id
    wanted = {"input_file_id": made[0].input_file_id, "endpoint": CHAT, "completion_window": "24h"}
    options = {"headers": {"Idempotency-Key": "once"}}
    first, again = (client.batches.create(**wanted, extra_headers=options["headers"]) for _ in range(2))  # type: ignore[arg-type]  # they are
    assert first.id == again.id
    with pytest.raises(openai.BadRequestError):
        client.batches.create(**(wanted | {"metadata": {"a": "b"}}), extra_headers=options["headers"])  # type: ignore[arg-type]  # they are


def test_a_cancelled_batch_ends_in_seconds_and_keeps_what_is_done(yard: Yard) -> None:
    client = client_of(yard)
    ids = [f"line-{at}" for at in range(200)]
    batch = submit(client, [chat_line(one, f"[[sim: tokens=20 slow=20]] {one}") for one in ids])
    eventually(lambda: (look(client, batch.id) or batch).request_counts.completed > 5, 20, "some lines are done")
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at is not None
    over = until(client, batch.id, within_s=30)
    assert over.status == "cancelled"
    output, errors = check_whole(client, over, ids)
    assert len(output) > 5
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert {line["response"] for line in errors} == {None}
    assert client.batches.cancel(batch.id).status == "cancelled"
    done = until(client, submit(client, [chat_line("a")]).id)
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
        client.batches.cancel(done.id)


def test_a_batch_whose_window_ends_keeps_what_is_done(yard: Yard) -> None:
    client = client_of(yard)
    ids = [f"line-{at}" for at in range(400)]
    lines = [chat_line(one, f"[[sim: tokens=20 slow=20]] {one}") for one in ids]
    over = until(client, submit(client, lines, completion_window="8s").id)
    assert over.status == "expired"
    assert over.expired_at is not None
    output, errors = check_whole(client, over, ids)
    assert output
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}


def test_an_input_that_is_deleted_meanwhile_changes_nothing(yard: Yard) -> None:
    client = client_of(yard)
    ids = [f"line-{at}" for at in range(100)]
    # Five seconds of work, so that it is seen under way.
    batch = submit(client, [chat_line(one, f"[[sim: tokens=20 slow=20]] {one}") for one in ids])
    until(client, batch.id, ["in_progress"])
    client.files.delete(batch.input_file_id)
    over = until(client, batch.id)
    assert over.status == "completed"
    assert len(check_whole(client, over, ids)[0]) == 100


def test_a_key_that_is_revoked_meanwhile_fails_the_lines_that_are_left(yard: Yard) -> None:
    key = yard.new_key(name="soon revoked")
    ids = [f"line-{at}" for at in range(300)]
    batch = submit(client_of(yard, key), [chat_line(one, f"[[sim: tokens=20 slow=10]] {one}") for one in ids])
    client = client_of(yard)
    eventually(lambda: (look(client, batch.id) or batch).request_counts.completed > 5, 20, "some lines are done")
    reply = yard.call("DELETE", f"/v1/keys/{key[3:11]}")
    assert reply.status in (200, 204), reply.body
    over = until(client, batch.id)
    assert over.status == "completed"
    output, errors = check_whole(client, over, ids)
    assert output
    assert {(line["response"]["status_code"], line["error"]["code"]) for line in errors} == {(401, "invalid_api_key")}
    assert "The API key that made this batch was revoked" in errors[0]["error"]["message"]


def test_a_line_is_admitted_like_a_request_in_real_time_and_waits_for_its_limits(yard: Yard) -> None:
    key = yard.new_key(name="one at a time", limits={"concurrency": 1})
    ids = [f"line-{at}" for at in range(8)]
    client = client_of(yard, key)
    over = until(client, submit(client, [chat_line(one, "[[sim: tokens=5 slow=5]]") for one in ids]).id)
    assert over.status == "completed"
    assert check_whole(client, over, ids)[1] == [], "a limit is waited for"


def test_what_an_engine_fails_is_tried_again_a_few_times_and_is_then_the_lines_error(yard: Yard) -> None:
    client = client_of(yard)
    lines = [
        chat_line("good"),
        chat_line("bad", "[[sim: http_error=500]]"),
        chat_line("odd", "[[sim: http_error=422]]"),
    ]
    over = until(client, submit(client, lines).id)
    assert over.status == "completed"
    _, errors = check_whole(client, over, ["good", "bad", "odd"])
    status = {line["custom_id"]: line["response"]["status_code"] for line in errors}
    assert set(status) == {"bad", "odd"}
    assert status["bad"] >= 500 > status["odd"]
    failed = {line["custom_id"]: line["response"]["request_id"] for line in errors}
    assert yard.row_of(failed["bad"])["cost_nanousd"] == 0
    tries = "SELECT status, http_status FROM inference_requests WHERE http_status >= 500"
    eventually(lambda: len(yard.query(tries)) >= 4, 20, "all tries are in the ledger")
    assert len(yard.query(tries)) == 4, "once, and three times again"


def test_the_command_line_submits_follows_and_fetches(yard: Yard, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(chat_line(f"line-{at}", f"say {at}") for at in range(30)))
    done = run(yard, "batch", "submit", str(file), "--metadata", "a=b", "--wait", "--json")
    assert done.returncode == 0, done.stderr
    batch = json.loads(done.stdout)
    assert (batch["status"], batch["metadata"]) == ("completed", {"a": "b"})
    assert "completed" in done.stderr
    assert len((tmp_path / "requests.output.jsonl").read_text().splitlines()) == 30
    assert not (tmp_path / "requests.errors.jsonl").exists()
    listed = run(yard, "batch", "-q")
    assert batch["id"] in listed.stdout.splitlines()
    acme = client_of(yard, yard.new_tenant("acme"))
    theirs = submit(acme, [chat_line("a")])
    for of_what, own, other in (
        ("batch", batch["id"], theirs.id),
        ("files", batch["input_file_id"], theirs.input_file_id),
    ):
        heading, *rows = [row.split() for row in run(yard, of_what).stdout.splitlines()]
        assert heading[:2] == ["ID", "TENANT"], "an admin sees every tenant's"
        owners = {row[0]: row[1] for row in rows}
        assert owners[own] != owners[other]
    shown = run(yard, "batch", batch["id"])
    assert "30 answered, 0 failed, 30 in all" in shown.stdout
    file.write_text("{\n")
    bad = run(yard, "batch", "submit", str(file), "--endpoint", CHAT, "--wait")
    assert bad.returncode == 1
    assert "invalid_json_line" in bad.stdout
    none = run(yard, "batch", "cancel", "batch_none")
    assert (none.returncode, "No batch found" in none.stderr) == (3, True)
    odd = run(yard, "batch", "submit", str(file))
    assert (odd.returncode, "Give --endpoint" in odd.stderr) == (2, True)


def test_the_command_line_says_what_a_batch_will_take_and_where_its_answers_go(yard: Yard, tmp_path: Path) -> None:
    client = client_of(yard)
    for _ in range(6):
        client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    eventually(yard.is_booked, 30, "all that was begun is settled")
    file = tmp_path / "file-of-requests.jsonl"  # a name like an id
    lines = [chat_line(f"line-{at}", "[[sim: tokens=40 slow=10]]") for at in range(60)]
    # The first is cancelled by a command, which takes its time to start: it is not over before that.
    file.write_text("\n".join(line.replace("slow=10", "slow=200") for line in lines))
    made = run(yard, "batch", "submit", str(file))
    assert made.returncode == 0, made.stderr
    shown = dict(line.split("  ", 1) for line in made.stdout.splitlines() if "  " in line)
    assert "about $" in shown["Expected"]
    assert "answers, " in shown["Expected"]
    assert "Done by" in shown
    batch_id = shown["ID"].strip()
    assert run(yard, "batch", "cancel", batch_id, "-q").returncode == 0
    file.write_text("\n".join(lines))

    place = tmp_path / "new" / "folder"
    refused = run(yard, "batch", "submit", str(file), "-o", str(place))
    assert (refused.returncode, "-o needs --wait" in refused.stderr) == (2, True)
    blocked = run(yard, "batch", "submit", str(file), "--wait", "-o", str(file / "below"))
    assert (blocked.returncode, "Cannot make the folder" in blocked.stderr) == (2, True)
    done = run(yard, "batch", "submit", str(file), "--wait", "-o", str(place))
    assert done.returncode == 0, done.stderr
    assert "Expected: about $" in done.stderr
    assert len((place / "file-of-requests.output.jsonl").read_text().splitlines()) == 60

    file.write_text("{\n")
    bad = run(yard, "batch", "submit", str(file), "--endpoint", CHAT)
    assert (bad.returncode, "invalid_json_line" in bad.stdout) == (1, True)
