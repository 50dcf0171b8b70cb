"""Whether the file of a batch can be run: all of it is looked at before any of it is.

Each bad line is told by its number, as OpenAI does, and one of them is enough
for the batch to fail. The file is read once as a stream; of its lines only
hashes of their ``custom_id`` are kept, and where shards begin. What a model
makes of a request's own fields is not judged here: that is a line's error,
not the file's.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec

from modelyard.batch.lines import Line, lines_of
from modelyard.domain.batches import EMBEDDINGS_MAX, LINES_MAX, METHOD, BatchError, Shard
from modelyard.policy.batch_forecast import Work

ERRORS_MAX = 1000
"""Most bad lines that are told; a file of none but bad ones would make a batch larger than its file."""
ENVELOPE_BYTES = 64 * 1024
"""What a line may have beside the request itself."""
AROUND_BYTES = 32
"""What JSON needs around the text of a message."""
_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_NEEDED = {_CHAT: "messages", _EMBEDDINGS: "input", _COMPLETIONS: "prompt"}
_SILENT = frozenset({_EMBEDDINGS, "/v1/rerank", "/v1/classify", "/v1/moderations", "/v1/images/generations"})
"""Endpoints whose answers have no tokens."""
_COMPLETION_DEFAULT = 16
"""Tokens that a text completion may have that says nothing of it."""
_OF_NUMBERS = re.compile(rb"\[\s*[-0-9]")
_UNSET = msgspec.UNSET
_Some = msgspec.Raw | msgspec.UnsetType
_ABSENT = (_UNSET, msgspec.Raw(b"null"))


class _Envelope(msgspec.Struct):
    custom_id: _Some = _UNSET
    method: _Some = _UNSET
    url: _Some = _UNSET
    body: _Some = _UNSET


class _Body(msgspec.Struct):
    model: _Some = _UNSET
    stream: _Some = _UNSET
    messages: _Some = _UNSET
    input: _Some = _UNSET
    prompt: _Some = _UNSET
    n: _Some = _UNSET
    max_tokens: _Some = _UNSET
    max_completion_tokens: _Some = _UNSET
    max_output_tokens: _Some = _UNSET


_envelope = msgspec.json.Decoder(_Envelope).decode
_body = msgspec.json.Decoder(_Body).decode
_text = msgspec.json.Decoder(str).decode
_count = msgspec.json.Decoder(int).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _BadLineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


@dataclass(slots=True)
class Checked:
    """What the file has, as far as it was read. ``errors`` empty: it is good, but for what its model is."""

    batch_id: str
    endpoint: str
    shard_lines: int
    model: str = ""
    model_line: int = 0
    errors: list[BatchError] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    lines: int = 0
    characters: int = 0
    inputs: int = 0
    output_max: int | None = 0
    bounded: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By the size of their bound, in bits: lines that say what they may generate, and what that is together."""
    seen: set[bytes] = field(default_factory=set)

    @property
    def work(self) -> Work:
        """Return what it asks for."""
        return Work(
            self.lines,
            self.characters,
            self.output_max,
            generates=self.endpoint not in _SILENT,
            bounded=tuple(self.bounded.values()),
        )

    def refuse(self, error: BatchError) -> None:
        """Note what is wrong."""
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(error)

    def add(self, line: Line) -> None:
        """Count a line, good or bad, and put it into a shard."""
        if self.lines % self.shard_lines == 0:
            number = len(self.shards)
            self.shards.append(Shard(self.batch_id, number, self.lines, 0, line.offset, 0))
        last = self.shards[-1]
        size = line.offset + line.size - last.offset
        self.shards[-1] = msgspec.structs.replace(last, lines=last.lines + 1, size=size)
        self.lines += 1


