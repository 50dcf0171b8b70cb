"""The ledger's own traffic again, as it was and with something changed, beside what was recorded.

``recorded.py`` makes arrivals of rows, ``replay_setup.py`` a world of an
endpoint's settings, ``replay_money.py`` says what was. The first variant is
the endpoint *as is*: how far it is from what was *recorded* says how far the
others can be trusted.
"""

import random
from collections.abc import Callable, Sequence
from math import inf

import msgspec

from modelyard.domain.books import ReplicaLife
from modelyard.sim.comparison import spread
from modelyard.sim.recorded import Asked, Stretch, Traffic, length_s, traffic
from modelyard.sim.replay_money import LATE_S, Held, PriceList, figures_of, held, money
from modelyard.sim.replay_setup import Change, Setup, changed, world_of
from modelyard.sim.requests import Request
from modelyard.sim.results import Column, Figure, Ran, Results, Tried, present
from modelyard.sim.timeline import Timeline, every_s
from modelyard.sim.world import World

AS_IS, RECORDED = "as is", "recorded"
FAR = 0.2
"""A replay that is off by more than this share of what was recorded is warned of."""
LOST = 0.001
"""... or where more than this share is refused that was answered: the ledger has those that an engine got."""
_FAR_S = 0.05
"""... unless it is less than this: what a gateway and a network take is not simulated."""
_FAR_H = 0.1
"""The same for hours of replicas: a look more or less, and a start."""
FIGURES = (
    Figure("requests", "Requests", "count"),
    Figure("prompt_tokens", "Prompt tokens", "count"),
    Figure("written_tokens", "Tokens written", "count"),
    Figure("refused", "Refused", "count", "less"),
    Figure("ttft_p50_s", "First token p50", "s", "less"),
    Figure("ttft_p99_s", "First token p99", "s", "less"),
    Figure("latency_p50_s", "Whole answer p50", "s", "less"),
    Figure("latency_p99_s", "Whole answer p99", "s", "less"),
    Figure("late", "First token after 5 s", "share", "less"),
    Figure("hit_rate", "Prompt tokens cached", "share", "more"),
    Figure("cold_starts", "Replicas started", "count", "less"),
    Figure("replica_hours", "Replica hours", "hours", "less"),
    Figure("gpu_hours", "Accelerator hours", "hours", "less"),
    Figure("gpu_usd", "Accelerators cost", "usd", "less"),
    Figure("revenue_usd", "Requests bring", "usd", "more"),
    Figure("margin_usd", "Left over", "usd", "more"),
    Figure("usd_per_million", "Cost of 1M tokens", "usd", "less"),
    Figure("busy", "Time in which they compute", "share"),
)
_SAME = ("ttft_p50_s", "ttft_p99_s", "latency_p50_s", "latency_p99_s")
_SUMS = (
    "requests", "prompt_tokens", "written_tokens", "refused", "cold_starts", "replica_hours", "gpu_hours", "gpu_usd",
    "revenue_usd", "margin_usd",
)  # fmt: skip
Progress = Callable[[str, int, float], None]


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an endpoint: rows in order of their arrival, and replicas that lived (None: not known)."""

    asked: tuple[Asked, ...]
    replayed: tuple[Stretch, ...]
    prices: PriceList
    lives: tuple[ReplicaLife, ...] | None = None
    busy: float | None = None
    """Share of the time of its replicas in which they had a request, None where that is not known."""

    @property
    def requests(self) -> tuple[Asked, ...]:
        """Those that can be replayed."""
        return tuple(one for one in self.asked if one.is_replayable)


def replay(
    setup: Setup,
    ledger: Ledger,
    changes: Sequence[Change],
    *,
    seeds: Sequence[int] = (1,),
    title: str = "",
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Results:
    """Return the replay as it is, what was recorded, and each change.

    Raises:
        SettingError: a change cannot be tried.
    """
    setups = [(change, changed(setup, change)) for change in (Change(name=AS_IS), *changes)]
    recorded = Tried(RECORDED, tuple(Ran(seed, recorded_figures(ledger), _no_series()) for seed in seeds))
    as_is, *tried = (
        Tried(change.name, tuple(run(its, ledger, change, seed, progress) for seed in seeds)) for change, its in setups
    )
    return _results((as_is, recorded, *tried), title, (*notes, *far(as_is, recorded)))


def recorded_only(ledger: Ledger, changes: Sequence[Change], *, title: str = "", notes: Sequence[str] = ()) -> Results:
    """Return what was recorded, and the same with other prices: exact, without a simulation."""
    assert all(change.is_price_only for change in changes), "what callers see would change, too"
    tried = [Tried(RECORDED, (Ran(0, recorded_figures(ledger), _no_series()),))]
    tried += [Tried(change.name, (Ran(0, recorded_figures(ledger, change), _no_series()),)) for change in changes]
    exact = "Only prices change: nothing was simulated, the ledger's rows were priced again."
    return _results(tried, title, (*notes, exact))


def _results(tried: Sequence[Tried], title: str, notes: Sequence[str]) -> Results:
    figures = [
        {name: value for name, value in one.figures.items() if value or name != "hit_rate"}
        for each in tried
        for one in each.runs
    ]
    return Results(title, "request", present(FIGURES, figures), tuple(tried), tuple(notes))


def total(found: Sequence[Results], *, title: str) -> Results:
    """Return what several endpoints come to together, variant by variant; waits have no sum, but their shares do."""
    tried = []
    for same in zip(*(one.tried for one in found), strict=True):
        runs = []
        for ran in zip(*(one.runs for one in same), strict=True):
            figures = [one.figures for one in ran]
            sums = {
                key: sum(one.get(key, 0.0) for one in figures) for key in _SUMS if any(key in one for one in figures)
            }
            if seen := sum(one["requests"] for one in figures if "late" in one):
                sums["late"] = sum(one["late"] * one["requests"] for one in figures if "late" in one) / seen
            tokens = sums.get("prompt_tokens", 0.0) + sums.get("written_tokens", 0.0)
            if tokens and sums.get("gpu_usd"):
                sums["usd_per_million"] = sums["gpu_usd"] / tokens * 1e6
            runs.append(Ran(ran[0].seed, sums, _no_series()))
        tried.append(Tried(same[0].name, tuple(runs)))
    return _results(tried, title, ())


def recorded_figures(ledger: Ledger, change: Change | None = None) -> dict[str, float]:
    """Return what was recorded, with the prices of ``change``."""
    spent = held(ledger.lives, ledger.replayed, change.prices if change else {}) if ledger.lives is not None else None
    found = figures_of(ledger.requests, sum(costs_of(ledger, change)), spent)
    return found if ledger.busy is None else {**found, "busy": ledger.busy}


def costs_of(ledger: Ledger, change: Change | None = None) -> list[int]:
    """Return what each row brings: as it was billed, or by the prices of ``change`` where it has some."""
    if change is None or not change.token_prices:
        return [one.cost_nanousd for one in ledger.asked]
    return [ledger.prices.cost(one, change.token_prices) for one in ledger.asked]


def run(setup: Setup, ledger: Ledger, change: Change, seed: int, progress: Progress | None = None) -> Ran:
    """Replay a ledger's requests on ``setup``; equal arguments give equal results."""
    requests, window_s = ledger.requests, length_s(ledger.replayed)
    came = traffic(
        requests,
        ledger.replayed,
        terms=setup.terms,
        factor=change.traffic,
        seed=seed,
        is_sticky=setup.is_sticky,
        block_tokens=setup.block_tokens,
    )

    def tell(now_s: float) -> None:
        if progress is not None:
            progress(change.name, seed, min(1.0, now_s / window_s))

    prices = {one.version_id: setup.replica_nanousd / 1e9 for one in setup.releases}
    timeline = Timeline(every_s(came.arrivals), prices, tell)
    world = World(world_of(setup), random.Random(seed), watch=timeline)
    world.stay(window_s)
    ended = world.run(came.arrivals)
    figures = _figures(setup, ledger, came, ended, world, costs_of(ledger, change), change.traffic)
    return Ran(seed, figures, timeline.series(ended))


