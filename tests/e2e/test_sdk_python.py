"""The unmodified ``openai`` SDK for Python against a real platform: what answers and errors become in a program."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from tests.support.ledger import gather, violations
from tests.support.waiting import eventually
from tests.support.yard import Yard

MODEL = "sim"
DURATION = re.compile(r"(\d+h)?(\d+m)?(\d+(\.\d+)?s)?(\d+ms)?")


@pytest.fixture(scope="module", autouse=True)
def _deployed(yard: Yard) -> None:
    yard.deploy(MODEL, options={"slots": 8, "ttft_ms": 1, "itl_ms": 1, "embedding_dimensions": 16})


@pytest.fixture
def client(yard: Yard) -> Iterator[OpenAI]:
    with connected(yard, yard.new_key()) as sdk:
        yield sdk


def connected(yard: Yard, key: str) -> OpenAI:
    return OpenAI(base_url=f"{yard.url}/v1", api_key=key, max_retries=0, timeout=30)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


# --- answers ------------------------------------------------------------------------


def test_a_chat_answer_has_every_required_key(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("hello big world"))
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert isinstance(answer.created, int)
    assert answer._request_id
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", "hello big world")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_stream_without_usage_shows_none(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=user("hello big world"), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello big world"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert all(chunk.choices for chunk in chunks)
    assert all("usage" not in chunk.model_fields_set or chunk.usage is None for chunk in chunks)


def test_a_chat_stream_with_usage_ends_with_one_chunk_of_it(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=user("hello big world"), stream=True, stream_options={"include_usage": True}
    )
    *others, last = list(stream)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 3
    assert all(chunk.usage is None for chunk in others)


def test_the_stream_helper_accumulates_the_answer(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=user("hello big world")) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "hello big world"


def test_text_outside_ascii_comes_through_whole(client: OpenAI, yard: Yard) -> None:
    text = "naïve 日本語 🙂👍🏽 Ωmega"
    assert client.chat.completions.create(model=MODEL, messages=user(text)).choices[0].message.content == text
    marked = f"[[sim: byte_tokens split_bytes]] {text}"
    chunks = client.chat.completions.create(model=MODEL, messages=user(marked), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_max_tokens_cuts_with_length(client: OpenAI) -> None:
    for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        answer = client.chat.completions.create(model=MODEL, messages=user("one two three four"), **limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2


def test_several_choices_are_indexed_and_all_are_counted(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("one two three"), n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_completions_answer_plain_and_streamed(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="once upon a time")
    assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "stop")
    assert answer.choices[0].text.strip() == "once upon a time"
    stream = client.completions.create(
        model=MODEL, prompt="once upon a time", stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks).strip() == "once upon a time"
    assert last.choices == []
    assert last.usage is not None


def test_several_prompts_give_several_choices(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["first", "second"])
    assert {choice.index: choice.text.strip() for choice in answer.choices} == {0: "first", 1: "second"}


def test_tools_are_called_with_arguments_as_json_text(client: OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    answer = client.chat.completions.create(
        model=MODEL, messages=user("weather?"), tools=[tool], tool_choice="required"
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert (call.type, call.function.name) == ("function", "get_weather")  # type: ignore[union-attr]
    assert isinstance(json.loads(call.function.arguments)["city"], str)  # type: ignore[union-attr]
    with client.chat.completions.stream(
        model=MODEL, messages=user("weather?"), tools=[tool], tool_choice="required"
    ) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.name == "get_weather"
    assert "city" in json.loads(streamed.function.arguments)


def test_a_json_schema_is_followed(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user("who?"),
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"name", "age"}
    assert isinstance(found["age"], int)


def test_embeddings_come_as_base64_by_default_and_as_floats_on_request(client: OpenAI) -> None:
    texts = ["first", "second"]
    packed = client.embeddings.create(model=MODEL, input=texts)
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [item.index for item in packed.data] == [0, 1]
    assert [len(item.embedding) for item in plain.data] == [16, 16]
    for left, right in zip(packed.data, plain.data, strict=True):
        assert left.embedding == pytest.approx(right.embedding, abs=1e-6)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    listed = client.models.list().data
    assert MODEL in [model.id for model in listed]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.object) == (MODEL, "model")
    assert isinstance(model.created, int)
    assert isinstance(model.owned_by, str)


def test_every_answer_has_a_request_id_that_is_in_the_ledger(client: OpenAI, yard: Yard) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=user("hello"))
    rid = raw.headers["x-request-id"]
    row = yard.row_of(rid)
    assert row["status"] == "success"
    computed = row["prompt_tokens"] - row["cached_tokens"]
    price = computed * 150_000 + row["cached_tokens"] * 75_000 + row["completion_tokens"] * 600_000
    assert row["cost_nanousd"] == price
    told = yard.get(f"/v1/usage/requests?request_id={rid}")["data"]
    assert [item["request_id"] for item in told] == [rid]
    assert client.models.list()._request_id


# --- errors -------------------------------------------------------------------------


def assert_shape(error: openai.APIStatusError) -> dict[str, Any]:
    """Check OpenAI's error object and the id on it; return the object."""
    body = error.body
    assert isinstance(body, dict)
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] is None or isinstance(body["code"], str)
    assert error.request_id
    assert error.response.headers["content-type"].startswith("application/json")
    return body


