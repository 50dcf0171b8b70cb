"""What a whole chat completion must have and engines do not give: required keys, and the request's ``metadata``."""

from typing import TYPE_CHECKING, Any

import msgspec

from modelyard.gateway.sse import Usage

if TYPE_CHECKING:
    from modelyard.gateway.dialects import StreamTranslation, Translation

_any = msgspec.json.Decoder(dict[str, Any])
_encode = msgspec.json.Encoder().encode


class MetadataTranslation:
    """One answer that is not streamed, with the request's ``metadata`` in it; ``inner`` translates it before."""

    __slots__ = ("_inner", "_metadata")

    def __init__(self, metadata: dict[str, str], inner: "Translation | None") -> None:
        self._metadata = metadata
        self._inner = inner

    def answer(self, chat: bytes, usage: Usage, request_id: str) -> bytes:
        """Return the chat completion with its metadata, and with the keys that are required.

        Raises:
            ValueError: ``chat`` is no chat completion.
        """
        if self._inner is not None:
            chat = self._inner.answer(chat, usage, request_id)
        return _encode({**_any.decode(complete(chat)), "metadata": self._metadata})

    def stream(self, request_id: str) -> "StreamTranslation":
        """Refuse: chunks carry no metadata."""
        raise AssertionError("chunks carry no metadata")


def complete(body: bytes) -> bytes:
    """Return a chat completion with the keys that OpenAI requires and llama.cpp leaves out when they would be null."""
    answer = _any.decode(body)
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            choice.setdefault("logprobs", None)
            if isinstance(message := choice.get("message"), dict):
                message.setdefault("content", None)
                message.setdefault("refusal", None)
    return _encode(answer)
