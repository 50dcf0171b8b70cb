"""Rate limits: requests a minute, tokens a minute, requests at once.

Each key and each tenant has one ``Allowance``, and one more for each model that
it has limits of its own for. A request is checked against all of them first and
then taken from all together, at its worst-case cost; ``settle`` gives back what
was not used. Buckets refill continuously, so a
limit of 60 a minute is one a second with a burst of 60 (the "token bucket" of
Turner, 1986), and ``retry-after`` is the true time until there is room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from modelyard.domain.tenants import Rates

REFILL_S = 0.001
CONCURRENCY_RETRY_S = 1.0
"""When to try again after the concurrency limit, as long as no request has shown how long one takes."""
KINDS = ("requests", "tokens", "concurrency")
SHARE_RETRY_S = 1.0
"""When to try again where only this gateway's share is too small; by then it has grown if the limit has room."""
MEAN_WEIGHT = 0.1
"""What one more request counts in the mean time of an account's requests."""


class Refusal(NamedTuple):
    """Why a request may not begin: ``kind`` is ``requests``, ``tokens`` or ``concurrency``.

    ``retry_after_s`` is None when waiting never helps (a request larger than the whole limit).
    """

    kind: str
    limit: int
    retry_after_s: float | None
    place: int = 0
    """Which of the allowances has no room."""


@dataclass(slots=True)
class Allowance:
    """What one key or tenant has left, in all or for one model.

    Levels are as of ``at_s``; an unlimited kind has a limit of None. ``mean_s`` is the smoothed time that a request
    runs, 0 unknown; only learnt where there is a limit to concurrency.
    """

    requests_limit: int | None
    tokens_limit: int | None
    concurrency_limit: int | None
    requests_left: float
    tokens_left: float
    running: int
    at_s: float
    mean_s: float = 0.0
    account: str = ""
    """Its name where gateways divide it, else empty."""
    whole: tuple[int | None, int | None, int | None] | None = None
    """Requests, tokens and concurrency of the whole account, where this is a share of it that may grow soon."""

    @classmethod
    def full(cls, limits: Rates, *, now_s: float) -> "Allowance":
        """Return an allowance nothing was taken from yet."""
        return cls(
            requests_limit=limits.requests_per_minute,
            tokens_limit=limits.tokens_per_minute,
            concurrency_limit=limits.concurrency,
            requests_left=float(limits.requests_per_minute or 0),
            tokens_left=float(limits.tokens_per_minute or 0),
            running=0,
            at_s=now_s,
        )

    def change(self, limits: Rates, *, now_s: float) -> None:
        """Take over new limits; what was used stays used, requests in flight stay counted."""
        self.refill(now_s)
        # Without a limit nothing was ever given back to the bucket: its level says nothing.
        used_requests = self.requests_limit - self.requests_left if self.requests_limit is not None else 0
        used_tokens = self.tokens_limit - self.tokens_left if self.tokens_limit is not None else 0
        self.requests_limit = limits.requests_per_minute
        self.tokens_limit = limits.tokens_per_minute
        self.concurrency_limit = limits.concurrency
        self.requests_left = (limits.requests_per_minute or 0) - used_requests
        self.tokens_left = (limits.tokens_per_minute or 0) - used_tokens

    def resize(self, limits: Rates, *, now_s: float) -> None:
        """Take over another share of the same limits. Room that was used elsewhere must not be used again here.

        So a larger share only fills faster; what is left now does not grow by it.
        """
        self.refill(now_s)
        self.requests_limit = limits.requests_per_minute
        self.tokens_limit = limits.tokens_per_minute
        self.concurrency_limit = limits.concurrency
        self.requests_left = min(self.requests_left, limits.requests_per_minute or 0)
        self.tokens_left = min(self.tokens_left, limits.tokens_per_minute or 0)

    def refill(self, now_s: float) -> None:
        """Bring both buckets to ``now_s``; more often than every millisecond is not worth it."""
        seconds = now_s - self.at_s
        if seconds < REFILL_S:
            return
        minutes = seconds / 60
        self.at_s = now_s
        limit = self.requests_limit
        if limit is not None and self.requests_left < limit:
            level = self.requests_left + limit * minutes
            self.requests_left = level if level < limit else limit
        limit = self.tokens_limit
        if limit is not None and self.tokens_left < limit:
            level = self.tokens_left + limit * minutes
            self.tokens_left = level if level < limit else limit

    def refusal(self, needed_tokens: int, least_tokens: int) -> Refusal | None:
        """Return why a request does not fit now, or None. Call ``refill`` first."""
        limit = self.concurrency_limit
        if limit is not None and self.running >= limit:
            return self._refuse(2, limit, self._free_in_s(limit))
        limit = self.requests_limit
        if limit is not None and self.requests_left < 1:
            return self._refuse(0, limit, _wait_s(1 - self.requests_left, limit))
        limit = self.tokens_limit
        if limit is not None:
            if least_tokens > limit:
                return self._refuse(1, limit, None, least_tokens)
            # The output cap is a worst case that may be larger than the whole limit; a full bucket lets it pass.
            needed = needed_tokens if needed_tokens < limit else limit
            if self.tokens_left < needed:
                return self._refuse(1, limit, _wait_s(needed - self.tokens_left, limit))
        return None

    def _refuse(self, kind: int, limit: int, wait_s: float | None, least: int = 0) -> Refusal:
        if self.whole is not None and (whole := self.whole[kind]) is not None:
            # A share of nothing may be more in a moment; only what exceeds the whole limit can never fit.
            if (wait_s is None and least <= whole) or (not limit and whole):
                wait_s = SHARE_RETRY_S
            limit = whole
        return Refusal(KINDS[kind], limit, wait_s)

    def _free_in_s(self, limit: int) -> float:
        # Of requests that began independently the first ends after a fraction of the mean, one over their number.
        return self.mean_s / limit if self.mean_s and limit else CONCURRENCY_RETRY_S if limit else 60.0


