"""How an answer leaves the engine: as a stream of events or as one JSON body, with the faults of its transport.

``Chunks`` knows OpenAI's forms (chat or text completions), ``EventStream``
the bytes of server-sent events. Text leaves only as whole characters: bytes of
an incomplete one are held back.
"""

import asyncio
import codecs
from typing import Any

import msgspec

from modelyard.engines.http import Connection
from modelyard.engines.simulated.answers import Choice, Token
from modelyard.engines.simulated.faults import Faults
from modelyard.engines.simulated.logprobs import Scores
from modelyard.engines.simulated.tokens import split

_encode = msgspec.json.Encoder().encode


class EventStream:
    """Server-sent events on a chunked response."""

    __slots__ = ("_connection", "_faults", "_is_begun")

    def __init__(self, connection: Connection, faults: Faults) -> None:
        self._connection = connection
        self._faults = faults
        self._is_begun = False

    def begin(self) -> None:
        """Send status and headers, once."""
        if not self._is_begun:
            self._is_begun = True
            wrong = self._faults.garbage == "content_type"
            self._connection.begin_chunked("text/html" if wrong else "text/event-stream; charset=utf-8")

    async def send(self, data: bytes, *, event: str = "") -> None:
        """Send one event."""
        name = f"event: {event}\n".encode() if event else b""
        await self.raw(name + b"data: " + data + b"\n\n")

    async def comment(self) -> None:
        """Send a comment, which every client must skip."""
        await self.raw(b": ping\n\n")

    async def raw(self, data: bytes) -> None:
        """Send bytes of the body, each in a write of its own when so asked."""
        self.begin()
        if self._faults.crlf:
            data = data.replace(b"\n", b"\r\n")
        if self._faults.split_bytes:
            for byte in data:
                self._connection.chunk(bytes((byte,)))
                await asyncio.sleep(0)
        else:
            self._connection.chunk(data)
        await self._connection.drain()

    async def huge_line(self, length: int) -> None:
        """Send ``length`` bytes without a line end."""
        await self.raw(b'data: {"x":"')
        block = b"a" * 65536
        while length > 0:
            self._connection.chunk(block[:length])
            length -= len(block)
            await self._connection.drain()

    def cut(self, data: bytes) -> None:
        """Send half of an event whose chunk header promises all of it, and close."""
        self.begin()
        self._connection.write(b"%x\r\n" % (len(data) + 8) + b"data: " + data[: len(data) // 2])
        self._connection.close()

    def end(self) -> None:
        """End the body as it should be."""
        self.begin()
        self._connection.end_chunked()


class Chunks:
    """Chunks and bodies of one answer: same id, time and model in all."""

    __slots__ = ("_base", "_decoders", "_is_chat", "_scores")

    def __init__(
        self,
        *,
        is_chat: bool,
        answer_id: str,
        created: int,
        model: str,
        choices: int,
        top: int | None = None,
        adapter: str = "",
    ) -> None:
        self._is_chat = is_chat
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        self._base = {"id": answer_id, "object": kind, "created": created, "model": model}
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(choices)]
        self._scores = [Scores(top=top, is_chat=is_chat, adapter=adapter) for _ in range(choices)]

    def role(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a chat choice."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def text(self, index: int, text: str) -> dict[str, Any]:
        """Return a chunk with text."""
        return self._chunk(index, {"content": text}, None)

    def lead(self, index: int, text: str) -> dict[str, Any]:
        """Return the chunk that repeats the prompt."""
        self._score(index, split(text), is_lead=True)
        return self.text(index, text)

    def token(self, index: int, token: Token, *, is_last: bool) -> dict[str, Any] | None:
        """Return the chunk of a token, or None when it completes no character."""
        text = self._decoders[index].decode(token.data, is_last)
        if token.call >= 0:
            return self._chunk(index, {"tool_calls": [_call_delta(self._base["id"], token, text)]}, None)
        self._score(index, [token.data])
        return self.text(index, text) if text else None

    def finish(self, index: int, reason: str) -> dict[str, Any]:
        """Return the last chunk of a choice."""
        return self._chunk(index, {}, reason)

    def usage(self, usage: dict[str, Any] | None) -> dict[str, Any]:
        """Return the usage chunk."""
        return {**self._base, "choices": [], "usage": usage}

    def whole(self, choices: list[Choice], usage: dict[str, Any] | None, *, with_usage: bool) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        body = {**self._base, "choices": [self._whole(index, choice) for index, choice in enumerate(choices)]}
        body["object"] = "chat.completion" if self._is_chat else "text_completion"
        return {**body, "usage": usage} if with_usage else body

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        if choice.lead:
            self._score(index, split(choice.lead), is_lead=True)
        self._score(index, [token.data for token in choice.tokens if token.call < 0])
        scores = self._scores[index].take()
        if self._is_chat:
            return _chat_choice(self._base["id"], index, choice, scores)
        text = choice.lead + _joined(choice, -1)
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": choice.finish}

    def _score(self, index: int, tokens: list[bytes], *, is_lead: bool = False) -> None:
        for place, token in enumerate(tokens):
            self._scores[index].add(token, is_first=is_lead and place == 0)

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        scores = self._scores[index].take()
        choice: dict[str, Any]
        if self._is_chat:
            choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        else:
            choice = {"index": index, "text": delta.get("content", ""), "logprobs": scores, "finish_reason": finish}
        return {**self._base, "choices": [choice]}


def usage_of(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def encode(value: dict[str, Any]) -> bytes:
    """Return JSON on one line."""
    return _encode(value)


def _call_delta(answer_id: Any, token: Token, text: str) -> dict[str, Any]:
    if token.name:
        function = {"name": token.name, "arguments": ""}
        return {"index": token.call, "id": _call_id(answer_id, token.call), "type": "function", "function": function}
    return {"index": token.call, "function": {"arguments": text}}


def _call_id(answer_id: Any, call: int) -> str:
    return f"call_{str(answer_id)[-16:]}{call}"


def _joined(choice: Choice, call: int) -> str:
    return b"".join(token.data for token in choice.tokens if token.call == call).decode("utf-8", "replace")


def _chat_choice(answer_id: Any, index: int, choice: Choice, scores: dict[str, Any] | None) -> dict[str, Any]:
    calls = [
        {
            "id": _call_id(answer_id, token.call),
            "type": "function",
            "function": {"name": token.name, "arguments": _joined(choice, token.call)},
        }
        for token in choice.tokens
        if token.name
    ]
    message: dict[str, Any] = {"role": "assistant", "content": None if calls else _joined(choice, -1), "refusal": None}
    if calls:
        message["tool_calls"] = calls
    return {"index": index, "message": message, "logprobs": scores, "finish_reason": choice.finish}
