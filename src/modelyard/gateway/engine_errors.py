"""What an engine's response says about a request: its usage, or its error in our words.

A 4xx of an engine is about the request, so its text helps the caller and goes
through; a 5xx is about the engine, and its text stays inside. llama.cpp has a
5xx that is about the request; it is known by its words.
"""

import msgspec

from modelyard import errors
from modelyard.domain.fleet import without_others
from modelyard.domain.usage import Unit
from modelyard.errors import ApiError
from modelyard.errors.platform import PROVIDER_REFUSED
from modelyard.gateway.openai.call import Call
from modelyard.gateway.openai.chat_request import ChatRequest
from modelyard.gateway.openai.whole import complete
from modelyard.gateway.responses import ResponseHead
from modelyard.gateway.sse import Usage

LARGE_BODY = 16 * 1024
TAIL = 1024
MESSAGE_LENGTH_MAX = 500
_READERS = (Unit.NONE, Unit.SEARCHES, Unit.PAIRS, Unit.REQUESTS)
"""Units of routes that read tokens and generate none."""


class NotAnAnswerError(Exception):
    """A 200 whose body is no answer."""


class _Answer(msgspec.Struct):
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()
    object: str | None = None


class _Tail(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    total_tokens: int = 0


class _Error(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | str | None = None
    message: str | None = None
    detail: msgspec.Raw = msgspec.Raw()


class _Text(msgspec.Struct):
    content: str | None = None


class _TextChoice(msgspec.Struct):
    message: _Text | None = None
    text: str | None = None


class _Texts(msgspec.Struct):
    choices: list[_TextChoice] = []


_FULL = (
    b"currently busy and cannot accept new requests", b"prefill token backlog limit",  # vLLM
    b"The request queue is full",  # SGLang
    b"Model is overloaded",  # TGI
)  # fmt: skip
"""How engines say that their queue has no place; a 503 for another reason is a failure."""
_NO_GUEST = b"requested LoRA adapters are not loaded"
"""How SGLang says with 400 that it does not have an adapter, followed by the names of all that it has."""
_TOO_LONG = b"is too large to process"
"""What llama.cpp says, with 500, of a text to embed that is longer than its slot."""
_ADVICE = (", try increasing it", ". increase the physical batch size")
"""Where engines begin to tell what only an operator can do."""
_REFUSED_CODE = PROVIDER_REFUSED.encode()
_REFUSAL, _LOGPROBS = b'"refusal":', b'"logprobs":'
_answer = msgspec.json.Decoder(_Answer)
_error_body = msgspec.json.Decoder(_ErrorBody)
_texts = msgspec.json.Decoder(_Texts)


def usage_of(body: bytes) -> Usage | None:
    """Return the usage an answer tells, None when it tells none.

    Raises:
        NotAnAnswerError: it is no JSON object, or an error in the clothes of a 200.
    """
    try:
        answer = _answer.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        raise NotAnAnswerError("invalid JSON") from None
    if (answer.error and bytes(answer.error) != b"null") or answer.object == "error":
        raise NotAnAnswerError("error body with status 200")
    return answer.usage


def read_answer(call: Call, head: ResponseHead, body: bytes, request_id: str) -> tuple[Usage | None, bytes]:
    """Return the usage that an answer tells (None when it tells none) and the body for the client.

    Raises:
        NotAnAnswerError: it is no JSON object, an error in the clothes of a 200, or not what the route promises.
    """
    if call.is_passthrough and not head.content_type.startswith(b"application/json"):
        return None, body
    usage = usage_of(body)
    if usage is not None and call.meter is not None and call.meter.unit in _READERS:
        _count_all_as_prompt(usage)
    try:
        if call.translation is None:
            is_chat = call.request.__class__ is ChatRequest
            # Looked for from the end: both stand behind the text, which may be long.
            is_whole = not is_chat or (body.rfind(_REFUSAL) >= 0 and body.rfind(_LOGPROBS) >= 0)
            return usage, body if is_whole else complete(body)
        return usage, call.translation.answer(body, usage or Usage(), request_id)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        raise NotAnAnswerError("not an answer of its route") from None


def _count_all_as_prompt(usage: Usage) -> None:
    """Take the total for the prompt where an engine that only reads tells no more."""
    if not usage.prompt_tokens and usage.completion_tokens is None:
        usage.prompt_tokens = usage.total_tokens


def count_tokens(body: bytes) -> int:
    """Return a lower bound of the generated tokens of an answer without usage: its words, in the customer's favour."""
    try:
        texts = _texts.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return 0
    return sum(
        len((choice.text or "").split()) + len(((choice.message and choice.message.content) or "").split())
        for choice in texts.choices
    )


def is_full(head: ResponseHead, body: bytes) -> bool:
    """Say whether an engine refused a request only because it has too many: it may come again a little later."""
    return head.status in (429, 503) and any(words in body for words in _FULL)


def lacks_guest(head: ResponseHead, body: bytes) -> bool:
    """Say whether an engine does not have the guest that it was asked for."""
    return head.status == 404 or (head.status == 400 and _NO_GUEST in body)


def blames_request(head: ResponseHead, body: bytes) -> bool:
    """Say whether an engine's error is about the request, and so speaks against no replica."""
    return head.status < 500 or (head.status == 500 and _TOO_LONG in body)


def translate(head: ResponseHead, body: bytes, model: str, engine_name: str = "") -> ApiError:
    """Return the error to show for an engine's error response; ``engine_name`` is what it calls ``model``."""
    if head.status == 429:
        return errors.engine_busy(model, retry_after_s=head.retry_after or 1.0)
    if head.status == 503:
        if reason := refusal_of_provider(body):
            return errors.provider_refused(model, reason, retry_after_s=head.retry_after or 2.0)
        return errors.engine_unavailable(model, retry_after_s=head.retry_after or 2.0)
    if head.status < 400 or not blames_request(head, body) or head.status in (401, 403, 404, 405, 407, 408):
        # 401 and 404 of an engine are about us (our secret, our route), not about the caller.
        return errors.bad_engine_response(f"status {head.status}")
    message, param = _message_of(body)
    # Who else is on the engine is not the caller's to know.
    message = without_others(message.replace(engine_name, model) if engine_name else message, model)
    if not _is_context_error(body):
        return ApiError(400, code="invalid_value", message=message, param=param)
    for advice in _ADVICE:
        message = message.partition(advice)[0]
    message = f"This does not fit the context of '{model}': {message.rstrip('.')}."
    return ApiError(400, code="context_length_exceeded", message=message, param=param)


def reason_of(head: ResponseHead, body: bytes) -> str:
    """Return what to remember of an engine that failed."""
    refused = refusal_of_provider(body) if head.status == 503 else ""
    return f"the provider refused: {refused}" if refused else f"engine answered {head.status}"


def refusal_of_provider(body: bytes) -> str:
    """Return why a provider refuses the platform, as its replica says in words of ours; "" where it does not."""
    if _REFUSED_CODE not in body:
        return ""
    try:
        error = _error_body.decode(body).error
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return ""
    is_refusal = isinstance(error, _Error) and error.code == PROVIDER_REFUSED
    return (error.message or "")[:MESSAGE_LENGTH_MAX] if is_refusal and isinstance(error, _Error) else ""


def _message_of(body: bytes) -> tuple[str, str | None]:
    default = "The engine refused the request as invalid."
    try:
        parsed = _error_body.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return default, None
    if isinstance(parsed.error, _Error):
        return (parsed.error.message or default)[:MESSAGE_LENGTH_MAX], parsed.error.param
    return (parsed.error or parsed.message or default)[:MESSAGE_LENGTH_MAX], None


def _is_context_error(body: bytes) -> bool:
    return (
        b"exceed_context_size" in body
        or b"context_length_exceeded" in body
        or b"maximum context length" in body
        or b"context size" in body
        or _TOO_LONG in body
    )
