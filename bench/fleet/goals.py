"""The goals of the scale claims in one table, each beside the baseline that it must beat, over seeds.

Every row is worked out here and now; nothing is quoted but the paper's own figures.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import msgspec

from bench.fleet.literal import Literal
from bench.fleet.scenarios import NOTHING, SOURCES, best, nodes, scaled
from bench.packing.__main__ import packers
from bench.packing.__main__ import run as packed
from bench.packing.openb import PUBLISHED, with_cores
from bench.sim import admission, fair
from modelyard.domain.endpoints import IdleTime
from modelyard.sim.arrival_files import azure
from modelyard.sim.fleet.scenario import Scenario, Traffic
from modelyard.sim.fleet.tally import Outcome

AZURE_FILE = "azure_llm_2023_conv.csv"
REQUESTS = 2000
MUCH = 1.5
"""Lines of batches for each request, from which on they fill what is idle."""

Run = Callable[[str, str, Scenario, object], list[Outcome]]


class Goal(NamedTuple):
    """One row. ``is_met`` has an entry a seed."""

    name: str
    wanted: str
    baseline: str
    ours: str
    is_met: Sequence[bool]


def shown(values: Sequence[float], form: str) -> str:
    """Return a mean with its range."""
    text = format(mean(values), form)
    return text if len(values) == 1 else f"{text} ({min(values):{form}} to {max(values):{form}})"


def fleet(run: Run, endpoints: int, hours: float) -> list[Goal]:
    """Return the goals of the fleet level."""
    replace = msgspec.structs.replace
    wide = nodes(8 * endpoints / Traffic().endpoints)
    alone = run("goals", "one each", replace(scaled(endpoints, hours, measures=NOTHING), nodes=wide), None)
    ours_scenario = best(endpoints, hours)
    ours = run("goals", "ours", ours_scenario, None)
    plain = scaled(endpoints, hours)
    literal = run("goals", "+1 a loop", replace(plain, rules=SOURCES), Literal())
    off = replace(plain.measures, prewarm=False)
    alike = replace(plain.rules, idle=IdleTime.FIXED)
    fixed = run("goals", "idle time alone", replace(plain, measures=off, rules=alike), None)
    shipped = run("goals", "as shipped", plain, None)
    traffic = replace(ours_scenario.traffic, batch_share=MUCH)
    filled = run("goals", f"{MUCH:g} lines a request", replace(ours_scenario, traffic=traffic), None)
    return [
        *_hours(alone, ours),
        *_busy(fixed, ours, filled),
        *_starts(fixed, shipped, ours),
        *_callers(literal, ours),
    ]


def _hours(alone: list[Outcome], ours: list[Outcome]) -> list[Goal]:
    same = [one.gpu_hours / two.gpu_hours for one, two in zip(alone, ours, strict=True)]
    with_batches = [
        (one.dedicated_gpu_hours + one.batch_gpu_hours) / two.gpu_hours for one, two in zip(alone, ours, strict=True)
    ]
    strict = [one.dedicated_gpu_hours / two.gpu_hours for one, two in zip(alone, ours, strict=True)]
    base = shown([one.gpu_hours for one in alone], ",.0f")
    fixed = shown([one.dedicated_gpu_hours for one in alone], ",.0f")
    own = shown([one.gpu_hours for one in ours], ",.0f")
    return [
        Goal("GPU-hours: dedicated, unquantised, as many as are needed", "20 times fewer", base,
             f"{own}: {shown(same, '.1f')} times", [one >= 20 for one in same]),
        Goal("the same: exactly one each, and the batches' own", "20 times fewer", fixed,
             f"{shown(with_batches, '.1f')} times", [one >= 20 for one in with_batches]),
        Goal("the same: exactly one each, without batches' own", "20 times fewer", fixed,
             f"{shown(strict, '.1f')} times", [one >= 20 for one in strict]),
    ]  # fmt: skip


def _busy(plain: list[Outcome], ours: list[Outcome], filled: list[Outcome]) -> list[Goal]:
    def total(found: list[Outcome]) -> list[float]:
        return [one.total_busy for one in found]

    online = [one.online_busy for one in ours]
    return [
        Goal("utilisation, requests in real time alone", "(reported)", shown([one.online_busy for one in plain], ".0%"),
             shown(online, ".0%"), []),
        Goal("utilisation with batches, 0.29 lines a request", "> 70 %", shown(total(plain), ".0%"),
             shown(total(ours), ".0%"), [one > 0.7 for one in total(ours)]),
        Goal(f"utilisation with batches, {MUCH:g} lines a request", "> 70 %", shown(total(plain), ".0%"),
             shown(total(filled), ".0%"), [one > 0.7 for one in total(filled)]),
    ]  # fmt: skip


def _starts(fixed: list[Outcome], shipped: list[Outcome], ours: list[Outcome]) -> list[Goal]:
    rows = []
    for name, found in (
        ("as shipped", shipped),
        ("engines that sleep, and warm pools", ours),
    ):
        fewer = [1 - b.activations / max(a.activations, 1) for a, b in zip(fixed, found, strict=True)]
        more = [b.online_gpu_hours / a.online_gpu_hours - 1 for a, b in zip(fixed, found, strict=True)]
        rows.append(
            Goal(
                f"endpoint cold starts: {name}",
                "75 % fewer at <= +13 % GPU-hours",
                shown([one.activations for one in fixed], ",.0f"),
                f"{shown(fewer, '.0%')} fewer at {shown(more, '+.1%')}",
                [a >= 0.75 and b <= 0.13 for a, b in zip(fewer, more, strict=True)],
            )
        )
    return rows


def _callers(literal: list[Outcome], ours: list[Outcome]) -> list[Goal]:
    wanted: tuple[tuple[str, str, str, Callable[[Outcome], float], Callable[[float], bool]], ...] = (
        ("requests that wait > 5 s", "< 1 %", ".2%", lambda one: one.late, lambda value: value < 0.01),
        ("first token p99, warm LLM, s", "< 5", ".2f", lambda one: one.ttft_p99_s, lambda value: value < 5),
        ("first token p50, warm LLM, s", "< 0.5", ".3f", lambda one: one.ttft_p50_s, lambda value: value < 0.5),
        ("dropped", "< 0.05 %", ".4%", lambda one: one.dropped, lambda value: value < 0.0005),
        ("answered, with failures", ">= 99.99 %", ".4%", lambda one: one.availability, lambda value: value >= 0.9999),
    )
    return [
        Goal(f"{name} (baseline: +1 a loop)", goal, shown([value(one) for one in literal], form),
             shown([value(one) for one in ours], form), [is_met(value(one)) for one in ours])
        for name, goal, form, value, is_met in wanted
    ]  # fmt: skip


def packing(seeds: int) -> list[Goal]:
    """Return the goal of the packer, on a trace of the paper's shape with its cores."""
    trace = with_cores()
    left: dict[str, list[float]] = {"best fit": [], "modelyard (FGD)": []}
    for seed in range(seeds):
        ways = packers(trace, seed)
        for name, values in left.items():
            values.append(100 * packed(trace, ways[name], demand=1.02, seed=seed)[0])
    paper, ours = PUBLISHED["modelyard (FGD)"], left["modelyard (FGD)"]
    return [
        Goal(
            "GPUs that nobody can use, % (baseline: best fit)",
            f"within 1 point of the paper's {paper:.2f}",
            f"{shown(left['best fit'], '.2f')}, the paper's {PUBLISHED['best fit']:.2f}",
            f"{shown(ours, '.2f')}: {mean(ours) - paper:+.2f}",
            [one <= paper + 1 for one in ours],
        )
    ]