def _figures(
    setup: Setup,
    ledger: Ledger,
    came: Traffic,
    ended: Sequence[Request],
    world: World,
    costs: Sequence[int],
    factor: float,
) -> dict[str, float]:
    requests = ledger.requests
    own = [cost for one, cost in zip(ledger.asked, costs, strict=True) if one.is_replayable]
    # What is not replayed (pictures, what counts no tokens) brings what it brought.
    others = (sum(costs) - sum(own)) * factor
    done = [(requests[place], one) for place, one in zip(came.places, ended, strict=True) if one.done_s < inf]
    earned = others + sum(own[place] for place, one in zip(came.places, ended, strict=True) if one.done_s < inf)
    seen = [one.ttft_s for asked, one in done if asked.ttft_s is not None] or [one.ttft_s for _, one in done]
    first, whole = spread(seen), spread(one.done_s - one.arrival.at_s for asked, one in done if asked.is_ok)
    spent, busy = _held(world, length_s(ledger.replayed), setup)
    written = sum(asked.completion_tokens for asked, _ in done)
    read = sum(one.arrival.prompt_tokens for _, one in done)
    found = {
        "requests": float(len(ended)),
        "prompt_tokens": float(read),
        "written_tokens": float(written),
        "refused": float(sum(bool(one.refusal) for one in ended)),
        "hit_rate": sum(one.cached_tokens for _, one in done) / max(1, read),
        "cold_starts": float(spent.started),
        "replica_hours": spent.replica_hours,
        "revenue_usd": earned / 1e9,
        "busy": busy,
    }
    if done:
        found |= {
            "ttft_p50_s": first.p50,
            "ttft_p99_s": first.p99,
            "latency_p50_s": whole.p50,
            "latency_p99_s": whole.p99,
            "late": sum(one > LATE_S for one in seen) / len(seen),
        }
    if setup.kind:
        found |= {"gpu_hours": spent.gpu_hours, **money(spent.nanousd, earned, read + written)}
    return found


