"""The four numbers of an engine's speed, from what a real engine was seen to do.

A run says when each request came, began and ended, not how long iterations
took. But what an engine does in between is known from a replay: so many
iterations, of such batches, with so many tokens read and held. The times of
the requests are linear in the four numbers then, which least squares finds;
with better numbers the replay changes a little, and so on, until nothing does.
No number is ever below zero: nothing makes an iteration shorter.
"""

from collections.abc import Callable, Iterable, Sequence
from math import log
from typing import NamedTuple

import msgspec

from modelyard.policy.engine_model import Speed
from modelyard.policy.least_squares import non_negative
from modelyard.sim.comparison import Replayed, compare, replay, spec_of
from modelyard.sim.tasks import Totals
from modelyard.sim.traces import Measured, Recorded, Served

ROUNDS = 12
_FIRST_GUESS = (0.02, 1e-4, 1e-4, 1e-8)
_PARTS = (1.0, 0.5, 0.25, 0.1, 0.03)
"""How much of a step of least squares is tried."""
_FINE = (0.2, 0.05, 0.02)
"""By what share each number is tried larger and smaller at the end."""
_BETTER = 1 - 1e-3
_TOGETHER = 20.0
"""What an error of all requests together (a mean, a percentile) counts, beside those of each."""


class Observation(msgspec.Struct, frozen=True):
    """Something that took ``seconds``: ``terms`` are what each number counts in it. ``weight`` is its say."""

    terms: tuple[float, ...]
    seconds: float
    weight: float


class _Try(NamedTuple):
    speed: Speed
    loss: float
    replayed: list[Replayed]


_Tried = Callable[[Sequence[float]], _Try]


def fit(run: Recorded, *, learn_from: Callable[[int], bool], is_fine: bool = True) -> Speed:
    """Return the speed that explains best the times of those requests whose place ``learn_from`` takes.

    All requests of the run are sent, since the others were there, too; nothing of their times is looked at. Least
    squares lead most of the way; ``is_fine``: each number is then tried a little larger and smaller as long as that
    helps, because where an engine is full a small change of speed moves whole requests about.
    """

    def tried(numbers: Sequence[float]) -> _Try:
        speed = Speed(*numbers)
        replayed = replay(spec_of(run, speed), run.served)
        return _Try(speed, _loss(replayed, run.served, learn_from), replayed)

    best = tried(_FIRST_GUESS)
    for _ in range(ROUNDS):
        seen = [
            observation
            for place, (ours, real) in enumerate(zip(best.replayed, run.served, strict=True))
            if learn_from(place)
            for observation in _observed(ours, real)
        ]
        better = _towards(least_squares(seen), best, tried)
        if better is None:
            break
        best = better
    for share in _FINE if is_fine else ():
        while (better := _around(best, share, tried)) is not None:
            best = better
    return best.speed


def fit_measured(rows: Sequence[Measured]) -> Speed:
    """Return the speed that explains best what was measured of one model on one kind of accelerator."""
    seen = []
    for row in rows:
        prompts = row.batch * row.prompt_tokens
        held = row.batch * (row.prompt_tokens + row.output_tokens / 2)
        seen.append(Observation((1.0, row.batch, prompts, prompts), row.prompt_s, 1.0 / row.prompt_s))
        seen.append(Observation((1.0, row.batch, 0.0, held), row.token_s, 1.0 / row.token_s))
    return Speed(*least_squares(seen))


def least_squares(seen: Sequence[Observation]) -> list[float]:
    """Return the numbers, none below zero, whose sums come closest to the seconds that were seen."""
    count = len(seen[0].terms)
    normal = [[0.0] * count for _ in range(count)]
    right = [0.0] * count
    for one in seen:
        row = [term * one.weight for term in one.terms]
        seconds = one.seconds * one.weight
        for index, value in enumerate(row):
            right[index] += value * seconds
            line = normal[index]
            for other, factor in enumerate(row):
                line[other] += value * factor
    return non_negative(normal, right)


def _observed(ours: Replayed, real: Served) -> Iterable[Observation]:
    if not real.has_first:
        yield _between(ours.come, ours.last, real.last_s - real.come_s)
        return
    yield _between(ours.come, ours.first, real.ttft_s)
    if real.output_tokens > 1:
        yield _between(ours.first, ours.last, real.last_s - real.first_s)


def _between(before: Totals, after: Totals, seconds: float) -> Observation:
    terms = tuple(late - early for early, late in zip(before.terms, after.terms, strict=True))
    return Observation(terms, seconds, 1.0 / max(seconds, 1e-3))


def _towards(target: Sequence[float], best: _Try, tried: _Tried) -> _Try | None:
    """Return a better try on the way to ``target``, None where there is none."""
    old = msgspec.structs.astuple(best.speed)
    # Better numbers change who runs beside whom, so that the whole step may lead too far.
    for part in _PARTS:
        one = tried([was + part * (new - was) for was, new in zip(old, target, strict=True)])
        if one.loss < best.loss * _BETTER:
            return one
    return None


def _around(best: _Try, share: float, tried: _Tried) -> _Try | None:
    """Return a better try with one number changed by ``share``, None where there is none."""
    numbers = list(msgspec.structs.astuple(best.speed))
    for place, number in enumerate(numbers):
        for factor in (1 + share, 1 / (1 + share)) if number else ():
            one = tried([*numbers[:place], number * factor, *numbers[place + 1 :]])
            if one.loss < best.loss * _BETTER:
                return one
    return None


def _loss(replayed: Sequence[Replayed], served: Sequence[Served], learn_from: Callable[[int], bool]) -> float:
    """Return how far a replay is off: each request by itself, and what callers saw of all of them together."""
    ratios = [
        log(max(found, 1e-6) / wanted)
        for place, (ours, real) in enumerate(zip(replayed, served, strict=True))
        if learn_from(place)
        for found, wanted in _spans(ours, real)
        if wanted > 0
    ]
    together = compare(replayed, served, judged=learn_from).errors.values()
    alone = sum(ratio * ratio for ratio in ratios) / max(1, len(ratios))
    return alone + _TOGETHER * sum(error * error for error in together) / max(1, len(together))


def _spans(ours: Replayed, real: Served) -> tuple[tuple[float, float], ...]:
    """Return pairs of the replay's seconds and the real ones, as far as those are known."""
    task = ours.task
    if not real.has_first:
        return ((task.done_s - task.come_s, real.last_s - real.come_s),)
    return (task.first_s - task.come_s, real.ttft_s), (task.done_s - task.first_s, real.last_s - real.first_s)