def check(
    file: BinaryIO,
    batch_id: str,
    endpoint: str,
    *,
    shard_lines: int,
    body_bytes_max: int,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Checked:
    """Return what ``file`` has. Blocks; it stops early once it is not wanted, or at the first line too many."""
    checked = Checked(batch_id, endpoint, shard_lines)
    for line in lines_of(file, longest=body_bytes_max + ENVELOPE_BYTES):
        if checked.lines >= LINES_MAX:
            checked.refuse(BatchError("too_many_tasks", f"The file has more than {LINES_MAX} requests. Split it."))
            break
        checked.add(line)
        try:
            _check_line(checked, line, body_bytes_max)
        except _BadLineError as bad:
            checked.refuse(BatchError(bad.code, bad.message, bad.param, line.number))
        if checked.lines % 1000 == 0 and not is_wanted():
            break
    if not checked.lines:
        checked.refuse(BatchError("empty_file", "The file has no requests. Each of its lines should be one."))
    if checked.inputs > EMBEDDINGS_MAX:
        message = f"All requests together have {checked.inputs} inputs; at most {EMBEDDINGS_MAX} are taken. Split it."
        checked.refuse(BatchError("too_many_inputs", message, "body.input"))
    return checked


def _check_line(checked: Checked, line: Line, body_bytes_max: int) -> None:
    if line.text is None:
        message = f"This line is longer than a request may be ({body_bytes_max} bytes)."
        raise _BadLineError("line_too_long", message)
    try:
        str(line.text, "utf-8")  # what is passed on as it is, is not looked into for this
        envelope = _envelope(line.text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise _BadLineError("invalid_json_line", "This line is not parseable as valid JSON.") from None
    _check_envelope(checked, envelope)
    assert isinstance(envelope.body, msgspec.Raw), "an envelope that was checked has a body"
    raw = bytes(envelope.body)
    if len(raw) > body_bytes_max:
        message = f"The request is longer than {body_bytes_max} bytes."
        raise _BadLineError("line_too_long", message, "body")
    try:
        body = _body(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise _BadLineError("invalid_type", "Invalid 'body': it must be an object.", "body") from None
    _check_body(checked, body, line.number)
    _count_in(checked, body, raw)


def _check_envelope(checked: Checked, envelope: _Envelope) -> None:
    for name in ("custom_id", "method", "url", "body"):
        if getattr(envelope, name) in _ABSENT:
            raise _BadLineError("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    custom_id = _string(envelope.custom_id, "custom_id")
    digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if digest in checked.seen:
        message = f"The custom_id '{custom_id[:100]}' is of an earlier line, too. Each must be of one line only."
        raise _BadLineError("duplicate_custom_id", message, "custom_id")
    checked.seen.add(digest)
    if _string(envelope.method, "method") != METHOD:
        raise _BadLineError("invalid_method", f"The method must be '{METHOD}'.", "method")
    if _string(envelope.url, "url") != checked.endpoint:
        message = f"The url must be the batch's endpoint, '{checked.endpoint}'."
        raise _BadLineError("invalid_url", message, "url")


def _check_body(checked: Checked, body: _Body, number: int) -> None:
    if body.model in _ABSENT:
        raise _BadLineError("invalid_request", "Missing required parameter: 'body.model'.", "body.model")
    model = _string(body.model, "body.model")
    if not model:
        raise _BadLineError("invalid_request", "Invalid 'body.model': it is empty.", "body.model")
    if not checked.model:
        checked.model, checked.model_line = model, number
    if model != checked.model:
        message = f"All lines must name one model: this one '{model[:100]}', line {checked.model_line} another."
        raise _BadLineError("model_mismatch", message, "body.model")
    if body.stream not in (*_ABSENT, msgspec.Raw(b"false")):
        raise _BadLineError("streaming_unsupported", "Batches do not stream. Leave 'stream' out.", "body.stream")
    needed = _NEEDED.get(checked.endpoint)
    if needed is not None and getattr(body, needed) in _ABSENT:
        raise _BadLineError("invalid_request", f"Missing required parameter: 'body.{needed}'.", f"body.{needed}")


def _count_in(checked: Checked, body: _Body, raw: bytes) -> None:
    checked.characters += _length_of(body, raw)
    if checked.endpoint == _EMBEDDINGS and isinstance(body.input, msgspec.Raw):
        checked.inputs += _inputs(bytes(body.input))
    told = next((found for found in _limits(body)), _COMPLETION_DEFAULT if checked.endpoint == _COMPLETIONS else None)
    if told is None:
        checked.output_max = None
        return
    most = told * max(1, _whole(body.n) or 1)
    if checked.output_max is not None:
        checked.output_max += most
    lines, together = checked.bounded.get(most.bit_length(), (0, 0))
    checked.bounded[most.bit_length()] = (lines + 1, together + most)


def _length_of(body: _Body, raw: bytes) -> int:
    """Return about how long the text of a request is, without the JSON around it."""
    for text in (body.messages, body.input, body.prompt):
        if isinstance(text, msgspec.Raw):
            found = bytes(text)
            return max(1, len(found) - AROUND_BYTES * found.count(b'"role"'))
    return len(raw)


def _limits(body: _Body) -> Iterator[int]:
    for value in (body.max_completion_tokens, body.max_tokens, body.max_output_tokens):
        if (found := _whole(value)) is not None and found >= 0:
            yield found


def _inputs(raw: bytes) -> int:
    """Return how many texts are to be embedded: a list of numbers is the tokens of one."""
    if not raw.startswith(b"[") or _OF_NUMBERS.match(raw):
        return 1
    items = _items(raw)
    return len(items) if items and bytes(items[0])[:1] in (b'"', b"[") else 1


def _string(value: _Some, param: str) -> str:
    assert isinstance(value, msgspec.Raw), "it was given"
    try:
        return _text(value)
    except (msgspec.MsgspecError, ValueError):
        raise _BadLineError("invalid_type", f"Invalid '{param}': it must be a string.", param) from None


def _whole(value: _Some) -> int | None:
    if not isinstance(value, msgspec.Raw):
        return None
    try:
        return _count(value)
    except (msgspec.MsgspecError, ValueError):
        return None