def requests(folder: Path, seeds: int, count: int) -> list[Goal]:
    """Return the goals of the request level."""
    rows = [fair.shares(None, seed) for seed in range(seeds)]
    turns = [fair.shares(fair.takes_turns, seed) for seed in range(seeds)]
    found = [
        Goal(
            "fairness: tokens apart of two tenants (baseline: a request a turn)",
            f"<= {rows[0].bound:,} (VTC)",
            shown([row.apart for row in turns], ",.0f"),
            shown([row.apart for row in rows], ",.0f"),
            [row.apart <= row.bound for row in rows],
        )
    ]
    came = admission.rates(azure(folder / AZURE_FILE), count, 2.9)
    names = ("11 at once (the source's formula)", "KV: prompt + predicted output (ours)")
    all_ways = [admission.ways(came, seed) for seed in range(min(seeds, 1))]
    ways = [[found_ways[name] for name in names] for found_ways in all_ways]
    times = [eleven.span_s / predicted.span_s for eleven, predicted in ways]
    found.append(
        Goal(
            f"throughput of one replica, {count:,} of Azure's requests (baseline: 11 at once)",
            "1.8 times, no preemption",
            shown([eleven.span_s for eleven, _ in ways], ",.0f") + " s",
            f"{shown([one.span_s for _, one in ways], ',.0f')} s: {shown(times, '.2f')} times",
            [one >= 1.8 and not ours.preemptions for one, (_, ours) in zip(times, ways, strict=True)],
        )
    )
    return found


def show(goals: Sequence[Goal], seeds: int) -> None:
    """Print the table."""
    print(f"\n## Goals, {seeds} seeds: mean (least to most)\n")
    print("| goal | wanted | baseline | ours | reached |\n|---|---|---:|---:|---|")
    for one in goals:
        met = sum(one.is_met)
        said = (
            ""
            if not one.is_met
            else "yes"
            if met == len(one.is_met)
            else f"{met} of {len(one.is_met)}"
            if met
            else "no"
        )
        print(f"| {one.name} | {one.wanted} | {one.baseline} | {one.ours} | {said} |")
