"""From the stream of a chat to the events of a Responses stream.

Every event carries the next ``sequence_number``; items open and close in the
order that clients insist on (``reference/api.md`` 1.7). Thinking ends where
text or a call begins, text ends where a call begins; calls stay open to the
end, because engines may go on with any of them.

A token costs one small decode and one ``%`` on bytes that were prepared when
its part was opened; its text is kept for the events that close the part.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from modelyard.clock import Clock
from modelyard.errors import ApiError
from modelyard.gateway.dialects.responses_answer import CalledFunction, arguments_text, item_id
from modelyard.gateway.dialects.responses_object import (
    INCOMPLETE_REASONS,
    FunctionCall,
    Item,
    Logprob,
    Logprobs,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    ResponseObject,
    Status,
    encode,
    whole_logprobs,
)
from modelyard.gateway.relay import EngineStreamError
from modelyard.gateway.sse import Usage, split_fields


class _CallDelta(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: CalledFunction | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


_chunk = msgspec.json.Decoder(_Chunk)

Kind = Literal["output_text", "refusal", "reasoning_text"]
_EVENTS: dict[Kind, bytes] = {
    "output_text": b"response.output_text",
    "refusal": b"response.refusal",
    "reasoning_text": b"response.reasoning_text",
}


@dataclass(slots=True)
class _OpenPart:
    """A part that text is added to. ``template`` makes a delta event of the encoded text and a sequence number."""

    kind: Kind
    template: bytes
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    def closed(self) -> OutputText | Refusal | ReasoningText:
        text = "".join(self.pieces)
        match self.kind:
            case "output_text":
                return OutputText(text, logprobs=self.logprobs)
            case "refusal":
                return Refusal(text)
            case "reasoning_text":
                return ReasoningText(text)


@dataclass(slots=True)
class _OpenCall:
    """A call whose arguments are coming; it is announced (has an ``item``) when its name is known."""

    key: int | None
    call_id: str | None
    item: FunctionCall | None = None
    output_index: int = 0
    pieces: list[str] = field(default_factory=list)
    template: bytes = b""


class ResponseStream:
    """One stream on its way back (``dialects.StreamTranslation``)."""

    __slots__ = (
        "_calls",
        "_clock",
        "_finish_reason",
        "_has_begun",
        "_item",
        "_items",
        "_part",
        "_request_id",
        "_response",
        "_sequence",
        "_tokens",
    )

    def __init__(self, response: ResponseObject, request_id: str, clock: Clock) -> None:
        self._response = response
        self._request_id = request_id
        self._clock = clock
        self._sequence = 0
        self._has_begun = False
        self._finish_reason = ""
        self._items: list[Item] = []
        self._item: Message | Reasoning | None = None
        self._part: _OpenPart | None = None
        self._calls: list[_OpenCall] = []
        self._tokens: list[Logprob] = []

    # --- the contract ---

    def begin(self) -> bytes:
        """Return ``response.created`` and ``response.in_progress``."""
        self._has_begun = True
        response = b'"response":' + self._response.encoded("in_progress")
        return self._event(b"response.created", response) + self._event(b"response.in_progress", response)

    def feed(self, event: bytes) -> bytes:
        """Return the events for one event of the chat; whatever says nothing gives nothing.

        Raises:
            EngineStreamError: it is no chunk of a chat.
        """
        try:
            chunk = _chunk.decode(event[5:] if b"\n" not in event else split_fields(event)[1])
            if not chunk.choices:
                return b""
            choice = chunk.choices[0]
            if choice.finish_reason:
                self._finish_reason = choice.finish_reason
            return self._add(choice.delta, choice.logprobs) if choice.delta is not None else b""
        except (msgspec.MsgspecError, RecursionError, ValueError):
            raise EngineStreamError("malformed chunk") from None

    def finish(self, usage: Usage) -> bytes:
        """Return what closes the open items, and the whole response."""
        out = b"" if self._has_begun else self.begin()
        if not self._items:
            # Clients look for a message in every answer that calls nothing.
            out += self._open_part("output_text")
        is_cut = self._finish_reason in INCOMPLETE_REASONS
        status: Status = "incomplete" if is_cut else "completed"
        # An open item is younger than every call, since a call would have closed it.
        out += self._close_calls(is_cut=is_cut) + self._close_item(status)
        response = self._response.encoded(
            status,
            map(encode, self._items),
            usage=usage,
            completed_at=int(self._clock.unix_s()),
            finish_reason=self._finish_reason,
        )
        return out + self._event(b"response." + status.encode(), b'"response":' + response)

    def fail(self, error: ApiError) -> bytes:
        """Return OpenAI's ``error`` event and ``response.failed``.

        SDKs raise what stands under ``error``; the keys beside it are those of OpenAI's schema.
        """
        out = b"" if self._has_begun else self.begin()
        code = error.code or "server_error"
        detail = {"type": error.type, "code": code, "message": error.message, "param": error.param}
        shown = {"code": code, "message": error.message, "param": error.param, "error": detail}
        out += self._event(b"error", encode(shown)[1:-1])
        self._settle_items()
        response = self._response.encoded("failed", map(encode, self._items), error=error)
        return out + self._event(b"response.failed", b'"response":' + response)

    def _settle_items(self) -> None:
        """Give open items what they have so far, without telling."""
        if self._item is not None and self._part is not None:
            self._item.content.append(self._part.closed())  # type: ignore[arg-type]  # parts fit the item they were opened in
        for item in (self._item, *(call.item for call in self._calls)):
            if item is not None:
                item.status = "incomplete"
        for call in self._calls:
            if call.item is not None:
                call.item.arguments = "".join(call.pieces)

    def _add(self, delta: _Delta, logprobs: Logprobs | None) -> bytes:
        out = b""
        if thought := delta.reasoning_content or delta.reasoning:
            out = self._add_text("reasoning_text", thought)
        elif logprobs is not None and logprobs.content:
            # Of a text that is held back, they come before it. Those of thinking are nobody's.
            self._tokens += whole_logprobs(logprobs.content)
        if delta.content:
            out += self._add_text("output_text", delta.content)
        if delta.refusal:
            out += self._add_text("refusal", delta.refusal)
        for call in delta.tool_calls or ():
            out += self._add_to_call(call)
        return out

    # --- text, refusals and thinking ---

    def _add_text(self, kind: Kind, text: str) -> bytes:
        part = self._part
        out = b""
        if part is None or part.kind != kind:
            out = self._open_part(kind)
            part = self._part
            assert part is not None, "a part was just opened"
        part.pieces.append(text)
        tokens = b""
        if self._tokens and kind == "output_text":
            tokens = encode(self._tokens)[1:-1]
            part.logprobs += self._tokens
            self._tokens = []
        number = self._sequence
        self._sequence = number + 1
        if kind == "output_text":
            return out + part.template % (number, encode(text), tokens)
        return out + part.template % (number, encode(text))

    def _open_part(self, kind: Kind) -> bytes:
        """Open a part for ``kind``, in the open item if it fits there."""
        wanted = Reasoning if kind == "reasoning_text" else Message
        out = self._close_part()
        item = self._item
        if not isinstance(item, wanted):
            out += self._close_item("completed")
            prefix = "rs" if wanted is Reasoning else "msg"
            item = wanted(item_id(prefix, self._request_id, len(self._items)), "in_progress", [])
            self._item = item
            out += self._add_item(item)
        part = _OpenPart(kind, b"")
        self._part = part
        where = self._where(item)
        tail = b',"logprobs":[%b]}\n\n' if kind == "output_text" else b"}\n\n"
        part.template = _delta_template(_EVENTS[kind] + b".delta", where) + tail
        return out + self._event(b"response.content_part.added", where + b',"part":' + encode(part.closed()))

    def _where(self, item: Message | Reasoning) -> bytes:
        """Return the keys that say which part of which item is meant: the one that is open."""
        return b'"item_id":%b,"output_index":%d,"content_index":%d' % (
            encode(item.id),
            self._items.index(item),
            len(item.content),
        )

    def _close_part(self) -> bytes:
        part, self._part = self._part, None
        item = self._item
        if part is None or item is None:
            return b""
        closed = part.closed()
        where = self._where(item)
        item.content.append(closed)  # type: ignore[arg-type]  # parts fit the item they were opened in
        if isinstance(closed, Refusal):
            said = b',"refusal":' + encode(closed.refusal)
        else:
            said = b',"text":' + encode(closed.text)
        if isinstance(closed, OutputText):
            said += b',"logprobs":' + encode(closed.logprobs)
        return self._event(_EVENTS[part.kind] + b".done", where + said) + self._event(
            b"response.content_part.done", where + b',"part":' + encode(closed)
        )

    def _close_item(self, status: Status) -> bytes:
        out = self._close_part()
        item, self._item = self._item, None
        return out + self._end_item(item, status) if item is not None else out

    # --- calls ---

    def _add_to_call(self, delta: _CallDelta) -> bytes:
        function = delta.function
        name = function.name if function is not None else None
        call = self._call_for(delta, name)
        out = b""
        if call.item is None:
            call.call_id = call.call_id or delta.id
            if name:
                out = self._announce(call, name)
        arguments = arguments_text(function.arguments) if function is not None else ""
        if not arguments:
            return out
        call.pieces.append(arguments)
        return out + self._arguments_delta(call, arguments) if call.item is not None else out

    def _call_for(self, delta: _CallDelta, name: str | None) -> _OpenCall:
        """Return the call that ``delta`` goes on with: by id or index; a new id together with a name begins another."""
        candidates = [call for call in self._calls if delta.index is None or call.key == delta.index]
        for call in candidates:
            if delta.id and call.call_id == delta.id:
                return call
        if candidates and not (name and delta.id and candidates[-1].call_id):
            return candidates[-1]
        call = _OpenCall(key=delta.index, call_id=delta.id)
        self._calls.append(call)
        return call

    def _announce(self, call: _OpenCall, name: str) -> bytes:
        out = self._close_item("completed")
        index = len(self._items)
        call_id = call.call_id or item_id("call", self._request_id, index)
        call.output_index = index
        call.item = FunctionCall(item_id("fc", self._request_id, index), call_id, name, "", "in_progress")
        where = b'"item_id":%b,"output_index":%d' % (encode(call.item.id), index)
        call.template = _delta_template(b"response.function_call_arguments.delta", where) + b"}\n\n"
        out += self._add_item(call.item)
        # What came before the name.
        return out + self._arguments_delta(call, "".join(call.pieces)) if call.pieces else out

    def _arguments_delta(self, call: _OpenCall, text: str) -> bytes:
        number = self._sequence
        self._sequence = number + 1
        return call.template % (number, encode(text))

    def _close_calls(self, *, is_cut: bool) -> bytes:
        out = b""
        calls, self._calls = [call for call in self._calls if call.item is not None], []
        for call in calls:
            item = call.item
            assert item is not None, "a call without a name was dropped"
            if not call.pieces:
                # A call without arguments is the empty object for every client.
                call.pieces.append("{}")
                out += self._arguments_delta(call, "{}")
            item.arguments = "".join(call.pieces)
            said = b'"item_id":%b,"name":%b,"output_index":%d,"arguments":%b' % (
                encode(item.id),
                encode(item.name),
                call.output_index,
                encode(item.arguments),
            )
            out += self._event(b"response.function_call_arguments.done", said)
            out += self._end_item(item, "incomplete" if is_cut and item is self._items[-1] else "completed")
        return out

    # --- events ---

    def _add_item(self, item: Item) -> bytes:
        self._items.append(item)
        said = b'"output_index":%d,"item":%b' % (len(self._items) - 1, encode(item))
        return self._event(b"response.output_item.added", said)

    def _end_item(self, item: Item, status: Status) -> bytes:
        item.status = status
        said = b'"output_index":%d,"item":%b' % (self._items.index(item), encode(item))
        return self._event(b"response.output_item.done", said)

    def _event(self, name: bytes, said: bytes) -> bytes:
        number = self._sequence
        self._sequence = number + 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (name, name, number, said)


def _delta_template(name: bytes, where: bytes) -> bytes:
    """Return the beginning of a delta event, to be filled with a sequence number and the encoded text."""
    head = b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name)
    return head + b"%d," + where.replace(b"%", b"%%") + b',"delta":%b'
