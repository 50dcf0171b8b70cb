"""Hold ``modelyard bench`` to the C load generator: ``python -m bench.loadtest [--rounds 3] [--seconds 5] [--json]``.

Both send the same prompt to one simulated engine, whose times are known, one after the other in each round. Told are
the time to the first token, tokens a second, as ratios of ours to C's, and the CPU that our client takes for a token.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import processes, tools

KEY, TTFT_MS, ITL_MS, TOKENS = "secret", 40, 10, 64
AT_ONCE = (1, 8, 32, 128)
PROMPT = "Explain quantum computing in simple terms."


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.loadtest", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one cell")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tools.build()
    with tempfile.TemporaryDirectory(prefix="loadtest-", dir=tools.BUILD) as scratch:
        engine, port = _start_engine(Path(scratch))
        try:
            processes.wait_until(lambda: processes.is_listening(port), "the simulated engine listening")
            rows = [_measure(port, Path(scratch), at_once, options) for at_once in AT_ONCE]
        finally:
            engine.kill()
            engine.wait()
    print(json.dumps(rows, indent=1) if options.json else _table(rows))


def _start_engine(scratch: Path) -> tuple[subprocess.Popen[bytes], int]:
    port = processes.free_port()
    command = [sys.executable, "-m", "modelyard.engines.simulated", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model-name", "sim", "--work-dir", str(scratch), "--slots", "256"]
    command += ["--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)]
    return subprocess.Popen(command, env={**os.environ, "ENGINE_SECRET": KEY}), port


def _measure(port: int, scratch: Path, at_once: int, options: argparse.Namespace) -> dict[str, Any]:
    body, lines = scratch / "body.json", scratch / "asks.jsonl"
    messages = [{"role": "user", "content": PROMPT}]
    asked = {"model": "sim", "messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body.write_text(json.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}}))
    lines.write_text(json.dumps({"messages": messages, "output_tokens": TOKENS}))
    found: list[dict[str, float]] = []
    for _ in range(options.rounds):
        in_c = _in_c(port, body, at_once, options.seconds)
        ours = _ours(port, lines, at_once, options.seconds)
        found.append({f"c_{name}": value for name, value in in_c.items()} | ours)
    return {"at_once": at_once} | {name: statistics.median(one[name] for one in found) for name in found[0]}


def _in_c(port: int, body: Path, at_once: int, seconds: float) -> dict[str, float]:
    command = tools.load_command(port, KEY, body, mode="stream", connections=at_once, seconds=seconds, rate=0)
    found = tools.parse_load(subprocess.run([*command, "-A"], stdout=subprocess.PIPE, check=True).stdout)
    if found["bad"] or found["truncated"]:
        raise tools.fail(f"the load generator in C saw failures: {found}")
    return {
        "ttft_p50_ms": found["ttft_p50"] / 1000,
        "ttft_p99_ms": found["ttft_p99"] / 1000,
        "tokens_s": found["chunks_s"],
    }


def _ours(port: int, lines: Path, at_once: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "modelyard", "bench", "sim", "--url", f"http://127.0.0.1:{port}", "--key", KEY]
    command += ["--dataset", str(lines), "--concurrency", str(at_once), "--duration", f"{seconds:g}s", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    (level,) = json.loads(done.stdout)["levels"]
    if level["failed"]:
        raise tools.fail(f"modelyard bench saw failures: {level['errors']}")
    return {
        "ttft_p50_ms": level["median_ttft_ms"],
        "ttft_p99_ms": level["p99_ttft_ms"],
        "itl_mean_ms": level["mean_itl_ms"],
        "itl_p99_ms": level["p99_itl_ms"],
        "tokens_s": (level["steady"] or level)["output_throughput"],
        "cpu_us_token": 1e6 * level["client"]["cpu_share"] * level["duration"] / level["total_output_tokens"],
        "cpu_share": level["client"]["cpu_share"],
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ["at once", "TTFT p50 ms: C", "ours", "ratio", "TTFT p99 ms: C", "ours", "tokens/s: C", "ours", "ratio"]
    heads += ["ITL mean / p99 ms", "client µs a token", "of a core"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---:|' * len(heads)}"]
    for row in rows:
        cells = (
            f"{row['at_once']}",
            f"{row['c_ttft_p50_ms']:.1f} | {row['ttft_p50_ms']:.1f} | {row['ttft_p50_ms'] / row['c_ttft_p50_ms']:.3f}",
            f"{row['c_ttft_p99_ms']:.1f} | {row['ttft_p99_ms']:.1f}",
            f"{row['c_tokens_s']:.0f} | {row['tokens_s']:.0f} | {row['tokens_s'] / row['c_tokens_s']:.3f}",
            f"{row['itl_mean_ms']:.2f} / {row['itl_p99_ms']:.1f}",
            f"{row['cpu_us_token']:.0f} | {row['cpu_share']:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
