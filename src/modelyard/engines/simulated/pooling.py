"""The routes that read texts and generate nothing: embeddings, rerank, score, classify, moderations, tokenize.

Scores are the share of the query's words that a text has; classes and
moderation scores come from a hash; a text that names a category of harm is
flagged for it.
"""

import hashlib
import math
import zlib
from typing import Annotated, Any

import msgspec

from modelyard.engines.http import Connection, Request
from modelyard.engines.simulated.attempts import Attempts
from modelyard.engines.simulated.embedding import as_base64, vector_of
from modelyard.engines.simulated.faults import Faults
from modelyard.engines.simulated.requests import (
    ChatRequest,
    EmbeddingsRequest,
    Message,
    Part,
    Refused,
    decode,
    texts_of,
)
from modelyard.engines.simulated.stream import encode
from modelyard.engines.simulated.tokens import split

CATEGORIES = (
    "harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent", "self-harm",
    "self-harm/instructions", "self-harm/intent", "sexual", "sexual/minors", "violence", "violence/graphic",
)  # fmt: skip
LABELS = ("LABEL_0", "LABEL_1")
_VOCABULARY = 50_000


class RerankRequest(msgspec.Struct):
    """``POST /v1/rerank``, as vLLM takes it."""

    query: str
    documents: Annotated[list[str], msgspec.Meta(min_length=1)]
    model: str | None = None
    top_n: int | None = None
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def texts(self) -> list[str]:
        """Return the documents, cut where that was asked."""
        most = self.max_tokens_per_doc
        return [b"".join(split(text)[:most]).decode() for text in self.documents] if most else self.documents


class ScoreRequest(msgspec.Struct):
    """``POST /v1/score``."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


class ClassifyRequest(msgspec.Struct):
    """``POST /v1/classify``."""

    input: str | list[str]
    model: str | None = None


class ModerationRequest(msgspec.Struct):
    """``POST /v1/moderations``."""

    input: str | list[str | Part]
    model: str | None = None


class TokenizeRequest(msgspec.Struct):
    """``POST /tokenize``: a prompt or messages."""

    prompt: str | None = None
    messages: list[Message] | None = None
    model: str | None = None


class Pooling:
    """The routes."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts

    async def embeddings(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/embeddings``."""
        wanted = decode(request.body, EmbeddingsRequest)
        model = self._attempts.check_model(wanted.model)
        texts = texts_of(wanted.input, "input")
        dimensions = self._attempts.accelerator.options.embedding_dimensions
        keep = wanted.dimensions or dimensions
        if keep > dimensions:
            raise Refused(400, f"dimensions must be at most {dimensions}")
        if "" in texts:
            raise Refused(400, "input must not be empty")
        vectors = [vector_of(text, dimensions, keep) for text in texts]
        as_text = wanted.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": i, "embedding": as_base64(vector) if as_text else vector}
            for i, vector in enumerate(vectors)
        ]
        await self._answer(request, connection, texts, {"object": "list", "data": data}, model)

    async def rerank(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/rerank``."""
        wanted = decode(request.body, RerankRequest)
        model = self._attempts.check_model(wanted.model)
        results = [
            {"index": i, "document": {"text": text}, "relevance_score": likeness(wanted.query, text)}
            for i, text in enumerate(wanted.texts())
        ]
        results.sort(key=lambda entry: -float(str(entry["relevance_score"])))
        texts = [f"{wanted.query} {text}" for text in wanted.texts()]
        await self._answer(request, connection, texts, {"id": "rerank-sim", "results": results[: wanted.top_n]}, model)

    async def score(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/score``."""
        wanted = decode(request.body, ScoreRequest)
        model = self._attempts.check_model(wanted.model)
        first, second = texts_of(wanted.text_1, "text_1"), texts_of(wanted.text_2, "text_2")
        if len(first) not in (1, len(second)):
            raise Refused(400, "text_1 must have one text, or as many as text_2")
        pairs = list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))
        data = [{"index": i, "object": "score", "score": likeness(*pair)} for i, pair in enumerate(pairs)]
        body = {"id": "score-sim", "object": "list", "data": data}
        await self._answer(request, connection, [f"{a} {b}" for a, b in pairs], body, model)

    async def classify(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/classify``."""
        wanted = decode(request.body, ClassifyRequest)
        model = self._attempts.check_model(wanted.model)
        texts = texts_of(wanted.input, "input")
        body = {"id": "classify-sim", "object": "list", "data": [_classified(i, text) for i, text in enumerate(texts)]}
        await self._answer(request, connection, texts, body, model)

    async def moderations(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/moderations``: one result a text, one for all parts together."""
        wanted = decode(request.body, ModerationRequest)
        model = self._attempts.check_model(wanted.model)
        given = wanted.input if isinstance(wanted.input, list) else [wanted.input]
        texts = [item for item in given if isinstance(item, str)]
        if len(texts) < len(given):
            texts = [" ".join(item if isinstance(item, str) else item.text for item in given)]
        body = {"id": "modr-sim", "results": [_moderated(text) for text in texts]}
        await self._answer(request, connection, texts, body, model)

    async def tokenize(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /tokenize`` at once: it takes no slot."""
        wanted = decode(request.body, TokenizeRequest)
        self._attempts.check_model(wanted.model)
        text = ChatRequest(messages=wanted.messages).rendered() if wanted.messages else wanted.prompt or ""
        ids = [zlib.crc32(piece) % _VOCABULARY for piece in split(text)]
        length = self._attempts.accelerator.options.context_length
        body = {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": None}
        connection.respond(200, encode(body))

    async def _answer(
        self, request: Request, connection: Connection, texts: list[str], body: dict[str, Any], model: str
    ) -> None:
        generation = await self._attempts.compute(request, connection, texts, model)
        if generation is None:
            return
        tokens = generation.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        self._attempts.ended(generation, "stop")
        connection.respond(200, encode({**body, "model": model, **usage_field(generation.faults, usage)}))


def usage_field(faults: Faults, usage: dict[str, Any]) -> dict[str, Any]:
    """Return the field with the usage, as the faults of the request leave it."""
    if faults.no_usage:
        return {}
    return {"usage": None if faults.null_usage else usage}


def likeness(query: str, text: str) -> float:
    """Return the share of the words of ``query`` that ``text`` has, 0 to 1."""
    words = set(query.lower().split())
    return len(words & set(text.lower().split())) / len(words) if words else 0.0


def _classified(index: int, text: str) -> dict[str, Any]:
    odds = [math.exp(_share(label + text)) for label in LABELS]
    probabilities = [value / sum(odds) for value in odds]
    best = LABELS[probabilities.index(max(probabilities))]
    return {"index": index, "label": best, "probs": probabilities, "num_classes": len(LABELS)}


def _moderated(text: str) -> dict[str, Any]:
    found = {name: name in text.lower() for name in CATEGORIES}
    scores = {name: (0.9 if hit else 0.0) + 0.1 * _share(name + text) for name, hit in found.items()}
    return {
        "flagged": any(found.values()),
        "categories": found,
        "category_scores": scores,
        "category_applied_input_types": {name: ["text"] for name in CATEGORIES},
    }


def _share(text: str) -> float:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()[0] / 255
