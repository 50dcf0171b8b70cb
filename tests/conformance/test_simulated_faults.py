"""Each fault of the simulated engine does to a real socket what its directive says, and the journal tells the truth."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from tests.support.simulated import CHAT, ENGINE, SECRET, Sim, end, launch, ready
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sim]:
    sim = launch(tmp_path_factory.mktemp("sim"), slots=4)
    yield ready(sim)
    end(sim)


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Sim]:
    sim = launch(tmp_path)
    yield ready(sim)
    end(sim)


def events(raw: bytes) -> list[bytes]:
    return [event for event in raw.replace(b"\r\n", b"\n").split(b"\n\n") if event]


def test_the_journal_has_what_reached_the_engine_and_every_token(shared: Sim) -> None:
    shared.stream("one two three", rid="req_j")
    shared.last("req_j")
    records = shared.records("req_j")
    assert [record["event"] for record in records] == ["begin", "token", "token", "token", "end"]
    assert [record["n"] for record in records[1:]] == [1, 2, 3, 3]
    begin = records[0]
    assert begin["body_keys"] == ["messages", "stream", "stream_options"]
    assert "authorization" in begin["header_names"]
    assert begin["prompt_tokens"] == records[-1]["prompt_tokens"]
    assert not any(value == SECRET for record in records for value in record.values())


@pytest.mark.parametrize("when", ["crash_before_first", "crash_after=2"])
def test_crash_is_a_kill_9_and_what_was_sent_arrives(mortal: Sim, when: str) -> None:
    with pytest.raises((IncompleteRead, ConnectionError)) as failure:
        mortal.stream(f"a b c d [[sim: {when}]]")
    assert mortal.process.wait(20) == -signal.SIGKILL
    tokens = [record for record in mortal.records() if record["event"] == "token"]
    assert len(tokens) == (2 if when == "crash_after=2" else 0)
    if isinstance(failure.value, IncompleteRead):
        assert b'" b"' in failure.value.partial


def test_crash_with_a_code_exits_with_it(mortal: Sim) -> None:
    with pytest.raises((IncompleteRead, ConnectionError)):
        mortal.stream("a b c [[sim: crash_after=1 crash_code=7]]")
    assert mortal.process.wait(20) == 7


def test_cut_ends_the_socket_in_the_middle_of_an_event(shared: Sim) -> None:
    with pytest.raises(IncompleteRead) as failure:
        shared.stream("a b c [[sim: cut_after=2]]", rid="req_cut")
    *whole, torn = failure.value.partial.split(b"\n\n")
    assert json.loads(whole[-1].removeprefix(b"data: "))
    with pytest.raises(json.JSONDecodeError):
        json.loads(torn.removeprefix(b"data: "))
    assert (shared.last("req_cut")["why"], shared.last("req_cut")["n"]) == ("cut", 2)


def test_cut_ends_a_body_that_is_not_streamed_too(shared: Sim) -> None:
    with shared.chat("a b [[sim: cut_after=1]]") as response, pytest.raises(IncompleteRead):
        response.read()


def test_clean_end_comes_without_finish_and_done(shared: Sim) -> None:
    raw = shared.stream("a b c [[sim: clean_end_after=2]]")
    assert b"[DONE]" not in raw
    assert b'"finish_reason":"' not in raw
    assert len(events(raw)) == 3


@pytest.mark.parametrize(
    ("form", "start"),
    [
        ("wrapped", b'data: {"error":{'),
        ("event", b'event: error\ndata: {"error":{'),
        ("flat", b'data: {"object":"error"'),
    ],
)
def test_errors_in_a_stream_come_in_three_forms(shared: Sim, form: str, start: bytes) -> None:
    raw = shared.stream(f"a b c [[sim: error_after=1 error_form={form}]]")
    assert events(raw)[-1].startswith(start)
    assert b"[DONE]" not in raw


def test_an_error_in_an_answer_that_is_not_streamed_is_a_500(shared: Sim) -> None:
    with shared.chat("a b [[sim: error_after=1]]") as response:
        assert response.status == 500
        assert json.loads(response.read())["error"]["code"] == 500


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_an_http_error_comes_before_the_stream(shared: Sim, status: int) -> None:
    with shared.chat(f"a [[sim: http_error={status}]]", stream=True) as response:
        assert response.status == status
        assert json.loads(response.read())["error"]["code"] == status


def test_garbage_is_what_it_says(shared: Sim) -> None:
    broken = events(shared.stream("a [[sim: garbage=invalid_json]]"))[1]
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken.removeprefix(b"data: "))
    with shared.chat("a [[sim: garbage=invalid_json]]") as response, pytest.raises(json.JSONDecodeError):
        json.loads(response.read())
    with shared.chat("a [[sim: garbage=error_200]]") as response:
        assert response.status == 200
        assert "error" in json.loads(response.read())
    with shared.chat("a [[sim: garbage=content_type]]", stream=True) as response:
        assert response.headers.get_content_type() == "text/html"
        response.read()
    with shared.chat("a [[sim: no_usage]]") as response:
        assert "usage" not in json.loads(response.read())
    with shared.chat("a [[sim: null_usage]]") as response:
        assert json.loads(response.read())["usage"] is None
    assert b"\n" not in shared.stream("a [[sim: huge_line=200000]]")


def test_parts_of_a_stream_can_be_missing_or_too_many(shared: Sim) -> None:
    assert b"assistant" not in shared.stream("a [[sim: missing_role]]")
    assert b"[DONE]" not in shared.stream("a [[sim: no_done]]")
    assert b'"finish_reason":"stop"' not in shared.stream("a [[sim: no_finish]]")
    assert b'"usage":{' not in shared.stream("a [[sim: no_usage]]")
    assert shared.stream("a b [[sim: usage_every_chunk]]").count(b'"usage":{') == 5
    assert shared.stream("a b [[sim: ping]]").count(b": ping\n\n") == 2
    assert b"\r\n\r\n" in shared.stream("a [[sim: crlf]]")


def test_split_bytes_changes_nothing_but_the_writes(shared: Sim) -> None:
    def shape(raw: bytes) -> list[bytes]:
        return [event[:6] + event[-60:] for event in events(raw)]

    plain, split = shared.stream("a 你 🙂"), shared.stream("a 你 🙂 [[sim: split_bytes]]")
    assert len(events(plain)) == len(events(split))
    assert [b"choices" in event for event in events(plain)] == [b"choices" in event for event in events(split)]


def test_a_character_that_spans_tokens_leaves_whole(shared: Sim) -> None:
    raw = shared.stream("🙂 [[sim: byte_tokens]]", rid="req_bytes")
    assert [e for e in events(raw) if "🙂".encode() in e]
    assert all(event.decode() for event in events(raw))
    assert shared.last("req_bytes")["n"] == 4


@pytest.mark.parametrize("when", ["hang_before_first", "hang_after=2"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_gives_up_on_a_hanging_engine_frees_the_slot(shared: Sim, when: str, *, stream: bool) -> None:
    rid = f"req_{when}_{stream}"
    body = {"messages": [{"role": "user", "content": f"a b c [[sim: {when}]]"}], "stream": stream}
    made = 2 if when == "hang_after=2" else 0
    with shared.open(body, path=CHAT, rid=rid):
        eventually(lambda: len(shared.records(rid)) == 1 + made, 20, "it hangs")
        assert shared.running() == 1
        assert shared.get("/health")[0] == 200
    assert (shared.last(rid)["event"], shared.last(rid)["why"], shared.last(rid)["n"]) == ("abort", "client gone", made)
    eventually(lambda: shared.running() == 0, 20, "its slot is free")


def test_a_client_that_leaves_the_queue_never_runs(tmp_path: Path) -> None:
    sim = ready(launch(tmp_path, slots=1))
    try:
        body = {"messages": [{"role": "user", "content": "a [[sim: hang_before_first]]"}]}
        with sim.open(body, path=CHAT, rid="req_a"):
            eventually(lambda: sim.records("req_a"), 20, "the first arrived")
            with sim.open(body, path=CHAT, rid="req_b"):
                eventually(lambda: sim.records("req_b"), 20, "the second arrived")
            assert sim.last("req_b")["n"] == 0
            load = ENGINE.read_load(sim.get("/metrics")[1].decode())
            assert (load.running, load.waiting) == (1, 0)
    finally:
        end(sim)


def test_faults_can_be_planned_for_requests_that_carry_no_directive(shared: Sim) -> None:
    planned = [{"directive": "http_error=503", "contains": "cat"}, {"health_status": 500}]
    with shared.send(planned, path="/sim/faults") as response:
        assert response.status == 200
        response.read()
    assert shared.get("/health")[0] == 500
    with shared.chat("a cat") as response:
        assert response.status == 503
        response.read()
    with shared.chat("a cat") as response:
        assert response.status == 200
        response.read()
    with shared.send([], path="/sim/faults") as response:
        response.read()
    assert shared.get("/health")[0] == 200


def test_a_request_that_can_never_fit_is_refused_and_not_journaled(tmp_path: Path) -> None:
    sim = ready(launch(tmp_path, kv_blocks=2, context_length=1000))
    try:
        with sim.chat("a b " * 20) as response:
            assert response.status == 400
            assert b"KV blocks" in response.read()
        assert sim.records() == []
    finally:
        end(sim)


def test_a_load_that_fails_exits_with_code_1(tmp_path: Path) -> None:
    sim = launch(tmp_path, load_s=0.1, fail_load=True)
    with sim.process:
        assert sim.process.wait(30) == 1


def test_sigterm_ends_it_at_once_even_with_a_stream_open(mortal: Sim) -> None:
    with mortal.chat("a b [[sim: hang_after=1]]", stream=True) as response:
        response.readline()
        mortal.process.terminate()
        assert mortal.process.wait(20) == 0
    assert mortal.records()[-1]["event"] == "abort"


def test_the_process_refuses_to_start_without_a_secret_or_with_a_bad_journal(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-m", "modelyard.engines.simulated", "--port", "1", "--model-name", "m"]
    done = subprocess.run(argv, check=False, env={}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "ENGINE_SECRET" in done.stderr) == (2, True)
    (tmp_path / "other").write_text("something")
    argv += ["--journal", str(tmp_path / "other")]
    done = subprocess.run(argv, check=False, env={"ENGINE_SECRET": "s"}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "no token journal" in done.stderr) == (2, True)


# --- continuing, and the faults that tell a lost engine from a deadly request ---------------------------------


def body_of(sim: Sim, messages: list[dict[str, Any]], *, rid: str = "req_c", **more: Any) -> dict[str, Any]:
    with sim.send({"messages": messages, **more}, rid=rid) as response:
        assert response.status == 200
        found: dict[str, Any] = json.loads(response.read())
        return found


CONTINUE: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}


def test_a_continued_answer_is_the_rest_and_its_prompt_is_mostly_cached(shared: Sim) -> None:
    user = {"role": "user", "content": "one two three four five six seven eight nine ten eleven twelve thirteen"}
    begun = {"role": "assistant", "content": "one two three four five six seven eight nine ten"}
    whole = body_of(shared, [user], cache_salt="c")
    rest = body_of(shared, [user, begun], cache_salt="c", **CONTINUE)
    assert begun["content"] + rest["choices"][0]["message"]["content"] == whole["choices"][0]["message"]["content"]
    used, more = whole["usage"], rest["usage"]
    assert more["prompt_tokens"] == used["prompt_tokens"] + 10
    assert more["completion_tokens"] == used["completion_tokens"] - 10
    assert more["prompt_tokens_details"]["cached_tokens"] == used["prompt_tokens"] // 16 * 16
    with shared.send({"messages": [user], **CONTINUE}) as response:
        assert response.status == 400
        response.read()


def test_what_killed_one_engine_spares_the_next_unless_it_always_does(mortal: Sim) -> None:
    def text(directive: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"a b c [[sim: {directive}]]"}, {"role": "assistant", "content": "a"}]

    for spared in ("crash_after=1", "crash_before_first", "cut_after=0", "error_after=0", "http_error=500"):
        assert body_of(mortal, text(spared), **CONTINUE)["choices"][0]["message"]["content"] == " b c"
    with pytest.raises((IncompleteRead, ConnectionError)):
        body_of(mortal, text("crash_always crash_after=1"), **CONTINUE)
    assert mortal.process.wait(20) == -signal.SIGKILL
    assert mortal.records("req_c")[-1]["n"] == 1


def test_an_engine_that_stalls_is_healthy_busy_and_silent(shared: Sim) -> None:
    body = {"messages": [{"role": "user", "content": "a b c [[sim: stall_after=1]]"}], "stream": True}
    with shared.open(body, path=CHAT, rid="req_stall") as first:
        eventually(lambda: len(shared.records("req_stall")) == 2, 20, "one token")
        with shared.open({**body, "messages": [{"role": "user", "content": "d"}]}, path=CHAT, rid="req_too") as second:
            eventually(lambda: shared.running() == 2, 20, "the other hangs too")
            assert shared.get("/health")[0] == 200
            with shared.send([], path="/sim/faults") as response:
                response.read()
            assert b"[DONE]" in second.getresponse().read()
        assert b"[DONE]" in first.getresponse().read()


def test_the_newest_request_is_preempted_when_the_kv_cache_is_full_and_all_end_well(tmp_path: Path) -> None:
    sim = ready(launch(tmp_path, kv_blocks=6, context_length=96, itl_ms=20))
    try:
        body = {"messages": [{"role": "user", "content": "a [[sim: tokens=70]]"}]}
        with sim.open(body, path=CHAT, rid="req_a") as first, sim.open(body, path=CHAT, rid="req_b") as second:
            pages = [json.loads(one.getresponse().read()) for one in (first, second)]
        assert [page["usage"]["completion_tokens"] for page in pages] == [70, 70]
        page = sim.get("/metrics")[1].decode()
        preempted = next(line for line in page.splitlines() if line.startswith("vllm:num_preemptions_total{"))
        assert float(preempted.split()[-1]) >= 1
        assert 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0\n' in page
    finally:
        end(sim)


def test_only_the_same_salt_finds_what_was_cached(shared: Sim) -> None:
    long = [{"role": "user", "content": "salted " * 40}]

    def cached(salt: str) -> int:
        found = body_of(shared, long, cache_salt=salt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(found, int)
        return found

    assert (cached("mine"), cached("yours"), cached("mine") > 30, cached("yours") > 30) == (0, 0, True, True)
