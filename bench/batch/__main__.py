"""Measure batches: ``python -m bench.batch [--seconds 20] [--rounds 2] [--rate 8] [--lines 100000] [--only PART]``.

``real-time``: requests at a rate, without a batch and with one that would fill
every slot, in turns; what they wait for their first token. Goal: the 99th
percentile with a batch at most 1.2 times that without.

``kills``: a batch of many lines while what works on it is killed three times
at random moments. Goal: it completes, every line is in its output once, and
every line is charged once. Batches have at most 50,000 lines, so more are made
of several.

The engine is simulated, with true token timing; the platform is real.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import processes
from modelyard.cli.files import send_file
from modelyard.cli.http import Platform
from modelyard.domain.batches import LINES_MAX
from modelyard.domain.lengths import lengths_of
from modelyard.loadtest.client import Client, Target
from modelyard.loadtest.driver import Driver, Level
from modelyard.loadtest.workload import Made, asks_of

CHAT = "/v1/chat/completions"
SLOTS = 16
ENGINE = {"slots": SLOTS, "ttft_ms": 20, "itl_ms": 10, "batch_slowdown": 0.03, "prefill_tokens_per_s": 20_000}
FAST = {"slots": 64, "ttft_ms": 1, "itl_ms": 0.2}
KILLS = 3
OVER = ("completed", "failed", "expired", "cancelled")


@dataclass(slots=True)
class Yard:
    """A running platform in a folder of its own."""

    folder: Path
    process: "subprocess.Popen[bytes]"
    platform: Platform

    @property
    def workers(self) -> list[int]:
        """Return the processes that work on batches."""
        return [pid for pid in processes.tree(self.process.pid) if b"\0up\0batch\0" in _command(pid)]


@contextlib.contextmanager
def platform(engine: dict[str, float], workers: int) -> Iterator[Yard]:
    """Run a platform with the model ``sim``."""
    folder = Path(tempfile.mkdtemp(prefix="batch-bench-"))
    environment = {**os.environ, "MODELYARD__BATCH__WORKERS": str(workers), "MODELYARD__BATCH__LEASE_S": "5"}
    environment["MODELYARD__PRICES__*__OUTPUT"] = "1"
    command = [sys.executable, "-m", "modelyard", "up", "--port", "0", "--data-dir", str(folder / "data")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, start_new_session=True)
    try:
        note = folder / "data" / "run" / "up.json"
        processes.wait_until(lambda: note.exists() and bool(json.loads(note.read_text())["url"]), "start", timeout_s=60)
        key = (folder / "data" / "secrets" / "admin-key").read_text().strip()
        running = Platform(json.loads(note.read_text())["url"], key)
        running.post("/v1/models/deploy", {"model_name": "sim", "framework": "simulated", "options": engine})
        processes.wait_until(
            lambda: any(one["state"] == "ready" for one in running.get("/v1/endpoints/sim")["replicas"]),
            "the model",
            timeout_s=60,
        )
        yield Yard(folder, process, running)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def submit(yard: Yard, texts: Iterator[str], name: str) -> str:
    """Make a batch whose lines ask for these; return its id."""
    file = yard.folder / f"{name}.jsonl"
    with file.open("w") as writer:
        for at, text in enumerate(texts):
            body = {"model": "sim", "messages": [{"role": "user", "content": text}]}
            line = {"custom_id": f"{name}-{at}", "method": "POST", "url": CHAT, "body": body}
            writer.write(json.dumps(line) + "\n")
    sent = send_file(yard.platform, file, purpose="batch")
    order = {"input_file_id": sent["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str(yard.platform.post("/v1/batches", order)["id"])


def look(yard: Yard, batch_id: str) -> dict[str, Any]:
    """Return a batch."""
    found: dict[str, Any] = yard.platform.get(f"/v1/batches/{batch_id}")
    return found


def first_tokens(yard: Yard, rate: float, seconds: float, seed: int) -> list[float]:
    """Make requests in real time; return the milliseconds to each one's first token, in order."""

    async def measure() -> list[float]:
        async with Client(Target(yard.platform.url, "sim", yard.platform.key)) as client:
            asks = asks_of(Made(lengths_of("normal:200:60"), lengths_of("40")), "chat", seed=seed)
            found = await Driver(client, asks, seed=seed).run(Level(rate=rate, duration_s=seconds, warmup=8))
        assert not [one.error for one in found.samples if one.error], "a request in real time failed"
        return sorted((one.first_s - one.due_s) * 1000 for one in found.samples)

    return asyncio.run(measure())


