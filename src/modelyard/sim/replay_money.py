"""What was recorded of an endpoint: what callers saw, what its replicas cost, what its requests brought."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from modelyard.domain.books import ReplicaLife
from modelyard.domain.prices import ANY_MODEL, PriceEntry
from modelyard.policy.pricelist import best
from modelyard.policy.pricing import batch_price, cost, micro_units
from modelyard.sim.comparison import spread
from modelyard.sim.recorded import Asked, Stretch

LATE_S = 5.0
"""Whoever waits longer for a first token waits too long (the source's figure)."""


UNSEEN_S = 150.0
"""So long nobody may have seen a replica that still is there."""


class PriceList(msgspec.Struct, frozen=True, kw_only=True):
    """What requests cost. ``entries``: configured ones first; ``labels`` are of versions by their ids."""

    entries: tuple[PriceEntry, ...]
    factor_micro: int
    labels: Mapping[str, str] = {}

    def cost(self, asked: Asked, others: Sequence[PriceEntry]) -> int:
        """Return nano-dollars of a request with ``others`` instead of what prices the same.

        By the entry that was in force when it came; one that ``others`` do not reach brings what was billed.
        """
        entry = best(
            self._with(others),
            tenant_id=asked.tenant_id,
            model=asked.model,
            version=self.labels.get(asked.version_id, ""),
            now_unix_s=asked.at_s,
        )
        if entry is None or entry not in others or not asked.is_charged:
            return asked.cost_nanousd
        price = batch_price(entry.price, self.factor_micro) if asked.is_batch else entry.price
        return cost(price, asked.prompt_tokens, asked.cached_tokens, asked.completion_tokens, micro_units(asked.units))

    def _with(self, others: Sequence[PriceEntry]) -> Sequence[PriceEntry]:
        if any(one.model == ANY_MODEL for one in others):
            return others  # one for all models is then the only one of all
        subjects = {one.subject for one in others}
        return [*(one for one in self.entries if one.subject not in subjects), *others]


class Held(msgspec.Struct, frozen=True):
    """What replicas held over some time: hours of them, of accelerators, and nano-dollars; how many were started."""

    replica_hours: float = 0.0
    gpu_hours: float = 0.0
    nanousd: int = 0
    started: int = 0


def held(lives: Iterable[ReplicaLife], replayed: Sequence[Stretch], prices: Mapping[str, int]) -> Held:
    """Return what ``lives`` held in these stretches; ``prices`` of kinds, where they are others than they were."""
    hours = gpu_hours = 0.0
    nanousd, started = 0, 0
    last = replayed[-1].until
    for life in lives:
        # One that was seen a moment ago is there still: it is written down once a minute.
        until = last if last - life.seen_at <= UNSEEN_S else life.seen_at
        until = until if life.ended_at is None else life.ended_at
        its = 0.0
        for one in replayed:
            its += max(0.0, min(until, one.until) - max(life.started_at, one.since)) / 3600
            started += one.since <= life.started_at < one.until
        hours += its
        gpu_hours += its * life.accelerators
        hourly = prices[life.accelerator] * life.accelerators if life.accelerator in prices else life.hourly_nanousd
        nanousd += round(its * hourly)
    return Held(hours, gpu_hours, nanousd, started)


def figures_of(requests: Sequence[Asked], nanousd: int, held: Held | None) -> dict[str, float]:
    """Return the figures of what was recorded of ``requests``, those that are replayed; ``nanousd`` is of all rows."""
    ttft_s = [one.ttft_s for one in requests if one.ttft_s is not None]
    latency_s = [one.latency_s for one in requests if one.is_ok]
    first, whole = spread(ttft_s), spread(latency_s)
    found = {
        "requests": float(len(requests)),
        "prompt_tokens": float(sum(one.prompt_tokens for one in requests)),
        "written_tokens": float(sum(one.completion_tokens for one in requests)),
        "revenue_usd": nanousd / 1e9,
        "hit_rate": sum(one.cached_tokens for one in requests) / max(1, sum(one.prompt_tokens for one in requests)),
    }
    if latency_s:
        found |= {"latency_p50_s": whole.p50, "latency_p99_s": whole.p99}
    if ttft_s:
        found |= {
            "ttft_p50_s": first.p50,
            "ttft_p99_s": first.p99,
            "late": sum(one > LATE_S for one in ttft_s) / len(ttft_s),
        }
    if held is not None:
        tokens = sum(one.prompt_tokens + one.completion_tokens for one in requests)
        found |= money(held.nanousd, nanousd, tokens)
        found |= {
            "cold_starts": float(held.started),
            "replica_hours": held.replica_hours,
            "gpu_hours": held.gpu_hours,
        }
    return found


def money(spent_nanousd: float, earned_nanousd: float, tokens: int) -> dict[str, float]:
    """Return what is spent and what is left."""
    found = {"gpu_usd": spent_nanousd / 1e9, "margin_usd": (earned_nanousd - spent_nanousd) / 1e9}
    if spent_nanousd and tokens:
        found["usd_per_million"] = spent_nanousd / 1e9 / tokens * 1e6
    return found
