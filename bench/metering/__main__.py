"""Measure metering, journal to ledger: ``python -m bench.metering [--requests 100000] [--reconcile 1000000] [--json]``.

Requests of many tenants, keys and models are written into a journal as a
gateway does it, and delivered into a ledger on disk as the controller does it:
events a second, bytes of an event in the journal and of a row in the ledger with
its indexes and roll-ups. Beside it, the same rows put into the same table by
bare ``INSERT``, as many to a transaction. With ``--reconcile`` requests are
played through a gateway, with clients that leave, engines that break and
gateways that are killed at random places, and all books are compared.
"""

import argparse
import asyncio
import json
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench import tools
from bench.journal.__main__ import intent_of, settle_of
from bench.metering.reconciled import Books, reconcile
from modelyard.clock import SystemClock
from modelyard.domain.usage import Mark
from modelyard.metering.delivery import BATCH, Delivery
from modelyard.metering.journal import Journal, segments
from modelyard.stores.sql import SqlUsageStore, open_database

TENANTS, KEYS, MODELS = 50, 3, 8
A_SECOND = 1_000
"""Requests a second of the simulated traffic, by which they fall into hours."""
TABLE = "inference_requests"


def write_journal(root: Path, requests: int, seed: int) -> int:
    """Write intents, marks (of each third) and settlements, interleaved; return the records."""
    chance = random.Random(seed)
    journal = Journal(root / "gateway-0", sync_s=1, clock=SystemClock(), soon=lambda flush: flush())
    start, records = 1_795_953_600.0, 0
    for number in range(requests):
        tenant, model = chance.randrange(TENANTS), chance.randrange(MODELS)
        key_id = f"key{tenant:03}{chance.randrange(KEYS)}"
        owner = {"tenant_id": f"ten-abcdefghijkmnpqrstuvwx{tenant:04}", "key_id": key_id}
        named = {"model": f"model-{model}", "endpoint_id": f"ep-abcdefghijkmnpqrstuvwxy{model:04}"}
        at = start + number / A_SECOND
        journal.begin(msgspec.structs.replace(intent_of(number), at=at, **owner, **named), _ignore)
        if number % 3 == 0:
            journal.mark(Mark(intent_of(number).request_id, 118, 64))
            records += 1
        completion = chance.randrange(1, 800)
        settle = msgspec.structs.replace(settle_of(number), at=at + 2, completion_tokens=completion)
        journal.settle(settle, _ignore)
        records += 2
    journal.close()
    return records


def _ignore(*_: object) -> None:
    """What would follow a record is not measured here."""


def delivery_s(root: Path, database: Path) -> tuple[float, float]:
    """Return wall and CPU seconds of the delivery."""

    async def deliver() -> tuple[float, float]:
        opened = open_database(f"sqlite:///{database}", timeout_s=60)
        delivery = Delivery(root, SqlUsageStore(opened), 1.0)
        wall, cpu = time.perf_counter(), time.process_time()
        await delivery.drain()
        spent = time.perf_counter() - wall, time.process_time() - cpu
        await opened.close()
        return spent

    return asyncio.run(deliver())


