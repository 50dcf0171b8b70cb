"""From what a graph gives to what a caller wants: pooling, scores, entities. Numpy only, no session."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[Any]

TINY = 1e-12


def pool(hidden: "Floats", mask: "NDArray[Any]", how: str) -> "Floats":
    """Return one vector a text from ``hidden`` (texts, tokens, size); padding, which ``mask`` leaves out, is behind."""
    import numpy as np

    if how == "cls":
        return np.ascontiguousarray(hidden[:, 0])
    if how == "last":
        return np.asarray(hidden[np.arange(len(hidden)), mask.sum(axis=1) - 1])
    weights = mask[:, :, None].astype(np.float32)
    return np.asarray((hidden * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1))


def normalised(vectors: "Floats") -> "Floats":
    """Return the vectors at length 1."""
    import numpy as np

    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), TINY))


def shortened(vector: "Floats", dimensions: int, *, is_normalised: bool) -> "Floats":
    """Return the first ``dimensions`` of a vector, as Matryoshka models are cut, at length 1 again."""
    cut = vector[:dimensions]
    return normalised(cut) if is_normalised else cut


def scored(outputs: "Floats", function: str) -> "Floats":
    """Return scores of raw outputs, along the last axis."""
    import numpy as np

    if function == "softmax":
        powers = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True))
    if function == "sigmoid":
        # The plain formula overflows for large negative numbers.
        half = outputs.dtype.type(0.5)
        return np.asarray(half * (1 + np.tanh(half * outputs)))
    return outputs


def cosine(first: "Floats", second: "Floats") -> float:
    """Return how alike two vectors are, -1 to 1."""
    return float(normalised(first) @ normalised(second))


def entities(
    text: str,
    scores: "Floats",
    offsets: Sequence[tuple[int, int]],
    words: Sequence[int | None],
    labels: Sequence[str],
    how: str,
) -> list[dict[str, Any]]:
    """Return the entities of a text in the form of Hugging Face's ``token-classification``.

    ``how``: ``none`` lists tokens; ``simple`` joins neighbours of one entity; ``first``, ``average`` and ``max`` make
    all tokens of a word one before that, as the pipeline of ``transformers`` does. Tokens whose word is None are
    special and are left out, as is the label ``O``.
    """
    tokens = _tokens(scores, offsets, words)
    if how in ("first", "average", "max"):
        tokens = _joined_words(tokens, how)
    found = []
    for place, (start, end, row, _) in enumerate(tokens):
        best = int(row.argmax())
        found.append(_Found(labels[best], float(row[best]), start, end, place))
    found = [one for one in found if one.label != "O"]
    if how == "none":
        return [
            {"entity": one.label, "score": one.score, "index": one.place, "word": text[one.start : one.end],
             "start": one.start, "end": one.end}
            for one in found
        ]  # fmt: skip
    return [_group(text, group) for group in _groups(found)]


class _Found:
    __slots__ = ("begins", "end", "kind", "label", "place", "score", "start")

    def __init__(self, label: str, score: float, start: int, end: int, place: int) -> None:
        prefix, _, rest = label.partition("-")
        self.label = label
        self.begins = prefix == "B" and bool(rest)
        self.kind = rest if prefix in ("B", "I") and rest else label
        self.score, self.start, self.end, self.place = score, start, end, place


def _tokens(scores: "Floats", offsets: Sequence[tuple[int, int]], words: Sequence[int | None]) -> list[Any]:
    """Return begin, end, scores and word of each token that is text."""
    return [
        (*offset, row, word)
        for offset, row, word in zip(offsets, scores, words, strict=True)
        if word is not None and offset[1] > offset[0]
    ]


def _joined_words(tokens: list[Any], how: str) -> list[Any]:
    import numpy as np

    joined: list[list[Any]] = []
    for token in tokens:
        if joined and joined[-1][0][3] == token[3]:
            joined[-1].append(token)
        else:
            joined.append([token])
    out = []
    for word in joined:
        rows = np.stack([token[2] for token in word])
        if how == "first":
            row = rows[0]
        elif how == "average":
            row = rows.mean(axis=0)
        else:
            row = rows[rows.max(axis=1).argmax()]
        out.append((word[0][0], word[-1][1], row, word[0][3]))
    return out


def _groups(found: list[_Found]) -> list[list[_Found]]:
    groups: list[list[_Found]] = []
    for one in found:
        last = groups[-1][-1] if groups else None
        if last is not None and last.place + 1 == one.place and last.kind == one.kind and not one.begins:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _group(text: str, group: list[_Found]) -> dict[str, Any]:
    start, end = group[0].start, group[-1].end
    score = sum(one.score for one in group) / len(group)
    return {"entity_group": group[0].kind, "score": score, "word": text[start:end], "start": start, "end": end}