def _held(world: World, window_s: float, setup: Setup) -> tuple[Held, float]:
    """Return what replicas held in the window, and the share of it in which they computed."""
    replicas = [*world.replicas.values(), *world.gone]
    hours = sum(max(0.0, min(one.gone_s, window_s) - min(one.began_s, window_s)) for one in replicas) / 3600
    started = sum(one.ready_s > one.began_s for one in replicas)
    busy_h = sum(one.engine.busy_by(world.events.now_s) for one in replicas) / 3600
    spent = Held(hours, hours * setup.accelerators, round(hours * setup.replica_nanousd), started)
    return spent, min(1.0, busy_h / hours) if hours else 0.0


def far(as_is: Tried, recorded: Tried) -> list[str]:
    """Return a warning where the replay is far from what was recorded."""
    labels = {figure.key: figure.label.lower() for figure in FIGURES}
    apart = []
    for key in _SAME:
        ours, real = as_is.mean(key), recorded.mean(key)
        if ours is None or not real or abs(ours - real) <= max(FAR * real, _FAR_S):
            continue
        apart.append(f"{labels[key]} {ours:.3g} s instead of {real:.3g} s")
    hours, real = as_is.mean("replica_hours") or 0.0, recorded.mean("replica_hours")
    if real is not None and abs(hours - real) > max(FAR * real, _FAR_H):
        apart.append(f"replica hours {hours:.3g} instead of {real:.3g}")
    refused = as_is.mean("refused") or 0.0
    if refused > LOST * (as_is.mean("requests") or 1.0):
        apart.append(f"{refused:,.0f} requests refused that were answered")
    if not apart:
        return [f"As it is, the replay is within {FAR:.0%} of what was recorded."]
    return [
        f"Warning: as it is, the replay is more than {FAR:.0%} off what was recorded: {', '.join(apart)}. "
        "Trust the order of the variants more than their figures."
    ]


def _no_series() -> dict[str, Column]:
    return {"hours": []}