def test_a_wrong_key_is_401(yard: Yard) -> None:
    with connected(yard, "sk-wrong") as sdk, pytest.raises(openai.AuthenticationError) as caught:
        sdk.chat.completions.create(model=MODEL, messages=user("hello"))
    assert assert_shape(caught.value)["code"] == "invalid_api_key"
    assert "sk-wrong" not in str(caught.value)


def test_a_revoked_key_is_401_at_once(yard: Yard) -> None:
    created = yard.call("POST", "/v1/keys", {"name": "short", "scopes": ["inference"]}).json()
    with connected(yard, created["key"]) as sdk:
        sdk.models.list()
        assert yard.call("DELETE", f"/v1/keys/{created['id']}").status in (200, 204)
        eventually(lambda: refused(sdk), 10, "the revoked key is refused")


def refused(sdk: OpenAI) -> bool:
    try:
        sdk.models.list()
    except openai.AuthenticationError:
        return True
    return False


@pytest.mark.parametrize("ask", ["chat", "completion", "embedding", "retrieve"])
def test_an_unknown_model_is_404(client: OpenAI, ask: str) -> None:
    name = "no/such:model"
    asks: dict[str, Callable[[], object]] = {
        "chat": lambda: client.chat.completions.create(model=name, messages=user("hello")),
        "completion": lambda: client.completions.create(model=name, prompt="hello"),
        "embedding": lambda: client.embeddings.create(model=name, input="hello"),
        "retrieve": lambda: client.models.retrieve(name),
    }
    with pytest.raises(openai.NotFoundError) as caught:
        asks[ask]()
    body = assert_shape(caught.value)
    assert (body["code"], body["param"]) == ("model_not_found", "model")


def test_an_invalid_request_is_400_with_the_param(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=user("hello"), temperature=9)
    assert assert_shape(caught.value)["param"] == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[])
    assert assert_shape(caught.value)["param"] == "messages"


