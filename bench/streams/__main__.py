"""Hold very many streams open at once: ``python -m bench.streams [--streams 50000] [--quick] [--json]``.

A process may open a fixed number of files (20,000 where this was written), and
a stream is two in a gateway, so there are several gateway workers on one port,
several engines and several load generators, each of these with a source
address of its own, since one address has 28,000 ports. Every stream gets a
token every few seconds and ends with ``[DONE]``; all are open before the first
ends. Lost is every stream that was refused, cut, ended without ``[DONE]`` or
with more or fewer tokens, and every one without exactly one settled row in the
ledger that is then made of the journals.
"""

import argparse
import asyncio
import json
import math
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import processes, tools
from bench.gateway.cells import finish_load
from bench.gateway.modelyard_peer import Modelyard
from modelyard.clock import SystemClock
from modelyard.config import DataDirectory
from modelyard.gateway.clockwork import raise_file_limit
from modelyard.metering.delivery import Delivery
from modelyard.stores.sql import SqlUsageStore, open_database

STREAMS_A_PROCESS = 12_000
"""Of an engine or a load generator, which need one file a stream."""
STREAMS_A_WORKER = 6_000
"""A worker takes as many clients as two fifths of its 20,000 files, and sheds standard requests at 85 % of that."""


@dataclass(slots=True)
class Outcome:
    """What was found. Times are seconds; memory and CPU are those of all gateway workers together."""

    streams: int
    workers: int
    open_at_once: int = 0
    opened_in_s: float = 0.0
    kb_a_stream: float = 0.0
    cpu_us_a_stream_second: float = 0.0
    cpu_us_a_token: float = 0.0
    cpu_us_to_open: float = 0.0
    relay_p99_ms: float = 0.0
    first_token_p99_ms: float = 0.0
    complete: int = 0
    why: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    right_rows: int = 0

    @property
    def is_whole(self) -> bool:
        """Say whether all were open at once, and each is complete and in the ledger once."""
        return self.open_at_once == self.complete == self.rows == self.right_rows == self.streams


