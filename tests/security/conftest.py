"""Shared by the security suites: one simulated model, and proof that refused requests never got anywhere."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
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
def _unbilled(yard: Yard, model: str) -> Iterator[None]:
    """After the file: one good request, and no ledger row besides it (an intent would have left one)."""
    before = {row.request_id for row in yard.rows()}
    yield
    good = post(yard, "/v1/completions", {"model": model, "prompt": "the end", "max_tokens": 1})
    assert good.status == 200, bytes(good.body)
    yard.row_of(good.header("x-request-id"))
    billed = {row.request_id for row in yard.rows()} - before - {good.header("x-request-id")}
    assert not billed, f"refused requests were dispatched: {billed}"
    assert yard.open_requests() == 0


@pytest.fixture
def ask(yard: Yard, _unbilled: None) -> Iterator[Ask]:
    """Return ``ask(path, body, **options) -> Answer``; after the test no engine may have begun anything."""
    before = begun(yard)

    def send(path: str, body: object, **options: Any) -> Answer:
        return post(yard, path, body, **options)

    yield send
    assert begun(yard) == before, "an engine saw a request that had to be refused"
