"""Time questions to a ledger of 100 million requests: ``python -m bench.usage [--requests N] [--rows N] [--json]``.

A year of roll-ups of many tenants, keys and models is made in SQL, and as many
rows of single requests as fit (``ledger.py``). Then the API is asked what people
ask, in one process on a real database, and every sum is held against the sum of
the whole.
"""

import argparse
import asyncio
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.management import Management, management

from bench import tools
from bench.usage.ledger import DAY, DAYS, END, HOUR, Made, Size, make
from modelyard.console import views
from modelyard.domain.tenants import PLATFORM, Identity, Scope

START = END - DAYS * DAY
NOW = END - 1234.5
"""In the middle of an hour, so that the newest edge comes from rows."""
TENANT = "ten-abcdefghijkmnpqrstuvwx0007"
ADMIN = Identity("k-admin", PLATFORM, (Scope.ADMIN,))
MANAGER = Identity("k-manager", TENANT, (Scope.MANAGE,))
GOAL_MS = 1_000


@dataclass(slots=True)
class Timed:
    """One question. Milliseconds: the first time, the median and the worst of the others."""

    question: str
    first_ms: float
    median_ms: float
    worst_ms: float
    cpu_ms: float
    """Median of the CPU time of the process: what it would be on a machine that does nothing else."""
    groups: int


def questions(rows_since: int) -> list[tuple[str, Identity, str]]:
    """Return what is asked: in words, by whom, and the path."""
    month, year = f"since={int(NOW - 30 * DAY)}", f"since={START}&until={END}"
    usage, completions = "/v1/usage?", "/v1/organization/usage/completions?"
    hour = int(NOW // HOUR * HOUR)
    return [
        ("platform, 24 h by model", ADMIN, f"{usage}group_by=model"),
        ("platform, 24 h by tenant", ADMIN, f"{usage}group_by=tenant"),
        ("platform, 30 days by day and model", ADMIN, f"{usage}group_by=day,model&{month}"),
        ("platform, 30 days by tenant", ADMIN, f"{usage}group_by=tenant&{month}"),
        ("platform, a year by month", ADMIN, f"{usage}group_by=month&{year}"),
        ("platform, a year by day and model", ADMIN, f"{usage}group_by=day,model&{year}"),
        ("platform, a year by day, Berlin", ADMIN, f"{usage}group_by=day&tz=Europe/Berlin&{year}"),
        ("platform, a year by day, India", ADMIN, f"{usage}group_by=day&tz=Asia/Kolkata&{year}"),
        ("platform, a year by tenant", ADMIN, f"{usage}group_by=tenant&{year}"),
        ("platform, a year by key and model", ADMIN, f"{usage}group_by=key,model&{year}"),
        ("tenant, 24 h by hour", MANAGER, f"{usage}group_by=hour"),
        ("tenant, 30 days by day and model", MANAGER, f"{usage}group_by=day,model&{month}"),
        ("tenant, a year by day, India", MANAGER, f"{usage}group_by=day&tz=Asia/Kolkata&{year}"),
        ("tenant, a year by hour", MANAGER, f"{usage}group_by=hour&{year}"),
        ("tenant, a year by month and key", MANAGER, f"{usage}group_by=month,key&{year}"),
        ("OpenAI, 31 days by project and model", ADMIN, f"{completions}start_time={END - 31 * DAY}&limit=31"
         "&group_by=project_id&group_by=model"),
        ("OpenAI, 168 hours by model", ADMIN, f"{completions}start_time={hour - 168 * HOUR}"
         "&bucket_width=1h&limit=168&group_by=model"),
        ("OpenAI, 1,440 minutes", ADMIN, f"{completions}start_time={max(hour - DAY, rows_since)}"
         f"&end_time={hour}&bucket_width=1m&limit=1440"),
        ("OpenAI, 60 minutes", ADMIN, f"{completions}start_time={hour - HOUR}&end_time={hour}&bucket_width=1m"),
        ("OpenAI, costs of 180 days by project", ADMIN, f"/v1/organization/costs?start_time={END - 180 * DAY}&limit=180"
         "&group_by=project_id"),
        ("newest 100 requests", MANAGER, "/v1/usage/requests?limit=100"),
    ]  # fmt: skip


async def ask(api: Management, made: Made, rounds: int) -> list[Timed]:
    """Ask everything, each question once and then in rounds."""
    found: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    groups: dict[str, int] = {}
    for _ in range(rounds + 1):
        for title, who, path in questions(made.rows_since):
            started, cpu = time.perf_counter(), time.process_time()
            answer = await api.call(who, "GET", path)
            used.setdefault(title, []).append((time.process_time() - cpu) * 1e3)
            found.setdefault(title, []).append((time.perf_counter() - started) * 1e3)
            assert answer.status_code == 200, f"{title}: {answer.text}"
            report = answer.json()
            groups[title] = len(report["data"])
            if "a year" in title and who is ADMIN:
                assert report["total"]["requests"] == made.requests, f"{title}: the sums are wrong"
        title = "console, usage page, 30 days"
        started, cpu = time.perf_counter(), time.process_time()
        rows, _ = await views.usage_rows(api.context, ADMIN, days=30)  # type: ignore[arg-type]
        used.setdefault(title, []).append((time.process_time() - cpu) * 1e3)
        found.setdefault(title, []).append((time.perf_counter() - started) * 1e3)
        groups[title] = len(rows)
    return [
        Timed(title, took[0], median(took[1:]), max(took[1:]), median(used[title][1:]), groups[title])
        for title, took in found.items()
    ]


async def run(folder: Path, size: Size, rounds: int) -> tuple[Made, list[Timed]]:
    """Make the ledger and ask."""
    (folder / "data").mkdir()
    made = await asyncio.to_thread(make, folder / "data" / "control.sqlite", size)
    async with management(folder) as api:
        api.clock.elapsed_s = NOW - api.clock.start_s
        return made, await ask(api, made, rounds)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.usage", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000_000)
    parser.add_argument("--tenants", type=int, default=500)
    parser.add_argument("--rows", type=int, default=5_000_000, help="Rows of single requests, 0.8 KB each.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    size = Size(options.requests, options.tenants, keys=2, models=20, models_a_key=3, busy=1 / 3, rows=options.rows)
    tools.BUILD.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="usage-", dir=tools.BUILD))
    try:
        made, timed = asyncio.run(run(folder, size, options.rounds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps({"made": made._asdict(), "timed": [asdict(one) for one in timed]}))
    else:
        _show(made, timed)
    sys.exit(any(one.median_ms > GOAL_MS for one in timed))


def _show(made: Made, timed: Sequence[Timed]) -> None:
    counts: dict[str, Any] = made._asdict()
    print(", ".join(f"{name.replace('_', ' ')} {value:,.0f}" for name, value in counts.items()))
    print("\n| question | groups | first ms | median ms | worst ms | CPU ms |\n|---|---:|---:|---:|---:|---:|")
    for one in timed:
        took = " | ".join(f"{ms:.0f}" for ms in (one.first_ms, one.median_ms, one.worst_ms, one.cpu_ms))
        print(f"| {one.question} | {one.groups:,} | {took} |")


if __name__ == "__main__":
    main()
