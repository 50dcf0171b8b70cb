"""The routes: a request decoded, computed and written, in the shapes that the gateway reads."""

import asyncio
import base64
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from modelyard.engines.onnx import pictures, scores, tensors
from modelyard.engines.onnx.metrics import Metrics
from modelyard.engines.onnx.model import Encoded, Model
from modelyard.engines.onnx.refusals import Refused, wrong_request
from modelyard.engines.onnx.scheduler import Scheduler
from modelyard.engines.onnx.shelf import Shelf

if TYPE_CHECKING:
    from numpy.typing import NDArray

INPUTS_MAX = 2048
PICTURES_MAX = 32
_SHOWN_MAX = 10
"""Classes that are listed with their names; ``probs`` has all."""
_INLINE_CHARACTERS = 2000
"""Texts up to so many characters together are tokenised on the loop: a thread costs more."""

T = TypeVar("T")
Texts = str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=INPUTS_MAX)]
Ids = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class EmbeddingsRequest(msgspec.Struct):
    """``POST /v1/embeddings``."""

    model: str
    input: str | Annotated[list[str | int | Ids], msgspec.Meta(min_length=1, max_length=131_072)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None


class RerankRequest(msgspec.Struct):
    """``POST /v1/rerank``."""

    model: str
    query: Annotated[str, msgspec.Meta(min_length=1)]
    documents: Annotated[list[str], msgspec.Meta(min_length=1, max_length=INPUTS_MAX)]
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ScoreRequest(msgspec.Struct):
    """``POST /v1/score``."""

    model: str
    text_1: Texts
    text_2: Texts


class ImageUrl(msgspec.Struct):
    """A picture as a ``data:`` URL."""

    url: str


class TextPart(msgspec.Struct, tag="text", tag_field="type"):
    """A text as OpenAI's parts have it."""

    text: str


class ImagePart(msgspec.Struct, tag="image_url", tag_field="type"):
    """A picture as OpenAI's parts have it."""

    image_url: ImageUrl


class ClassifyRequest(msgspec.Struct):
    """``POST /v1/classify``: texts or pictures."""

    model: str
    input: str | Annotated[list[str | TextPart | ImagePart], msgspec.Meta(min_length=1, max_length=INPUTS_MAX)]


class TokenClassifyRequest(msgspec.Struct):
    """``POST /v1/token_classify``."""

    model: str
    input: Texts
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"


class Handlers:
    """What is answered on each route, as plain objects."""

    def __init__(self, shelf: Shelf, scheduler: Scheduler, metrics: Metrics) -> None:
        self._shelf = shelf
        self._scheduler = scheduler
        self._metrics = metrics
        self._numbers = count(1)
        self.routes: dict[str, Callable[[bytes], Any]] = {
            "/v1/embeddings": self.embeddings,
            "/v1/rerank": self.rerank,
            "/v1/score": self.score,
            "/v1/classify": self.classify,
            "/v1/token_classify": self.token_classify,
        }

    async def embeddings(self, body: bytes) -> dict[str, Any]:
        """Answer ``POST /v1/embeddings``."""
        wanted = decode(body, EmbeddingsRequest)
        async with self._shelf.use(wanted.model) as model:
            _check_task(model, "embeddings")
            if wanted.dimensions is not None and wanted.dimensions > model.dimensions:
                raise wrong_request(f"dimensions must be at most {model.dimensions}.", "dimensions")
            encoded = await self._encode_input(model, wanted.input)
            vectors = await self._compute(model, encoded)
        if wanted.dimensions is not None:
            is_normalised = model.judged.is_normalised
            vectors = [scores.shortened(one, wanted.dimensions, is_normalised=is_normalised) for one in vectors]
        written = _as_base64 if wanted.encoding_format == "base64" else _as_list
        data = [{"object": "embedding", "index": i, "embedding": written(one)} for i, one in enumerate(vectors)]
        return {"object": "list", "data": data, "model": model.name, **_usage(encoded)}

    async def rerank(self, body: bytes) -> dict[str, Any]:
        """Answer ``POST /v1/rerank``."""
        wanted = decode(body, RerankRequest)
        async with self._shelf.use(wanted.model) as model:
            documents = _nonempty(wanted.documents, "documents")
            if (most := wanted.max_tokens_per_doc) is not None:
                _check_task(model, "rerank", "embeddings")
                documents = await asyncio.to_thread(lambda: [model.cut(text, most) for text in documents])
            relevances, usage = await self._relevances(model, [wanted.query], documents)
        results = [
            {"index": i, "document": {"text": text}, "relevance_score": relevance}
            for i, (text, relevance) in enumerate(zip(documents, relevances, strict=True))
        ]
        results.sort(key=lambda one: -relevances[int(str(one["index"]))])
        return {"id": self._id("rerank"), "model": model.name, "results": results[: wanted.top_n], **usage}

    async def score(self, body: bytes) -> dict[str, Any]:
        """Answer ``POST /v1/score``."""
        wanted = decode(body, ScoreRequest)
        first, second = _listed(wanted.text_1, "text_1"), _listed(wanted.text_2, "text_2")
        if len(first) not in (1, len(second)):
            raise wrong_request("text_1 must have one text, or as many as text_2.", "text_1")
        async with self._shelf.use(wanted.model) as model:
            relevances, usage = await self._relevances(model, first, second)
        data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(relevances)]
        return {"id": self._id("score"), "object": "list", "model": model.name, "data": data, **usage}

    async def classify(self, body: bytes) -> dict[str, Any]:
        """Answer ``POST /v1/classify``."""
        wanted = decode(body, ClassifyRequest)
        given = wanted.input if isinstance(wanted.input, list) else [wanted.input]
        async with self._shelf.use(wanted.model) as model:
            _check_task(model, "classify", "image_classify")
            if model.task == "image_classify":
                found = await self._compute_pictures(model, given)
                usage = _usage([])
            else:
                texts = [one if isinstance(one, str) else one.text for one in given if not isinstance(one, ImagePart)]
                if len(texts) < len(given):
                    raise wrong_request(f"The model '{model.name}' classifies texts, not pictures.", "input")
                encoded = await self._encode(model, _nonempty(texts, "input"))
                found = await self._compute(model, encoded)
                usage = _usage(encoded)
        data = [_classified(i, one, model.labels) for i, one in enumerate(found)]
        return {"id": self._id("classify"), "object": "list", "model": model.name, "data": data, **usage}

    async def token_classify(self, body: bytes) -> dict[str, Any]:
        """Answer ``POST /v1/token_classify``."""
        wanted = decode(body, TokenClassifyRequest)
        texts = _listed(wanted.input, "input")
        async with self._shelf.use(wanted.model) as model:
            _check_task(model, "token_classify")
            encoded = await self._encode(model, texts)
            found = await self._compute(model, encoded)
        how = wanted.aggregation_strategy
        data = [
            {"index": i, "entities": scores.entities(text, one, tokens.offsets, tokens.words, model.labels, how)}
            for i, (text, one, tokens) in enumerate(zip(texts, found, encoded, strict=True))
        ]
        return {"id": self._id("tokens"), "object": "list", "model": model.name, "data": data, **_usage(encoded)}

    async def infer(self, name: str, body: bytes) -> dict[str, Any]:
        """Answer ``POST /v2/models/{model}/infer``."""
        wanted = decode(body, tensors.InferRequest)
        async with self._shelf.use(name) as model:
            feeds = await asyncio.to_thread(tensors.read_feeds, wanted, model.inputs)
            known = [node.name for node in model.outputs]
            names = [one.name for one in wanted.outputs or []] or known
            if missing := [one for one in names if one not in known]:
                raise wrong_request(f"There is no output '{missing[0][:99]}'; there are {', '.join(known)}.", "outputs")
            key = _joinable(feeds) if model.options.batch_tensors else ("alone", next(self._numbers))
            [outputs] = await self._counted(model, [(feeds, 1)], key)
        answer: dict[str, Any] = {"model_name": name, "model_version": "1"}
        if wanted.id is not None:
            answer["id"] = wanted.id
        return {**answer, "outputs": await asyncio.to_thread(lambda: [tensors.written(n, outputs[n]) for n in names])}

    async def metadata(self, name: str) -> dict[str, Any]:
        """Answer ``GET /v2/models/{model}``."""
        async with self._shelf.use(name) as model:
            return {
                "name": name,
                "versions": ["1"],
                "platform": "onnxruntime_onnx",
                "inputs": tensors.metadata_of(model.inputs),
                "outputs": tensors.metadata_of(model.outputs),
            }

    async def _relevances(
        self, model: Model, first: Sequence[str], second: Sequence[str]
    ) -> tuple[list[float], dict[str, Any]]:
        """Return how well pairs fit: by a cross-encoder, or by the cosine of two embeddings."""
        _check_task(model, "rerank", "embeddings")
        if model.task == "rerank":
            pairs = list(zip(list(first) * (len(second) if len(first) == 1 else 1), second, strict=True))
            encoded = await self._encode(model, pairs)
            return [float(one) for one in await self._compute(model, encoded)], _usage(encoded)
        encoded = await self._encode(model, [*first, *second])
        vectors = await self._compute(model, encoded)
        queries = vectors[: len(first)] * (len(second) if len(first) == 1 else 1)
        return [scores.cosine(*pair) for pair in zip(queries, vectors[len(first) :], strict=True)], _usage(encoded)

    async def _encode_input(self, model: Model, given: str | list[Any]) -> list[Encoded]:
        if isinstance(given, str):
            given = [given]
        if all(isinstance(one, str) for one in given):
            return await self._encode(model, _nonempty(given, "input"))
        if all(isinstance(one, int) for one in given):
            return [model.encode_ids(given)]
        if all(isinstance(one, list) for one in given):
            return [model.encode_ids(one) for one in given]
        raise wrong_request("input must be texts, or arrays of token ids, not both.", "input")

    async def _encode(self, model: Model, texts: Sequence[Any]) -> list[Encoded]:
        size = sum(len(one) if isinstance(one, str) else len(one[0]) + len(one[1]) for one in texts)
        if size <= _INLINE_CHARACTERS:
            return model.encode(texts)
        return await asyncio.to_thread(model.encode, texts)

    async def _compute(self, model: Model, encoded: list[Encoded]) -> list[Any]:
        self._metrics.tokens.labels(model.name).inc(sum(len(one.ids) for one in encoded))
        return await self._counted(model, [(one, len(one.ids)) for one in encoded], "text")

    async def _compute_pictures(self, model: Model, given: Sequence[str | TextPart | ImagePart]) -> list[Any]:
        if len(given) > PICTURES_MAX:
            raise wrong_request(f"A request may have at most {PICTURES_MAX} pictures.", "input")
        urls = [one.image_url.url for one in given if isinstance(one, ImagePart)]
        if len(urls) < len(given):
            raise wrong_request(f"The model '{model.name}' classifies pictures: send image_url parts.", "input")

        def read(url: str) -> "NDArray[Any]":
            return model.picture(pictures.content_of(url))

        arrays = [await asyncio.to_thread(read, url) for url in urls]
        return await self._counted(model, [(one, 1) for one in arrays], "picture")

    async def _counted(self, model: Model, payloads: list[tuple[Any, int]], key: Any) -> list[Any]:
        outcome = "failed"
        try:
            found = await self._scheduler.compute(model.name, payloads, key)
        except Refused as refusal:
            outcome = "refused" if refusal.status < 500 else "failed"
            raise
        except asyncio.CancelledError:
            outcome = "left"
            raise
        else:
            outcome = "ok"
            return found
        finally:
            self._metrics.requests.labels(model.name, outcome).inc()

    def _id(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers)}"


