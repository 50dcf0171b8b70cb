"""How fast an engine is, learned from its own metrics page while it works.

One iteration of a continuous-batching engine takes t = a + b·batch +
c·prefill_tokens + d·kv_tokens seconds. Two looks at the counters of a busy
engine say how long its iterations took in between (each running request gets
one token an iteration), so that the four numbers are fitted by recursive least
squares that forgets: yesterday's prompts say little about today's. What a
replica can serve follows from it; until it can be trusted, slots and the mean
time of a request say it (``by_slots``).
"""

import math
from collections.abc import Sequence

import msgspec

from modelyard.domain.signals import Window

FORGETTING = 0.98
"""Weight of a sample after the next: the last fifty or so count."""
SAMPLES_MIN = 12
"""Samples before the fit is used."""
_TERMS = 4
_SCALE = (1.0, 1.0, 100.0, 10_000.0)
"""Terms are of very different size; scaled to about 1, one starting uncertainty serves all of them."""
_UNSURE = 1000.0
_ITERATIONS_MIN = 2.0
_SPAN_S = (0.05, 30.0)
"""Looks closer together count noise, those further apart hide what happened between."""


class Look(msgspec.Struct, frozen=True):
    """One reading of a metrics page. ``at_s`` is monotonic; totals only grow."""

    at_s: float
    running: int
    prompt_tokens: float
    generation_tokens: float
    kv_tokens: float = 0.0


class Sample(msgspec.Struct, frozen=True):
    """One mean iteration between two looks."""

    seconds: float
    batch: float
    prefill_tokens: float
    kv_tokens: float


class Speed(msgspec.Struct, frozen=True):
    """The four numbers, in seconds: for an iteration, and more of it for each running request (those whose prompt is
    read among them), each token of a prompt that it reads, and each token that they hold."""

    step_s: float
    request_s: float = 0.0
    prefill_token_s: float = 0.0
    kv_token_s: float = 0.0

    def iteration_s(self, batch: float, prefill_tokens: float, kv_tokens: float) -> float:
        """Return the seconds of one iteration; never less than a microsecond."""
        seconds = (
            self.step_s + self.request_s * batch + self.prefill_token_s * prefill_tokens + self.kv_token_s * kv_tokens
        )
        return seconds if seconds > 1e-6 else 1e-6


class EngineModel(msgspec.Struct, frozen=True):
    """The fit: ``weights`` are a, b, c, d of scaled terms; ``covariance`` is by rows; ``error`` is relative, a mean."""

    weights: tuple[float, ...] = (0.0,) * _TERMS
    covariance: tuple[float, ...] = tuple(
        _UNSURE if row == column else 0.0 for row in range(_TERMS) for column in range(_TERMS)
    )
    samples: int = 0
    error: float = 1.0

    @property
    def is_known(self) -> bool:
        """Whether there were enough samples, and they agree."""
        return self.samples >= SAMPLES_MIN and self.error < 0.5

    @property
    def speed(self) -> Speed:
        """What the fit says; no term of it makes an iteration shorter."""
        return Speed(*(max(weight, 0.0) / scale for weight, scale in zip(self.weights, _SCALE, strict=True)))

    def iteration_s(self, batch: float, prefill_tokens: float, kv_tokens: float) -> float:
        """Return the seconds of one iteration; never less than a microsecond."""
        return self.speed.iteration_s(batch, prefill_tokens, kv_tokens)


class Capacity(msgspec.Struct, frozen=True):
    """What one replica can serve; ``source`` says how that is known."""

    requests_s: float
    tokens_s: float
    source: str


def between(before: Look, after: Look) -> Sample | None:
    """Return the mean iteration between two looks; None unless the engine was busy at both and wrote tokens."""
    span_s = after.at_s - before.at_s
    generated = after.generation_tokens - before.generation_tokens
    read = after.prompt_tokens - before.prompt_tokens
    if not _SPAN_S[0] <= span_s <= _SPAN_S[1] or min(before.running, after.running) < 1:
        return None
    batch = (before.running + after.running) / 2
    iterations = generated / batch
    if iterations < _ITERATIONS_MIN or read < 0:  # it hardly did anything, or began anew
        return None
    return Sample(span_s / iterations, batch, read / iterations, (before.kv_tokens + after.kv_tokens) / 2)


