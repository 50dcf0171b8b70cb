"""OpenAI's inference requests: strict types in, an engine's body out.

Each route decodes into a struct that names every field we know; the engine's
body is encoded from that struct again, so a field nobody listed cannot reach
an engine (``reference/security.md`` S3).
"""

from collections.abc import Callable

from modelyard.gateway.openai.call import Call, Incoming
from modelyard.gateway.openai.chat import decode_chat
from modelyard.gateway.openai.completions import decode_completion
from modelyard.gateway.openai.embeddings import decode_embedding

Decode = Callable[[Incoming], Call]

DECODERS: dict[str, Decode] = {
    "/v1/chat/completions": lambda request: decode_chat(request.body),
    "/v1/completions": lambda request: decode_completion(request.body),
    "/v1/embeddings": lambda request: decode_embedding(request.body),
}
"""How to decode a request of each inference route."""


def decoder_of(path: str) -> Decode | None:
    """Return how to decode a request to ``path``; None for what is no inference route."""
    return DECODERS.get(path)


__all__ = ["DECODERS", "Call", "Decode", "Incoming", "decoder_of"]
