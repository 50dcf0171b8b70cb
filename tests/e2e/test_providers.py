"""External providers: one platform is the provider of another, over both of the APIs that it speaks.

``outside`` is the provider: a whole platform with a key of ours. ``yard`` is the one under test.
"""

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from tests.support import processes
from tests.support.engines import plan
from tests.support.load import chat
from tests.support.waiting import eventually
from tests.support.yard import CONTEXT, Reply, Yard

OPTIONS = {"slots": 1, "ttft_ms": 1, "itl_ms": 1, "context_length": CONTEXT}
THEIRS = "their-large-model"


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with Yard(tmp_path_factory.mktemp("outside")) as outside:
        outside.deploy(THEIRS, options={**OPTIONS, "slots": 8})
        yield outside


@pytest.fixture(scope="module")
def key(outside: Yard) -> str:
    return outside.new_key(name="ours")


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, key: str) -> Iterator[Yard]:
    settings = {
        "fetch.private_networks": "127.0.0.0/8",
        "prices.apart@theirs.input": 1000,
        "prices.apart@theirs.output": 2000,
        "control.crash_backoff_max_s": 0.5,
    }
    yard = Yard(tmp_path_factory.mktemp("ours"), settings=settings)
    keys = yard.data / "secrets" / "providers"
    keys.mkdir(parents=True, mode=0o700)
    (keys / "theirs").write_text(key + "\n")
    with yard:
        yield yard


def provider(outside: Yard, kind: str, **more: object) -> dict[str, Any]:
    """Return the order for a provider's version."""
    base = f"{outside.url}/v1" if kind == "openai" else outside.url
    return {
        "framework": kind,
        "version": "theirs",
        "options": {"url": base, "model": THEIRS, "key_file": "theirs", **more},
    }


def add_fallback(yard: Yard, name: str, order: dict[str, Any], *, ready: int = 2, **share: object) -> None:
    reply = yard.call("POST", f"/v1/endpoints/{name}/releases", {**order, **(share or {"fallback": 1})})
    assert reply.status == 202, reply.body
    yard.wait_ready(name, ready)
    series = f'modelyard_replicas{{model="{name}"}} {ready}.0'
    eventually(lambda: series in yard.call("GET", "/metrics").body.decode(), 60, f"the gateway has both of {name}")


def ask(yard: Yard, name: str, text: str, **more: Any) -> Reply:
    return yard.call("POST", "/v1/chat/completions", chat(name, text, **more), within_s=30)


def version_of(yard: Yard, reply: Reply) -> str:
    """Return the name of the version that the ledger says answered."""
    row = yard.row_of(reply.headers["x-request-id"])
    (found,) = yard.query(f"SELECT version FROM model_registry WHERE model_id = '{row['model_id']}'")
    return str(found["version"])