def main() -> None:
    """Parse the command line, run, print; exit with 1 if anything was lost."""
    options = _arguments()
    tools.build()
    raise_file_limit()
    scratch = Path(tempfile.mkdtemp(prefix="streams-", dir=tools.BUILD))
    count = math.ceil(options.streams / STREAMS_A_PROCESS)
    engines = [tools.FakeEngine.start(processes.free_port(), []) for _ in range(count)]
    peer = Modelyard(workers=options.workers or math.ceil(options.streams / STREAMS_A_WORKER))
    try:
        for engine in engines:
            processes.wait_until(engine.is_listening, "the fake engines listening")
        port = peer.start_before([e.port for e in engines], scratch, gateway_pin=[], other_pin=[]).port
        outcome, tokens = _hold(options, peer, port, engines)
        peer.stop()
        _audit(outcome, scratch, tokens)
    finally:
        peer.stop()
        for engine in engines:
            engine.stop()
        if not options.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps(asdict(outcome), indent=1) if options.json else _table(outcome))
    sys.exit(0 if outcome.is_whole else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.streams", description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=0, help=f"gateway workers; default one per {STREAMS_A_WORKER}")
    parser.add_argument("--rate", type=float, default=1000.0, help="streams opened a second")
    parser.add_argument("--hold", type=float, default=15.0, help="seconds that all are open")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between two tokens of a stream")
    parser.add_argument("--plan", default="standard", help="plan of the tenant; priority is shed last")
    parser.add_argument("--quick", action="store_true", help="2,000 streams, a token a second, 3 s")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep logs and data directory in .cache/bench")
    options = parser.parse_args()
    if options.quick:
        options.streams, options.interval, options.hold = 2_000, 1.0, 3.0
    return options


def _hold(
    options: argparse.Namespace, peer: Modelyard, port: int, engines: list[tools.FakeEngine]
) -> tuple[Outcome, int]:
    """Open all streams, hold them, let them end; return what was seen, and the tokens of each stream."""
    ramp_s = options.streams / options.rate
    # The first stream must still run when the last one has been open for a while, also if the machine is slow.
    tokens = math.ceil((1.3 * ramp_s + options.hold + 5.0) / options.interval)
    for engine in engines:
        engine.set(tokens=tokens, interval_us=int(options.interval * 1e6))
    pids = peer.pids()
    outcome = Outcome(options.streams, len(pids))
    cpu, memory, began = processes.cpu_ns(pids), processes.resident_kb(pids), time.monotonic()
    loads = _start_loads(options, peer, port, tokens)
    grown_s = began
    while outcome.open_at_once < options.streams and time.monotonic() < grown_s + 3.0:
        time.sleep(0.25)
        active = sum(engine.counters()["active"] for engine in engines)
        if active > outcome.open_at_once:
            outcome.open_at_once, grown_s = active, time.monotonic()
    outcome.opened_in_s = round(grown_s - began, 1)
    outcome.cpu_us_to_open = (processes.cpu_ns(pids) - cpu) / 1000 / options.streams
    cpu, chunks, since = processes.cpu_ns(pids), sum(e.counters()["chunks"] for e in engines), time.monotonic()
    time.sleep(options.hold)
    active = sum(e.counters()["active"] for e in engines)
    spent_us = (processes.cpu_ns(pids) - cpu) / 1000
    relayed = sum(e.counters()["chunks"] for e in engines) - chunks
    outcome.cpu_us_a_stream_second = spent_us / (time.monotonic() - since) / max(1, active)
    outcome.cpu_us_a_token = spent_us / max(1, relayed)
    outcome.kb_a_stream = (processes.resident_kb(pids) - memory) / options.streams
    if active < outcome.open_at_once:
        print(f"bench: {outcome.open_at_once - active} streams ended while all should be open", file=sys.stderr)
    _count(outcome, [finish_load(load) for load in loads])
    return outcome, tokens


def _start_loads(options: argparse.Namespace, peer: Modelyard, port: int, tokens: int) -> list[subprocess.Popen[bytes]]:
    count = math.ceil(options.streams / STREAMS_A_PROCESS)
    loads = []
    for number in range(count):
        streams = options.streams // count + (number < options.streams % count)
        command = tools.load_command(
            port,
            peer.keys[options.plan],
            tools.STREAM_BODY,
            mode="once",
            connections=streams,
            seconds=tokens * options.interval + 30,
            rate=options.rate / count,
        )
        command += ["-a", f"127.0.0.{2 + number}", "-n", str(tokens)]
        loads.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    return loads


def _count(outcome: Outcome, found: list[dict[str, Any]]) -> None:
    """Add up what the load generators saw."""
    outcome.relay_p99_ms = max(one["relay_p99"] for one in found) / 1000
    outcome.first_token_p99_ms = max(one["ttft_p99"] for one in found) / 1000
    names = {"rejects": "refused", "bad": "cut", "connerr": "not connected", "truncated": "without [DONE]"}
    names |= {"miscounted": "wrong number of tokens", "unfinished": "never ended"}
    outcome.why = {said: sum(one[name] for one in found) for name, said in names.items()}
    outcome.why["cut"] -= outcome.why["refused"]
    outcome.complete = sum(one["done_ok"] for one in found) - outcome.why["wrong number of tokens"]


def _audit(outcome: Outcome, folder: Path, tokens: int) -> None:
    """Deliver the journals into a ledger as the controller does, and compare its rows with the streams."""
    data = DataDirectory(folder)
    database = open_database(f"sqlite:///{data.database}", timeout_s=10.0, clock=SystemClock())
    asyncio.run(Delivery(data.journal, SqlUsageStore(database), 1.0).drain())
    with sqlite3.connect(data.database) as rows:
        outcome.rows, outcome.right_rows = rows.execute(
            "select count(*), sum(status = 'success' and completion_tokens = ?) from inference_requests", (tokens,)
        ).fetchone()
    outcome.right_rows = outcome.right_rows or 0  # no rows have no sum


def _table(outcome: Outcome) -> str:
    lost = outcome.streams - outcome.complete
    why = ", ".join(f"{number:,} {why}" for why, number in outcome.why.items() if number)
    rows = (
        ("streams asked for", f"{outcome.streams:,}"),
        ("gateway workers", str(outcome.workers)),
        ("open at once", f"{outcome.open_at_once:,}"),
        ("opened in", f"{outcome.opened_in_s:g} s"),
        ("lost", f"{lost:,}" + (f" ({why})" if why else "")),
        ("rows in the ledger", f"{outcome.rows:,}, of them right {outcome.right_rows:,}"),
        ("memory a stream", f"{outcome.kb_a_stream:.1f} KB"),
        ("CPU to open a stream", f"{outcome.cpu_us_to_open:.0f} µs"),
        ("CPU of an open stream", f"{outcome.cpu_us_a_stream_second:.1f} µs a second"),
        ("CPU of a token", f"{outcome.cpu_us_a_token:.1f} µs"),
        ("relay of a token, p99", f"{outcome.relay_p99_ms:.1f} ms"),
    )
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        ["| figure".ljust(width + 3) + "| value |", "|---|---:|", *(f"| {n.ljust(width)} | {v} |" for n, v in rows)]
    )


if __name__ == "__main__":
    main()
