"""Clients that leave, engines that break, gateways that are killed: what clients got, journal and ledger agree.

``python -m bench.metering --reconcile 1000000`` plays a million; here are some of them.
"""

from pathlib import Path

import msgspec
from bench.metering.played import Fate, Got
from bench.metering.reconciled import reconcile
from tests.conformance.backends import open_fresh

from modelyard.domain.usage import EVERYTHING, UsageStatus
from modelyard.stores.sql import SqlUsageStore


async def test_books_of_a_rough_day_agree_to_the_token(tmp_path: Path) -> None:
    database = open_fresh("sqlite", tmp_path)
    books = await reconcile(tmp_path / "journals", SqlUsageStore(database), requests=1_500, chunk=300, seed=5)
    await database.close()
    assert books.flaws == []
    assert books.requests == 1_500
    assert books.clients_tokens - books.unbilled_tokens == books.ledger_tokens == books.journal_tokens
    assert books.journal_tokens == books.rolled_up_tokens > 0
    # All of it happened: else this would prove nothing.
    assert min(books.by_status[status] for status in ("success", "client_closed", "error", "interrupted")) > 10
    assert books.unbilled_tokens > 0


async def test_a_wrong_token_is_found(tmp_path: Path) -> None:
    database = open_fresh("sqlite", tmp_path)
    store = SqlUsageStore(database)
    await reconcile(tmp_path / "journals", store, requests=300, chunk=300, seed=6)
    rows = await store.rows_between(EVERYTHING, since=0, until=1e12, after=None, limit=1_000)
    await database.close()
    whole = next(row for row in rows if row.status is UsageStatus.SUCCESS)
    told = (whole.prompt_tokens, whole.cached_tokens, whole.completion_tokens, whole.reasoning_tokens)
    got = Got(Fate.COMPLETE, 0, is_stream=True, delivered=whole.completion_tokens, told=told, is_whole=True)
    assert got.flaw(whole) == ""
    assert got.flaw(None)
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"):
        assert got.flaw(msgspec.structs.replace(whole, **{name: getattr(whole, name) + 1})), name
    left = next(row for row in rows if row.status is UsageStatus.CLIENT_CLOSED and row.completion_tokens)
    got = Got(Fate.CLIENT_LEAVES, 0, is_stream=True, delivered=left.completion_tokens)
    assert got.flaw(left) == ""
    assert got.flaw(msgspec.structs.replace(left, completion_tokens=left.completion_tokens - 1))
    assert got.flaw(msgspec.structs.replace(left, is_estimated=False))
    assert got.flaw(msgspec.structs.replace(left, status=UsageStatus.SUCCESS))
