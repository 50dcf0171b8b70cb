"""What a caller reads when an engine refuses."""

import msgspec
import pytest

from modelyard.domain.usage import Unit
from modelyard.gateway.engine_errors import blames_request, read_answer, reason_of, translate
from modelyard.gateway.openai.call import Call, Meter
from modelyard.gateway.openai.chat import decode_chat
from modelyard.gateway.responses import ResponseHead


@pytest.mark.parametrize(
    ("status", "said", "shown"),
    [
        (
            400,
            "request (50 tokens) exceeds the available context size (20 tokens), try increasing it",
            "This does not fit the context of 'm': request (50 tokens) exceeds the available context size (20 tokens).",
        ),
        (
            400,
            "over the maximum context length.",
            "This does not fit the context of 'm': over the maximum context length.",
        ),
        (
            500,
            "input (50 tokens) is too large to process. increase the physical batch size (current batch size: 20)",
            "This does not fit the context of 'm': input (50 tokens) is too large to process.",
        ),
    ],
)
def test_a_prompt_over_the_context_names_the_model_and_not_what_only_an_operator_can_do(
    status: int, said: str, shown: str
) -> None:
    head = ResponseHead()
    head.status = status
    assert blames_request(head, said.encode()), "no replica is worse for it"
    error = translate(head, b'{"error": {"message": "%s"}}' % said.encode(), "m")
    assert (error.status, error.code, error.message) == (400, "context_length_exceeded", shown)


@pytest.mark.parametrize(("status", "said"), [(500, "out of memory"), (503, "is too large to process"), (502, "")])
def test_what_is_about_the_engine_speaks_against_the_replica(status: int, said: str) -> None:
    head = ResponseHead()
    head.status = status
    assert not blames_request(head, said.encode())
    assert translate(head, said.encode(), "m").status >= 500


def test_a_provider_that_refuses_the_platform_is_no_replica_that_is_being_restarted() -> None:
    head = ResponseHead()
    head.status = 503
    said = b'{"error":{"message":"it knows no such model (status 404)","type":"x","param":null,"code":"%b"}}'
    error = translate(head, said % b"provider_refused", "m")
    assert (error.status, error.code) == (503, "provider_refused")
    assert "The provider of 'm' refused: it knows no such model (status 404)." in error.message
    assert reason_of(head, said % b"provider_refused") == "the provider refused: it knows no such model (status 404)"
    assert "it knows" not in translate(head, said % b"other", "m").message
    assert reason_of(head, said % b"other") == "engine answered 503"
    for odd in (b"provider_refused", b'{"error":"provider_refused"}'):
        assert translate(head, odd, "m").code == "engine_unavailable"


def test_a_chat_answer_gets_the_keys_that_are_required_and_one_that_has_them_is_left_alone() -> None:
    call = decode_chat(b'{"model":"m","messages":[{"role":"user","content":"hi"}]}')
    bare = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}],"usage":null}'
    _, body = read_answer(call, ResponseHead(), bare, "req_1")
    [choice] = msgspec.json.decode(body)["choices"]
    assert choice["logprobs"] is None
    assert choice["message"] == {"role": "assistant", "content": "x", "refusal": None}
    assert read_answer(call, ResponseHead(), body, "req_1")[1] is body
    for odd in (b'{"choices":null}', b'{"choices":[7,{"message":8}]}', b"{}"):
        read_answer(call, ResponseHead(), odd, "req_1")


@pytest.mark.parametrize(("unit", "prompt"), [(Unit.SEARCHES, 9), (Unit.NONE, 9), (Unit.IMAGES, 0), (Unit.SECONDS, 0)])
def test_an_engine_that_reads_and_tells_a_total_is_billed_for_it(unit: Unit, prompt: int) -> None:
    call = Call("m", msgspec.Struct(), 0, meter=Meter(unit, 1.0, lambda _answer: 1.0))
    usage, _ = read_answer(call, ResponseHead(), b'{"usage":{"total_tokens":9}}', "req_1")
    assert usage is not None
    assert usage.prompt_tokens == prompt