def real_time(options: argparse.Namespace) -> None:
    """Compare first tokens without and with a batch, in turns."""
    waits: dict[str, list[float]] = {"without": [], "with": []}
    answered = spent_s = 0.0
    with platform(ENGINE, 1) as yard:
        for turn in range(options.rounds):
            waits["without"] += first_tokens(yard, options.rate, options.seconds, turn)
            batch_id = submit(yard, (f"[[sim: tokens=150]] {at}" for at in range(20_000)), f"fill-{turn}")
            _until(yard, batch_id, lambda batch: batch["request_counts"]["completed"] > SLOTS)
            before, begun_s = look(yard, batch_id)["request_counts"]["completed"], time.monotonic()
            waits["with"] += first_tokens(yard, options.rate, options.seconds, turn)
            time.sleep(2.0)  # what it counted is told with its next sign of life
            answered += look(yard, batch_id)["request_counts"]["completed"] - before
            spent_s += time.monotonic() - begun_s
            yard.platform.post(f"/v1/batches/{batch_id}/cancel", {})
            _until(yard, batch_id, lambda batch: batch["status"] in OVER)
    print(
        f"Requests in real time at {options.rate:g}/s, {SLOTS} slots, {options.rounds} rounds of {options.seconds:g} s:"
    )
    for name, found in waits.items():
        found.sort()
        quantiles = "  ".join(f"p{int(q * 100)} {_quantile(found, q):7.1f} ms" for q in (0.5, 0.9, 0.99))
        print(f"  {name:8} a batch  first token {quantiles}  ({len(found)} requests)")
    ratio = _quantile(waits["with"], 0.99) / _quantile(waits["without"], 0.99)
    print(f"  p99 with / without: {ratio:.2f} (goal 1.2); meanwhile {answered / spent_s:.1f} lines/s of the batch")


def kills(options: argparse.Namespace) -> None:
    """Kill what works on a batch, and count its lines."""
    chance = random.Random(options.seed)
    sizes = [min(LINES_MAX, options.lines - at) for at in range(0, options.lines, LINES_MAX)]
    with platform(FAST, 2) as yard:
        begun_s = time.monotonic()
        ids = [
            submit(yard, (f"[[sim: tokens=2]] {at}" for at in range(size)), f"b{number}")
            for number, size in enumerate(sizes)
        ]
        moments = sorted(chance.uniform(0.05, 0.9) for _ in range(KILLS))
        killed: list[str] = []
        while True:
            batches = [look(yard, batch_id) for batch_id in ids]
            share = sum(one["request_counts"]["completed"] for one in batches) / options.lines
            if moments and share >= moments[0] and (pids := yard.workers):
                os.kill(chance.choice(pids), signal.SIGKILL)
                moments.pop(0)
                killed.append(f"{100 * share:.0f} %")
            if all(one["status"] in OVER for one in batches):
                break
            time.sleep(0.2)
        seconds = time.monotonic() - begun_s
        print(f"{options.lines} lines in {len(ids)} batches, kill -9 at {', '.join(killed)}: {seconds:.0f} s, "
              f"{options.lines / seconds:.0f} lines/s, {[one['status'] for one in batches]}")  # fmt: skip
        counted = sum(
            _count(yard, one, size, f"b{at}") for at, (one, size) in enumerate(zip(batches, sizes, strict=True))
        )
        print(f"  every line once: {'yes' if counted == options.lines else 'NO'} ({counted})")
        print(f"  charged once: {'yes' if (charged := _charged(yard)) == options.lines else f'NO: {charged}'}")


def _until(yard: Yard, batch_id: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
    processes.wait_until(lambda: is_so(look(yard, batch_id)), f"what is waited for of {batch_id}", timeout_s=90)


def _count(yard: Yard, batch: dict[str, Any], size: int, name: str) -> int:
    """Return how many lines of a batch are in its output, each once and in order."""
    found = 0
    with yard.platform.download(f"/v1/files/{batch['output_file_id']}/content") as response:
        rest = b""
        for block in response.stream(1 << 20):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                assert json.loads(line)["custom_id"] == f"{name}-{found}", "out of order, or twice"
                found += 1
    assert found == size, f"{found} of {size}"
    return found


def _charged(yard: Yard) -> int:
    """Return how many rows of the ledger cost anything, once all is in it."""
    path = yard.folder / "data" / "control.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as database:
        ask = "SELECT count(*) FROM usage_open"
        processes.wait_until(lambda: database.execute(ask).fetchone()[0] == 0, "all settled", timeout_s=60)
        return int(database.execute("SELECT count(*) FROM inference_requests WHERE cost_nanousd > 0").fetchone()[0])


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _quantile(found: list[float], share: float) -> float:
    return found[min(len(found) - 1, int(share * len(found)))]


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.batch", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("real-time", "kills"))
    options = parser.parse_args()
    if options.only != "kills":
        real_time(options)
    if options.only != "real-time":
        kills(options)


if __name__ == "__main__":
    main()