@contextlib.contextmanager
def occupied(yard: Yard, name: str) -> Iterator[None]:
    """Hold the one slot of the endpoint's own engine."""
    body = json.dumps(chat(name, "[[sim: tokens=4000 slow=20]] hold", stream=True))
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", yard.port, timeout=30)) as connection:
        headers = {"authorization": f"Bearer {yard.admin_key}", "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read(1)
        yield
        answer.close()


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_a_full_endpoint_is_answered_by_the_provider_under_its_own_name(yard: Yard, outside: Yard, kind: str) -> None:
    name = f"own-{kind}"
    yard.deploy(name, options=OPTIONS)
    add_fallback(yard, name, provider(outside, kind))
    reply = ask(yard, name, "hello own engine")
    assert (reply.status, version_of(yard, reply)) == (200, "v1"), "those with weight come first"
    with occupied(yard, name):
        reply = ask(yard, name, "hello provider", temperature=0.5)
        assert reply.status == 200, reply.body
        body = reply.json()
        assert body["model"] == name
        assert body["choices"][0]["message"]["content"].strip() == "hello provider"
        assert THEIRS not in reply.body.decode()
        assert version_of(yard, reply) == "theirs"
        why = yard.get(f"/v1/requests/{reply.headers['x-request-id']}/why")["why"]
        assert any("of a fallback: no room on the 1 replica" in line for line in why), why
        streamed = ask(yard, name, "hello again", stream=True, stream_options={"include_usage": True})
        chunks = [json.loads(line[6:]) for line in streamed.body.decode().split("\n\n") if line.startswith("data: {")]
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        assert text.strip() == "hello again"
        assert {chunk["model"] for chunk in chunks} == {name}
        assert chunks[-1]["usage"]["completion_tokens"] > 0
        row = yard.row_of(streamed.headers["x-request-id"])
        assert row["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]
        assert not row["is_estimated"]


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_tools_schemas_and_limits_go_through_both_ways(yard: Yard, outside: Yard, kind: str) -> None:
    name = f"tools-{kind}"
    order = {"model_name": name, **provider(outside, kind), "hardware": {"min_replicas": 1, "max_replicas": 1}}
    assert yard.call("POST", "/v1/models/deploy", order).status == 202
    yard.wait_ready(name)
    client = OpenAI(base_url=f"{yard.url}/v1", api_key=yard.admin_key, max_retries=0)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Rome?"}]
    asked: Any = {"model": name, "messages": messages, "tools": tools, "tool_choice": "required"}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    [call] = answer.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert "city" in json.loads(call.function.arguments)
    pieces = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    calls = [one for piece in pieces for one in piece.tool_calls or []]
    assert {one.index for one in calls} == {0}
    told = [one.function for one in calls if one.function]
    assert told[0].name == "weather"
    assert json.loads("".join(one.arguments or "" for one in told)) == json.loads(call.function.arguments)
    assert calls[0].id
    messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny in Rome"}]
    final = client.chat.completions.create(model=name, messages=messages, tools=tools).choices[0]
    assert final.finish_reason in ("stop", "tool_calls")
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    said = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "Where?"}], response_format=wanted
    )
    assert "city" in json.loads(said.choices[0].message.content or "")
    short = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "one two three four five"}], max_tokens=2
    )
    assert (short.choices[0].finish_reason, short.usage and short.usage.completion_tokens) == ("length", 2)
    with pytest.raises(BadRequestError) as refused:
        long: Any = [{"role": "user", "content": "word " * (2 * CONTEXT)}]
        client.chat.completions.create(model=name, messages=long)
    assert "context" in str(refused.value)
    assert THEIRS not in str(refused.value)


def test_the_command_line_adds_shows_and_turns_round_a_fallback(yard: Yard, outside: Yard) -> None:
    def cli(*words: str) -> str:
        command = [sys.executable, "-m", "modelyard", *words, "--url", yard.url, "--key", yard.admin_key]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = ["--option", f"url={outside.url}/v1", "--option", f"model={THEIRS}", "--option", "key_file=theirs"]
    yard.deploy("typed", options=OPTIONS)
    added = cli("endpoints", "add-release", "typed", "--engine", "openai", "--version", "cloud", *where, "--fallback")
    assert "Added cloud to 'typed': what the others have no room for." in added
    cli("endpoints", "set", "typed", "--fallback-after", "2s")
    shown = cli("endpoints", "typed")
    assert "a fallback answers after 2 s" in shown
    assert "what the others have no room for" in shown
    yard.wait_ready("typed", 2)
    cli("endpoints", "set", "typed", "--weight", "cloud=100", "--fallback", "v1=1")
    releases = {one["version"]: (one["weight"], one["fallback"]) for one in yard.get("/v1/endpoints/typed")["releases"]}
    assert releases == {"v1": (0, 1), "cloud": (100, 0)}
    eventually(lambda: version_of(yard, ask(yard, "typed", "hello")) == "cloud", 40, "the provider comes first")
    cli("deploy", "--name", "typed-cloud", "--engine", "openai", "--version", "cloud", *where, "--wait")


