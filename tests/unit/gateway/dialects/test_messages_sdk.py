"""What Anthropic's own SDK makes of our answers: its types accept each of them, and its client joins our streams."""

import json
from datetime import UTC, datetime

import pytest
from tests.support.messages import REQUEST_ID, THINKING, USAGE, call, chunk, stream_of, translation

from modelyard import errors
from modelyard.gateway.answers import ModelObject
from modelyard.gateway.dialects.messages_answer import INVALID_JSON
from modelyard.gateway.dialects.messages_replies import count_body, error_body, model_list

types = pytest.importorskip("anthropic.types")
pydantic = pytest.importorskip("pydantic")

CHUNKS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "hm"}),
    chunk({"content": "let me "}),
    chunk({"content": "see"}),
    chunk({"tool_calls": [call(0, "f", '{"a"', id="c1")]}),
    chunk({"tool_calls": [call(0, None, ":1}")]}),
    chunk({"tool_calls": [call(1, "g", "", id="c2")]}),
    chunk({}, "tool_calls"),
]
SAID = {
    "reasoning_content": "hm",
    "content": "let me see",
    "tool_calls": [
        {"id": "c1", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "c2", "function": {"name": "g", "arguments": ""}},
    ],
}
WHOLE = json.dumps({"choices": [{"message": SAID, "finish_reason": "tool_calls"}]}).encode()


def answer(chat: bytes = WHOLE) -> bytes:
    return translation(thinking=THINKING).answer(chat, USAGE, REQUEST_ID)


def test_the_sdks_types_accept_an_answer() -> None:
    message = types.Message.model_validate_json(answer(), strict=True)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[2].input == {"a": 1}
    assert message.stop_reason == "tool_use"
    broken = WHOLE.replace(b'{\\"a\\":1}', b"nonsense")
    assert types.Message.model_validate_json(answer(broken)).content[2].input == {INVALID_JSON: "nonsense"}


def test_the_sdks_client_joins_a_stream_to_the_whole_answer() -> None:
    from anthropic.lib.streaming._messages import accumulate_event

    adapter = pydantic.TypeAdapter(types.RawMessageStreamEvent)
    snapshot = None
    buffers: dict[int, bytes] = {}
    for raw in stream_of(*CHUNKS, thinking=THINKING).decode().split("\n\n")[:-1]:
        event = adapter.validate_json(raw.partition("\ndata: ")[2], strict=True)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    whole = types.Message.model_validate_json(answer())
    assert json.loads(snapshot.to_json(exclude_none=True)) == json.loads(whole.to_json(exclude_none=True))


@pytest.mark.parametrize(
    "error",
    [
        errors.invalid_json("x"),
        errors.invalid_api_key(),
        errors.tenant_suspended(),
        errors.model_not_found("m"),
        errors.queue_full("m", retry_after_s=1),
        errors.internal_error("r"),
        errors.overloaded(retry_after_s=1),
        errors.total_timeout(1),
    ],
)
def test_the_sdks_types_accept_an_error(error: errors.ApiError) -> None:
    from anthropic.types.shared import ErrorResponse

    assert ErrorResponse.model_validate_json(error_body(error, "req_1"), strict=True).request_id == "req_1"


def test_the_sdks_types_accept_models_and_counts() -> None:
    made = datetime(2026, 5, 31, tzinfo=UTC)
    (model,) = json.loads(model_list([ModelObject("m", int(made.timestamp()), "t")]))["data"]
    assert types.ModelInfo.model_validate(model).created_at == made
    assert types.MessageTokensCount.model_validate_json(count_body(3)).input_tokens == 3
