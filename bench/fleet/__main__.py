"""The scale claims: ``python -m bench.fleet [TABLE …] [--endpoints N] [--hours 24]``.

A fleet in virtual time on the rates of production clients (ServeGen), every decision by the production's policies.
Each table has the baseline that it must beat in its first row. ``--json`` prints all outcomes.
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import msgspec

from bench import tools
from bench.fleet import goals
from bench.fleet.literal import Literal
from bench.fleet.scenarios import SOURCES, best, scaled, steps
from bench.fleet.seats import burden
from bench.packing.__main__ import packers
from bench.packing.__main__ import run as packed
from bench.packing.openb import PUBLISHED, with_cores
from modelyard.domain.endpoints import IdleTime
from modelyard.sim.fleet import Scenario, simulate
from modelyard.sim.fleet.population import populate
from modelyard.sim.fleet.scenario import Faults
from modelyard.sim.fleet.tally import Outcome
from modelyard.sim.rates import RATES_FILE, Client, servegen

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "traces"
CALM = Faults(node_per_day=0.0, engine_per_day=0.0, reclaim_per_day=0.0)


class Bench:
    """Runs scenarios for every seed, and keeps what came out."""

    def __init__(self, folder: Path, clients: list[Client], seeds: int) -> None:
        self.folder = folder
        self.clients = clients
        self.seeds = seeds
        self.found: dict[str, dict[str, list[Outcome]]] = {}

    def run(self, table: str, name: str, scenario: Scenario, sizer: object = None) -> list[Outcome]:
        """Run one scenario."""
        outcomes = []
        for seed in range(self.seeds):
            begun = time.perf_counter()
            outcomes.append(simulate(scenario, self.clients, random.Random(seed), sizer=sizer))
            print(f"<!-- {table}: {name}, seed {seed}: {time.perf_counter() - begun:.0f} s -->", flush=True)
        self.found.setdefault(table, {})[name] = outcomes
        return outcomes


def spread(outcomes: list[Outcome], value: Callable[[Outcome], float], form: str) -> str:
    """Return a mean with its range over the seeds."""
    values = [value(one) for one in outcomes]
    text = format(mean(values), form)
    return text if len(values) == 1 else f"{text} ({min(values):{form}} to {max(values):{form}})"


def strictly(base: Outcome) -> float:
    """Return the GPU-hours of one replica each and never more, and of accelerators for the batches."""
    return base.dedicated_gpu_hours + base.batch_gpu_hours


def show_steps(bench: Bench, endpoints: int, hours: float) -> None:
    """What each measure contributes."""
    first: list[Outcome] = []
    rows = []
    for name, scenario in steps(endpoints, hours):
        found = bench.run("steps", name, scenario)
        first = first or found
        times = [base.gpu_hours / one.gpu_hours for base, one in zip(first, found, strict=True)]
        before = rows[-1][1] if rows else found
        step = mean(one.gpu_hours / prior.gpu_hours for one, prior in zip(found, before, strict=True)) - 1
        rows.append((name, found, times, step))
    print(f"\n## GPU-hours of {hours:g} h, {endpoints:,} endpoints\n")
    fixed = mean(one.dedicated_gpu_hours for one in first)
    print(f"One replica each and never more, whatever is asked, would hold {fixed:,.0f}, without batches.\n")
    print(
        "| | GPU-hours (range) | online | batch | this step | fewer than the first | than one each | online busy |"
        " total busy | late | dropped |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, found, times, step in rows:
        print(
            f"| {name} | {spread(found, lambda one: one.gpu_hours, ',.0f')} |"
            f" {mean(one.online_gpu_hours for one in found):,.0f} | {mean(one.batch_gpu_hours for one in found):,.0f} |"
            f" {step:+.0%} | {mean(times):.1f}x ({min(times):.1f} to {max(times):.1f}) |"
            f" {mean(strictly(base) / one.gpu_hours for base, one in zip(first, found, strict=True)):.1f}x |"
            f" {mean(one.online_busy for one in found):.0%} | {mean(one.total_busy for one in found):.0%} |"
            f" {mean(one.late for one in found):.2%} |"
            f" {mean(one.dropped for one in found):.3%} |"
        )


def show_prewarm(bench: Bench, endpoints: int, hours: float) -> None:
    """What the forecast, and an idle time of the endpoint's own, are worth; all else is as shipped."""
    base = scaled(endpoints, hours)
    off = msgspec.structs.replace(base.measures, prewarm=False)

    def ruled(**changes: object) -> dict[str, object]:
        return {"rules": msgspec.structs.replace(base.rules, **changes)}

    fixed, eager = ruled(idle=IdleTime.FIXED), {"prewarm_cold_cost_s": 2700.0, "prewarm_budget": 8.0}
    rows = [
        (name, bench.run("prewarm", name, msgspec.structs.replace(base, **changes)))
        for name, changes in (
            ("300 s of idle time, no forecast", {**fixed, "measures": off}),
            ("300 s, pre-warmed", fixed),
            ("300 s, pre-warmed at 2,700 s a cold start", ruled(idle=IdleTime.FIXED, **eager)),
            ("idle time by gaps (`learned`)", {**ruled(idle=IdleTime.LEARNED), "measures": off}),
            ("by gaps, and pre-warmed", ruled(idle=IdleTime.LEARNED)),
            ("idle time by price (`priced`)", {**ruled(idle=IdleTime.PRICED), "measures": off}),
            ("as shipped: by price, and pre-warmed", {}),
            ("by price and pre-warmed, at 900 s a cold start", ruled(prewarm_cold_cost_s=900.0)),
            ("the source's numbers, no forecast", {"rules": SOURCES, "measures": off}),
        )
    ]
    without = rows[0][1]
    print(f"\n## Cold starts of {hours:g} h, {endpoints:,} endpoints\n")
    print("| | cold starts | fewer | GPU-hours | more | late |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, found in rows:
        fewer = [1 - one.activations / max(other.activations, 1) for one, other in zip(found, without, strict=True)]
        more = [one.online_gpu_hours / other.online_gpu_hours - 1 for one, other in zip(found, without, strict=True)]
        print(
            f"| {name} | {spread(found, lambda one: one.activations, ',.0f')} | {mean(fewer):.0%}"
            f" ({min(fewer):.0%} to {max(fewer):.0%}) | {spread(found, lambda one: one.online_gpu_hours, ',.0f')} |"
            f" {mean(more):+.1%} ({min(more):+.1%} to {max(more):+.1%}) | {mean(one.late for one in found):.2%} |"
        )


def show_serve(bench: Bench, endpoints: int, hours: float) -> None:
    """How callers fare."""
    base = scaled(endpoints, hours)
    calm, sources = msgspec.structs.replace(base, faults=CALM), msgspec.structs.replace(base, rules=SOURCES)
    rows = [
        ("+1 a loop, the source to the letter", bench.run("serve", "literal", sources, Literal())),
        ("ours, with the source's numbers", bench.run("serve", "sources", sources)),
        ("ours", bench.run("serve", "ours", base)),
        ("ours, engines sleep and move", bench.run("serve", "dense", best(endpoints, hours))),
        ("ours, nothing breaks", bench.run("serve", "calm", calm)),
    ]
    print(f"\n## Callers over {hours:g} h, {endpoints:,} endpoints\n")
    print("| | wait > 5 s | TTFT p50, warm LLM | p99 | dropped | available | GPU-hours |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, found in rows:
        print(
            f"| {name} | {spread(found, lambda one: one.late, '.2%')} |"
            f" {1000 * mean(one.ttft_p50_s for one in found):.0f} ms |"
            f" {spread(found, lambda one: one.ttft_p99_s, '.2f')} s | {spread(found, lambda one: one.dropped, '.4%')} |"
            f" {spread(found, lambda one: one.availability, '.4%')} |"
            f" {mean(one.gpu_hours for one in found):,.0f} |"
        )


def show_batch(bench: Bench, endpoints: int, hours: float) -> None:
    """How busy accelerators get."""
    base = scaled(endpoints, hours)
    rows = []
    for share in (0.0, 0.29, 1.0, 2.0):
        one = msgspec.structs.replace(base, traffic=msgspec.structs.replace(base.traffic, batch_share=share))
        rows.append((f"{share:g}", bench.run("batch", f"{share:g}", one)))
    one = msgspec.structs.replace(base, rules=msgspec.structs.replace(base.rules, batch_scales=True))
    rows.append(("0.29, and `batch_scales`", bench.run("batch", "demand", one)))
    for share in (0.29, 1.0, 1.5):
        dense = best(endpoints, hours)
        dense = msgspec.structs.replace(dense, traffic=msgspec.structs.replace(dense.traffic, batch_share=share))
        rows.append((f"{share:g}, engines sleep and move", bench.run("batch", f"dense {share:g}", dense)))
    print(f"\n## Utilisation over {hours:g} h, {endpoints:,} endpoints\n")
    print("| batch requests for each online one | online | total | of them done on idle replicas | GPU-hours | late |")
    print("|---|---:|---:|---:|---:|---:|")
    for share, found in rows:
        done = [one.batch_done / max(one.batch_requests, 1.0) for one in found]
        print(
            f"| {share} | {spread(found, lambda one: one.online_busy, '.0%')} |"
            f" {spread(found, lambda one: one.total_busy, '.0%')} | {mean(min(one, 1.0) for one in done):.0%} |"
            f" {spread(found, lambda one: one.gpu_hours, ',.0f')} |"
            f" {mean(one.late for one in found):.2%} |"
        )


def show_seats(bench: Bench, endpoints: int, hours: float) -> None:
    """How evenly guests burden the replicas of their host, at ten in the morning of the first day."""
    scenario = scaled(endpoints, hours)
    found = []
    for seed in range(bench.seeds):
        population = populate(scenario, bench.clients, random.Random(seed))
        rate = population.rate(round(scenario.start_day * 144) + 60)
        for at, one in enumerate(population.deployments):
            rates = rate[population.deployment == at].tolist()
            replicas = math.ceil(sum(rates) / one.profile.requests_s / 0.6)
            if one.is_host and replicas > 1:
                found.append((one, replicas, max(rates) / sum(rates), burden(rates, replicas)))
    found.sort(key=lambda row: -row[3].most)
    print(f"\n## Guests on {len(found)} hosts of several replicas, {endpoints:,} endpoints\n")
    print("| the most uneven | guests | replicas | its largest guest | busiest replica, mean = 1 | seats a guest |")
    print("|---|---:|---:|---:|---:|---:|")
    for one, replicas, largest, how in found[:5]:
        print(
            f"| {one.name}, {one.profile.name} | {one.guests} | {replicas} | {largest:.0%} | {how.most:.2f} |"
            f" {how.seats:.2f} |"
        )
    print(f"\nMedian of all hosts: {median(row[3].most for row in found):.2f}.")


def show_packing(bench: Bench, endpoints: int, hours: float) -> None:
    """FGD on a trace of the paper's shape, from ``bench.packing``."""
    trace = with_cores()
    found: dict[str, list[float]] = {}
    for seed in range(bench.seeds):
        for name, packer in packers(trace, seed).items():
            if name in PUBLISHED:
                found.setdefault(name, []).append(100 * packed(trace, packer, demand=1.02, seed=seed)[0])
    print(f"\n## Unallocated of {trace.capacity:,} GPUs at a demand of 102 %\n")
    print("| packer | here | the paper's, ten seeds | points apart |\n|---|---:|---:|---:|")
    for name, values in found.items():
        spread_of = f"({min(values):.2f} to {max(values):.2f})"
        apart = mean(values) - PUBLISHED[name]
        print(f"| {name} | {mean(values):.2f} % {spread_of} | {PUBLISHED[name]} % | {apart:+.2f} |")


def show_goals(bench: Bench, endpoints: int, hours: float) -> None:
    """Every goal in one table."""
    if not (bench.folder / goals.AZURE_FILE).is_file():
        raise tools.fail(f"{bench.folder} has no {goals.AZURE_FILE}; name its folder by --traces or MODELYARD_TRACES")
    found = goals.fleet(bench.run, endpoints, hours) + goals.packing(bench.seeds)
    goals.show(found + goals.requests(bench.folder, bench.seeds, goals.REQUESTS), bench.seeds)


TABLES = {
    "goals": show_goals,
    "packing": show_packing,
    "seats": show_seats,
    "steps": show_steps,
    "prewarm": show_prewarm,
    "serve": show_serve,
    "batch": show_batch,
}


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="all by default")
    parser.add_argument("--endpoints", type=int, help="default: 3000; of the goals alone 300")
    parser.add_argument("--hours", type=float, help="default: 24; of the goals alone 4")
    parser.add_argument("--seeds", type=int, help="default: 3; of the goals alone 2")
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("MODELYARD_TRACES", FOLDER)))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not (options.traces / RATES_FILE).is_file():
        raise tools.fail(f"{options.traces} has no {RATES_FILE}; name its folder by --traces or MODELYARD_TRACES")
    # The goals alone are made for a look of some minutes.
    sizes = (300, 4.0, 2) if options.tables == ["goals"] else (3000, 24.0, 3)
    asked = (options.endpoints, options.hours, options.seeds)
    endpoints, hours, seeds = (default if value is None else value for value, default in zip(asked, sizes, strict=True))
    bench = Bench(options.traces, servegen(options.traces), seeds)
    for name in options.tables or list(TABLES):
        TABLES[name](bench, endpoints, hours)
    if options.json:
        print(json.dumps(msgspec.to_builtins(bench.found)))


if __name__ == "__main__":
    main()
