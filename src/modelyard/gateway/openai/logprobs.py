"""Log probabilities of text completions in the form of that route, also from engines that give a chat's.

llama.cpp does (``{"content": [{"token": …, "logprob": …}]}``); OpenAI's
completions have four parallel lists.
"""

from typing import Any

import msgspec

from modelyard.gateway.openai.chunks import RewrittenChunks
from modelyard.gateway.sse import Usage

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


class LogprobsStream(RewrittenChunks):
    """One stream of text chunks; offsets go on from chunk to chunk."""

    __slots__ = ("_lengths",)

    def __init__(self, *, wants_usage: bool) -> None:
        super().__init__(wants_usage=wants_usage)
        self._lengths: dict[int, int] = {}

    def feed(self, event: bytes) -> bytes:
        """Translate one chunk, or send it on as it came when nothing in it changes.

        Raises:
            EngineStreamError: it has a form that nobody knows.
        """
        if _FOREIGN not in event and not self._wants_usage:
            return event + b"\n\n"
        return super().feed(event)

    def _rewrite(self, chunk: Any) -> None:
        _convert(chunk, self._lengths)


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
