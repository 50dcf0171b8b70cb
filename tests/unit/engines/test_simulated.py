"""The simulated model is lossless, exact in its counts, and fails only as it is told."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.clock import ManualClock
from modelyard.engines.simulated.answers import Choice, chat_choices, completion_choices
from modelyard.engines.simulated.batching import Batch, PrefixCache
from modelyard.engines.simulated.embedding import as_base64, vector_of
from modelyard.engines.simulated.faults import FaultPlan, Faults, Planned, cut_directives, read_directive
from modelyard.engines.simulated.journal import TokenJournal
from modelyard.engines.simulated.requests import ChatRequest, CompletionRequest, Refused, body_keys, decode, texts_of
from modelyard.engines.simulated.shapes import shape_of
from modelyard.engines.simulated.stream import Chunks
from modelyard.engines.simulated.tokens import blocks_for, repeat_to, split

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"properties": {"what": {"type": "string"}}}}}
OTHER = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def answer(text: str, *, directive: str = "", room: int = 1000, by_byte: bool = False, **fields: Any) -> list[Choice]:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    request = decode(json.dumps(body).encode(), ChatRequest)
    return chat_choices(request, text, read_directive(directive), room=room, by_byte=by_byte)


def text_of(choice: Choice) -> str:
    return b"".join(token.data for token in choice.tokens if token.call < 0).decode()


# --- tokens ------------------------------------------------------------------


@given(st.text())
def test_tokens_joined_are_the_text(text: str) -> None:
    for by_byte in (False, True):
        assert b"".join(split(text, by_byte=by_byte)) == text.encode("utf-8", "replace")


def test_tokens_are_word_pieces_marks_and_single_characters() -> None:
    assert split("<|user|>Hello wonderful 你好!") == [
        b"<|user|>",
        b"Hello",
        b" wonderfu",
        b"l",
        " 你".encode(),
        "好".encode(),
        b"!",
    ]
    assert split("é", by_byte=True) == [b"\xc3", b"\xa9"]


def test_a_repeated_answer_has_the_length_that_was_asked() -> None:
    assert b"".join(repeat_to(split("a b"), 5)) == b"a b a b a"
    assert [blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


# --- answers --------------------------------------------------------------------


def test_the_answer_is_an_echo_that_ends_by_itself() -> None:
    [choice] = answer("Hello 你 there")
    assert (text_of(choice), choice.finish) == ("Hello 你 there", "stop")


def test_an_empty_message_is_answered_too() -> None:
    assert text_of(answer("")[0]) == "ok"


@pytest.mark.parametrize(("limit", "finish"), [(1, "length"), (2, "length"), (3, "stop"), (4, "stop")])
def test_max_tokens_ends_the_answer_with_length(limit: int, finish: str) -> None:
    [choice] = answer("a b c", max_tokens=limit)
    assert (len(choice.tokens), choice.finish) == (min(3, limit), finish)


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert len(answer("a b c d", max_tokens=1, max_completion_tokens=2)[0].tokens) == 2


def test_the_context_ends_the_answer_with_length() -> None:
    [choice] = answer("a b c d", room=2)
    assert (text_of(choice), choice.finish) == ("a b", "length")


@pytest.mark.parametrize(
    ("stop", "text", "made"),
    [("c", "a b ", 3), ("b c", "a ", 3), (["x", "d", "b"], "a ", 2), ("zz", "a b c d", 4), ("", "a b c d", 4)],
)
def test_a_stop_string_ends_the_answer_and_is_not_in_it(stop: str | list[str], text: str, made: int) -> None:
    [choice] = answer("a b c d", stop=stop)
    assert (text_of(choice), choice.finish, len(choice.tokens)) == (text, "stop", made)


def test_ignore_eos_goes_on_to_the_limit_and_min_tokens_to_the_minimum() -> None:
    assert answer("a b", ignore_eos=True, max_tokens=7)[0].finish == "length"
    assert len(answer("a b", ignore_eos=True, max_tokens=7)[0].tokens) == 7
    assert len(answer("a b", min_tokens=5)[0].tokens) == 5


def test_the_directive_tokens_sets_the_exact_length() -> None:
    for length in (1, 2, 9):
        [choice] = answer("a b c", directive=f"tokens={length}")
        assert (len(choice.tokens), choice.finish) == (length, "stop")
    assert answer("a b c", directive="tokens=9", max_tokens=4)[0].finish == "length"


def test_n_gives_as_many_choices() -> None:
    assert len(answer("a", n=3)) == 3


def test_completions_answer_each_prompt_n_times_in_order() -> None:
    request = decode(b'{"prompt": ["a b", "c"], "n": 2, "echo": true}', CompletionRequest)
    choices = completion_choices(request, request.prompts(), Faults(), room=100, by_byte=False)
    assert [text_of(choice) for choice in choices] == ["a b", "a b", "c", "c"]
    assert choices[2].lead == "c"


@pytest.mark.parametrize(
    ("text", "fields", "called"),
    [
        ("please look_up this", {}, ["look_up"]),
        ("please look_up and add", {}, ["look_up", "add"]),
        ("please look_up and add", {"parallel_tool_calls": False}, ["look_up"]),
        ("nothing here", {}, []),
        ("please look_up", {"tool_choice": "none"}, []),
        ("nothing here", {"tool_choice": "required"}, ["look_up"]),
        ("nothing here", {"tool_choice": {"type": "function", "function": {"name": "add"}}}, ["add"]),
    ],
)
def test_tools_are_called_when_named_required_or_chosen(text: str, fields: dict[str, Any], called: list[str]) -> None:
    [choice] = answer(text, tools=[TOOL, OTHER], **fields)
    assert [token.name for token in choice.tokens if token.name] == called
    assert choice.finish == ("tool_calls" if called else "stop")
    for number, name in enumerate(called):
        arguments = json.loads(b"".join(token.data for token in choice.tokens if token.call == number))
        assert arguments == ({"what": text} if name == "look_up" else {"a": 0})


def test_a_tool_that_is_not_there_is_refused() -> None:
    with pytest.raises(Refused, match="not in tools"):
        answer("x", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "nothing"}})


def test_the_answer_to_a_tool_result_is_text() -> None:
    messages = [{"role": "user", "content": "look_up it"}, {"role": "tool", "content": "42", "tool_call_id": "c"}]
    request = decode(json.dumps({"messages": messages, "tools": [TOOL]}).encode(), ChatRequest)
    [choice] = chat_choices(request, request.last_text(), Faults(), room=100, by_byte=False)
    assert text_of(choice) == "42"


def test_json_formats_give_json() -> None:
    assert json.loads(text_of(answer("hi", response_format={"type": "json_object"})[0])) == {"echo": "hi"}
    schema = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 3}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert json.loads(text_of(answer("hi", response_format=wanted)[0])) == {"x": 3}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "t"),
        ({"type": "string", "minLength": 3}, "txx"),
        ({"type": "string", "format": "date"}, "2026-01-01"),
        ({"enum": ["a", "b"]}, "a"),
        ({"const": 5}, 5),
        ({"type": ["null", "string"]}, None),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ({"type": "number", "exclusiveMinimum": 1}, 1.5),
        ({"type": "integer", "minimum": 4, "multipleOf": 3}, 6),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, [True, True]),
        ({"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}]}, {"a": 1, "b": 2}),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"const": 1}}}, {"a": 1}),
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, {"b": "t"}),
    ],
)
def test_a_schema_gets_its_smallest_value(schema: dict[str, Any], value: object) -> None:
    assert shape_of(schema, text="t") == value


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert json.dumps(shape_of(schema, text="t"))


@given(st.text(min_size=1, max_size=40))
def test_streamed_text_is_whole_characters_and_adds_up_to_the_answer(text: str) -> None:
    [choice] = answer(text, by_byte=True)
    chunks = Chunks(is_chat=True, answer_id="x", created=0, model="m", choices=1)
    parts = []
    for position, token in enumerate(choice.tokens):
        chunk = chunks.token(0, token, is_last=position == len(choice.tokens) - 1)
        if chunk is not None:
            parts.append(chunk["choices"][0]["delta"]["content"])
    assert "".join(parts) == text
    assert all(parts)


# --- requests -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "texts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], ["id1 id2"]), ([[1], [2, 3]], ["id1", "id2 id3"])],
)
def test_inputs_come_in_four_forms(value: Any, texts: list[str]) -> None:
    assert texts_of(value, "input") == texts


@pytest.mark.parametrize("value", [[], [[]], [1, "a"], [True], [1.5]])
def test_other_inputs_are_refused(value: Any) -> None:
    with pytest.raises(Refused):
        texts_of(value, "input")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"messages": []}', b'{"messages": [{"role": "user"}], "n": 0}', b"\xff"]
)
def test_bad_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(Refused):
        decode(body, ChatRequest)


def test_parts_are_read_as_text_and_media_as_one_token() -> None:
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "x"}}]
    request = decode(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode(), ChatRequest)
    assert request.rendered() == "<|user|>see <|media|><|end|><|assistant|>"
    assert body_keys(b'{"b": 1, "a": {"c": 2}}') == ["b", "a"]


# --- faults -------------------------------------------------------------------------------


def test_directives_are_cut_out_and_read() -> None:
    text, directive = cut_directives("Hello [[sim: crash_after=5 slow=2.5]] you [[sim: ping, error_form=flat]]")
    assert text == "Hello you"
    assert read_directive(directive) == Faults(crash_after=5, slow=2.5, ping=True, error_form="flat")
    assert cut_directives("  nothing ") == ("  nothing ", "")


@pytest.mark.parametrize("wrong", ["typo=1", "crash_after", "crash_after=-1", "tokens=0", "http_error=200", "ping=x"])
def test_a_directive_with_a_mistake_is_an_error(wrong: str) -> None:
    with pytest.raises(ValueError, match="sim"):
        read_directive(wrong)


def test_planned_faults_are_used_up_by_the_requests_they_meet() -> None:
    plan = FaultPlan()
    plan.replace([Planned("ping", times=2, contains="cat"), Planned("crlf", times=0), Planned(health_status=503)])
    assert plan.health_status == 503
    assert plan.for_request("a cat", "") == Faults(ping=True)
    assert plan.for_request("a dog", "slow=1") == Faults(crlf=True, slow=1)
    assert plan.for_request("a cat", "") == Faults(ping=True)
    assert plan.for_request("a cat", "") == Faults(crlf=True)
    plan.replace([])
    assert plan.for_request("a cat", "") == Faults()
    assert plan.health_status == 200


# --- batch and cache ---------------------------------------------------------------------------


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_batch_admits_in_order_while_slots_and_blocks_last() -> None:
    batch = Batch(slots=2, blocks=10)
    entered: list[str] = []
    leave = {name: asyncio.Event() for name in "abcd"}

    async def work(name: str, blocks: int) -> None:
        async with batch.place(blocks):
            entered.append(name)
            await leave[name].wait()

    async with asyncio.TaskGroup() as group:
        for name, blocks in (("a", 6), ("b", 6), ("c", 1), ("d", 1)):
            group.create_task(work(name, blocks))
        await turns()
        assert entered == ["a"], "b does not fit beside a, and c waits behind b"
        assert repr(batch) == "<Batch 1/2 slots, 3 waiting, 4/10 blocks free>"
        assert batch.kv_usage == pytest.approx(0.6)
        leave["a"].set()
        await turns()
        assert entered == ["a", "b", "c"], "the third waits for a slot"
        for event in leave.values():
            event.set()
    assert repr(batch) == "<Batch 0/2 slots, 0 waiting, 10/10 blocks free>"


async def test_who_leaves_while_waiting_or_running_gives_back_its_place() -> None:
    batch = Batch(slots=1, blocks=4)

    async def work() -> None:
        async with batch.place(4):
            await asyncio.get_running_loop().create_future()

    tasks = [asyncio.create_task(work()) for _ in range(3)]
    await turns()
    assert (batch.running, batch.waiting) == (1, 2)
    # The first frees the place in the same turn in which its successor is cancelled.
    tasks[1].cancel()
    tasks[0].cancel()
    await turns()
    assert (batch.running, batch.waiting) == (1, 0)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert repr(batch) == "<Batch 0/1 slots, 0 waiting, 4/4 blocks free>"


def test_the_prefix_cache_counts_whole_blocks_of_the_same_salt() -> None:
    cache = PrefixCache(100)
    prompt = [b"%d" % number for number in range(40)]
    assert cache.use("tenant-1", prompt) == 0
    assert cache.use("tenant-1", prompt) == 32
    assert cache.use("tenant-1", [*prompt[:20], b"x", *prompt[21:]]) == 16
    assert cache.use("tenant-2", prompt) == 0
    assert cache.use("tenant-1", prompt[:32]) == 31, "at least one token is computed"


def test_the_prefix_cache_forgets_the_oldest() -> None:
    cache = PrefixCache(2)
    first, second = [b"a"] * 32, [b"b"] * 32
    cache.use("", first)
    cache.use("", second)
    assert cache.use("", first) == 0


# --- embeddings and journal -----------------------------------------------------------------------


@given(st.text(), st.integers(1, 64))
def test_vectors_have_length_one_and_are_the_same_each_time(text: str, keep: int) -> None:
    vector = vector_of(text, 64, keep)
    assert len(vector) == keep
    assert math.isclose(sum(value * value for value in vector), 1, rel_tol=1e-5)
    assert vector == vector_of(text, 64, keep)
    assert len(as_base64(vector)) == 4 * math.ceil(keep * 4 / 3)


def test_the_journal_appends_lines_and_refuses_files_of_others(tmp_path: Path) -> None:
    clock = ManualClock(start_s=5)
    file = tmp_path / "tokens.jsonl"
    for number in (1, 2):
        journal = TokenJournal(file, clock, replica="r-1")
        journal.write("req_1", "token", n=number)
        journal.close()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(record["rid"], record["event"], record["n"], record["t"]) for record in records] == [
        ("req_1", "token", 1, 5.0),
        ("req_1", "token", 2, 5.0),
    ]
    other = tmp_path / "authorized_keys"
    other.write_text("ssh-ed25519 AAAA")
    with pytest.raises(ValueError, match="no token journal"):
        TokenJournal(other, clock, replica="r-1")
    (tmp_path / "link").symlink_to(other)
    with pytest.raises(OSError, match="symbolic"):
        TokenJournal(tmp_path / "link", clock, replica="r-1")
