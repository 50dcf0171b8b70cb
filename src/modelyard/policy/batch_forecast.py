"""What a batch will take: tokens, money and time, from its text and from what its model did lately.

Only what was seen is used: the model's own answers tell how long they get and
how long they take, its replicas how many it gives at once. Where a model has
answered nobody yet, tokens are guessed from the text and the time is unknown,
which is said.
"""

import msgspec

from modelyard.domain.batches import Forecast
from modelyard.domain.usage import Price
from modelyard.policy.pricing import cost

CHARS_PER_TOKEN = 4.0
OUTPUT_DEFAULT = 256
"""Tokens of an answer of which nothing is known."""
SAMPLES_MIN = 5
"""Answers from which on a model is known."""


class Work(msgspec.Struct, frozen=True):
    """What a batch asks for: lines, characters of their text, and the most that all may generate, if each says so."""

    lines: int
    characters: int
    output_max: int | None
    generates: bool = True
    """Whether answers have tokens of their own; those of embeddings have none."""


class Seen(msgspec.Struct, frozen=True):
    """What the model did lately: answers with their mean tokens and seconds, and how many it can give at once."""

    answers: int = 0
    output_tokens: float = 0.0
    seconds: float = 0.0
    slots: int = 0
    lines_ahead: int = 0
    """Lines of older batches that it still has to answer."""


def forecast(work: Work, seen: Seen, price: Price, *, concurrency: int) -> Forecast:
    """Return what ``work`` will take at ``price``, with ``concurrency`` lines under way at most."""
    is_known = seen.answers >= SAMPLES_MIN
    prompt = int(work.characters / CHARS_PER_TOKEN) or work.lines
    output = 0
    if work.generates:
        each = seen.output_tokens if is_known else float(OUTPUT_DEFAULT)
        output = round(each * work.lines)
        if work.output_max is not None:
            output = min(output, work.output_max)
    seconds = None
    if is_known and seen.slots:
        seconds = (work.lines + seen.lines_ahead) * seen.seconds / min(seen.slots, concurrency)
    return Forecast(prompt, output, cost(price, prompt, 0, output), seconds, _basis(seen, is_known=is_known))


def _basis(seen: Seen, *, is_known: bool) -> str:
    if not is_known:
        return f"the text alone: the model has answered {seen.answers} requests lately"
    at_once = f"{seen.slots} at once" if seen.slots else "no replica yet"
    ahead = f", behind {seen.lines_ahead} lines of other batches" if seen.lines_ahead else ""
    return f"its last {seen.answers} answers, {seen.seconds:.3g} s each, {at_once}{ahead}"
