"""OpenAI's inference requests: strict types in, an engine's body out.

Each route decodes into a struct that names every field we know; the engine's
body is encoded from that struct again, so a field nobody listed cannot reach
an engine (``reference/security.md`` S3).
"""

from collections.abc import Callable

from modelyard.gateway.openai import audio, classifying, images, ranking, tensors
from modelyard.gateway.openai.call import Call, Incoming
from modelyard.gateway.openai.chat import decode_chat
from modelyard.gateway.openai.completions import decode_completion
from modelyard.gateway.openai.embeddings import decode_embedding
from modelyard.gateway.openai.moderations import decode_moderation

Decode = Callable[[Incoming], Call]

DECODERS: dict[str, Decode] = {
    "/v1/chat/completions": lambda request: decode_chat(request.body),
    "/v1/completions": lambda request: decode_completion(request.body),
    "/v1/embeddings": lambda request: decode_embedding(request.body),
    "/v1/rerank": ranking.decode_rerank,
    "/v2/rerank": ranking.decode_rerank,
    "/rerank": ranking.decode_rerank,
    "/v1/score": ranking.decode_score,
    "/score": ranking.decode_score,
    "/v1/classify": classifying.decode_classify,
    "/classify": classifying.decode_classify,
    "/v1/token_classify": classifying.decode_token_classify,
    "/v1/moderations": decode_moderation,
    "/v1/audio/speech": audio.decode_speech,
    "/v1/audio/transcriptions": audio.decode_transcription,
    "/v1/audio/translations": audio.decode_translation,
    "/v1/images/generations": images.decode_generation,
    "/v1/images/edits": images.decode_edit,
}
"""How to decode a request of each inference route with a path of its own."""


def decoder_of(path: str) -> Decode | None:
    """Return how to decode a request to ``path``; None for what is no inference route."""
    found = DECODERS.get(path)
    if found is None and tensors.is_infer(path):
        return tensors.decode_infer
    return found


__all__ = ["DECODERS", "Call", "Decode", "Incoming", "decoder_of"]
