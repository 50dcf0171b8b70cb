"""Settings tuned on training days: ``python -m bench.fleet.search [--endpoints 600] [--candidates 16] [--hours 3]``.

Random candidates, halved (``modelyard/sim/fleet/search.py``), then the best on held-out days beside what is shipped.
"""

import argparse
import os
import random
from pathlib import Path
from statistics import mean

from bench import tools
from bench.fleet.__main__ import FOLDER
from bench.fleet.scenarios import scaled
from modelyard.sim.fleet import Scenario, simulate
from modelyard.sim.fleet.search import SPACE, Days, Value, Verdict, drawn, halved, judged
from modelyard.sim.fleet.tally import Outcome
from modelyard.sim.rates import RATES_FILE, servegen

FEW: tuple[dict[str, Value], ...] = (
    {"idle": "learned"},
    {"idle": "learned", "down_utilization": 60.0, "down_utilization_s": 300.0},
)
"""Settings that candidates which won have in common, judged alone: few are easier to explain than all."""


def show(verdict: Verdict) -> None:
    """Print one line for each of the two."""
    print("\n| | GPU-hours | cold starts | late | TTFT p99 | loss, less than shipped |")
    print("|---|---:|---:|---:|---:|---:|")
    gains = verdict.gains
    for name, found in (("shipped", verdict.shipped), ("tuned", verdict.tuned)):
        gain = f"{mean(gains):.1%} ({min(gains):.1%} to {max(gains):.1%})" if name == "tuned" else ""
        print(
            f"| {name} | {mean(one.online_gpu_hours for one in found):,.0f} |"
            f" {mean(one.activations for one in found):,.0f} | {mean(one.late for one in found):.3%} |"
            f" {mean(one.ttft_p99_s for one in found):.2f} s | {gain} |"
        )
    print(f"\n{verdict.settings}; better every time: {verdict.is_clear}")


def main() -> None:
    """Parse the command line, search, judge."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet.search", description=__doc__.split("\n")[0])
    parser.add_argument("--endpoints", type=int, default=600)
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--hours", type=float, default=3.0, help="of the first round; each further one has twice")
    parser.add_argument("--held-out-hours", type=float, default=12.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("MODELYARD_TRACES", FOLDER)))
    options = parser.parse_args()
    if not (options.traces / RATES_FILE).is_file():
        raise tools.fail(f"{options.traces} has no {RATES_FILE}; name its folder by --traces or MODELYARD_TRACES")
    clients = servegen(options.traces)

    def run(scenario: Scenario, seed: int) -> Outcome:
        return simulate(scenario, clients, random.Random(seed))

    base, days = scaled(options.endpoints, options.held_out_hours), Days()
    seeds = range(1, 1 + options.seeds)
    if options.candidates > 1:
        candidates = [{}, *drawn(SPACE, options.candidates - 1, random.Random(7))]
        trials = halved(base, candidates, days, run, hours=options.hours)
        print("| rank | loss by round | settings |\n|---:|---|---|")
        for rank, trial in enumerate(trials, 1):
            print(f"| {rank} | {', '.join(f'{one:.0f}' for one in trial.losses)} | {trial.settings or 'as shipped'} |")
        best = next((trial for trial in trials if trial.settings), trials[0])
        show(judged(base, best.settings, days, run, seeds))
    for few in FEW:
        show(judged(base, few, days, run, seeds))


if __name__ == "__main__":
    main()