def bare_s(source: Path, target: Path) -> float:
    """Return the CPU seconds of putting the ledger's rows into an equal table, a transaction for as many."""
    with closing(sqlite3.connect(source)) as ledger, closing(sqlite3.connect(target, isolation_level=None)) as bare:
        rows = ledger.execute(f"SELECT * FROM {TABLE} ORDER BY created_at").fetchall()
        for (statement,) in ledger.execute(
            "SELECT sql FROM sqlite_master WHERE tbl_name = ? AND sql NOT NULL", (TABLE,)
        ):
            bare.execute(statement)
        bare.execute("PRAGMA journal_mode = WAL").fetchall()
        bare.execute("PRAGMA synchronous = NORMAL")
        places = ", ".join("?" * len(rows[0]))
        started = time.process_time()
        for start in range(0, len(rows), BATCH // 2):
            bare.execute("BEGIN IMMEDIATE")
            bare.executemany(f"INSERT INTO {TABLE} VALUES ({places})", rows[start : start + BATCH // 2])
            bare.execute("COMMIT")
        return time.process_time() - started


def sizes(database: Path) -> dict[str, int]:
    """Return bytes of pages by what they are for: rows, their indexes, roll-ups."""
    kinds = {"rows": 0, "indexes of rows": 0, "roll-ups": 0}
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("VACUUM")
        page = opened.execute("PRAGMA page_size").fetchone()[0]
        names = dict(opened.execute("SELECT name, tbl_name FROM sqlite_master WHERE rootpage"))
        try:
            used = dict(opened.execute("SELECT name, count(*) FROM dbstat GROUP BY name"))
        except sqlite3.OperationalError:  # not compiled in: the file as a whole
            return {"all": database.stat().st_size}
    for name, pages in used.items():
        table = names.get(name, "")
        if table == TABLE:
            kinds["rows" if name == TABLE else "indexes of rows"] += pages * page
        elif table.startswith("usage_"):
            kinds["roll-ups"] += pages * page
    return kinds


def measure(scratch: Path, requests: int, seed: int) -> dict[str, float]:
    """Do one round."""
    root, database = scratch / "journal", scratch / "ledger.sqlite"
    records = write_journal(root, requests, seed)
    journal_bytes = sum(path.stat().st_size for path in segments(root / "gateway-0"))
    wall_s, cpu_s = delivery_s(root, database)
    bare = bare_s(database, scratch / "bare.sqlite")
    found = {
        "events_a_second": records / wall_s,
        "requests_a_second": requests / wall_s,
        "events_a_cpu_second": records / cpu_s,
        "cpu_us_a_request": cpu_s * 1e6 / requests,
        "times_bare_insert": cpu_s / bare,
        "journal_bytes_an_event": journal_bytes / records,
        "journal_bytes_a_request": journal_bytes / requests,
    }
    return found | {f"ledger_bytes_a_request: {kind}": size / requests for kind, size in sizes(database).items()}


def reconciled(scratch: Path, requests: int, chunk: int) -> tuple[Books, float]:
    """Play and compare; return the books and the seconds that took."""

    async def run() -> Books:
        opened = open_database(f"sqlite:///{scratch / 'books.sqlite'}", timeout_s=60)
        try:
            return await reconcile(scratch / "journals", SqlUsageStore(opened), requests=requests, chunk=chunk, seed=0)
        finally:
            await opened.close()

    started = time.perf_counter()
    return asyncio.run(run()), time.perf_counter() - started


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.metering", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reconcile", type=int, default=0, metavar="REQUESTS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    tools.BUILD.mkdir(parents=True, exist_ok=True)
    rounds: list[dict[str, float]] = []
    result: dict[str, Any] = {}
    for number in range(options.rounds):
        with _scratch() as scratch:
            rounds.append(measure(scratch, options.requests, number))
    if rounds:
        result["delivery"] = {name: median(one[name] for one in rounds) for name in rounds[0]}
    if options.reconcile:
        with _scratch() as scratch:
            books, took_s = reconciled(scratch, options.reconcile, chunk=2_000)
        result["reconciled"] = {**asdict(books), "by_status": dict(books.by_status), "seconds": took_s}
    if options.json:
        print(json.dumps(result))
    else:
        _show(result)
    sys.exit(bool(options.reconcile and result["reconciled"]["flaws"]))


def _show(result: dict[str, dict[str, Any]]) -> None:
    for title, figures in result.items():
        print(f"| {title} | |\n|---|---:|")
        for name, figure in figures.items():
            print(f"| {name.replace('_', ' ')} | {figure if not isinstance(figure, float) else f'{figure:,.1f}'} |")
        print()


class _scratch:  # noqa: N801 - reads as a function where it is used
    """A folder for as long as it is needed."""

    def __enter__(self) -> Path:
        self._folder = Path(tempfile.mkdtemp(prefix="metering-", dir=tools.BUILD))
        return self._folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


if __name__ == "__main__":
    main()
