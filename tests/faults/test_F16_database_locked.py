"""F16 (SQLite): another process holds the database's write lock."""

import contextlib
import sqlite3
from collections.abc import Iterator

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually
from tests.support.yard import Yard

from modelyard.ids import new_api_key

SETTINGS = {"control.database_timeout_s": 0.5}


@contextlib.contextmanager
def locked(yard: Yard) -> Iterator[None]:
    """Hold ``BEGIN EXCLUSIVE`` on the control database, as a foreign process would."""
    with contextlib.closing(sqlite3.connect(yard.data / "control.sqlite", isolation_level=None, timeout=5)) as database:
        database.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            database.execute("ROLLBACK")


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options={"slots": 16, "ttft_ms": 1, "itl_ms": 1})
    return "sim"


async def test_a_locked_database_stops_administration_and_nothing_else(yard: Yard, model: str) -> None:
    known, (stranger, _) = yard.new_key(), new_api_key()
    rows_before = len(yard.rows())
    eventually(lambda: yard.call("GET", "/v1/models", key=stranger).status == 401, 5, "keys are judged")
    async with Load(yard.port, known) as load:
        with locked(yard):
            refused = eventually(lambda: refusal(yard, stranger), 10, "an unknown key is not judged")
            assert refused["code"] == "auth_unavailable"
            for number in range(20):
                load.start(chat(model, f"hello {number}", stream=number % 2 == 0))
            await load.finish(10)
            assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}

            created = yard.call("POST", "/v1/keys", {"name": "late", "scopes": ["inference"]})
            assert (created.status, created.json()["error"]["code"]) == (503, "storage_unavailable")
            assert int(created.headers["retry-after"]) >= 1
            assert len(yard.rows()) == rows_before, "the ledger could not be written, the journal has it all"

        check_ledger(yard, load.exchanges)
    eventually(lambda: yard.call("GET", "/v1/models", key=stranger).status == 401, 10, "keys are judged again")
    eventually(lambda: bool(yard.new_key(name="later")), 10, "administration works again")


def refusal(yard: Yard, key: str) -> dict[str, object]:
    """Return the error object when an unknown key gets 503; {} while it still gets 401."""
    reply = yard.call("GET", "/v1/models", key=key)
    assert reply.status in (401, 503), reply
    return dict(reply.json()["error"]) if reply.status == 503 else {}
