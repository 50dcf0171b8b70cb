"""Replay request traces through routers: ``python -m bench.routing [--trace conversation] [--load 1.0] [--json]``.

Every router meets the same engines and the same requests (``replay.py``); ours is the gateway's own dispatcher. The
row "floor" is nobody's: each prompt is read at once, alone, with one cache for all replicas; of the two before it one
knows what engines have yet to read, the other has its own hits and no waiting. Traces: Mooncake's, in
the folder that ``--traces`` or ``MODELYARD_TRACES`` names.
"""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from bench import tools
from bench.routing import cost
from bench.routing.policies import PEERS, LlmD, RoundRobin
from bench.routing.replay import BATCH_MAX, OURS, Outcome, Setting, floor, outcome, read_file, replay, unhindered
from modelyard.sim.requests import Arrival

TRACES = ("conversation", "synthetic")
FOLDER = Path(__file__).resolve().parents[3] / "shared" / "traces"
SEEING = "ours, if it saw into the engines"
UNHINDERED = "ours, if nobody waited"
FLOOR = "floor: no waiting, one cache"


def trace(folder: Path, name: str, load: float) -> list[Arrival]:
    """Return the requests of one trace, or end with how to get it."""
    path = folder / f"mooncake_{name}_trace.jsonl"
    if not path.is_file():
        raise tools.fail(
            f"{path} is missing; save {name}_trace.jsonl of kvcache-ai/Mooncake (FAST25-release/traces) there,"
            " or name another folder by --traces or MODELYARD_TRACES"
        )
    return read_file(path, load=load)


def rows(arrivals: list[Arrival], setting: Setting) -> dict[str, Outcome]:
    """Return what callers saw, by router."""
    found = {kind.name: outcome(replay(arrivals, kind, setting)) for kind in PEERS}
    requests = replay(arrivals, None, setting)
    found[OURS] = outcome(requests)
    found[SEEING] = outcome(replay(arrivals, None, setting, sees=True))
    found[UNHINDERED] = unhindered(requests, found[OURS].hit_rate)
    found[FLOOR] = floor(arrivals, replicas=setting.replicas)
    return found


def show(found: dict[str, Outcome]) -> None:
    """Print one table."""
    print("| router | hit rate | TTFT p50 s | p90 s | p99 s | ≤ 5 s | p90: round robin × | p90: llm-d × |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    robin, llm_d = found[RoundRobin.name].p90_s, found[LlmD.name].p90_s
    for name, seen in found.items():
        print(
            f"| {name} | {seen.hit_rate:.2f} | {seen.p50_s:.2f} | {seen.p90_s:.2f} | {seen.p99_s:.2f} |"
            f" {seen.within_5_s:.1%} | {robin / seen.p90_s:.2f} | {llm_d / seen.p90_s:.2f} |"
        )


def main() -> None:
    """Parse the command line, replay, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=__doc__.split("\n")[0])
    parser.add_argument("--trace", choices=TRACES, action="append", help="default: both")
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("MODELYARD_TRACES", FOLDER)))
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--load", type=float, default=1.0, help="how many times as fast as they came")
    parser.add_argument("--batch", type=int, default=BATCH_MAX, help="requests an engine runs at once")
    parser.add_argument("--slots", type=int, help="what ours sends an engine at once, the rest waits; default: --batch")
    parser.add_argument("--staleness", type=float, action="append", help="age of polled gauges in s; default: 0 and 1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cost", action="store_true", help="only measure what a choice costs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.cost:
        costs = cost.table()
        print(json.dumps(costs) if options.json else "\n".join(f"{us:7.2f} µs  {what}" for what, us in costs.items()))
        return
    results = []
    for name in options.trace or TRACES:
        requests = trace(options.traces, name, options.load)
        for staleness_s in options.staleness or (0.0, 1.0):
            setting = Setting(options.replicas, staleness_s, options.batch, options.slots or 0, options.seed)
            found = rows(requests, setting)
            seen = {router: asdict(result) for router, result in found.items()}
            results.append({"trace": name, "staleness_s": staleness_s, "routers": seen})
            if not options.json:
                age = f"{staleness_s:g} s old" if staleness_s else "fresh"
                print(f"\n{name}: {len(requests):,} requests, {options.replicas} replicas, gauges {age}\n")
                show(found)
    if options.json:
        print(json.dumps({"replicas": options.replicas, "load": options.load, "results": results}))


if __name__ == "__main__":
    main()