def learn(model: EngineModel, sample: Sample) -> EngineModel:
    """Return ``model`` with one more sample (recursive least squares with forgetting)."""
    if not all(map(math.isfinite, (sample.seconds, sample.batch, sample.prefill_tokens, sample.kv_tokens))):
        return model
    terms = _terms(sample.batch, sample.prefill_tokens, sample.kv_tokens)
    rows = [model.covariance[_TERMS * row : _TERMS * (row + 1)] for row in range(_TERMS)]
    spread = [sum(p * x for p, x in zip(row, terms, strict=True)) for row in rows]
    gain = [value / (FORGETTING + sum(s * x for s, x in zip(spread, terms, strict=True))) for value in spread]
    predicted = sum(w * x for w, x in zip(model.weights, terms, strict=True))
    missed = sample.seconds - predicted
    if model.is_known and predicted > 0:
        # A pause between two looks reads like one very slow iteration; an engine that really got slower stays so.
        missed = min(missed, predicted)
    # An iteration is never seen to vary in all four ways for ever: without a cap what is not seen would grow for ever.
    covariance = tuple(
        min(max((rows[row][column] - gain[row] * spread[column]) / FORGETTING, -_UNSURE), _UNSURE)
        for row in range(_TERMS)
        for column in range(_TERMS)
    )
    off = min(abs(missed) / max(sample.seconds, 1e-6), 1.0)
    return EngineModel(
        weights=tuple(w + g * missed for w, g in zip(model.weights, gain, strict=True)),
        covariance=covariance,
        samples=model.samples + 1,
        error=off if model.samples == 0 else 0.9 * model.error + 0.1 * off,
    )


def by_model(model: EngineModel, *, batch: int, prompt_tokens: float, completion_tokens: float) -> Capacity | None:
    """Return what a replica serves with a full ``batch`` of such requests; None while the fit is unsure."""
    if not model.is_known or batch < 1 or completion_tokens <= 0:
        return None
    # Of ``batch`` requests one ends every completion_tokens / batch iterations, and the next one's prompt is read then.
    prefill = batch * prompt_tokens / completion_tokens
    kv_tokens = batch * (prompt_tokens + completion_tokens / 2)
    tokens_s = batch / model.iteration_s(batch, prefill, kv_tokens)
    requests_s = tokens_s / completion_tokens
    return Capacity(requests_s, tokens_s, f"its engine's measured speed of {tokens_s:.0f} tokens/s")


def by_slots(slots: int, *, service_s: float, completion_tokens: float = 0.0) -> Capacity | None:
    """Return what ``slots`` requests at once come to, when each takes ``service_s``; None when that is not known."""
    if slots < 1 or not (math.isfinite(service_s) and service_s > 0):
        return None
    requests_s = slots / service_s
    return Capacity(requests_s, requests_s * completion_tokens, f"{slots} slots and {service_s:.2f} s a request")


def capacity_of(model: EngineModel | None, window: Window, *, slots: int, kv_tokens: int) -> Capacity | None:
    """Return what one replica serves of requests like those of ``window``; None when there were none.

    ``slots`` requests at once, or as many as ``kv_tokens`` (0: unknown) hold of them.
    """
    if window.requests == 0:
        return None
    prompt, completion = window.prompt_tokens / window.requests, window.completion_tokens / window.requests
    if model is not None:
        batch = slots
        if kv_tokens:
            batch = max(1, min(batch, int(kv_tokens / max(prompt + completion, 1.0))))
        known = by_model(model, batch=batch, prompt_tokens=prompt, completion_tokens=completion)
        if known is not None:
            return known
    return by_slots(slots, service_s=window.service_s / window.requests, completion_tokens=completion)


def utilization_of(
    running: Sequence[int], *, slots: float, ready: int, capacity: Capacity | None, tokens_s: float | None
) -> float | None:
    """Return how busy engines are: by the slots that they use, or by the tokens they write of those they could.

    ``running`` are the requests on each of those that say; None where none does.
    """
    if not running:
        return None
    share = sum(running) / (len(running) * max(slots, 1.0))
    if capacity is not None and capacity.tokens_s > 0 and tokens_s is not None:
        share = max(share, tokens_s / (capacity.tokens_s * ready))
    return min(share, 1.0)


def _terms(batch: float, prefill_tokens: float, kv_tokens: float) -> tuple[float, ...]:
    return tuple(value / scale for value, scale in zip((1.0, batch, prefill_tokens, kv_tokens), _SCALE, strict=True))
