"""A ledger of a year, made in SQL.

Pairs of a key and a model are busy in some hours and not in others; each has
its own size of request, so that the rows of the last days, which are made from
the very roll-ups, add up to them exactly.
"""

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from modelyard.clock import SystemClock
from modelyard.stores.sql import open_database

HOUR, DAY = 3600, 86_400
END = 1_796_083_200
"""Midnight of 1 December 2026."""
DAYS = 365


class Size(NamedTuple):
    """What to make."""

    requests: int
    tenants: int
    keys: int
    """Of a tenant."""
    models: int
    models_a_key: int
    busy: float
    """Share of hours in which a pair of key and model is used."""
    rows: int
    """Rows of single requests, the newest ones."""


class Made(NamedTuple):
    """What was made."""

    requests: int
    hourly: int
    daily: int
    monthly: int
    platform_hourly: int
    rows: int
    rows_since: int
    bytes: int
    seconds: float


_KEYS = "customer_id, api_key_id, model_name, endpoint_id, model_id, route, status, is_batch, unit"
_SUMS = (
    "requests, prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens, audio_input_tokens, "
    "audio_output_tokens, units_micro, cost_nanousd"
)


def make(database: Path, size: Size) -> Made:
    """Make the ledger in a fresh database."""
    started = time.perf_counter()
    clock = SystemClock()
    open_database(f"sqlite:///{database}", timeout_s=60, clock=clock)._engine.dispose()
    with closing(sqlite3.connect(database, isolation_level=None)) as opened:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -400000", "temp_store = FILE"):
            opened.execute(f"PRAGMA {pragma}").fetchall()
        # Made behind the rows: each entry would else go to another page of a large index.
        indexes = opened.execute("SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql NOT NULL").fetchall()
        for name, _ in indexes:
            opened.execute(f"DROP INDEX {name}")
        opened.execute("BEGIN IMMEDIATE")
        _pairs(opened, size)
        _hours(opened, size)
        _fold(opened)
        rows_since = _rows(opened, size.rows)
        for _, statement in indexes:
            opened.execute(statement)
        opened.execute("COMMIT")
        opened.execute("PRAGMA journal_mode = WAL").fetchall()
        counts = [
            opened.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in (
                "usage_rollup_hourly",
                "usage_rollup_daily",
                "usage_rollup_monthly",
                "usage_rollup_platform_hourly",
                "inference_requests",
            )
        ]
        total = opened.execute("SELECT sum(requests) FROM usage_rollup_platform_daily").fetchone()[0]
    return Made(total, *counts, rows_since, database.stat().st_size, time.perf_counter() - started)


def _pairs(opened: sqlite3.Connection, size: Size) -> None:
    """Make the pairs, with a weight each (few are large) and what one request of it uses."""
    opened.execute(
        "CREATE TEMP TABLE pairs (n INTEGER PRIMARY KEY, customer_id, api_key_id, model_name, endpoint_id, model_id, "
        "route, prompt, cached, completion, cost, weight)"
    )
    number = 0
    for tenant in range(size.tenants):
        for key in range(size.keys):
            for slot in range(size.models_a_key):
                model = (tenant * 7 + key * 3 + slot * 5) % size.models
                number += 1
                prompt, completion = 100 + number % 900, 20 + number % 500
                opened.execute(
                    "INSERT INTO pairs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        number, f"ten-abcdefghijkmnpqrstuvwx{tenant:04}", f"k{tenant:05}{key:02}", f"model-{model:02}",
                        f"ep-abcdefghijkmnpqrstuvwxyz{model:02}", f"ver-abcdefghijkmnpqrstuvwxy{model:02}",
                        "/v1/embeddings" if model % 5 == 0 else "/v1/chat/completions", prompt, prompt // 4,
                        completion, prompt * 150 + completion * 600, 1.0 / (1 + number % 97),
                    ),
                )  # fmt: skip


