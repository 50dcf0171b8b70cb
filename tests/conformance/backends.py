"""The backends that the store suites run against.

To add Postgres: append its name to ``BACKENDS``, and in ``database_url`` return
the URL of a fresh database (one ``CREATE DATABASE`` a test); nothing in the
suites themselves may change for it. What only a file can do (a lock held by
another connection) is marked in the suites and skipped elsewhere.
"""

from pathlib import Path

from modelyard.stores.sql import Database, open_database

BACKENDS = ["sqlite"]
TIMEOUT_S = 5.0


def database_url(backend: str, folder: Path) -> str:
    assert backend == "sqlite", f"no such backend: {backend}"
    return f"sqlite:///{folder / 'control.sqlite'}"


def open_fresh(backend: str, folder: Path, *, timeout_s: float = TIMEOUT_S) -> Database:
    return open_database(database_url(backend, folder), timeout_s=timeout_s)
