"""Sizes decided for the same requests: ``python -m bench.autoscale [--seeds 3] [--hours 6] [--forecast] [--json]``.

Compares the production policy with a literal reading of the source's flow ("+1 per loop") on generated bursts and
on public traces, in a queue model of its own (``queue_model.py``): a replica has 8 slots, a request takes 8 s, a load
60 s. ``--forecast`` replays ServeGen's 14 days and a generated office through ``policy/backtest.py`` instead.
"""

import argparse
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from bench import tools
from bench.autoscale import traces
from bench.autoscale.queue_model import Outcome, World, replay
from bench.autoscale.sizers import SIZERS
from modelyard.domain.endpoints import SOURCE, Autoscale, Scaling
from modelyard.policy.backtest import Backtest, backtest
from modelyard.sim.rates import SLOT_S, servegen

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "traces"
WORLD = World()
SPEC = Scaling(min_replicas=1, max_replicas=64, scale_to_zero=True, idle_s=300.0)
Load = Callable[[random.Random], list[float]]


def loads(folder: Path, hours: float) -> dict[str, Load]:
    """Return generators of arrivals by name; the public trace is the same for every seed but thinned by it."""
    return {
        "bursts 0.5 ↔ 12 req/s (generated)": lambda chance: traces.bursts(hours, calm=0.5, storm=12.0, chance=chance),
        "rare visits (generated)": lambda chance: list(traces.poisson(0, hours * 3600, 1 / 420, chance)),
        "steady 6 req/s (generated)": lambda chance: list(traces.poisson(0, hours * 3600, 6.0, chance)),
        "Azure conversations, 1 h, 90 %": lambda chance: [
            at_s for at_s in traces.azure(folder, "conv") if chance.random() < 0.9
        ],
        "Azure code, 1 h, 90 %": lambda chance: [
            at_s for at_s in traces.azure(folder, "code") if chance.random() < 0.9
        ],
    }


def sized(arrivals: list[float]) -> dict[str, Outcome]:
    """Return what each way to decide comes to."""
    until_s = arrivals[-1] + 600 if arrivals else 600.0
    return {kind.name: replay(arrivals, kind(SPEC, SOURCE), WORLD, until_s=until_s) for kind in SIZERS}


def show(name: str, seeds: list[dict[str, Outcome]]) -> None:
    """Print one table: means over the seeds, with the range of what waits."""
    print(f"\n{name}: {mean(next(iter(seed.values())).requests for seed in seeds):,.0f} requests, {len(seeds)} seeds\n")
    print("| decided by | wait > 5 s (range) | GPU-hours | busy | cold starts | largest | changes |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind in SIZERS:
        rows = [seed[kind.name] for seed in seeds]
        late = [row.late_share for row in rows]
        print(
            f"| {kind.name} | {mean(late):.1%} ({min(late):.1%}–{max(late):.1%}) |"
            f" {mean(row.gpu_hours for row in rows):.1f} | {mean(row.utilization for row in rows):.0%} |"
            f" {mean(row.cold_starts for row in rows):.1f} | {max(row.largest for row in rows)} |"
            f" {mean(row.changes for row in rows):.0f} |"
        )


def forecasts(folder: Path, seeds: int) -> dict[str, list[Backtest]]:
    """Return backtests of public rates (each client an endpoint) and of generated offices."""
    found: dict[str, list[Backtest]] = {"ServeGen clients (public, 14 days)": [], "offices (generated, 28 days)": []}
    for client in servegen(folder):
        history = {slot: number for slot, rate in enumerate(client.rates) if (number := round(rate * SLOT_S))}
        if any(slot < 1008 for slot in history) and any(slot >= 1008 for slot in history):
            found["ServeGen clients (public, 14 days)"].append(_backtest(history, 2016))
    for seed in range(10 * seeds):
        rates = traces.office(4, random.Random(seed))
        history = {slot: number for slot, rate in enumerate(rates) if (number := round(rate * SLOT_S))}
        found["offices (generated, 28 days)"].append(_backtest(history, 4032))
    return found


def _backtest(history: dict[int, int], slots: int) -> Backtest:
    return backtest(history, Autoscale(), idle_s=300.0, load_s=WORLD.load_s, first=0, last=slots - 1)


def show_forecasts(found: dict[str, list[Backtest]]) -> None:
    """Print one table: sums over endpoints; precision and recall are means."""
    print("| endpoints | asleep by | cold starts | GPU-hours | foreseen | precision | recall |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, rows in found.items():
        before, after = sum(row.fixed.cold_starts for row in rows), sum(row.forecast.cold_starts for row in rows)
        precision = mean(row.precision for row in rows if row.precision is not None)
        recall = mean(row.recall for row in rows if row.recall is not None)
        print(f"| {len(rows)} {name} | idle time | {before} | {sum(row.fixed.gpu_hours for row in rows):.0f} | | | |")
        print(
            f"| | with the forecast | {after} | {sum(row.forecast.gpu_hours for row in rows):.0f} |"
            f" {1 - after / max(before, 1):.0%} | {precision:.2f} | {recall:.2f} |"
        )


def main() -> None:
    """Parse the command line, replay, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.autoscale", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=6.0, help="of generated arrivals")
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("MODELYARD_TRACES", FOLDER)))
    parser.add_argument("--forecast", action="store_true", help="replay weeks through the forecast instead")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not (options.traces / "azure_llm_2023_conv.csv").is_file():
        raise tools.fail(f"{options.traces} has no traces; name their folder by --traces or MODELYARD_TRACES")
    if options.forecast:
        show_forecasts(forecasts(options.traces, options.seeds))
        return
    results = {}
    for name, load in loads(options.traces, options.hours).items():
        seeds = [sized(load(random.Random(seed))) for seed in range(options.seeds)]
        results[name] = [
            {kind: {"late": one.late_share, "gpu_hours": one.gpu_hours, "cold_starts": one.cold_starts}
             for kind, one in seed.items()}
            for seed in seeds
        ]  # fmt: skip
        if not options.json:
            show(name, seeds)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
