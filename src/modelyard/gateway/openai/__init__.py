"""OpenAI's inference requests: strict types in, an engine's body out.

Each route decodes into a struct that names every field we know; the engine's
body is encoded from that struct again, so a field nobody listed cannot reach
an engine (``reference/security.md`` S3).
"""

from modelyard.gateway.openai.call import Call
from modelyard.gateway.openai.chat import decode_chat
from modelyard.gateway.openai.completions import decode_completion
from modelyard.gateway.openai.embeddings import decode_embedding

DECODERS = {
    "/v1/chat/completions": decode_chat,
    "/v1/completions": decode_completion,
    "/v1/embeddings": decode_embedding,
}
"""How to decode the body of each inference route."""

__all__ = ["DECODERS", "Call"]
