"""From a message of Anthropic's, whole or as events, to a chat completion of OpenAI's. Thoughts are left out."""

from typing import Any

from modelyard.engines.providers.dialect import Counted, Json, Refused, encode, read_object, whole_number

_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
BUSY = frozenset({"overloaded_error", "rate_limit_error", "timeout_error"})
"""Kinds of errors that another replica may not have."""


def chat_of(message: Json, name: str, now: int) -> tuple[Json, Counted]:
    """Return a whole message as a chat completion under our ``name``.

    Raises:
        ValueError: it is no message.
    """
    content = message.get("content")
    if message.get("type") != "message" or not isinstance(content, list):
        raise ValueError("not a message")
    texts: list[str] = []
    calls: list[Json] = []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "id": str(id), "name": str(tool)}:
                arguments = encode(block.get("input") or {}).decode()
                calls.append({"id": id, "type": "function", "function": {"name": tool, "arguments": arguments}})
            case _:
                pass  # thoughts, and what servers' own tools did
    answer: Json = {"role": "assistant", "content": "".join(texts) if texts or not calls else None, "refusal": None}
    if calls:
        answer["tool_calls"] = calls
    usage = _Usage()
    usage.take(message.get("usage"))
    choice = {
        "index": 0,
        "message": answer,
        "logprobs": None,
        "finish_reason": _finish_reason(message.get("stop_reason")),
    }
    chat: Json = {
        "id": _id_of(message),
        "object": "chat.completion",
        "created": now,
        "model": name,
        "choices": [choice],
        "usage": usage.told(),
    }
    return chat, usage.counted()


class AnthropicReader:
    """Turns the events of one message into chunks; ``name`` is ours."""

    def __init__(self, name: str, now: int) -> None:
        self._head: Json = {"id": "chatcmpl-", "object": "chat.completion.chunk", "created": now, "model": name}
        self._usage = _Usage()
        self._calls: dict[int, int] = {}
        """Which call of the answer a block is, by its index."""
        self._said_input: set[int] = set()
        """Blocks whose arguments have begun."""
        self._reason: object = None
        self.is_done = False

    @property
    def counted(self) -> Counted:
        """Tokens so far."""
        return self._usage.counted()

    def feed(self, name: str, data: bytes) -> bytes:
        """Return the chunks for an event; nothing for most kinds that there are beside text and tools.

        Raises:
            Refused: it is an error.
            ValueError: it makes no sense.
        """
        event = read_object(data)
        match event.get("type"):
            case "message_start":
                return self._begin(event)
            case "content_block_start":
                return self._open(event)
            case "content_block_delta":
                return self._grow(event)
            case "content_block_stop":
                return self._close(event)
            case "message_delta":
                delta = event.get("delta")
                self._reason = (delta.get("stop_reason") if isinstance(delta, dict) else None) or self._reason
                self._usage.take(event.get("usage"))
                return b""
            case "message_stop":
                return self._end()
            case "error":
                raise refusal_of(500, event)
            case _:
                return b""

    def _begin(self, event: Json) -> bytes:
        message = event.get("message")
        if not isinstance(message, dict):
            raise ValueError("a stream without a message")  # noqa: TRY004 - the provider's fault
        self._head["id"] = _id_of(message)
        self._usage.take(message.get("usage"))
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def _open(self, event: Json) -> bytes:
        match event.get("content_block"):
            case {"type": "tool_use", "id": str(id), "name": str(tool)}:
                self._calls[_index(event)] = at = len(self._calls)
                call = {"index": at, "id": id, "type": "function", "function": {"name": tool, "arguments": ""}}
                return self._chunk({"tool_calls": [call]})
            case {"type": "text", "text": str(text)} if text:
                return self._chunk({"content": text})
        return b""

    def _grow(self, event: Json) -> bytes:
        match event.get("delta"):
            case {"type": "text_delta", "text": str(text)} if text:
                return self._chunk({"content": text})
            case {"type": "input_json_delta", "partial_json": str(text)} if text:
                return self._arguments(_index(event), text)
        return b""

    def _close(self, event: Json) -> bytes:
        """End a block: a call without arguments has an empty object, which is told by no delta."""
        index = _index(event)
        if index in self._calls and index not in self._said_input:
            return self._arguments(index, "{}")
        return b""

    def _arguments(self, index: int, text: str) -> bytes:
        if (at := self._calls.get(index)) is None:
            raise ValueError("arguments of no call")
        self._said_input.add(index)
        return self._chunk({"tool_calls": [{"index": at, "function": {"arguments": text}}]})

    def _end(self) -> bytes:
        self.is_done = True
        finish = self._chunk({}, reason=_finish_reason(self._reason))
        usage = encode({**self._head, "choices": [], "usage": self._usage.told()})
        return b"%bdata: %b\n\ndata: [DONE]\n\n" % (finish, usage)

    def _chunk(self, delta: Json, *, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return b"data: %b\n\n" % encode({**self._head, "choices": [choice]})


def refusal_of(status: int, body: Json) -> Refused:
    """Return an error of Anthropic's as one of OpenAI's."""
    error = body.get("error")
    found: dict[str, Any] = error if isinstance(error, dict) else {}
    kind = str(found.get("type") or "api_error")
    message = str(found.get("message") or "The provider refused the request.")
    if kind in BUSY:
        return Refused(429 if kind == "rate_limit_error" else 503, message, kind="rate_limit_error")
    # What Anthropic says of a prompt that is too long has no code of its own.
    is_long = "prompt is too long" in message or "exceed context limit" in message
    code = "context_length_exceeded" if is_long else None
    return Refused(status, message, kind="server_error" if status >= 500 else "invalid_request_error", code=code)


class _Usage:
    """Tokens as they become known: counts are of the whole message, the last one holds."""

    def __init__(self) -> None:
        self._found = dict.fromkeys(
            ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens"), 0
        )

    def take(self, usage: object) -> None:
        """Take over what is told."""
        for name in self._found:
            if isinstance(usage, dict) and usage.get(name) is not None:
                self._found[name] = whole_number(usage[name])

    def counted(self) -> Counted:
        """Return the sums: to OpenAI, cached tokens are a part of the prompt."""
        *prompt, output = self._found.values()
        return Counted(sum(prompt), output)

    def told(self) -> Json:
        """Return OpenAI's usage object."""
        prompt, generated = self.counted()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._found["cache_read_input_tokens"]},
        }


def _id_of(message: Json) -> str:
    return f"chatcmpl-{str(message.get('id') or '').removeprefix('msg_')}"


def _index(event: Json) -> int:
    return whole_number(event.get("index"))


def _finish_reason(reason: object) -> str:
    return _REASONS.get(str(reason), "stop")
