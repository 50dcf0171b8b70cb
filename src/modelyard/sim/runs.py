"""Variants of a world of requests, each with the same seeds: what each came to, and what happened over time.

A variant is a world, its traffic by seed, and what an hour of a replica costs. ``modelyard sim`` makes variants from a
file, and its ``--replay`` from the ledger; both call ``run_all``.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from math import inf

import msgspec

from modelyard.sim.comparison import spread
from modelyard.sim.engine import Engine
from modelyard.sim.report import summary
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.results import Figure, Ran, Results, Tried, present
from modelyard.sim.timeline import Timeline, every_s
from modelyard.sim.world import World
from modelyard.sim.world_spec import WorldSpec

Progress = Callable[[str, int, float], None]
"""Told a variant, its seed, and the share (0 to 1) of its time that has passed."""

GROUPS_MAX = 12
"""Tenants that have figures of their own: a file of requests may have thousands."""
FIGURES = (
    Figure("requests", "Requests", "count"),
    Figure("done", "Answered", "share", "more"),
    Figure("refused", "Refused", "share", "less"),
    Figure("within", "First token in time", "share", "more"),
    Figure("goodput_s", "Requests in time", "rate", "more"),
    Figure("ttft_p50_s", "First token p50", "s", "less"),
    Figure("ttft_p90_s", "First token p90", "s", "less"),
    Figure("ttft_p99_s", "First token p99", "s", "less"),
    Figure("tpot_p50_s", "Each token after p50", "s", "less"),
    Figure("tpot_p99_s", "Each token after p99", "s", "less"),
    Figure("waited_p99_s", "In line p99", "s", "less"),
    Figure("tokens_s", "Tokens written", "rate", "more"),
    Figure("hit_rate", "Prompt tokens cached", "share", "more"),
    Figure("preemptions", "Preemptions", "count", "less"),
    Figure("cold_starts", "Replicas started", "count", "less"),
    Figure("replicas_mean", "Replicas, mean", "count", "less"),
    Figure("replicas_most", "Replicas, most", "count", "less"),
    Figure("busy", "Time in which they compute", "share"),
    Figure("kv", "KV cache held, mean", "share"),
    Figure("gpu_hours", "Accelerator hours", "hours", "less"),
    Figure("usd_per_hour", "Cost an hour", "usd", "less"),
    Figure("usd_per_million", "Cost of 1M tokens written", "usd", "less"),
    Figure("tenants", f"Tenants, the {GROUPS_MAX} with the most requests below", "count"),
)


class Price(msgspec.Struct, frozen=True):
    """What a replica holds and costs."""

    accelerators: int = 1
    usd_per_hour: float = 0.0
    """Of all of them."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A world to try. ``arrivals`` returns the requests of a seed, in order; ``prices`` are of a replica by version."""

    name: str
    spec: WorldSpec
    arrivals: Callable[[int], Sequence[Arrival]]
    prices: Mapping[str, Price] = {}
    slo_s: float = 5.0
    """Seconds to the first token that count as in time."""


def run_all(
    variants: Sequence[Variant], seeds: Sequence[int], *, title: str = "", progress: Progress | None = None
) -> Results:
    """Run every variant with every seed; equal arguments give equal results."""
    assert variants, "there is nothing to run"
    assert seeds, "a run needs a seed"
    tried = tuple(
        Tried(variant.name, tuple(run_one(variant, seed, progress=progress) for seed in seeds)) for variant in variants
    )
    runs = [run.figures for one in tried for run in one.runs]
    return Results(title, "request", (*present(FIGURES, runs), *_extra_figures(runs)), tried)


def run_one(variant: Variant, seed: int, *, progress: Progress | None = None) -> Ran:
    """Run one variant with one seed."""
    arrivals = variant.arrivals(seed)
    last_s = max(arrivals[-1].at_s, 1e-9) if arrivals else 1.0

    def tell(now_s: float) -> None:
        if progress is not None:
            progress(variant.name, seed, min(1.0, now_s / last_s))

    prices = {version_id: price.usd_per_hour for version_id, price in variant.prices.items()}
    timeline = Timeline(every_s(arrivals), prices, tell)
    # Not the numbers that arrivals are drawn with, or who goes where would hang on when they come.
    world = World(variant.spec, random.Random(f"world {seed}"), watch=timeline)
    requests = world.run(arrivals)
    timeline.finish(world, _end_s(requests))
    return Ran(seed, figures_of(variant, world, requests), timeline.series(requests))


