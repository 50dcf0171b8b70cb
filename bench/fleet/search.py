"""Settings tuned on training days: ``python -m bench.fleet.search [--endpoints 600] [--candidates 48] [--hours 2]``.

Random candidates, halved (``modelyard/sim/fleet/search.py``); of those that are left the few settings that make the
difference (``choice.py``); and these on held-out days beside what is shipped. Each of the three has clients of its own,
so that the verdict is of endpoints like none that anything was tuned on; ``--same-clients`` lets all three have all.
"""

import argparse
import os
import random
from pathlib import Path
from statistics import mean

import msgspec

from bench import tools
from bench.fleet.__main__ import FOLDER
from bench.fleet.scenarios import SOURCES, scaled
from modelyard.sim.fleet import Scenario, simulate
from modelyard.sim.fleet.choice import Choice, Common, chosen, common, winners
from modelyard.sim.fleet.cohorts import Cohorts, split
from modelyard.sim.fleet.population import usable
from modelyard.sim.fleet.search import SPACE, Days, Run, Trial, Verdict, drawn, halved, judged
from modelyard.sim.fleet.tally import Outcome
from modelyard.sim.rates import RATES_FILE, Client, servegen

SPLIT, DRAW = 7, 7
"""Seeds: which client is in which group, and which candidates are tried."""

USES = "to learn on", "to choose by", "to judge by"


def runner(clients: tuple[Client, ...]) -> Run:
    """Return what runs a scenario on the traffic of ``clients``."""

    def run(scenario: Scenario, seed: int) -> Outcome:
        return simulate(scenario, clients, random.Random(seed))

    return run


def show_trials(trials: list[Trial]) -> None:
    """Print the candidates, the best first."""
    print("| rank | loss by round | settings |\n|---:|---|---|")
    for rank, trial in enumerate(trials, 1):
        settings = ", ".join(f"{name}={value}" for name, value in trial.settings.items()) or "the base's"
        print(f"| {rank} | {', '.join(f'{one:.0f}' for one in trial.losses)} | {settings} |", flush=True)


def show_choice(won: list[Trial], shared: list[Common], choice: Choice) -> None:
    """Print what winners have in common, and what was chosen of it."""
    print(f"\n{len(won)} winners have in common:", flush=True)
    for one in shared:
        print(f"* {one.name} in {one.share:.0%}: {', '.join(map(str, one.values))}")
    print(f"\nOn the validation's clients and day, loss {choice.shipped:.1f}:")
    for step in choice.steps:
        print(f"* {step.name}={step.value}: {step.loss:.1f} ({step.loss / choice.shipped - 1:+.1%})")


def show_verdict(verdict: Verdict) -> None:
    """Print one line for each of the two, and one for each run."""
    print("\n| | GPU-hours | cold starts | late | TTFT p99 | dropped | loss, less than the base's |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    gains = verdict.gains
    for name, found in (("base", verdict.shipped), ("tuned", verdict.tuned)):
        gain = f"{mean(gains):.1%} ({min(gains):.1%} to {max(gains):.1%})" if name == "tuned" else ""
        print(
            f"| {name} | {mean(one.online_gpu_hours for one in found):,.0f} |"
            f" {mean(one.activations for one in found):,.0f} | {mean(one.late for one in found):.3%} |"
            f" {mean(one.ttft_p99_s for one in found):.2f} s | {mean(one.dropped for one in found):.4%} | {gain} |"
        )
    runs = ", ".join(f"{gain:.1%}" for gain in gains)
    print(f"\n{verdict.settings}; better every time: {verdict.is_clear} ({runs})", flush=True)


def main() -> None:
    """Parse the command line, search, choose, judge."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet.search", description=__doc__.split("\n")[0])
    parser.add_argument("--endpoints", type=int, default=600)
    parser.add_argument("--candidates", type=int, default=48)
    parser.add_argument("--hours", type=float, default=2.0, help="of the first round; each further one has twice")
    parser.add_argument("--held-out-hours", type=float, default=12.0, help="of the validation too")
    parser.add_argument("--seeds", type=int, default=2, help="to choose by")
    parser.add_argument("--held-out-seeds", type=int, default=3, help="to judge by, others")
    parser.add_argument("--same-clients", action="store_true")
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("MODELYARD_TRACES", FOLDER)))
    options = parser.parse_args()
    if not (options.traces / RATES_FILE).is_file():
        raise tools.fail(f"{options.traces} has no {RATES_FILE}; name its folder by --traces or MODELYARD_TRACES")
    clients = tuple(usable(servegen(options.traces)))
    groups = Cohorts(clients, clients, clients) if options.same_clients else split(clients, random.Random(SPLIT))
    sizes = ", ".join(f"{len(group)} {what}" for group, what in zip(msgspec.structs.astuple(groups), USES, strict=True))
    print(f"Clients: {sizes}.\n")

    base = msgspec.structs.replace(scaled(options.endpoints, options.held_out_hours), rules=SOURCES)
    days, seeds = Days(), range(1, 1 + options.seeds)
    unseen = range(11, 11 + options.held_out_seeds)
    candidates = [{}, *drawn(SPACE, options.candidates - 1, random.Random(DRAW))]
    trials = halved(base, candidates, days, runner(groups.training), hours=options.hours)
    show_trials(trials)
    won = winners(trials)
    shared = common(won, SPACE, base)
    choice = chosen(base, shared, days, runner(groups.validation), seeds)
    show_choice(won, shared, choice)
    if choice.steps:
        show_verdict(judged(base, choice.settings, days, runner(groups.held_out), unseen))


if __name__ == "__main__":
    main()
