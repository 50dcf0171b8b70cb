"""S18, S21: a batch belongs to its tenant, and its lines have the limits and the budget of everything else."""

import json

import openai
import pytest
from tests.support.batches import CHAT, chat_line, check_whole, client_of, submit, until
from tests.support.waiting import eventually
from tests.support.yard import Yard

SETTINGS = {"batch.concurrency": 16, "batch.price_factor": 1.0}
PROMPT = "!" * 300
OUTPUT = 16


@pytest.fixture(scope="module", autouse=True)
def _model(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1}, shared=True)


def test_another_tenant_finds_neither_batch_nor_files_and_cannot_use_them(yard: Yard) -> None:
    mine, theirs = client_of(yard, yard.new_tenant("acme")), client_of(yard, yard.new_tenant("other"))
    batch = until(mine, submit(mine, [chat_line("a")]).id)
    assert batch.status == "completed"
    for verb in (theirs.batches.retrieve, theirs.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            verb(batch.id)
    assert theirs.batches.list().data == []
    with pytest.raises(openai.BadRequestError):
        theirs.batches.list(after=batch.id)
    assert batch.output_file_id is not None
    for file_id in (batch.input_file_id, batch.output_file_id):
        for read in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
            with pytest.raises(openai.NotFoundError):
                read(file_id)
        stolen = theirs.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        failed = until(theirs, stolen.id)
        assert failed.errors is not None
        assert [(one.code, one.param) for one in failed.errors.data or []] == [("invalid_request", "file_id")]
    assert mine.files.content(batch.output_file_id).text


def test_a_model_that_the_key_may_not_use_does_not_exist_for_its_batches(yard: Yard) -> None:
    client = client_of(yard, yard.new_key(name="bound", models=["another"]))
    failed = until(client, submit(client, [chat_line("a")]).id)
    assert failed.errors is not None
    assert [one.code for one in failed.errors.data or []] == ["model_not_found"]


def test_a_budget_holds_for_the_lines_of_a_batch(yard: Yard) -> None:
    worst = len(json.dumps({"model": "sim", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": OUTPUT}))
    key = yard.new_key(name="budget", limits={"tokens_per_day": 10 * (worst + OUTPUT)})
    client = client_of(yard, key)
    ids = [f"line-{at}" for at in range(60)]
    over = until(client, submit(client, [chat_line(one, PROMPT, max_tokens=OUTPUT) for one in ids]).id, within_s=60)
    output, errors = check_whole(client, over, ids)
    used = sum(line["response"]["body"]["usage"]["total_tokens"] for line in output)
    assert 9 * (worst + OUTPUT) < used <= 10 * (worst + OUTPUT), "lines wait for what others only hold"
    assert {line["error"]["code"] for line in errors} == {"insufficient_quota"}
    assert {line["response"]["status_code"] for line in errors} == {429}
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": PROMPT * 10}], max_tokens=OUTPUT
        )
    eventually(yard.is_booked, 30, "all is settled")
    rows = yard.query(f"SELECT sum(total_tokens) AS n FROM inference_requests WHERE api_key_id = '{key[3:11]}'")
    assert rows[0]["n"] == used, "what is billed is what was answered"


def test_a_line_waits_while_only_a_request_under_way_holds_its_budget(yard: Yard) -> None:
    client = client_of(yard, yard.new_key(name="held", limits={"tokens_per_day": 2000}))
    chat = {"model": "sim", "messages": [{"role": "user", "content": "[[sim: tokens=1500 slow=20]]"}]}
    stream = client.chat.completions.create(**chat, stream=True, max_tokens=1800)  # type: ignore[call-overload]
    next(stream)
    with pytest.raises(openai.RateLimitError, match="it may fit when they end") as refused:
        client.chat.completions.create(**chat, max_tokens=16)  # type: ignore[call-overload]
    assert refused.value.response.headers["x-modelyard-reserved"] == "true"
    made = submit(client, [chat_line("a", max_tokens=OUTPUT)])
    assert until(client, made.id, ("in_progress",)).request_counts.failed == 0  # type: ignore[union-attr]
    stream.close()
    over = until(client, made.id)
    output, errors = check_whole(client, over, ["a"])
    assert (len(output), errors) == (1, []), "what was held came back"


def test_nobody_can_speak_for_a_key_on_the_public_port(yard: Yard) -> None:
    token = (yard.data / "secrets" / "internal-token").read_text().strip()
    key_id = yard.admin_key[3:11]
    stranger = openai.OpenAI(
        base_url=f"{yard.url}/v1",
        api_key="my_aaaaaaaa_" + "0" * 43 + "_000000",
        max_retries=0,
        default_headers={
            "x-modelyard-internal-token": token,
            "x-modelyard-caller": json.dumps({"key_id": key_id, "line": "batch_x/0"}),
        },
    )
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model="sim", messages=[{"role": "user", "content": "hi"}])
    own = openai.OpenAI(
        base_url=f"{yard.url}/v1",
        api_key=yard.admin_key,
        max_retries=0,
        default_headers={
            "x-modelyard-internal-token": token,
            "x-modelyard-caller": json.dumps({"key_id": "zzzzzzzz", "line": "batch_x/0"}),
        },
    )
    answer = own.chat.completions.create(model="sim", messages=[{"role": "user", "content": "hi"}])
    row = yard.row_of(answer._request_id)
    assert row["api_key_id"] == key_id


def test_the_sockets_of_callers_are_for_this_user_and_want_the_token(yard: Yard) -> None:
    import http.client
    import socket
    import stat

    (place,) = (yard.data / "run").glob("c-*.sock")
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    caller = json.dumps({"key_id": yard.admin_key[3:11], "line": ""})
    token = (yard.data / "secrets" / "internal-token").read_text().strip()

    def status_of(path: str, headers: dict[str, str]) -> int:
        connection = http.client.HTTPConnection("gateway")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(30)
        connection.sock.connect(str(place))
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status

    good = {"x-modelyard-internal-token": token, "x-modelyard-caller": caller}
    assert status_of("/v1/models/sim", good) == 200
    assert status_of("/v1/models/sim", good | {"x-modelyard-internal-token": "0" * 64}) == 401
    assert status_of("/v1/models/sim", {"x-modelyard-caller": caller}) == 401
    assert status_of("/v1/models/sim", good | {"x-modelyard-caller": "{"}) == 401
    assert status_of("/v1/models/sim", good | {"x-modelyard-caller": '{"key_id": "aaaaaaaa"}'}) == 401
    assert status_of("/v1/keys", good) == 404, "it is for models only"
