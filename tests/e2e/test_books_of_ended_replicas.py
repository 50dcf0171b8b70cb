"""Replicas that ended the ordinary ways leave books that balance; what is really lost is still found."""

import contextlib
import http.client
import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.e2e.test_cli_commands import run
from tests.support.waiting import eventually
from tests.support.yard import Yard

WITHIN_S = 90.0
STREAMS = 6


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with Yard(tmp_path_factory.mktemp("ended")) as yard:
        yield yard


def chat(model: str, tokens: int, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "count, please"}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "ignore_eos": True, **more}


def answers(yard: Yard, model: str) -> bool:
    return yard.call("POST", "/v1/chat/completions", chat(model, 20)).status == 200


def serve(yard: Yard, model: str, requests: int = 12) -> None:
    for _ in range(requests):
        eventually(lambda: answers(yard, model), WITHIN_S, f"{model} answers")  # right after a restart it may not


def checks(yard: Yard) -> tuple[int, dict[str, Any]]:
    """Reconcile; return the exit code and the checks."""
    done = run(yard, "reconcile", "--json")
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)["checks"]}


def wait_ended(yard: Yard, model: str) -> dict[str, Any]:
    """Wait until the book has a replica of this model that ended, and say which."""
    ended = f"SELECT * FROM replica_lives WHERE model_name = '{model}' AND ended_at IS NOT NULL"
    life: dict[str, Any] = eventually(lambda: yard.query(ended), WITHIN_S, f"a replica of {model} ended")[0]
    eventually(yard.is_booked, 40.0, "all is settled")
    return life


def assert_balanced(yard: Yard) -> None:
    code, found = checks(yard)
    assert code == 0, found
    assert found["ledger and engines"]["compared"] >= 2


def read_all(yard: Yard, body: dict[str, object]) -> int:
    """Read a stream for as long as there is something; return how many bytes came."""
    connection, size = yard._connection(30.0), 0
    with contextlib.closing(connection), contextlib.suppress(http.client.HTTPException, OSError):
        headers = {"authorization": f"Bearer {yard.admin_key}", "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        while piece := answer.read1():
            size += len(piece)
    return size


@pytest.mark.timeout(300)
def test_an_endpoint_that_is_removed_and_an_engine_that_is_killed_under_requests_are_no_difference(yard: Yard) -> None:
    yard.deploy("gone")
    yard.deploy("killed")
    bodies = [chat("killed", 12_000, stream=n % 2 == 0) for n in range(STREAMS)]
    counted = "SELECT * FROM replica_lives WHERE model_name = 'killed' AND generation_tokens > 500"
    with ThreadPoolExecutor(STREAMS) as pool:
        sizes = pool.map(lambda body: read_all(yard, body), bodies)
        serve(yard, "gone")
        yard.deploy("other")  # the book is written when something begins
        eventually(lambda: yard.query(counted), 150.0, "the engine's counters under way are in the book")
        serve(yard, "gone", 30)
        assert yard.call("DELETE", "/v1/endpoints/gone").status == 202
        yard.kill(yard.engines("killed")[0].pid)
        assert sum(sizes) > 0
    wait_ended(yard, "killed")
    wait_ended(yard, "gone")
    assert_balanced(yard)


def test_down_and_up_is_no_difference(yard: Yard) -> None:
    yard.wait_ready("killed")
    serve(yard, "killed", 5)
    yard.stop()
    yard.start()
    yard.wait_ready("killed")
    serve(yard, "killed", 5)
    eventually(yard.is_booked, 40.0, "all is settled")
    assert_balanced(yard)


def test_a_row_that_somebody_deleted_is_still_found(yard: Yard) -> None:
    """Last: these books do not balance any more."""
    found = "SELECT request_id FROM inference_requests WHERE model_name = 'gone' ORDER BY created_at LIMIT 1"
    (row,) = yard.query(found)
    with contextlib.closing(sqlite3.connect(yard.data / "control.sqlite", timeout=10)) as database, database:
        database.execute("DELETE FROM inference_requests WHERE request_id = ?", (row["request_id"],))
    code, by_name = checks(yard)
    assert code == 1
    (difference,) = by_name["journal and ledger"]["differences"]
    assert difference["request_ids"] == [row["request_id"]]
