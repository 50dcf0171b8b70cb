"""Measure the usage journal: ``python -m bench.journal [--requests 50000] [--rounds 5] [--json]``.

Microseconds of CPU per record (an intent and a settlement are two), seconds to
recover after a crash, and the records that ``kill -9`` loses, beside a bare
``write()`` of the same bytes and one SQLite transaction a record.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench import tools
from modelyard.clock import SystemClock
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.metering.journal import Journal, read_records, segments

SYNC_S = 0.05
CHUNK = 100
"""Requests between two turns of the event loop, so that the group sync runs as it does in a gateway."""


def intent_of(number: int) -> Intent:
    """Return a typical intent."""
    return Intent(
        request_id=f"req_abcdefghijkmnpqr{number:08x}",
        at=1_800_000_000.0 + number,
        tenant_id="ten-abcdefghijkmnpqrstuvwxyz23",
        key_id="abcd2345",
        endpoint_id="ep-abcdefghijkmnpqrstuvwxyz23",
        model="smollm2-135m",
        version_id="ver-abcdefghijkmnpqrstuvwxyz2",
        route="/v1/chat/completions",
        is_stream=True,
        prompt_estimate=120,
        reserved_tokens=620,
        price=Price(150_000_000, 75_000_000, 600_000_000),
    )


def settle_of(number: int) -> Settle:
    """Return a typical settlement."""
    return Settle(
        request_id=f"req_abcdefghijkmnpqr{number:08x}",
        at=1_800_000_001.0 + number,
        prompt_tokens=118,
        cached_tokens=64,
        completion_tokens=402,
        status=UsageStatus.SUCCESS,
        http_status=200,
        error_code="",
        ttft_ms=41.5,
        latency_ms=2190.2,
        replica_id="rep-abcdefghijkm-abcdefgh-0-1",
        attempts=1,
        is_estimated=False,
    )


def journal_us(folder: Path, requests: int) -> float:
    """Return CPU per record with the group sync running; all threads count."""

    async def fill() -> None:
        # A write a record: the worst case. Under load a gateway writes once for all records of a turn of its loop.
        journal = Journal(folder, sync_s=SYNC_S, clock=SystemClock(), soon=_at_once)
        syncing = asyncio.create_task(journal.run())
        for start in range(0, requests, CHUNK):
            for number in range(start, start + CHUNK):
                journal.begin(intent_of(number), _ignore)
                journal.settle(settle_of(number), _ignore)
            await asyncio.sleep(0)
        syncing.cancel()
        await asyncio.gather(syncing, return_exceptions=True)
        journal.close()

    return _cpu_us(lambda: asyncio.run(fill()), records=2 * requests) - _building_us(requests)


def write_us(folder: Path, requests: int) -> float:
    """Return CPU per bare ``write()`` of as many bytes: the floor."""
    payload = b"x" * 180
    descriptor = os.open(folder / "bare", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def fill() -> None:
        for _ in range(2 * requests):
            os.write(descriptor, payload)

    spent = _cpu_us(fill, records=2 * requests)
    os.close(descriptor)
    return spent


def sqlite_us(folder: Path, requests: int) -> float:
    """Return CPU per row in a transaction of its own, WAL and ``synchronous=NORMAL``."""
    requests //= 10
    database = sqlite3.connect(folder / "rows.sqlite", isolation_level=None)
    database.execute("pragma journal_mode=wal")
    database.execute("pragma synchronous=normal")
    database.execute("create table usage (id text primary key, body blob)")

    def fill() -> None:
        for number in range(2 * requests):
            database.execute("insert into usage values (?, ?)", (f"req_abcdefghijkmnpqr{number:08x}", b"x" * 150))

    spent = _cpu_us(fill, records=2 * requests)
    database.close()
    return spent


def recovery_s(folder: Path) -> tuple[float, int]:
    """Return the seconds that a new gateway takes to read what a dead one left, and the records it read."""
    records = sum(len(read_records(path, 0)[0]) for path in segments(folder))
    started = time.perf_counter()
    Journal(folder, sync_s=SYNC_S, clock=SystemClock(), soon=_at_once).close()
    return time.perf_counter() - started, records


def lost_by_kill(folder: Path, order: random.Random) -> tuple[int, int]:
    """Kill a writer at a random moment; return acknowledged records and how many of them are not in the journal."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.journal", "--write-into", str(folder)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None, "asked for a pipe"
    process.stdout.readline()
    time.sleep(order.uniform(0.02, 0.3))
    process.send_signal(signal.SIGKILL)
    acknowledged = process.stdout.read().count(b"\n")
    process.wait()
    process.stdout.close()
    found = sum(len(read_records(path, 0)[0]) for path in segments(folder))
    return acknowledged, max(0, acknowledged - found)


def write_for_ever(folder: Path) -> None:
    """Append and acknowledge on stdout until killed."""
    journal = Journal(folder, sync_s=SYNC_S, clock=SystemClock(), soon=_at_once)
    os.write(1, b"ready\n")
    number = 0
    while True:
        journal.begin(intent_of(number), lambda is_written: os.write(1, b"\n"))
        number += 1


def _at_once(flush: Callable[[], None]) -> None:
    flush()


def _ignore(*_: object) -> None:
    """What would follow a record is not the journal's cost."""


def _building_us(requests: int) -> float:
    """Return CPU per record of making the records, which is not the journal's."""

    def build() -> None:
        for number in range(requests):
            intent_of(number)
            settle_of(number)

    return _cpu_us(build, records=2 * requests)


def _cpu_us(run: Callable[[], None], *, records: int) -> float:
    started = time.process_time()
    run()
    return (time.process_time() - started) * 1e6 / records


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.journal", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write-into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write_into:
        write_for_ever(options.write_into)
    tools.BUILD.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="journal-", dir=tools.BUILD))
    ways = {"journal": journal_us, "bare write()": write_us, "SQLite, one transaction a record": sqlite_us}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    recoveries: list[tuple[float, int]] = []
    kills: list[tuple[int, int]] = []
    order = random.Random(0)
    try:
        for number in range(options.rounds):
            for name, way in ways.items():
                folder = scratch / f"{number}-{name.split()[0].strip(',')}"
                folder.mkdir()
                spent[name].append(way(folder, options.requests))
            recoveries.append(recovery_s(scratch / f"{number}-journal"))
            kills.append(lost_by_kill(scratch / f"{number}-killed", order))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    per_100k = median(seconds / records * 100_000 for seconds, records in recoveries)
    acknowledged, lost = (sum(column) for column in zip(*kills, strict=True))
    middle = {name: median(found) for name, found in spent.items()}
    if options.json:
        print(json.dumps({"cpu_us": middle, "recovery_s_per_100k": per_100k, "acked": acknowledged, "lost": lost}))
        return
    print("| way to record one usage event | CPU µs a record | × bare write() |\n|---|---:|---:|")
    for name, found in middle.items():
        print(f"| {name} | {found:.1f} | {found / middle['bare write()']:.1f} |")
    print(f"\nRecovery: {per_100k:.2f} s per 100,000 records left behind.")
    print(f"kill -9, {options.rounds} times: {lost} of {acknowledged} acknowledged records lost.")


if __name__ == "__main__":
    main()
