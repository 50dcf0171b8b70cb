"""The request level of the simulator: ``python -m bench.sim [PART …] [--seeds 3] [--json FILE]``.

``accuracy``: simulated beside real vLLM, on requests whose times the fit has not seen. ``admission``: one replica on
Azure's conversations, admitted in five ways. ``fairness``: two tenants, by tokens and by turns; a quiet one beside a
flood. ``overload``: the first of an endpoint. ``faults``: engines that crash and hang. ``batches``: lines that fill
what is idle. ``speed``: events a second. Recordings are in ``tests/data``, traces in the folder that ``--traces`` or
``MODELYARD_TRACES`` names.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from statistics import mean

import msgspec

from bench import tools
from bench.sim import accuracy, admission, failing, fair
from modelyard.sim.arrival_files import azure
from modelyard.sim.report import summary
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
FOLDER = ROOT.parent / "shared" / "traces"
PARTS = ("accuracy", "admission", "fairness", "overload", "faults", "batches", "speed")


def show_accuracy() -> list[object]:
    """Print how far the simulator is off."""
    fitted = accuracy.vllm(DATA / "llmservingsim")
    names = list(fitted[0].held_out.errors)
    print("\nSimulated against real vLLM 0.19, held-out half of the requests: relative errors\n")
    print(f"| run | learned from | {' | '.join(names)} | worst | fit s |")
    print(f"|---|---|{'---:|' * (len(names) + 2)}")
    for one in fitted:
        cells = " | ".join(f"{one.held_out.errors[name]:+.1%}" for name in names)
        print(f"| {one.name} | {one.learned_from} | {cells} | {one.held_out.worst:.1%} | {one.fit_s:.1f} |")
    print("\nReal values, held-out half, seconds\n")
    print("| run | learned from | TTFT mean | p50 | p99 | TPOT mean | p50 | p99 | a ms | b µs | c µs | d ns |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for one in fitted:
        ttft, tpot, speed = one.held_out.ttft_real, one.held_out.tpot_real, one.speed
        print(
            f"| {one.name} | {one.learned_from} | {ttft.mean:.3f} | {ttft.p50:.3f} | {ttft.p99:.2f} |"
            f" {tpot.mean:.4f} | {tpot.p50:.4f} | {tpot.p99:.4f} | {speed.step_s * 1e3:.1f} |"
            f" {speed.request_s * 1e6:.0f} | {speed.prefill_token_s * 1e6:.1f} | {speed.kv_token_s * 1e9:.1f} |"
        )
    print("\nThe same formula on Splitwise's measurements, every other row held out: relative errors\n")
    print("| model | on | TP | rows | prompt mean | p90 | token mean | p90 |\n|---|---|---:|---:|---:|---:|---:|---:|")
    rows = accuracy.measured(DATA / "splitwise" / "perf_model.csv")
    for (model, hardware, ranks), (_, off) in rows.items():
        print(
            f"| {model} | {hardware} | {ranks} | {off.runs} | {off.prompt:.1%} | {off.prompt_p90:.1%} |"
            f" {off.token:.1%} | {off.token_p90:.1%} |"
        )
    return [msgspec.to_builtins(one) for one in fitted]


def show_admission(folder: Path, seed: int, count: int) -> dict[str, object]:
    """Print what each way to admit comes to."""
    path = folder / "azure_llm_2023_conv.csv"
    if not path.is_file():
        raise tools.fail(f"{path} is missing; save it from Azure/AzurePublicDataset, or name its folder by --traces")
    arrivals, found = azure(path), {}
    for requests_s in (1.9, 2.9, 4.0):
        came = admission.rates(arrivals, count, requests_s)
        ways = admission.ways(came, seed)
        found[f"{requests_s} requests/s"] = msgspec.to_builtins(ways)
        best = ways["11 at once (the source's formula)"].span_s
        print(
            f"\nAzure conversations at {requests_s} requests/s, {len(came):,} requests, one replica of 137 K tokens\n"
        )
        print(
            "| admitted by | TTFT p50 s | p99 s | all done after s | × 11 at once | preemptions | recomputed tokens |"
        )
        print("|---|---:|---:|---:|---:|---:|---:|")
        for name, seen in ways.items():
            print(
                f"| {name} | {seen.ttft_s.p50:.2f} | {seen.ttft_s.p99:.2f} | {seen.span_s:,.0f} |"
                f" {best / seen.span_s:.2f} | {seen.preemptions} | {seen.recomputed_tokens:,} |"
            )
    return found


def show_fairness(seeds: int) -> None:
    """Print shares of two tenants, and what a quiet one feels of a flood."""
    fronts = {"by tokens (ours: VTC)": None, "by turns (a request each)": fair.takes_turns}
    print(f"\nTwo tenants that always wait, one with requests ten times as long; {seeds} seeds, means\n")
    print("| served | long : short, tokens | most apart | bound | within it |")
    print("|---|---:|---:|---:|---|")
    for name, front in fronts.items():
        rows = [fair.shares(front, seed) for seed in range(seeds)]
        ratio = mean(row.long / row.short for row in rows)
        kept = all(row.apart <= row.bound for row in rows)
        print(
            f"| {name} | {ratio:.2f} : 1 | {max(row.apart for row in rows):,} | {rows[0].bound:,} |"
            f" {'yes' if kept else 'no'} |"
        )
    show_isolation(seeds)


def show_isolation(seeds: int) -> None:
    """Print what a quiet tenant feels of a flood, and what it costs to spare it."""
    half, none = {"stream": 0.5}, {"stream": 0.0}
    ways = {
        "by turns (a request each)": fair.Setting(front=fair.takes_turns),
        "by tokens alone (VTC)": fair.Setting(kept_share_max=0.0),
        "ours, the flood streams": fair.Setting(),
        "ours, half of it streams": fair.Setting(**half),
        "ours, none of it streams": fair.Setting(**none),
        "ours, an eighth kept, it streams": fair.Setting(kept_share_max=1 / 8),
        "never waits for a slot (no gateway can)": fair.Setting(front=fair.at_once),
        "64 slots: by tokens alone": fair.Setting(kept_share_max=0.0, slots=64),
        "64 slots: ours, the flood streams": fair.Setting(slots=64),
        "64 slots: ours, half of it streams": fair.Setting(slots=64, **half),
        "64 slots: never waits for a slot": fair.Setting(front=fair.at_once, slots=64),
    }
    print(f"\nFirst tokens of a tenant beside one that asks for a hundred times as much; {seeds} seeds, means\n")
    print("| served | alone p50, p99 s | beside p50, p99 s | p50 × | p99 × (from, to) | tokens/s | of VTC's |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    full: dict[int, float] = {}
    for name, setting in ways.items():
        found = [fair.isolation(setting, seed) for seed in range(seeds)]
        alone = [mean(getattr(one.alone, part) for one in found) for part in ("p50", "p99")]
        beside = [mean(getattr(one.beside, part) for one in found) for part in ("p50", "p99")]
        times = [one.beside.p99 / one.alone.p99 for one in found]
        tokens_s = mean(one.tokens_s for one in found)
        if setting.kept_share_max == 0.0:
            full[setting.slots] = tokens_s
        part = f"{tokens_s / full[setting.slots]:.1%}" if setting.slots in full else ""
        print(
            f"| {name} | {alone[0]:.3f}, {alone[1]:.3f} | {beside[0]:.3f}, {beside[1]:.3f} |"
            f" {beside[0] / alone[0]:.2f} | {mean(times):.2f} ({min(times):.2f}, {max(times):.2f}) |"
            f" {tokens_s:,.0f} | {part} |"
        )


def show_overload(seeds: int) -> None:
    """Print what the first overload of an endpoint comes to, with and without its engines' speed."""
    print(f"\n20 requests/s for a minute, on a Llama-2-70B replica that served nothing before; {seeds} seeds, sums\n")
    print("| slots | the engine's speed | answered | tokens/s | refused at once | waited 30 s in vain |")
    print("|---:|---|---:|---:|---:|---:|")
    for slots in (4, 8, 16, 64):
        for is_known in (False, True):
            found = [admission.first_overload(seed, slots=slots, is_known=is_known) for seed in range(seeds)]
            tokens_s = mean(one.tokens_s for one in found)
            full, late = (sum(one.refused.get(why, 0) for one in found) for why in ("full", "late"))
            print(
                f"| {slots} | {'known' if is_known else 'not known'} | {sum(one.done for one in found)} |"
                f" {tokens_s:,.0f} | {full:,} | {late} |"
            )


