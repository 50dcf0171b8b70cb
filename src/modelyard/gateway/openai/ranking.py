"""``/v1/rerank`` (also ``/v2/rerank``, ``/rerank``) and ``/v1/score``.

Rerank takes what Cohere's and Jina's clients send and answers with the union
of both, so that either reads it; engines get the common part. A search unit is
one query over up to 100 documents, as Cohere bills.
"""

from typing import Annotated, Any

import msgspec

from modelyard import errors
from modelyard.domain.usage import Unit
from modelyard.gateway.dialects import StreamTranslation
from modelyard.gateway.openai.call import Call, Incoming, Meter, ModelName, decode_strict
from modelyard.gateway.sse import Usage

DOCUMENTS_MAX = 2048
DOCUMENTS_PER_SEARCH = 100

_encode = msgspec.json.Encoder().encode


class Document(msgspec.Struct):
    """A document as Jina's clients write it."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The body; ``priority`` is Cohere's and has no effect here."""

    model: ModelName
    query: Annotated[str, msgspec.Meta(min_length=1)]
    documents: Annotated[list[str | Document], msgspec.Meta(min_length=1, max_length=DOCUMENTS_MAX)]
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=1)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=999)] | None = None


Texts = (
    Annotated[str, msgspec.Meta(min_length=1)]
    | Annotated[list[str], msgspec.Meta(min_length=1, max_length=DOCUMENTS_MAX)]
)


class ScoreRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Pairs of texts: one against each of the other, or one by one."""

    model: ModelName
    text_1: Texts
    text_2: Texts


class _Ranked(msgspec.Struct):
    index: Annotated[int, msgspec.Meta(ge=0)]
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_Ranked]
    model: str = ""


_rerank = msgspec.json.Decoder(RerankRequest)
_score = msgspec.json.Decoder(ScoreRequest)
_ranking = msgspec.json.Decoder(_Ranking)


def decode_rerank(incoming: Incoming) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    request, ignored = decode_strict(_rerank, incoming.body)
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    if "" in texts:
        raise errors.invalid_value(f"documents[{texts.index('')}]", "it is empty")
    searches = -(-len(texts) // DOCUMENTS_PER_SEARCH)
    translation = RerankTranslation(texts, top_n=request.top_n, with_documents=bool(request.return_documents))
    request.documents = list(texts)
    request.return_documents = request.priority = None
    return Call(
        model=request.model,
        request=request,
        # A cross-encoder reads the query with each document.
        text_length=len(request.query) * len(texts) + sum(map(len, texts)),
        choices=len(texts),
        output_tokens=0,
        ignored=ignored,
        engine_route="/v1/rerank",
        translation=translation,
        needs=(("max_tokens_per_doc", "max_tokens_per_doc"),) if request.max_tokens_per_doc is not None else (),
        meter=Meter(Unit.SEARCHES, searches, lambda _answer: searches),
    )


def decode_score(incoming: Incoming) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    request, ignored = decode_strict(_score, incoming.body)
    first, second = listed(request.text_1, "text_1"), listed(request.text_2, "text_2")
    if len(first) not in (1, len(second)):
        raise errors.invalid_value("text_1", f"it has {len(first)} texts and 'text_2' {len(second)}")
    pairs = len(second)
    return Call(
        model=request.model,
        request=request,
        text_length=sum(map(len, first)) * (pairs if len(first) == 1 else 1) + sum(map(len, second)),
        choices=pairs,
        output_tokens=0,
        ignored=ignored,
        engine_route="/v1/score",
        meter=Meter(Unit.PAIRS, pairs, lambda _answer: pairs),
    )


class RerankTranslation:
    """One ranking on its way back."""

    __slots__ = ("_texts", "_top_n", "_with_documents")

    def __init__(self, texts: list[str], *, top_n: int | None, with_documents: bool) -> None:
        self._texts = texts
        self._top_n = top_n
        self._with_documents = with_documents

    def answer(self, chat: bytes, usage: Usage, request_id: str) -> bytes:
        """Return the ranking, best first.

        Raises:
            ValueError: it is no ranking of these documents.
        """
        ranking = _ranking.decode(chat)
        if any(entry.index >= len(self._texts) for entry in ranking.results):
            raise ValueError("a document that was not sent")
        best = sorted(ranking.results, key=lambda entry: (-entry.relevance_score, entry.index))[: self._top_n]
        searches = -(-len(self._texts) // DOCUMENTS_PER_SEARCH)
        tokens = usage.prompt_tokens or usage.total_tokens
        return _encode(
            {
                "id": f"rerank-{request_id}",
                "model": ranking.model,
                "results": [self._entry(entry) for entry in best],
                "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": searches}},
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def stream(self, request_id: str) -> StreamTranslation:
        """Refuse: a ranking is not streamed."""
        raise AssertionError("a ranking is not streamed")

    def _entry(self, entry: _Ranked) -> dict[str, Any]:
        found: dict[str, Any] = {"index": entry.index, "relevance_score": entry.relevance_score}
        if self._with_documents:
            found["document"] = {"text": self._texts[entry.index]}
        return found


def listed(texts: str | list[str], param: str) -> list[str]:
    """Return one text or several as a list.

    Raises:
        ApiError: 400 for an empty one.
    """
    found = [texts] if isinstance(texts, str) else texts
    if "" in found:
        raise errors.invalid_value(f"{param}[{found.index('')}]", "it is empty")
    return found
