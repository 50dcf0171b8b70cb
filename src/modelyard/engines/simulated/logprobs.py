"""Log probabilities of the echo: made from a hash of each token, so that they are the same in every run.

They add up to less than 1 and fall with the rank, as a model's do. An adapter
is less sure of its words than its base, each in its own way, so that answers
tell by whom they were computed. What a
model would never say has -9999.0, OpenAI's number for "very unlikely":
minus infinity is no JSON.
"""

import hashlib
import math
from typing import Any

VERY_UNLIKELY = -9999.0
_LEAST, _SPREAD = 0.55, 0.4
"""Shares that the base gives its words."""
_LEAST_OF_ADAPTER, _SPREAD_OF_ADAPTER = 0.36, 0.1
"""Below all of the base's, and above what is left for the next of its rivals."""
_RIVALS = (" the", " a", " of", " and")
"""What else the model might have said; beyond them everything is very unlikely."""


def rated(token: bytes, top: int, *, adapter: str = "") -> list[tuple[bytes, float]]:
    """Return ``token`` and its ``top`` - 1 rivals (none for less) with their log probabilities, best first.

    They are those of ``adapter``, or of the base.
    """
    chance = hashlib.sha256(adapter.encode("utf-8", "replace") + token).digest()[0] / 255
    share = _LEAST_OF_ADAPTER + _SPREAD_OF_ADAPTER * chance if adapter else _LEAST + _SPREAD * chance
    found = [(token, math.log(share))]
    rest = 1 - share
    for rank in range(1, top):
        if rank <= len(_RIVALS):
            rest /= 2
            found.append((_RIVALS[rank - 1].encode(), math.log(rest)))
        else:
            found.append((f"<|{rank}|>".encode(), VERY_UNLIKELY))
    return found


class Scores:
    """The log probabilities of one choice, collected until the next chunk takes them."""

    __slots__ = ("_adapter", "_entries", "_is_chat", "_offset", "_offsets", "_top")

    def __init__(self, *, top: int | None, is_chat: bool, adapter: str = "") -> None:
        self._adapter = adapter
        self._top = top
        self._is_chat = is_chat
        self._entries: list[list[tuple[bytes, float | None]]] = []
        self._offsets: list[int] = []
        self._offset = 0

    def add(self, token: bytes, *, is_first: bool = False) -> None:
        """Note a token of text; the ``is_first`` of a repeated prompt has no probability."""
        if self._top is None or not token:
            return
        self._entries.append([(token, None)] if is_first else [*rated(token, self._top, adapter=self._adapter)])
        self._offsets.append(self._offset)
        self._offset += len(_text(token))

    def take(self) -> dict[str, Any] | None:
        """Return what was noted since the last call, in the form of the API; None for nothing."""
        entries, offsets = self._entries, self._offsets
        if not entries:
            return None
        self._entries, self._offsets = [], []
        if self._is_chat:
            return {"content": [_chat_entry(entry, self._top or 0) for entry in entries], "refusal": None}
        return {
            "tokens": [_text(entry[0][0]) for entry in entries],
            "token_logprobs": [entry[0][1] for entry in entries],
            "top_logprobs": [
                None if entry[0][1] is None else {_text(token): value for token, value in entry[: self._top]}
                for entry in entries
            ],
            "text_offset": offsets,
        }


def _chat_entry(entry: list[tuple[bytes, float | None]], top: int) -> dict[str, Any]:
    return {**_score(*entry[0]), "top_logprobs": [_score(*rated) for rated in entry[:top]]}


def _score(token: bytes, value: float | None) -> dict[str, Any]:
    return {"token": _text(token), "logprob": value, "bytes": list(token)}


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