def reserve(allowances: Sequence[Allowance], *, needed_tokens: int, least_tokens: int, now_s: float) -> Refusal | None:
    """Take one request of ``needed_tokens`` from all ``allowances``, or from none and return why.

    ``least_tokens`` is the prompt alone: what is used even if nothing is generated.
    """
    for allowance in allowances:
        if now_s - allowance.at_s >= REFILL_S:
            allowance.refill(now_s)
        at_once, requests, tokens = allowance.concurrency_limit, allowance.requests_limit, allowance.tokens_limit
        if (
            (at_once is not None and allowance.running >= at_once)
            or (requests is not None and allowance.requests_left < 1)
            or (tokens is not None and allowance.tokens_left < needed_tokens)
        ) and (refusal := allowance.refusal(needed_tokens, least_tokens)) is not None:
            # Only what may not fit is looked at more closely: the call costs as much as all the rest here.
            place = next(place for place, one in enumerate(allowances) if one is allowance)
            return refusal._replace(place=place)
    for allowance in allowances:
        allowance.running += 1
        allowance.requests_left -= 1
        allowance.tokens_left -= needed_tokens
    return None


def settle(
    allowances: Sequence[Allowance], *, reserved_tokens: int, used_tokens: int, seconds: float | None = None
) -> None:
    """End a request that was reserved: give back what it did not use. ``seconds``: how long it ran, if that counts."""
    for allowance in allowances:
        allowance.running -= 1
        assert allowance.running >= 0, "settled more often than reserved"
        limit = allowance.tokens_limit
        if limit is not None:
            level = allowance.tokens_left + reserved_tokens - used_tokens
            allowance.tokens_left = level if level < limit else limit
        if seconds is not None and allowance.concurrency_limit is not None:
            mean_s = allowance.mean_s
            allowance.mean_s = mean_s + MEAN_WEIGHT * (seconds - mean_s) if mean_s else seconds


def share(limits: Rates, *, index: int, of: int) -> Rates:
    """Return worker ``index``'s part when ``of`` gateway workers divide ``limits``; all parts sum to the whole."""
    if of == 1:
        return limits
    return Rates(
        requests_per_minute=_part(limits.requests_per_minute, index, of),
        tokens_per_minute=_part(limits.tokens_per_minute, index, of),
        concurrency=_part(limits.concurrency, index, of),
    )


def _part(limit: int | None, index: int, of: int) -> int | None:
    return None if limit is None else limit // of + (1 if index < limit % of else 0)


def _wait_s(missing: float, limit: int) -> float:
    # A limit of 0 never refills: it is how a key is stopped without being revoked.
    return missing * 60 / limit if limit else 60.0