def decode(body: bytes, kind: type[T]) -> T:
    """Return a request's body as a ``kind``.

    Raises:
        Refused: 400 saying what is wrong.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        param = path.strip(".`")
        raise wrong_request(f"{reason}, at {param}." if param else f"{reason}.", param or None) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise wrong_request(f"The body is no JSON: {error}.", code="invalid_json") from None


def _check_task(model: Model, *tasks: str) -> None:
    if model.task not in tasks:
        raise Refused(
            400, "route_unsupported",
            f"The model '{model.name}' was loaded for the task '{model.task}'; this route needs {' or '.join(tasks)}.",
            "model",
        )  # fmt: skip


def _listed(texts: str | list[str], param: str) -> list[str]:
    return _nonempty([texts] if isinstance(texts, str) else texts, param)


def _nonempty(texts: list[str], param: str) -> list[str]:
    if len(texts) > INPUTS_MAX:
        raise wrong_request(f"{param} may have at most {INPUTS_MAX} texts.", param)
    if "" in texts:
        raise wrong_request(f"{param}[{texts.index('')}] is empty.", param)
    return texts


def _classified(index: int, found: "NDArray[Any]", labels: tuple[str, ...]) -> dict[str, Any]:
    """Return vLLM's shape, and the best classes by name."""
    best = sorted(range(len(labels)), key=lambda i: -found[i])[:_SHOWN_MAX]
    return {
        "index": index,
        "label": labels[best[0]],
        "probs": found.tolist(),
        "num_classes": len(labels),
        "scores": [{"label": labels[i], "score": float(found[i])} for i in best],
    }


def _joinable(feeds: dict[str, Any]) -> tuple[Any, ...]:
    """Return what two requests must have in common to be one batch."""
    rows = {len(array) if array.ndim else None for array in feeds.values()}
    if len(rows) != 1 or rows & {None, 0}:
        raise wrong_request("All inputs must have as many rows: the model was deployed with batch_tensors.", "inputs")
    return tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(feeds.items()))


def _usage(encoded: Sequence[Encoded]) -> dict[str, Any]:
    tokens = sum(len(one.ids) for one in encoded)
    return {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _as_list(vector: "NDArray[Any]") -> list[float]:
    listed: list[float] = vector.tolist()
    return listed


def _as_base64(vector: "NDArray[Any]") -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
