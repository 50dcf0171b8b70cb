"""The lines of output and error files, in the exact form that OpenAI's have."""

import hashlib
from typing import Any, NamedTuple

import msgspec

from modelyard.domain.batches import Tokens
from modelyard.policy.pricing import countable

EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")


class LineError(msgspec.Struct, frozen=True):
    """Why a line has no good answer."""

    code: str
    message: str


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Line(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: LineError | None


class Answer(NamedTuple):
    """What is kept of an answered line."""

    text: bytes
    is_error: bool
    tokens: Tokens = Tokens()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Used(msgspec.Struct):
    usage: _Usage | None = None


class _Detail(msgspec.Struct):
    message: str = ""
    code: str | None = None
    type: str | None = None


class _Error(msgspec.Struct):
    error: _Detail


_encode = msgspec.json.Encoder().encode
_used = msgspec.json.Decoder(_Used).decode
_error = msgspec.json.Decoder(_Error).decode
_any = msgspec.json.Decoder(Any).decode


def line_id(batch_id: str, ordinal: int) -> str:
    """Return the id of a line's answer: the same whenever it is written."""
    return "batch_req_" + hashlib.blake2b(f"{batch_id}/{ordinal}".encode(), digest_size=12).hexdigest()


def answered(id_: str, custom_id: str, status: int, request_id: str, body: bytes) -> Answer:
    """Return the line of an answer; one that is an error has its reason beside it, too."""
    is_error = status >= 400
    content = _one_line(body)
    error = error_of(body, status) if is_error else None
    text = _encode(_Line(id_, custom_id, _Response(status, request_id, content), error))
    return Answer(text, is_error, Tokens() if is_error else tokens_of(body))


def unanswered(id_: str, custom_id: str, code: str, message: str) -> Answer:
    """Return the line of a request that no model was asked."""
    return Answer(_encode(_Line(id_, custom_id, None, LineError(code, message))), is_error=True)


def tokens_of(body: bytes) -> Tokens:
    """Return the tokens that an answer tells of, whichever of OpenAI's two ways it has, as the ledger counts them."""
    try:
        usage = _used(body).usage
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Tokens()
    if usage is None:
        return Tokens()
    read = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    written = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    told = countable(usage.prompt_tokens or usage.input_tokens or 0)
    output = countable(usage.completion_tokens or usage.output_tokens or 0)
    return Tokens(
        told,
        min(countable(read.cached_tokens or 0), told),
        output,
        min(countable(written.reasoning_tokens or 0), output),
    )


def _one_line(body: bytes) -> msgspec.Raw:
    """Return a body as JSON without line ends; what is no JSON becomes a string."""
    try:
        value = _any(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = body.decode("utf-8", "replace")
    # A body may be laid out over several lines; strings cannot hold a bare line end.
    return msgspec.Raw(_encode(value) if b"\n" in body or b"\r" in body or isinstance(value, str) else body)


def error_of(body: bytes, status: int) -> LineError:
    """Return what an error body says."""
    try:
        detail = _error(body).error
    except (msgspec.MsgspecError, ValueError):
        return LineError(f"http_{status}", f"The request was answered with status {status}.")
    return LineError(detail.code or detail.type or f"http_{status}", detail.message)
