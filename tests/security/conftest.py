"""Shared by the security suites: one simulated model, and proof that refused requests never got anywhere."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.canary import Canary
from tests.support.refusals import begun, post
from tests.support.wire import Answer
from tests.support.yard import Yard

Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    """Return the name of a simulated model that is ready."""
    yard.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1})
    return "sim"


@pytest.fixture(scope="module")
def refused_ids(yard: Yard, model: str) -> Iterator[set[str | None]]:
    """Collect ids of refused requests; after the file none of them has a ledger row (an intent would have left one)."""
    ids: set[str | None] = set()
    yield ids
    good = post(yard, "/v1/completions", {"model": model, "prompt": "the end", "max_tokens": 1})
    assert good.status == 200, bytes(good.body)
    yard.row_of(good.header("x-request-id"))  # the journal is delivered in order: all before it is there, too
    billed = ids & {row.request_id for row in yard.rows()}
    assert not billed, f"refused requests were dispatched: {billed}"


@pytest.fixture
def ask(yard: Yard, refused_ids: set[str | None]) -> Iterator[Ask]:
    """Return ``ask(path, body, **options) -> Answer``; after the test no engine may have begun anything."""
    before = begun(yard)

    def send(path: str, body: object, **options: Any) -> Answer:
        answer = post(yard, path, body, **options)
        refused_ids.add(answer.header("x-request-id"))
        return answer

    yield send
    assert begun(yard) == before, "an engine saw a request that had to be refused"


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    """Listen as a neighbour, for all tests of a file."""
    running = Canary()
    yield running
    running.close()
