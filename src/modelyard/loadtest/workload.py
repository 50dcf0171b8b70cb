"""What is asked: prompts of a length, answers of a length, or the lines of a file."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from modelyard.domain.lengths import TOKENS_MAX, Lengths

_WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "name",
    "team",
    "minute",
    "idea",
    "body",
    "back",
    "parent",
    "face",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "research",
    "girl",
    "guy",
    "moment",
    "air",
    "teacher",
    "force",
    "order",
    "light",
    "voice",
    "field",
]
"""Short words, which common tokenizers make one token of, each with the blank before it."""
_LINES_MAX = 1_000_000


class Ask(msgspec.Struct, frozen=True):
    """One request: the body's own part, and how long its answer is to be (0: the model decides)."""

    content: Any
    output_tokens: int


class Made(msgspec.Struct, frozen=True):
    """Prompts of words, all different from their first on, behind a shared part."""

    input_tokens: Lengths
    output_tokens: Lengths
    prefix_share: float = 0.0
    """Part of a prompt of mean length that is the same in all."""


def asks_of(made: Made, route: str, *, seed: int) -> Iterator[Ask]:
    """Yield requests without end; of one ``seed`` always the same."""
    generator = random.Random(seed)
    prefix = _text(random.Random(0), round(made.input_tokens.mean * made.prefix_share))
    while True:
        length = max(1, made.input_tokens.draw(generator) - len(prefix.split()))
        text = " ".join(part for part in (prefix, _text(generator, length)) if part)
        output = 0 if route == "embeddings" else made.output_tokens.draw(generator)
        yield Ask(content_of(text, route), output)


def asks_of_file(file: Path, route: str, output_tokens: Lengths | None, *, seed: int) -> Callable[[], Iterator[Ask]]:
    """Return what yields the lines of a JSONL file in an order by ``seed``, again and again.

    A line has ``messages`` (chat), ``prompt`` or ``input``, and may have ``output_tokens`` (or ``max_tokens``).

    Raises:
        ValueError: a line is something else.
        OSError: it cannot be read.
    """
    found: list[Ask] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if number > _LINES_MAX:
                raise ValueError(f"{file} has more than {_LINES_MAX:,} lines")
            found.append(_ask_of_line(line, f"{file}, line {number}", route))
    if not found:
        raise ValueError(f"{file} is empty")

    def asks() -> Iterator[Ask]:
        generator = random.Random(seed)
        while True:
            for one in generator.sample(found, len(found)):
                drawn = one.output_tokens or (output_tokens.draw(generator) if output_tokens else 0)
                yield msgspec.structs.replace(one, output_tokens=drawn)

    return asks


def content_of(text: str, route: str) -> Any:
    """Return ``text`` as the route takes it."""
    return [{"role": "user", "content": text}] if route == "chat" else text


def _ask_of_line(line: bytes, where: str, route: str) -> Ask:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    content = fields.get("messages") if route == "chat" else None
    text = next((fields[name] for name in ("prompt", "input", "text") if isinstance(fields.get(name), str)), None)
    if content is None and text is not None:
        content = content_of(text, route)
    if not content:
        wanted = "'messages' or 'prompt'" if route == "chat" else "'prompt' or 'input'"
        raise ValueError(f"{where} has no {wanted}")
    output = fields.get("output_tokens", fields.get("max_tokens", 0))
    if type(output) is not int or not 0 <= output <= TOKENS_MAX:
        raise ValueError(f"{where}: output_tokens is no number of tokens")
    return Ask(content, output)


def _text(generator: random.Random, words: int) -> str:
    drawn: Sequence[str] = generator.choices(_WORDS, k=words)
    return " ".join(drawn)