def test_an_unknown_route_is_404_in_the_same_shape(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.post("/assistants", cast_to=object, body={})
    assert assert_shape(caught.value)["code"] == "unknown_url"


def test_a_request_without_a_limit_fits_any_context(yard: Yard, client: OpenAI) -> None:
    yard.deploy("small", options={"context_length": 256})
    answer = client.chat.completions.create(model="small", messages=user("hello big world"))
    assert answer.choices[0].message.content == "hello big world"


def test_a_prompt_beyond_the_context_is_400(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=user("word " * 20_000))
    assert assert_shape(caught.value)["code"] == "context_length_exceeded"


def test_a_prompt_beyond_the_tokens_per_minute_is_told_so_with_the_limit(yard: Yard) -> None:
    with connected(yard, yard.new_key(limits={"tokens_per_minute": 50})) as sdk:
        with pytest.raises(openai.RateLimitError) as caught:
            sdk.chat.completions.create(model=MODEL, messages=user("word " * 200))
        headers = caught.value.response.headers
        assert headers["x-should-retry"] == "false"
        assert headers["x-ratelimit-limit-tokens"] == headers["x-ratelimit-remaining-tokens"] == "50"


def test_requests_per_minute_end_in_429_with_true_headers(yard: Yard) -> None:
    with connected(yard, yard.new_key(limits={"requests_per_minute": 2})) as sdk:
        ask = sdk.chat.completions.with_raw_response.create
        first = ask(model=MODEL, messages=user("hello"))
        assert_limit_headers(first.headers, ["requests"])
        assert (first.headers["x-ratelimit-limit-requests"], first.headers["x-ratelimit-remaining-requests"]) == (
            "2",
            "1",
        )
        ask(model=MODEL, messages=user("hello"))
        with pytest.raises(openai.RateLimitError) as caught:
            ask(model=MODEL, messages=user("hello"))
    body, headers = assert_shape(caught.value), caught.value.response.headers
    assert (body["code"], body["type"]) == ("rate_limit_exceeded", "requests")
    assert 1 <= int(headers["retry-after"]) <= 31
    assert_limit_headers(headers, ["requests"])
    assert headers["x-ratelimit-remaining-requests"] == "0"


def test_tokens_per_minute_end_in_429_with_true_headers(yard: Yard) -> None:
    with connected(yard, yard.new_key(limits={"tokens_per_minute": 400})) as sdk:
        ask = sdk.chat.completions.with_raw_response.create
        first = ask(model=MODEL, messages=user("[[sim: tokens=300]] on"), max_tokens=300)
        assert_limit_headers(first.headers, ["tokens"])
        with pytest.raises(openai.RateLimitError) as caught:
            ask(model=MODEL, messages=user("hello"), max_tokens=300)
    body, headers = assert_shape(caught.value), caught.value.response.headers
    assert (body["code"], body["type"]) == ("rate_limit_exceeded", "tokens")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert_limit_headers(headers, ["tokens"])


def test_limits_are_told_on_streams_too(yard: Yard) -> None:
    with connected(yard, yard.new_key(limits={"requests_per_minute": 9, "tokens_per_minute": 9000})) as sdk:
        raw = sdk.chat.completions.with_raw_response.create(model=MODEL, messages=user("hello"), stream=True)
        assert_limit_headers(raw.headers, ["requests", "tokens"])
        assert list(raw.parse())


def assert_limit_headers(headers: Any, kinds: list[str]) -> None:
    for kind in kinds:
        limit, remaining = (int(headers[f"x-ratelimit-{part}-{kind}"]) for part in ("limit", "remaining"))
        assert 0 <= remaining <= limit
        reset = headers[f"x-ratelimit-reset-{kind}"]
        assert reset, "reset is a Go-like duration"
        assert DURATION.fullmatch(reset), reset


def test_a_second_request_over_the_concurrency_is_429(yard: Yard) -> None:
    with connected(yard, yard.new_key(limits={"concurrency": 1})) as sdk:
        stream = sdk.chat.completions.create(model=MODEL, messages=user("[[sim: tokens=2000 slow=20]] on"), stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            sdk.chat.completions.create(model=MODEL, messages=user("hello"))
        assert assert_shape(caught.value)["code"] == "rate_limit_exceeded"
        stream.close()
        eventually(lambda: accepted(sdk), 20, "the slot of the closed stream is free")


def accepted(sdk: OpenAI) -> bool:
    try:
        sdk.chat.completions.create(model=MODEL, messages=user("hello"))
    except openai.RateLimitError:
        return False
    return True


@pytest.mark.parametrize("form", ["wrapped", "event", "flat"])
def test_an_engine_error_in_a_stream_raises_with_a_code(client: OpenAI, form: str) -> None:
    prompt = f"[[sim: tokens=9 error_after=3 error_form={form}]] oh"
    heard: list[Any] = []
    with pytest.raises(openai.APIError) as caught:
        heard.extend(client.chat.completions.create(model=MODEL, messages=user(prompt), stream=True))
    assert caught.value.code
    assert heard, "the text so far is kept"


@pytest.mark.parametrize("fault", ["cut_after=3", "clean_end_after=3"])
def test_a_stream_that_an_engine_cuts_never_looks_complete(client: OpenAI, fault: str) -> None:
    prompt = f"[[sim: tokens=9 {fault}]] oh"
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model=MODEL, messages=user(prompt), stream=True))


@pytest.mark.parametrize("quirk", ["no_usage", "null_usage", "missing_role", "usage_every_chunk", "ping", "crlf"])
def test_sloppy_engines_are_tidied_up(client: OpenAI, quirk: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=user(f"[[sim: {quirk}]] hello big world"),
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "hello big world"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize(
    "fault", ["garbage=invalid_json", "garbage=error_200", "garbage=content_type", "http_error=500"]
)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_nonsense_of_an_engine_is_a_clean_5xx(client: OpenAI, fault: str, stream: bool) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=user(f"[[sim: {fault}]] hello"), stream=stream)
    body = assert_shape(caught.value)
    assert body["code"]
    assert "127.0.0.1" not in body["message"]
    accepted(client)  # a good answer, so that failures do not add up for the next case


def test_the_ledger_agrees_with_everything_above(yard: Yard) -> None:
    def wrong() -> list[str]:
        found = violations(gather(yard, []))
        return [line for line in found if "of unknown requests" not in line]  # the SDK keeps no journal of ours

    try:
        eventually(lambda: not wrong(), 30, "ledger, roll-ups and engines agree")
    except AssertionError:
        raise AssertionError("\n".join(wrong())) from None
