"""The guard with a real engine as its child: what is let through, what is not, and who ends with whom."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support import processes
from tests.support.waiting import eventually, eventually_async
from yarl import URL

from modelyard.engines import EngineCommand, LaunchSpec
from modelyard.engines.guard import Plan, Route, guarded, openai_routes
from modelyard.engines.simulated import SimulatedEngine
from modelyard.fleet.ports import free_port

SECRET = "the-callers-secret"
ROUTES = (
    *openai_routes(frozenset({"/v1/chat/completions"}), ready="/health", load="/metrics"),
    Route("POST", "/v2/models/acme%2Ftiny/infer", engine_path="/v1/completions"),
    Route("POST", "/load_lora_adapter", guest_field="lora_name"),
)
ENGINE = (
    sys.executable, "-m", "modelyard.engines.simulated", "--host", "127.0.0.1", "--port", "@http@",
    "--model-name", "acme/tiny", "--work-dir", ".", "--load-s", "0.6", "--itl-ms", "5", "--slots", "2",
    "--context-length", "1000000",
)  # fmt: skip


def spec_of(folder: Path) -> LaunchSpec:
    return LaunchSpec("r-1", "acme/tiny", None, "127.0.0.1", free_port(()), SECRET, 2, 4096, 1, {}, folder)


def command_of(spec: LaunchSpec, *words: str, **more: Any) -> EngineCommand:
    plan = Plan(spec.host, spec.port, str(spec.work_dir), ROUTES, has_key=True, **more)
    # What the engine wants to be asked with is the guard's own key, from a place that only this user can read.
    return guarded(spec, plan, words or ENGINE, {"INNER_KEY": "@key@"})


@dataclass(slots=True)
class Guarded:
    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    @property
    def child(self) -> int:
        return processes.children_of(self.process.pid)[0]


def started(command: EngineCommand, spec: LaunchSpec) -> Guarded:
    log = spec.work_dir / "log"
    # The simulated engine takes its secret from ENGINE_SECRET, which a guard never passes on: a shell renames it.
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv, env={**os.environ, **command.env}, cwd=spec.work_dir, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    return Guarded(process, f"http://127.0.0.1:{spec.port}", log)


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def with_inner_secret(words: tuple[str, ...]) -> tuple[str, ...]:
    return ("/bin/sh", "-c", 'ENGINE_SECRET="$INNER_KEY" exec "$@"', "sh", *words)


@pytest.fixture
def guarded_engine(tmp_path: Path) -> Iterator[Guarded]:
    spec = spec_of(tmp_path)
    running = started(command_of(spec, *with_inner_secret(ENGINE)), spec)
    yield running
    if running.process.poll() is None:
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait(10)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


async def ready(guarded: Guarded, session: aiohttp.ClientSession) -> list[int]:
    seen: list[int] = []

    async def look() -> bool:
        async with session.get(guarded.url + "/health") as response:
            seen.append(response.status)
        return response.status == 200

    await eventually_async(look, 30, guarded.log.read_text())
    return seen


async def call(
    guarded: Guarded, session: aiohttp.ClientSession, method: str, path: str, body: object = None, secret: str = SECRET
) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {secret}"}
    async with session.request(method, guarded.url + path, json=body, headers=headers) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


async def test_it_says_loading_until_the_engine_listens_and_answers_then(
    guarded_engine: Guarded, session: aiohttp.ClientSession
) -> None:
    seen = await ready(guarded_engine, session)
    assert seen[0] == 503
    assert set(seen) == {503, 200}
    body = {"model": "acme/tiny", "messages": [{"role": "user", "content": "one two"}]}
    status, answer = await call(guarded_engine, session, "POST", "/v1/chat/completions", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "one two")
    status, page = await call(guarded_engine, session, "GET", "/metrics")
    assert SimulatedEngine().read_load(page).generation_tokens_total == 2


async def test_only_what_the_plan_names_passes_and_only_with_the_secret(
    guarded_engine: Guarded, session: aiohttp.ClientSession
) -> None:
    await ready(guarded_engine, session)
    for secret in ("", "wrong", SECRET + "x"):
        for method, path in (("GET", "/metrics"), ("POST", "/v1/chat/completions"), ("GET", "/sim/faults")):
            status, answer = await call(guarded_engine, session, method, path, {}, secret=secret)
            assert (status, answer["error"]["code"]) == (401, 401), (method, path)
    # The engine itself serves these; nobody put them on the list.
    for method, path in (
        ("GET", "/sim/faults"),
        ("POST", "/sim/faults"),
        ("POST", "/v1/embeddings"),
        ("POST", "/health"),
    ):
        status, answer = await call(guarded_engine, session, method, path, [] if method == "POST" else None)
        assert status == 404, (method, path)
        assert path in answer["error"]["message"]


async def test_a_stream_passes_piece_by_piece_over_one_connection_with_other_answers(
    guarded_engine: Guarded, session: aiohttp.ClientSession
) -> None:
    await ready(guarded_engine, session)
    body = {"model": "acme/tiny", "messages": [{"role": "user", "content": "a b c d"}], "stream": True}
    headers = {"authorization": f"Bearer {SECRET}"}
    for _ in range(3):  # a connection is kept
        async with session.post(guarded_engine.url + "/v1/chat/completions", json=body, headers=headers) as response:
            first = await response.content.readline()
            rest = await response.read()
        assert first.startswith(b"data: {")
        assert rest.rstrip().endswith(b"data: [DONE]")
    assert (await call(guarded_engine, session, "GET", "/v1/models"))[0] == 200


async def test_a_client_that_leaves_is_seen_by_the_engine(
    guarded_engine: Guarded, session: aiohttp.ClientSession
) -> None:
    await ready(guarded_engine, session)
    body = {
        "model": "acme/tiny", "messages": [{"role": "user", "content": "long"}], "stream": True,
        "max_tokens": 4000, "ignore_eos": True,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {SECRET}"}
    async with session.post(guarded_engine.url + "/v1/chat/completions", json=body, headers=headers) as response:
        await response.content.readline()
        _, page = await call(guarded_engine, session, "GET", "/metrics")
        assert SimulatedEngine().read_load(page).running == 1
        response.close()

    async def is_free() -> bool:
        _, page = await call(guarded_engine, session, "GET", "/metrics")
        return SimulatedEngine().read_load(page).running == 0

    await eventually_async(is_free, 20, "the engine stopped generating")


async def test_a_path_leads_where_the_engine_has_it(guarded_engine: Guarded, session: aiohttp.ClientSession) -> None:
    await ready(guarded_engine, session)
    url = guarded_engine.url + "/v2/models/acme%2Ftiny/infer"
    headers = {"authorization": f"Bearer {SECRET}"}
    body = {"model": "acme/tiny", "prompt": "x y"}
    async with session.post(URL(url, encoded=True), json=body, headers=headers) as response:
        assert response.status == 200
        assert (await response.json())["choices"][0]["text"] == "x y"


async def test_a_guest_that_the_engine_lists_is_not_loaded_again(
    guarded_engine: Guarded, session: aiohttp.ClientSession
) -> None:
    await ready(guarded_engine, session)
    # The simulated engine has no such path: 404 is its own, 200 the guard's.
    assert (await call(guarded_engine, session, "POST", "/load_lora_adapter", {"lora_name": "acme/tiny"}))[0] == 200
    assert (await call(guarded_engine, session, "POST", "/load_lora_adapter", {"lora_name": "other"}))[0] == 404


async def test_no_secret_is_in_any_command_line_and_the_callers_not_in_the_engine(
    guarded_engine: Guarded, session: aiohttp.ClientSession
) -> None:
    await ready(guarded_engine, session)
    for pid in (guarded_engine.process.pid, guarded_engine.child):
        assert SECRET not in " ".join(processes.command_of(pid))
    environment = environment_of(guarded_engine.child)
    assert SECRET.encode() not in environment
    assert b"INNER_KEY=@key@" not in environment


async def test_sigterm_ends_both(guarded_engine: Guarded, session: aiohttp.ClientSession) -> None:
    await ready(guarded_engine, session)
    child = guarded_engine.child
    guarded_engine.process.send_signal(signal.SIGTERM)
    assert guarded_engine.process.wait(30) == 0, "the simulated engine exits with 0"
    assert not processes.is_alive(child)


async def test_an_engine_does_not_outlive_a_guard_that_is_killed(
    guarded_engine: Guarded, session: aiohttp.ClientSession
) -> None:
    await ready(guarded_engine, session)
    child = guarded_engine.child
    guarded_engine.process.kill()
    guarded_engine.process.wait(10)
    eventually(lambda: not processes.is_alive(child), 30, "the engine is gone")


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", -9), ("kill -SEGV $$", -11)])
def test_it_ends_as_the_engine_ended(tmp_path: Path, script: str, code: int) -> None:
    spec = spec_of(tmp_path)
    guarded = started(command_of(spec, "/bin/sh", "-c", script), spec)
    assert guarded.process.wait(60) == code, guarded.log.read_text()


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    guarded = started(command_of(spec, "no-such-engine"), spec)
    assert guarded.process.wait(60) == 2
    assert "guard: no-such-engine: No such file" in guarded.log.read_text()


def test_files_are_written_for_this_user_only_with_ports_and_key_filled_in(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    (tmp_path / "engine.yaml").write_text("of an earlier start")
    command = command_of(spec, "/bin/true", files={"engine.yaml": "port: @http@\nkey: @key@\n"})
    assert started(command, spec).process.wait(60) == 0
    file = tmp_path / "engine.yaml"
    port, key = (line.partition(": ")[2] for line in file.read_text().splitlines())
    assert 1024 < int(port) < 65536
    assert int(port) != spec.port
    assert len(key) > 40
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_key_on_a_command_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="visible"):
        command_of(spec_of(tmp_path), "engine", "--api-key", "@key@")


async def test_a_large_body_passes_whole(guarded_engine: Guarded, session: aiohttp.ClientSession) -> None:
    await ready(guarded_engine, session)
    body = {"model": "acme/tiny", "messages": [{"role": "user", "content": "word " * 150_000}], "max_tokens": 1}
    status, answer = await call(guarded_engine, session, "POST", "/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] >= 150_000


ECHO = """
import http.server, json, sys
class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/cut":
            self.connection.shutdown(2)
            self.close_connection = True
            return
        status, answer = 200, json.dumps({"headers": dict(self.headers), "body": json.loads(body)}).encode()
        if self.path == "/fails":
            status, answer = 500, body
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer[:3])
        self.wfile.flush()
        self.wfile.write(answer[3:])
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Echo).serve_forever()
"""


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Guarded]:
    """An engine that says what it was sent, since no real one does."""
    spec = spec_of(tmp_path)
    routes = (
        Route("GET", "/health", is_open=True),
        Route("POST", "/v1/chat/completions"),
        Route("POST", "/v1/completions", dropped=("cache_salt",)),
        Route("POST", "/fails", caller_fault='{"error":"Unable'),
        Route("POST", "/cut"),
    )
    plan = Plan(spec.host, spec.port, str(tmp_path), routes, has_key=True, model="acme/tiny", adapter_field="lora_path")
    running = started(guarded(spec, plan, (sys.executable, "-c", ECHO, "@http@"), {}), spec)
    yield running
    if running.process.poll() is None:
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait(10)


async def test_an_adapter_is_named_where_the_engine_wants_it(echo: Guarded, session: aiohttp.ClientSession) -> None:
    await ready(echo, session)
    sent = {"model": "mine@1f", "messages": [], "big": 12345678901234567890, "lora_path": "../elsewhere"}
    _, told = await call(echo, session, "POST", "/v1/chat/completions", sent)
    assert told["body"] == {**sent, "lora_path": "mine@1f"}
    _, told = await call(echo, session, "POST", "/v1/chat/completions", {"model": "acme/tiny", "messages": []})
    assert told["body"] == {"model": "acme/tiny", "messages": []}


async def test_an_engine_gets_its_own_key_and_only_headers_that_it_needs(
    echo: Guarded, session: aiohttp.ClientSession
) -> None:
    await ready(echo, session)
    headers = {"authorization": f"Bearer {SECRET}", "x-request-id": "req_1", "cookie": "a=b", "x-lora": "x"}
    async with session.post(echo.url + "/v1/completions", json={"model": "acme/tiny"}, headers=headers) as response:
        told = {name.lower(): value for name, value in (await response.json(content_type=None))["headers"].items()}
    assert told["x-request-id"] == "req_1"
    assert told["authorization"].startswith("Bearer ")
    assert SECRET not in told["authorization"]
    assert set(told) <= {"host", "authorization", "x-request-id", "content-type", "content-length", "accept"}


async def test_a_field_that_the_engine_refuses_on_a_path_is_dropped_there(
    echo: Guarded, session: aiohttp.ClientSession
) -> None:
    await ready(echo, session)
    sent = {"model": "acme/tiny", "cache_salt": "s"}
    assert (await call(echo, session, "POST", "/v1/completions", sent))[1]["body"] == {"model": "acme/tiny"}
    assert (await call(echo, session, "POST", "/v1/chat/completions", sent))[1]["body"] == sent


async def test_a_failure_that_is_the_callers_is_told_apart(echo: Guarded, session: aiohttp.ClientSession) -> None:
    await ready(echo, session)
    for error, expected in (("Unable to parse", 400), ("Out of memory", 500)):
        status, answer = await call(echo, session, "POST", "/fails", {"error": error, "model": "acme/tiny"})
        assert (status, answer["error"]) == (expected, error)


async def test_an_engine_that_closes_without_an_answer_is_told_of(
    echo: Guarded, session: aiohttp.ClientSession
) -> None:
    await ready(echo, session)
    status, answer = await call(echo, session, "POST", "/cut", {"model": "acme/tiny"})
    assert (status, answer["error"]["type"]) == (502, "server_error")
