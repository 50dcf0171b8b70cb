"""Log probabilities of text completions in the form of that route, also from engines that give a chat's.

llama.cpp does (``{"content": [{"token": …, "logprob": …}]}``); OpenAI's
completions have four parallel lists.
"""

from typing import Any

import msgspec

from modelyard.errors import ApiError
from modelyard.gateway.relay import DONE, EngineStreamError
from modelyard.gateway.sse import Usage, split_fields, usage_event

_any = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode
_FOREIGN = b'"content":'


class LogprobsTranslation:
    """One request for log probabilities."""

    __slots__ = ("_wants_usage",)

    def __init__(self, *, wants_usage: bool) -> None:
        self._wants_usage = wants_usage

    def answer(self, chat: bytes, usage: Usage, request_id: str) -> bytes:
        """Return the text completion with lists; as it came when it has them.

        Raises:
            ValueError: it is no text completion.
        """
        if _FOREIGN not in chat:
            return chat
        body = _any.decode(chat)
        _convert(body, {})
        return _encode(body)

    def stream(self, request_id: str) -> "LogprobsStream":
        """Return a new translation of a stream."""
        return LogprobsStream(wants_usage=self._wants_usage)


class LogprobsStream:
    """One stream of text chunks; offsets go on from chunk to chunk."""

    __slots__ = ("_lengths", "_sample", "_wants_usage")

    def __init__(self, *, wants_usage: bool) -> None:
        self._wants_usage = wants_usage
        self._lengths: dict[int, int] = {}
        self._sample = b""

    def begin(self) -> bytes:
        """Return nothing: the first chunk begins the stream."""
        return b""

    def feed(self, event: bytes) -> bytes:
        """Translate one chunk.

        Raises:
            EngineStreamError: it has a form that nobody knows.
        """
        self._sample = self._sample or event
        if _FOREIGN not in event and not self._wants_usage:
            return event + b"\n\n"
        chunk = _any.decode(split_fields(event)[1])
        try:
            _convert(chunk, self._lengths)
        except ValueError as error:
            raise EngineStreamError(str(error)) from None
        if self._wants_usage:
            chunk["usage"] = None
        return b"data: " + _encode(chunk) + b"\n\n"

    def finish(self, usage: Usage) -> bytes:
        """Return the usage, if it was asked for, and the end."""
        if self._wants_usage and self._sample:
            return usage_event(self._sample, usage) + b"\n\n" + DONE
        return DONE

    def fail(self, error: ApiError) -> bytes:
        """Return the error event."""
        return b"data: " + error.body() + b"\n\n"


def _convert(body: Any, lengths: dict[int, int]) -> None:
    """Turn a chat's log probabilities into lists; ``lengths`` is the text so far of each choice, in characters."""
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list):
        raise ValueError("no choices")  # noqa: TRY004 - what a translation raises
    try:
        for choice in choices:
            found = choice.get("logprobs")
            if isinstance(found, dict) and isinstance(found.get("content"), list):
                choice["logprobs"] = _lists(found["content"], lengths, choice.get("index", 0))
    except (AttributeError, KeyError, TypeError):
        raise ValueError("log probabilities in no form that is known") from None


def _lists(entries: list[Any], lengths: dict[int, int], index: int) -> dict[str, Any]:
    offsets = []
    for entry in entries:
        offsets.append(lengths.get(index, 0))
        lengths[index] = offsets[-1] + len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {rival["token"]: rival["logprob"] for rival in entry.get("top_logprobs") or []} for entry in entries
        ],
        "text_offset": offsets,
    }
