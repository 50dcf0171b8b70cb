"""How fast an engine is, learned from its own metrics page while it works.

One iteration of a continuous-batching engine takes t = a + b·batch +
c·prefill_tokens + d·kv_tokens seconds. Two looks at the counters of a busy
engine say how long its iterations took in between, so that the four numbers
are fitted by least squares that forgets: yesterday's prompts say little about
today's. None of them may be negative, since nothing makes an iteration
shorter; without that, a quiet hour in which batch and tokens rise and fall
together drives them apart without bound. What a replica can serve follows from
the fit; until it can be trusted, slots and the mean time of a request say it
(``by_slots``).
"""

import math
from collections.abc import Sequence

import msgspec

from modelyard.domain.signals import Window
from modelyard.policy.least_squares import non_negative

KEPT = 0.995
"""Weight of a sample after the next: the last two hundred or so count."""
KEPT_IF_WRONG = 0.9
"""The same while the fit is off to one side for some time: the engine has changed, or shares its accelerator."""
WRONG = 0.2
"""How far off that is, as a logarithm."""
SAMPLES_MIN = 12
"""Samples before the fit is used."""
_TERMS = 4
_VERSION = 1
_SCALE = (1.0, 1.0, 100.0, 10_000.0)
"""Terms are of very different size; scaled to about 1, their numbers can be compared."""
_RIDGE = 1e-4
"""Part of each term's own weight that is added to it: what two terms explain alike is shared between them."""
_CLIP = 2.0
"""A sample counts as no more than so many times what was expected, or the part: a pause between two looks reads like
one very slow iteration."""
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
    iterations: float | None = None
    """Iterations since it started, where the engine counts them."""


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


def request_s(speed: Speed, *, batch: float, prompt_tokens: float, completion_tokens: float) -> float:
    """Return how long an engine takes for each of many such requests, ``batch`` of them at once."""
    held = batch * (prompt_tokens + completion_tokens / 2)
    return speed.prefill_token_s * prompt_tokens + completion_tokens * speed.iteration_s(batch, 0.0, held) / batch


class EngineModel(msgspec.Struct, frozen=True):
    """The fit: ``weights`` are a, b, c, d of scaled terms.

    ``moments`` are the sums that they come from: of products of terms, by rows, and of terms; each sample counts by
    its relative error, and the less the older it is. ``error`` is relative, a mean; ``bias`` the same with its sign.
    """

    weights: tuple[float, ...] = (0.0,) * _TERMS
    moments: tuple[float, ...] = (0.0,) * (_TERMS * (_TERMS + 1))
    samples: int = 0
    error: float = 1.0
    bias: float = 0.0

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


def encode(model: EngineModel) -> bytes:
    """Return a fit for a store."""
    return msgspec.msgpack.encode((_VERSION, model))


def decode(text: bytes) -> EngineModel:
    """Return what ``encode`` made.

    Raises:
        ValueError: it is damaged, or of another release.
    """
    try:
        version, model = msgspec.msgpack.decode(text, type=tuple[int, EngineModel])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not the fit of an engine: {error}") from error
    sizes = len(model.weights), len(model.moments)
    if version != _VERSION or sizes != (_TERMS, _TERMS * (_TERMS + 1)):
        raise ValueError(f"the fit of an engine of version {version}, sizes {sizes}; this release reads {_VERSION}")
    numbers = (*model.weights, *model.moments, model.error, model.bias)
    if model.samples < 0 or not all(map(math.isfinite, numbers)):
        raise ValueError("the fit of an engine has numbers that are none")
    return model


class Capacity(msgspec.Struct, frozen=True):
    """What one replica can serve; ``source`` says how that is known."""

    requests_s: float
    tokens_s: float
    source: str


def between(before: Look, after: Look) -> Sample | None:
    """Return the mean iteration between two looks; None unless the engine was busy at both and wrote tokens.

    Where the engine does not count iterations, each running request got one token in each.
    """
    span_s = after.at_s - before.at_s
    generated = after.generation_tokens - before.generation_tokens
    read = after.prompt_tokens - before.prompt_tokens
    if not _SPAN_S[0] <= span_s <= _SPAN_S[1] or min(before.running, after.running) < 1:
        return None
    running = (before.running + after.running) / 2
    batch = running
    iterations = generated / running
    if before.iterations is not None and after.iterations is not None:
        iterations = after.iterations - before.iterations
        # Tokens say it better than two looks, unless they are counted at a request's end or come several at once.
        if generated > 0 and iterations > 0 and abs(generated / iterations - running) <= 0.5 * running + 1:
            batch = max(generated / iterations, 1.0)
    if iterations < _ITERATIONS_MIN or read < 0 or generated < 0:  # it hardly did anything, or began anew
        return None
    return Sample(span_s / iterations, batch, read / iterations, (before.kv_tokens + after.kv_tokens) / 2)


def learn(model: EngineModel, sample: Sample) -> EngineModel:
    """Return ``model`` with one more sample."""
    if not all(map(math.isfinite, (sample.seconds, sample.batch, sample.prefill_tokens, sample.kv_tokens))):
        return model
    seconds = max(sample.seconds, 1e-6)
    terms = _terms(sample.batch, sample.prefill_tokens, sample.kv_tokens)
    predicted = sum(w * x for w, x in zip(model.weights, terms, strict=True))
    off = math.log(min(max(seconds / predicted, 1e-3), 1e3)) if predicted > 0 else 1.0
    if model.is_known and predicted > 0:
        seconds = min(max(seconds, predicted / _CLIP), predicted * _CLIP)
    # Not only while it is known: who is far off is not, and has most to forget.
    kept = KEPT_IF_WRONG if model.samples >= SAMPLES_MIN and abs(model.bias) > WRONG else KEPT
    row = [term / seconds for term in terms]
    products = [one * other for one in row for other in row]
    moments = tuple(kept * past + new for past, new in zip(model.moments, (*products, *row), strict=True))
    news = 1.0 if model.samples == 0 else 0.1
    return EngineModel(
        weights=_fitted(moments),
        moments=moments,
        samples=model.samples + 1,
        error=model.error + news * (min(abs(off), 1.0) - model.error),
        bias=model.bias + news * (min(max(off, -1.0), 1.0) - model.bias),
    )


def _fitted(moments: Sequence[float]) -> tuple[float, ...]:
    size = _TERMS
    normal = [list(moments[size * row : size * (row + 1)]) for row in range(size)]
    for row in range(size):
        normal[row][row] *= 1.0 + _RIDGE
    return tuple(non_negative(normal, moments[size * size :]))


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
