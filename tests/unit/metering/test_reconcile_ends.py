"""Ends of replicas raise no false alarm: each reason for which an engine did more is allowed for, and no more."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conformance.backends import open_fresh
from tests.support.journals import intent_of, settle_of, write_run

from modelyard.clock import ManualClock
from modelyard.domain.books import ReplicaLife, ReplicaUse
from modelyard.domain.usage import Intent, Settle, UsageStatus
from modelyard.metering.delivery import Delivery
from modelyard.metering.reconcile import Check
from modelyard.metering.reconcile.replicas import EACH_UNSURE, SETTLES_S, UNDER_WAY, ledger_and_engines
from modelyard.stores.sql import SqlBookStore, SqlUsageStore

BEGIN_S = 1_700_002_800.0
PAGE_S = BEGIN_S + 800
"""When the engine's page was last read."""
END_S = BEGIN_S + 803
LIFE = ReplicaLife(
    replica_id="rep-1",
    endpoint_id="ep-1",
    owner_id="ten-a",
    model="smol",
    version_id="ver-1",
    accelerator="cpu",
    accelerators=1.0,
    hourly_nanousd=0,
    started_at=BEGIN_S,
    ready_at=BEGIN_S,
    ended_at=END_S,
    seen_at=END_S,
    prompt_tokens=10_000,
    generation_tokens=0,
    counted_at=PAGE_S,
)
OTHER = msgspec.structs.replace(LIFE, replica_id="rep-2", generation_tokens=None, prompt_tokens=None)
"""Another replica of the same endpoint, of whose engine nothing is known."""


def asked(rid: str, arrived: float, settled: float, **more: Any) -> tuple[Intent, Settle]:
    return intent_of(rid, arrived), settle_of(rid, settled, **more)


class Ledger:
    def __init__(self, folder: Path) -> None:
        self.root = folder / "journal"
        self.database = open_fresh("sqlite", folder)
        self.books = SqlBookStore(self.database)
        self.delivery = Delivery(self.root, SqlUsageStore(self.database), 0.01)

    async def check(self, made: int, *pairs: tuple[Intent, Settle], **more: Any) -> Check:
        """Compare an engine that made so many tokens with a ledger of these requests."""
        write_run(self.root, "gateway-0", [], ManualClock(start_s=BEGIN_S), pairs=pairs)
        await self.delivery.drain()
        life = msgspec.structs.replace(LIFE, generation_tokens=made)
        await self.books.put_lives([life, OTHER], [])
        return await ledger_and_engines(self.books, since=BEGIN_S, until=BEGIN_S + 3600, tolerance=0.0, **more)


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger(tmp_path)
    yield ledger
    await ledger.database.close()


SURE = asked("sure", BEGIN_S + 1, BEGIN_S + 2)


@pytest.mark.parametrize(
    "settled", [pytest.param(PAGE_S - 1, id="just before the page"), pytest.param(PAGE_S + 3, id="after it")]
)
@pytest.mark.parametrize("made", [20, 33, 40])
async def test_a_request_around_the_last_page_may_be_in_it_or_not(ledger: Ledger, settled: float, made: int) -> None:
    check = await ledger.check(made, SURE, asked("around", PAGE_S - 5, settled))
    assert check.is_good, check.differences


async def test_what_nobody_was_billed_for_is_found_although_requests_were_under_way(ledger: Ledger) -> None:
    check = await ledger.check(41, SURE, asked("around", PAGE_S - 5, PAGE_S + 3))
    assert [one.tokens for one in check.differences] == [-1]


async def test_a_request_that_arrived_after_the_page_explains_nothing(ledger: Ledger) -> None:
    check = await ledger.check(40, SURE, asked("after", PAGE_S + 2.5, PAGE_S + 3))
    assert [one.tokens for one in check.differences] == [-20]


async def test_a_stream_that_the_end_cut_off_may_have_got_further_in_the_engine(ledger: Ledger) -> None:
    cut = asked("cut", PAGE_S - 5, END_S, status=UsageStatus.INTERRUPTED, is_estimated=True)
    check = await ledger.check(40 + EACH_UNSURE, SURE, cut)
    assert check.is_good, check.differences
    assert any("1 times a request was retried, cut off or estimated" in note for note in check.notes)
    check = await ledger.check(41 + EACH_UNSURE)
    assert [one.tokens for one in check.differences] == [-EACH_UNSURE - 1]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"replica": "rep-2", "attempts": 2}, id="answered by another"),
        pytest.param({"replica": "rep-2/guest", "attempts": 2}, id="by a guest of another"),
        pytest.param({"replica": "", "attempts": 1, "completion": 7, "is_estimated": True}, id="its gateway died"),
    ],
)
async def test_a_request_that_ended_elsewhere_may_have_been_worked_on_here(ledger: Ledger, how: dict[str, Any]) -> None:
    check = await ledger.check(20 + EACH_UNSURE, SURE, asked("moved", PAGE_S - 5, END_S + 5, **how))
    assert check.is_good, check.differences
    check = await ledger.check(21 + EACH_UNSURE)
    assert [one.tokens for one in check.differences] == [-EACH_UNSURE - 1]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"replica": "rep-2"}, id="at once by another"),
        pytest.param({"replica": "", "attempts": 0, "completion": 0}, id="never sent"),
    ],
)
async def test_a_request_that_was_never_here_explains_nothing(ledger: Ledger, how: dict[str, Any]) -> None:
    check = await ledger.check(21, SURE, asked("never", PAGE_S - 5, END_S + 5, **how))
    assert [one.tokens for one in check.differences] == [-1]


async def test_a_retried_request_of_another_endpoint_explains_nothing(ledger: Ledger) -> None:
    intent, settle = asked("strange", PAGE_S - 5, END_S, replica="rep-9", attempts=2)
    check = await ledger.check(21, SURE, (msgspec.structs.replace(intent, endpoint_id="ep-2"), settle))
    assert [one.tokens for one in check.differences] == [-1]


async def test_the_last_requests_have_a_minute_to_reach_the_ledger(ledger: Ledger) -> None:
    check = await ledger.check(20 + UNDER_WAY, SURE, now_s=END_S + SETTLES_S - 1)
    assert check.is_good, check.differences
    check = await ledger.check(20 + UNDER_WAY, now_s=END_S + SETTLES_S + 1)
    assert [one.tokens for one in check.differences] == [-UNDER_WAY]


async def test_copies_for_a_shadow_are_nobodys_and_no_difference(ledger: Ledger) -> None:
    check = await ledger.check(5000, shadows={"ver-1"})
    assert check.is_good, check.differences
    assert any("get copies that nobody is billed for" in note for note in check.notes)
    check = await ledger.check(19, SURE, shadows={"ver-1"})
    assert [one.tokens for one in check.differences] == [1], "billed is billed"


async def test_what_an_engine_counts_while_books_are_compared_is_no_difference(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is written between two questions: none of the two may be set against the other's time."""
    later = msgspec.structs.replace(LIFE, generation_tokens=60, counted_at=PAGE_S + 60, ended_at=None)
    ask = SqlBookStore.replica_use

    async def meanwhile(books: SqlBookStore, **span: Any) -> dict[str, ReplicaUse]:
        await books.put_lives([later], [])
        return await ask(books, **span)

    monkeypatch.setattr(SqlBookStore, "replica_use", meanwhile)
    check = await ledger.check(20, SURE, asked("next", PAGE_S + 10, PAGE_S + 20, completion=40))
    assert check.is_good, check.differences
