"""What a batch will take: tokens, money and time, from its text and from what its model did lately.

Only what was seen is used: the model's own answers tell how long they get, what
else they are billed for and how long they take, its replicas how many it gives
at once. Where a model has answered nobody yet, tokens are guessed from the text
and the time is unknown, which is said.
"""

import msgspec

from modelyard.domain.batches import Forecast
from modelyard.domain.usage import Price
from modelyard.policy.pricing import cost, micro_units

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
    bounded: tuple[tuple[int, int], ...] = ()
    """Lines whose bounds are alike, with the most that they may generate together; the other lines say none."""


class Seen(msgspec.Struct, frozen=True):
    """What the model did lately: answers with their mean tokens and units, how long one takes, how many at once."""

    answers: int = 0
    output_tokens: float = 0.0
    seconds: float | None = None
    """Of one answer; None: too few were looked at."""
    slots: int = 0
    lines_ahead: int = 0
    """Lines of older batches that it still has to answer."""
    units: float = 0.0
    """What an answer is billed beside tokens: pairs, images, requests."""


def forecast(work: Work, seen: Seen, price: Price, *, concurrency: int) -> Forecast:
    """Return what ``work`` will take at ``price``, with ``concurrency`` lines under way at most."""
    is_known = seen.answers >= SAMPLES_MIN
    prompt = int(work.characters / CHARS_PER_TOKEN) or work.lines
    output = 0
    if work.generates:
        output = _output(work, seen.output_tokens if is_known else float(OUTPUT_DEFAULT))
    units = micro_units(seen.units * work.lines) if is_known else 0
    # The price of a request is due for each line; the sum below has it once.
    requests = price.request * max(0, work.lines - 1)
    seconds = None
    if is_known and seen.slots and seen.seconds is not None:
        seconds = (work.lines + seen.lines_ahead) * seen.seconds / min(seen.slots, concurrency)
    return Forecast(
        prompt,
        output,
        cost(price, prompt, 0, output, units) + requests,
        seconds,
        _basis(seen, price, is_known=is_known),
        price.batch_micro,
    )


def _output(work: Work, each: float) -> int:
    """Return what all lines will generate, no line more than it may, where answers have ``each`` tokens."""
    unbounded = work.lines - sum(lines for lines, _ in work.bounded)
    output = round(each * unbounded + sum(min(each * lines, most) for lines, most in work.bounded))
    return output if work.output_max is None else min(output, work.output_max)


def _basis(seen: Seen, price: Price, *, is_known: bool) -> str:
    if not is_known:
        left_out = "; what is billed beside tokens is left out" if price.unit else ""
        return f"the text alone: the model has answered {seen.answers} requests lately{left_out}"
    took = f", {seen.seconds:.3g} s each" if seen.seconds is not None else ""
    at_once = f"{seen.slots} at once" if seen.slots else "no replica yet"
    ahead = f", behind {seen.lines_ahead} lines of other batches" if seen.lines_ahead else ""
    return f"its last {seen.answers} answers{took}, {at_once}{ahead}"