def figures_of(variant: Variant, world: World, requests: Sequence[Request]) -> dict[str, float]:
    """Return what a run came to, by the keys of ``FIGURES``; keys with a ``[name]`` are of a tenant or a version."""
    seen = summary(world, requests, slo_s=variant.slo_s)
    end_s = _end_s(requests)
    hours = max(end_s, 1e-9) / 3600
    lived = [
        (one, max(0.0, min(one.gone_s, end_s) - one.began_s) / 3600) for one in (*world.replicas.values(), *world.gone)
    ]
    prices = {one.id: variant.prices.get(one.release.version_id, Price()) for one, _ in lived}
    usd = sum(prices[one.id].usd_per_hour * held for one, held in lived)
    tokens = sum(one.arrival.output_tokens for one in requests if one.done_s < inf)
    number = max(1, seen.requests)
    found = {
        "requests": float(seen.requests),
        "done": seen.done / number,
        "refused": sum(seen.refused.values()) / number,
        "within": seen.within_share,
        "goodput_s": seen.goodput_s,
        "ttft_p50_s": seen.ttft_s.p50,
        "ttft_p90_s": seen.ttft_s.p90,
        "ttft_p99_s": seen.ttft_s.p99,
        "tpot_p50_s": seen.tpot_s.p50,
        "tpot_p99_s": seen.tpot_s.p99,
        "waited_p99_s": seen.waited_s.p99,
        "tokens_s": seen.tokens_s,
        "preemptions": float(seen.preemptions),
        "replicas_mean": sum(held for _, held in lived) / hours,
        "replicas_most": float(_most(world, end_s)),
        "busy": min(1.0, seen.busy_share),
        "kv": _kv_held([(one.engine, held * 3600) for one, held in lived]),
        "gpu_hours": sum(prices[one.id].accelerators * held for one, held in lived),
    }
    if any(one.arrival.blocks for one in requests):
        found["hit_rate"] = seen.hit_rate
    if variant.spec.scaling is not None:
        found["cold_starts"] = float(sum(one.ready_s > one.began_s for one, _ in lived))
    if usd:
        found["usd_per_hour"] = usd / hours
        if tokens:
            found["usd_per_million"] = usd / tokens * 1e6
    return {
        **found,
        **_by("tenant", requests, lambda one: one.arrival.tenant_id, variant.slo_s),
        **_by("version", [one for one in requests if one.version_id], lambda one: one.version_id, variant.slo_s),
    }


def _end_s(requests: Sequence[Request]) -> float:
    return max((min(one.done_s, one.refused_s) for one in requests), default=0.0)


def _kv_held(lived: Sequence[tuple[Engine, float]]) -> float:
    """Return the share of KV caches that was held, over the seconds that each engine lived."""
    held = room = 0.0
    for engine, seconds in lived:
        totals = engine.totals(inf)
        held += totals.kv_tokens / max(totals.iterations, 1.0) * engine.busy_s
        room += seconds * engine.spec.kv_tokens
    return min(1.0, held / max(room, 1e-9))


def _most(world: World, end_s: float) -> int:
    """Return the most replicas that were there at once."""
    changes: list[tuple[float, int]] = []
    for one in (*world.replicas.values(), *world.gone):
        changes += [(one.began_s, 1), (min(one.gone_s, end_s), -1)]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


_EACH = (
    ("share", "Requests of {}", "share", ""),
    ("within", "In time, {}", "share", "more"),
    ("refused", "Refused, {}", "share", "less"),
    ("ttft_p99_s", "First token p99, {}", "s", "less"),
)


def _by(what: str, requests: Sequence[Request], name: Callable[[Request], str], slo_s: float) -> dict[str, float]:
    """Return what each tenant or version came to, where there are several."""
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(name(request), []).append(request)
    found: dict[str, float] = {}
    largest = sorted(groups, key=lambda label: (-len(groups[label]), label))[:GROUPS_MAX]
    if len(groups) > GROUPS_MAX:
        found[f"{what}s"] = float(len(groups))
    for label in sorted(largest) if len(groups) > 1 else ():
        group = groups[label]
        seconds = [one.ttft_s for one in group if one.first_s < inf]
        found[f"{what}[{label}].share"] = len(group) / len(requests)
        found[f"{what}[{label}].within"] = sum(one <= slo_s for one in seconds) / len(group)
        found[f"{what}[{label}].refused"] = sum(bool(one.refusal) for one in group) / len(group)
        found[f"{what}[{label}].ttft_p99_s"] = spread(seconds).p99
    return found


def _extra_figures(runs: Sequence[Mapping[str, float]]) -> list[Figure]:
    """Return the figures of tenants and versions that any run has."""
    labels = dict.fromkeys(key.rpartition(".")[0] for run in runs for key in run if "[" in key)
    return [
        Figure(f"{label}.{name}", text.format(label.partition("[")[2].removesuffix("]")), unit, better)
        for label in labels
        for name, text, unit, better in _EACH
    ]
