"""Windows over what gateways count: two looks at growing totals in, quantiles and shares out.

Totals only grow, so whatever lies between two looks is their difference, and
sums of several gateways are sums of differences. A gateway that starts anew
begins at 0 again: counts that went back are a whole new total. Quantiles are
interpolated within a bucket of ``BOUNDS_S``, so they are off by a quarter of
their value at most.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf
from operator import add, sub

import msgspec

from modelyard.domain.signals import BOUNDS_S, ReleaseCounts, Window

Counts = Sequence[int]
"""A histogram by ``BOUNDS_S``; what is missing at its end is 0."""


class Sums(msgspec.Struct, frozen=True):
    """What happened between two looks."""

    requests: int = 0
    errors: int = 0
    ttft: tuple[int, ...] = ()
    itl: tuple[int, ...] = ()
    latency: tuple[int, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    service_s: float = 0.0


NOTHING = Sums()


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration: the first whose bound is not below it, or the one above all bounds."""
    return bisect_left(BOUNDS_S, seconds)


def went_back(before: ReleaseCounts, after: ReleaseCounts) -> bool:
    """Say whether the totals began anew between two looks."""
    return (
        after.requests < before.requests
        or after.errors < before.errors
        or after.service_s < before.service_s
        or after.prompt_tokens < before.prompt_tokens
        or after.completion_tokens < before.completion_tokens
    )


def increase(before: ReleaseCounts | None, after: ReleaseCounts) -> Sums:
    """Return what one gateway counted between two looks; without the first one, all of it."""
    if before is None or went_back(before, after):
        return Sums(
            after.requests, after.errors, after.ttft, after.itl, after.latency,
            after.prompt_tokens, after.completion_tokens, after.service_s,
        )  # fmt: skip
    return Sums(
        after.requests - before.requests,
        after.errors - before.errors,
        _less(after.ttft, before.ttft),
        _less(after.itl, before.itl),
        _less(after.latency, before.latency),
        after.prompt_tokens - before.prompt_tokens,
        after.completion_tokens - before.completion_tokens,
        after.service_s - before.service_s,
    )


def total(parts: Iterable[Sums]) -> Sums:
    """Return the sum, of several gateways or several releases."""
    whole: Sums | None = None
    for part in parts:
        if whole is None:
            whole = part
            continue
        whole = Sums(
            whole.requests + part.requests,
            whole.errors + part.errors,
            _plus(whole.ttft, part.ttft),
            _plus(whole.itl, part.itl),
            _plus(whole.latency, part.latency),
            whole.prompt_tokens + part.prompt_tokens,
            whole.completion_tokens + part.completion_tokens,
            whole.service_s + part.service_s,
        )
    return whole if whole is not None else NOTHING


def window_of(sums: Sums, seconds: float) -> Window:
    """Return the window of what happened in ``seconds``."""
    return Window(
        seconds=seconds,
        requests=sums.requests,
        errors=sums.errors,
        ttft_p50_s=quantile(sums.ttft, 0.5),
        ttft_p95_s=quantile(sums.ttft, 0.95),
        ttft_p99_s=quantile(sums.ttft, 0.99),
        itl_p95_s=quantile(sums.itl, 0.95),
        latency_p99_s=quantile(sums.latency, 0.99),
        prompt_tokens=sums.prompt_tokens,
        completion_tokens=sums.completion_tokens,
        service_s=sums.service_s,
    )


def quantile(counts: Counts, share: float) -> float | None:
    """Return the duration that ``share`` (0 to 1) of those counted do not exceed; None of nothing.

    Within a bucket they count as evenly spread. Above all bounds the last bound is what can be said.
    """
    wanted = share * sum(counts)
    if not wanted and not any(counts):
        return None
    below = 0
    low = 0.0
    for count, high in zip(counts, (*BOUNDS_S, inf), strict=False):
        if count and below + count >= wanted:
            return low if high == inf else low + (high - low) * max(0.0, wanted - below) / count
        below += count
        low = high
    return BOUNDS_S[-1]


def _less(after: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    # ``map`` ends with the shorter one, which is never ``after``.
    return (*map(sub, after, before), *after[len(before) :])


def _plus(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    return (*map(add, longer, shorter), *longer[len(shorter) :])