def _hours(opened: sqlite3.Connection, size: Size) -> None:
    """Make the hourly roll-up: each pair in its busy hours, and a tenth of them with failures too."""
    weight = opened.execute("SELECT sum(weight) FROM pairs").fetchone()[0]
    scale = size.requests / (DAYS * 24 * size.busy * weight)
    opened.execute("CREATE TEMP TABLE hours (hour INTEGER PRIMARY KEY)")
    opened.executemany("INSERT INTO hours VALUES (?)", ((END - at * HOUR,) for at in range(1, DAYS * 24 + 1)))
    mixed = "((p.n * 2654435761 + h.hour / 3600 * 40503) % 1000003)"
    # Half of an average hour to one and a half, so that no two are equal.
    made = f"max(1, CAST({scale} * p.weight * (0.5 + {mixed} % 1000 / 1000.0) AS INTEGER))"
    for status, number, condition in (
        ("success", made, f"{mixed} < {int(size.busy * 1_000_003)}"),
        ("error", "1", f"{mixed} < {int(size.busy * 100_000)}"),
    ):
        opened.execute(
            f"INSERT INTO usage_rollup_hourly (period, {_KEYS}, {_SUMS}) "
            "SELECT hour, customer_id, api_key_id, model_name, endpoint_id, model_id, route, status, false, '', n, "
            "n * prompt, n * cached, n * completion, 0, 0, 0, 0, n * cost FROM ("
            f"SELECT h.hour, p.*, '{status}' AS status, {made if status == 'success' else number} AS n "
            f"FROM hours h CROSS JOIN pairs p WHERE {condition})".replace(
                "p.*",
                "p.customer_id, p.api_key_id, p.model_name, p.endpoint_id, p.model_id, p.route, p.prompt, "
                "p.cached, p.completion, p.cost",
            )
        )


def _fold(opened: sqlite3.Connection) -> None:
    sums = ", ".join(f"sum({name.strip()})" for name in _SUMS.split(","))
    day, kinds = f"period - period % {DAY}", "model_name, route, status, is_batch, unit"
    month = "CAST(strftime('%s', period, 'unixepoch', 'start of month') AS INTEGER)"
    for table, period, keys in (
        ("daily", day, _KEYS),
        ("monthly", month, _KEYS),
        ("platform_hourly", "period", kinds),
        ("platform_daily", day, kinds),
    ):
        opened.execute(
            f"INSERT INTO usage_rollup_{table} (period, {keys}, {_SUMS}) SELECT {period}, {keys}, {sums} "
            f"FROM usage_rollup_hourly GROUP BY {period}, {keys}"
        )


def _rows(opened: sqlite3.Connection, wanted: int) -> int:
    """Make the rows of the newest whole hours, about as many as wanted; return since when they are kept."""
    found, since = 0, END
    for period, number in opened.execute(
        "SELECT period, sum(requests) FROM usage_rollup_platform_hourly GROUP BY period ORDER BY period DESC"
    ):
        if found + number > wanted:
            break
        found, since = found + number, period
    opened.execute("CREATE TEMP TABLE numbers (i INTEGER PRIMARY KEY)")
    most = opened.execute("SELECT max(requests) FROM usage_rollup_hourly").fetchone()[0]
    opened.executemany("INSERT INTO numbers VALUES (?)", ((at,) for at in range(most)))
    opened.execute(
        "INSERT INTO inference_requests (request_id, endpoint_id, customer_id, api_key_id, model_name, model_id, "
        "replica_id, route, is_stream, prompt_tokens, cached_tokens, completion_tokens, total_tokens, cost_nanousd, "
        "status, http_status, error_code, ttft_ms, latency_ms, attempts, is_estimated, created_at, hour, settled_at) "
        "SELECT printf('req_%010d%s%05d', period, substr(api_key_id, 2), i) || substr(model_name, 7) || status, "
        "endpoint_id, customer_id, api_key_id, model_name, model_id, 'rep-abcdefghijkm-abcdefgh-0-1', route, true, "
        "prompt_tokens / requests, cached_tokens / requests, completion_tokens / requests, "
        "(prompt_tokens + completion_tokens) / requests, cost_nanousd / requests, status, 200, '', 41.5, 2190.2, 1, "
        "false, period + (i + 0.5) * 3600.0 / requests, period, period + (i + 0.5) * 3600.0 / requests + 2.2 "
        "FROM usage_rollup_hourly JOIN numbers ON i < requests WHERE period >= ?",
        (since,),
    )
    opened.execute("INSERT INTO usage_rows_kept VALUES ('inference_requests', ?)", (since,))
    return since