def show_faults(seeds: int) -> None:
    """Print what is lost when engines fail."""
    ways = {
        "nothing is tried elsewhere": (failing.no_failover, failing.NOT_TEXT),
        "tried elsewhere before the first token": (None, 1.0),
        "ours: also gone on with, where the text is all (90 %)": (None, failing.NOT_TEXT),
        "ours, all answers are text": (None, 0.0),
    }
    scenario_h = failing.SCENARIO_H
    print(f"\n{failing.REPLICAS} engines, 10 requests/s, an hour, {seeds} seeds; an engine crashes twice an hour and")
    print(
        f"hangs every two hours; the last column: as often as in the fleet's scenario, every {1 / scenario_h:,.0f} h\n"
    )
    print(
        "| requests of engines that fail | crashes, hangs | failed | gone on with | first token after 5 s |"
        " answered (from, to) | in the scenario |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (front, not_text) in ways.items():
        found = [failing.run(front, seed, not_text=not_text) for seed in range(1, seeds + 1)]
        shares = [one.availability() for one in found]
        print(
            f"| {name} | {sum(one.crashes for one in found)}, {sum(one.hangs for one in found)} |"
            f" {sum(one.failed for one in found)} of {sum(one.seen.requests for one in found):,} |"
            f" {sum(one.gone_on for one in found)} | {sum(one.slow for one in found)} |"
            f" {mean(shares):.3%} ({min(shares):.3%}, {max(shares):.3%}) |"
            f" {mean(one.availability(scenario_h) for one in found):.5%} |"
        )


def show_batches(seeds: int) -> None:
    """Print what a batch adds, and what others feel of it."""
    print(f"\nTwo engines, 12 requests/s for 15 minutes, {seeds} seeds, means; and a batch that is never through\n")
    print("| | tokens/s | TTFT p50 s | p99 s | a token p50 ms | waited p99 s | lines/s | made way |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, lines in {"without": 0, "with the batch": 100_000}.items():
        found = [failing.fill(seed, lines=lines) for seed in range(1, seeds + 1)]
        seen = [one.seen for one in found]
        tokens_s = mean(one.seen.tokens_s + one.line_tokens_s for one in found)
        print(
            f"| {name} | {tokens_s:,.0f} |"
            f" {mean(one.ttft_s.p50 for one in seen):.3f} | {mean(one.ttft_s.p99 for one in seen):.3f} |"
            f" {1000 * mean(one.tpot_s.p50 for one in seen):.1f} | {mean(one.waited_s.p99 for one in seen):.3f} |"
            f" {mean(one.lines / one.seen.span_s for one in found):.1f} | {mean(one.made_way for one in found):,.0f} |"
        )


def speed(folder: Path, seed: int) -> None:
    """Print how fast the simulator is on this machine."""
    arrivals = azure(folder / "azure_llm_2023_conv.csv")
    for replicas in (4, 16, 64):
        release = ReleaseSpec(engine=EngineSpec(speed=admission.SPEED), replicas=replicas)
        world = World(WorldSpec(releases=(release,)), random.Random(seed))
        began_s = time.perf_counter()
        seen = summary(world, world.run(arrivals))
        spent_s = time.perf_counter() - began_s
        print(
            f"{replicas} replicas: {seen.requests:,} requests and {seen.events:,} events in {spent_s:.1f} s,"
            f" {seen.events / spent_s:,.0f} events/s, {seen.span_s / spent_s:,.0f} × real time"
        )


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim", description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS, nargs="*", help="default: all")
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("MODELYARD_TRACES", FOLDER)))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=6000, help="of Azure's trace, for admission")
    parser.add_argument("--json", type=Path, help="also write figures there")
    options = parser.parse_args()
    parts = options.part or PARTS
    found: dict[str, object] = {}
    if "accuracy" in parts:
        found["accuracy"] = show_accuracy()
    if "admission" in parts:
        found["admission"] = show_admission(options.traces, 1, options.requests)
    if "fairness" in parts:
        show_fairness(options.seeds)
    if "overload" in parts:
        show_overload(options.seeds)
    if "faults" in parts:
        show_faults(options.seeds)
    if "batches" in parts:
        show_batches(options.seeds)
    if "speed" in parts:
        speed(options.traces, 1)
    if options.json is not None:
        options.json.write_text(json.dumps(found, default=str), "utf-8")


if __name__ == "__main__":
    main()
