"""Going on with an answer whose engine was lost in the middle of it.

A stream is continued on another replica from exactly the text that the client
has: a chat by a trailing assistant message that the engine goes on with
(``continue_final_message``), a completion by a longer prompt. The client gets
one stream, under one id, and one bill. Where the text alone does not hold all
of the state (tool calls, schemas, several choices, logprobs, reasoning) there
is no going on, and the client gets an error event.
"""

import re
from typing import Any

import msgspec

from modelyard.gateway.openai.call import Call
from modelyard.gateway.openai.chat import AssistantMessage, ChatRequest
from modelyard.gateway.openai.completions import CompletionRequest
from modelyard.gateway.sse import Usage

CONTINUES = frozenset({"continue_final_message", "assistant_prefill"})
"""Engine extras of which one is needed to go on with a chat."""
PREFILL = "prefill"
"""What a call needs that itself ends with the beginning of an answer."""
_CONTINUE = b',"continue_final_message":true,"add_generation_prompt":false}'

_EVENT = re.compile(rb"data: ?(\{[^\r\n]*\})")


class NotResumableError(Exception):
    """The text does not hold all of what the client has been told."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


_CONTENT = b'"delta":{"content":"'
_NOT_TEXT = (b'"reasoning', b'"refusal":"', b'"tool_calls":[{', b'"function_call":{', b'"text":')
"""What stands in an event that tells something else than ``_CONTENT``."""
_TEXT = re.compile(rb'(?:[^"\\]|\\.)*')
_BACKSLASH = ord("\\")
_text = msgspec.json.Decoder(str)
_chunk = msgspec.json.Decoder(_Chunk)
_any = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode


def can_continue(call: Call, engine_extras: frozenset[str]) -> bool:
    """Say whether an answer to ``call`` could be continued on another replica at all."""
    return call.can_resume and (isinstance(call.request, CompletionRequest) or not CONTINUES.isdisjoint(engine_extras))


def text_of(raw: bytes) -> str:
    """Return the text in events of a stream, with or without chunk framing around them.

    Raises:
        NotResumableError: something else than text was told.
    """
    text = _text_of_like_events(raw)
    return _text_of_any(raw) if text is None else text


def _text_of_like_events(raw: bytes) -> str | None:
    """Return the text of events that are alike up to their content, a tenth of the work; None for all others."""
    first = raw.find(b"{")
    content = raw.find(_CONTENT, first)
    if first < 0 or content < 0:
        return None
    head = raw[first : content + len(_CONTENT)]
    tail = b""
    texts = []
    # A line break cannot stand in JSON, so a blank line is the end of an event.
    for event in raw.split(b"\n\n")[:-1]:
        start = event.find(b"{")
        if not event.startswith(head, start):
            return None
        start += len(head)
        end = event.find(b'"', start)
        if end < 0:
            return None
        if event[end - 1] == _BACKSLASH and (found := _TEXT.match(event, start)):
            end = found.end()
        if event[end:] != tail:
            if tail:
                return None
            tail = event[end:]
        texts.append(event[start:end])
    if any(mark in head or mark in tail for mark in _NOT_TEXT):
        return None
    try:
        return _text.decode(b'"%b"' % b"".join(texts))
    except msgspec.MsgspecError:
        return None


def _text_of_any(raw: bytes) -> str:
    pieces = []
    for found in _EVENT.finditer(raw):
        try:
            choices = _chunk.decode(found[1]).choices
        except msgspec.MsgspecError:
            raise NotResumableError from None
        for choice in choices:
            delta = choice.delta
            if delta is None:
                pieces.append(choice.text or "")
                continue
            has_calls = bool(delta.tool_calls) and bytes(delta.tool_calls) not in (b"null", b"[]")
            if delta.reasoning_content or delta.reasoning or delta.refusal or has_calls:
                raise NotResumableError
            pieces.append(delta.content or "")
    return "".join(pieces)


def is_used_up(call: Call, tokens: int) -> bool:
    """Say whether an answer of so many tokens has all that ``call`` allows: then only its end is missing."""
    limit = getattr(call.request, "max_tokens", None)
    return limit is not None and tokens >= limit


def end_of(sample: bytes) -> bytes:
    """Return the chunk event that ends an answer at its limit, in the likeness of ``sample``."""
    chunk: dict[str, Any] = _any.decode(sample.partition(b":")[2])
    first: dict[str, Any] = chunk["choices"][0]
    content: dict[str, Any] = {"delta": {}} if "delta" in first else {"text": ""}
    chunk["choices"] = [{"index": 0, **content, "finish_reason": "length"}]
    return b"data: " + _encode(chunk)


def continued_body(body: bytes, call: Call, text: str, tokens: int, engine_extras: frozenset[str]) -> bytes:
    """Return the engine's body for the rest of the answer that begins with ``text`` (``tokens`` of it).

    ``body`` is the first one: what the gateway added to it (the cache salt) stays.
    """
    request = call.request
    fields: dict[str, Any] = _any.decode(body)
    if isinstance(request, ChatRequest):
        fields["messages"].append(msgspec.to_builtins(AssistantMessage(content=text)))
    else:
        fields["prompt"] += text
    for name, least in (("max_tokens", 1), ("min_tokens", 0)):
        if fields.get(name):
            fields[name] = max(least, fields[name] - tokens)
    new = _encode(fields)
    if isinstance(request, ChatRequest) and "continue_final_message" in engine_extras:
        new = new[:-1] + _CONTINUE
    return new


def renamed(event: bytes, sample: bytes) -> bytes:
    """Return a chunk event of the second engine under the identity of the first (``sample``: one of its events)."""
    first: dict[str, Any] = _any.decode(sample.partition(b":")[2])
    chunk: dict[str, Any] = _any.decode(event.partition(b":")[2])
    for name in ("id", "created", "model", "system_fingerprint"):
        if name in first:
            chunk[name] = first[name]
        else:
            chunk.pop(name, None)
    return b"data: " + _encode(chunk)


def whole_usage(rest: Usage, tokens: int) -> Usage:
    """Return the usage of the whole answer from that of its ``rest``, whose prompt held ``tokens`` of the answer."""
    prompt = max(0, rest.prompt_tokens - tokens)
    completion = (rest.completion_tokens or 0) + tokens
    # What the second engine had cached is partly the answer itself; nobody can say how much.
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