def test_each_release_is_billed_at_its_own_price(yard: Yard, outside: Yard) -> None:
    yard.deploy("apart", options=OPTIONS)
    add_fallback(yard, "apart", provider(outside, "openai"))
    own = yard.row_of(ask(yard, "apart", "one two").headers["x-request-id"])
    with occupied(yard, "apart"):
        reply = ask(yard, "apart", "one two")
        theirs = yard.row_of(reply.headers["x-request-id"])
    assert own["cost_nanousd"] == own["prompt_tokens"] * 150_000 + own["completion_tokens"] * 600_000
    assert theirs["cost_nanousd"] == theirs["prompt_tokens"] * 1_000_000 + theirs["completion_tokens"] * 2_000_000
    usage = reply.json()["usage"]
    assert (theirs["prompt_tokens"], theirs["completion_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def test_a_provider_that_fails_is_stood_in_for_by_the_own_model(yard: Yard, outside: Yard) -> None:
    """Provider first: the weights are the other way round."""
    reply = yard.call(
        "POST",
        "/v1/models/deploy",
        {"model_name": "away", **provider(outside, "openai"), "hardware": {"min_replicas": 1, "max_replicas": 1}},
    )
    assert reply.status == 202, reply.body
    yard.wait_ready("away")
    own = {"framework": "simulated", "version": "own", "options": OPTIONS}
    add_fallback(yard, "away", own)
    reply = ask(yard, "away", "hello")
    assert (reply.status, version_of(yard, reply)) == (200, "theirs")
    (engine,) = outside.engines(THEIRS)
    for directive in ("http_error=503", "http_error=429"):
        plan(outside, engine, directive, contains="broken")
        reply = ask(yard, "away", "broken is what it says")
        assert reply.status == 200, reply.body
        row = yard.row_of(reply.headers["x-request-id"])
        assert (version_of(yard, reply), row["attempts"]) == ("own", 2), "the ledger names who answered"
        assert row["cost_nanousd"] == row["prompt_tokens"] * 150_000 + row["completion_tokens"] * 600_000
    plan(outside, engine, "")


def test_the_provider_answers_while_the_own_model_sleeps_and_it_wakes_for_it(yard: Yard, outside: Yard) -> None:
    # Questions come more often than that, so that it does not sleep again between two of them.
    scaling = {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 3}
    yard.deploy("drowsy", options={**OPTIONS, "load_s": 1.5}, scaling=scaling, wait=False)
    yard.wait_asleep("drowsy")
    reply = yard.call("POST", "/v1/endpoints/drowsy/releases", {**provider(outside, "openai"), "fallback": 1})
    assert reply.status == 202, reply.body
    eventually(lambda: yard.get("/v1/endpoints/drowsy")["status"] == "stopped", 60, "its own replica went to sleep")
    series = 'modelyard_replicas{model="drowsy"} 1.0'

    def is_alone() -> bool:
        return series in yard.call("GET", "/metrics").body.decode() and yard.ready_replicas("drowsy") == 1

    eventually(is_alone, 60, "the provider's replica stays")

    before = yard.times_ready("drowsy")
    reply = ask(yard, "drowsy", "anybody there")
    assert (reply.status, version_of(yard, reply)) == (200, "theirs")
    why = yard.get(f"/v1/requests/{reply.headers['x-request-id']}/why")["why"]
    assert any("no replica of the releases with weight was there" in line for line in why), why
    # By its event: on a busy machine it may be asleep again before anybody looks.
    eventually(lambda: yard.times_ready("drowsy") > before, 40, "the question woke its own replica")
    eventually(lambda: version_of(yard, ask(yard, "drowsy", "hello")) == "v1", 40, "which answers now")


def test_a_wrong_key_is_the_reason_that_it_does_not_get_ready(yard: Yard, outside: Yard) -> None:
    (yard.data / "secrets" / "providers" / "wrong").write_text("sk-wrong-key-that-nobody-may-see")
    reply = yard.call(
        "POST", "/v1/models/deploy", {"model_name": "locked", **provider(outside, "anthropic", key_file="wrong")}
    )
    assert reply.status == 202, reply.body
    eventually(lambda: yard.get("/v1/endpoints/locked")["status"] == "failed", 60, "it failed")
    told = json.dumps(yard.get("/v1/endpoints/locked/why"))
    assert "refuses the key (status 401)" in told
    assert "sk-wrong-key" not in told
    assert yard.call("DELETE", "/v1/endpoints/locked").status == 202


def test_a_model_that_the_provider_lacks_is_told_before_and_at_the_call(yard: Yard, outside: Yard) -> None:
    order = {"model_name": "lacking", **provider(outside, "openai", model="nosuch")}
    assert yard.call("POST", "/v1/models/deploy", order).status == 202
    eventually(lambda: yard.get("/v1/endpoints/lacking")["status"] == "failed", 60, "it failed")
    told = json.dumps(yard.get("/v1/endpoints/lacking/why"))
    assert "does not list the model 'nosuch'" in told
    assert "check the option model" in told
    command = ["deploy", "--name", "lacking-too", "--engine", "openai", "--option", f"url={outside.url}/v1"]
    command += ["--option", "model=nosuch", "--option", "key_file=theirs", "--wait", "--timeout", "60s"]
    done = subprocess.run(
        [sys.executable, "-m", "modelyard", *command, "--url", yard.url, "--key", yard.admin_key],
        check=False, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "does not list the model 'nosuch'" in done.stderr
    order = {"model_name": "blind", **provider(outside, "openai", model="nosuch", check_model=False)}
    assert yard.call("POST", "/v1/models/deploy", order).status == 202
    yard.wait_ready("blind")
    reply = ask(yard, "blind", "hello")
    assert (reply.status, reply.json()["error"]["code"]) == (503, "provider_refused")
    assert "refused: it knows no such model or route" in reply.json()["error"]["message"]

    def is_told() -> bool:
        return "the provider refused: it knows no such model" in json.dumps(yard.get("/v1/endpoints/blind/why"))

    eventually(is_told, 40, "the operator is told why")
    for name in ("lacking", "lacking-too", "blind"):
        assert yard.call("DELETE", f"/v1/endpoints/{name}").status == 202


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"key_file": "../admin-key"}, "options.key_file"),
        ({"key_file": "no-such-file"}, "options.key_file"),
        ({"key_file": "", "key_env": "MODELYARD__FETCH__HF_TOKEN"}, "options.key_env"),
        ({"key_file": "", "key_env": "MODELYARD_PROVIDER_UNSET"}, "options.key_env"),
        ({"key_env": "MODELYARD_PROVIDER_X"}, "options.key_env"),
        ({"url": "http://169.254.169.254/v1"}, "options.url"),
        ({"url": "https://user:password@example.com/v1"}, "options.url"),
        ({"url": "ftp://example.com"}, "options.url"),
        ({"routes": "chat,moon"}, "options.routes"),
        ({"model": ""}, "options.model"),
    ],
)
def test_what_would_leak_or_lead_inside_is_refused(
    yard: Yard, outside: Yard, options: dict[str, Any], param: str
) -> None:
    reply = yard.call("POST", "/v1/models/deploy", {"model_name": "bad", **provider(outside, "openai", **options)})
    assert reply.status == 400
    assert f"{param}: " in reply.json()["error"]["message"]


def test_only_an_admin_may_deploy_one(yard: Yard, outside: Yard) -> None:
    tenant = yard.call("POST", "/v1/tenants", {"name": "guest"}).json()["id"]
    manager = yard.call("POST", "/v1/keys", {"name": "m", "scopes": ["manage"], "tenant_id": tenant}).json()["key"]
    order = {"model_name": "mine", **provider(outside, "openai")}
    reply = yard.call("POST", "/v1/models/deploy", order, key=manager)
    assert reply.status == 400
    assert "needs a key with the scope 'admin'" in reply.json()["error"]["message"]


def test_the_key_is_in_its_file_and_nowhere_else(yard: Yard, key: str) -> None:
    """After all of the above: not in the database, a record, a log, an argument or an environment of a child."""
    secret = key.encode()
    assert processes.holders_of(secret, yard.folder) == [yard.data / "secrets" / "providers" / "theirs"]
    engines = yard.engines()
    assert engines
    for engine in engines:
        assert secret not in "\0".join(processes.command_of(engine.pid)).encode()
        assert secret not in processes.environment_of(engine.pid)
