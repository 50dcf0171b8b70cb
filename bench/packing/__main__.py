"""What packing leaves unused: ``python -m bench.packing [--trace FOLDER] [--demand 1.02] [--rounds 3] [--json]``.

Tasks arrive and none leaves, until they asked for ``--demand`` of all accelerators, as in FGD's paper (ATC'23); a task
that has no room is turned away. Unallocated is the share of the accelerators that nobody has in the end. The time is
of each decision of ours, on one core. Without ``--trace`` a trace of the shape of Alibaba's is drawn.
"""

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path

from bench.packing.openb import PUBLISHED, with_cores
from bench.packing.openb import best_fit as best_with_cores
from bench.packing.policies import Packer, best_fit, by, chance, fgd, gpu_packing, spread
from bench.packing.trace import Trace, alibaba, gpus, shaped
from modelyard.policy.cluster import Cluster

PAPER = {"spread": 23.6, "random": 13.4, "GPU packing": 10.2, "best fit": 9.9, "modelyard (FGD)": 5.3}
"""Percent unallocated in an earlier reproduction on Alibaba's trace, with its CPUs and memory."""
FIGURES = {"with cores": PUBLISHED}
"""Of others, by trace: what the paper's authors publish of it, else the reproduction."""


def packers(trace: Trace, seed: int) -> dict[str, Packer]:
    """Return every way to pack by its name."""
    return {
        "spread": by(spread),
        "random": chance(seed),
        "GPU packing": by(gpu_packing),
        "best fit": by(best_with_cores if trace.has_cores else best_fit),
        "modelyard (FGD)": fgd(trace.mix),
    }


def run(trace: Trace, packer: Packer, *, demand: float, seed: int) -> tuple[float, list[float]]:
    """Return the share that is left unallocated, and the seconds of each decision."""
    cluster = Cluster.of(trace.nodes)
    allocated, times = 0.0, []
    gc.collect()
    for ask in trace.asks(random.Random(seed), demand=demand):
        begun = time.perf_counter()
        placement = packer(ask, cluster)
        times.append(time.perf_counter() - begun)
        if placement is not None:
            cluster.take(placement)
            allocated += gpus(ask.kinds, ask.count, ask.memory_bytes)
    return 1 - allocated / trace.capacity, times


def main() -> None:
    """Print one table a trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="folder with Alibaba's CSV files")
    parser.add_argument("--demand", type=float, default=1.02)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", dest="is_json")
    given = parser.parse_args()
    traces = [alibaba(given.trace)] if given.trace else [
        shaped(has_kinds=False), shaped(has_kinds=True), with_cores()
    ]  # fmt: skip
    found = [{"trace": trace.name, "demand": given.demand, "rows": measured(trace, given)} for trace in traces]
    if given.is_json:
        print(json.dumps(found, indent=2))
        return
    for trace, one in zip(traces, found, strict=True):
        show(trace, given.demand, one["rows"])


def measured(trace: Trace, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the table's rows by packer."""
    left: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for seed in range(given.rounds):
        for name, packer in packers(trace, seed).items():
            share, took = run(trace, packer, demand=given.demand, seed=seed)
            left.setdefault(name, []).append(share)
            times.setdefault(name, []).extend(took)
    return {name: _row(trace, left[name], times[name], left["best fit"]) for name in left}


def show(trace: Trace, demand: float, rows: dict[str, dict[str, float]]) -> None:
    """Print one table."""
    print(f"\n{trace.name}: {len(trace.nodes)} nodes, {trace.capacity} accelerators, demand {demand:.0%}\n")
    theirs = FIGURES.get(trace.name, PAPER)
    print("| packer | unallocated | accelerators | best fit = 1 | theirs (with CPUs) | decision p50 ms | p99 ms |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['unallocated']:.1%} | {row['accelerators']:.0f} | {row['ratio']:.2f} |"
            f" {theirs.get(name, '-')} % | {row['p50_ms']:.3f} | {row['p99_ms']:.3f} |"
        )


def _row(trace: Trace, left: list[float], times: list[float], best: list[float]) -> dict[str, float]:
    ranked = sorted(times)
    return {
        "unallocated": statistics.median(left),
        "accelerators": statistics.median(left) * trace.capacity,
        "ratio": statistics.median(one / other for one, other in zip(left, best, strict=True)),
        "p50_ms": 1e3 * ranked[len(ranked) // 2],
        "p99_ms": 1e3 * ranked[int(len(ranked) * 0.99)],
    }


if __name__ == "__main__":
    main()
