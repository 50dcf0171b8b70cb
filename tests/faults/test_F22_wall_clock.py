"""F22: the wall clock is set back an hour, a day forward and into the next month while requests run."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.support.clocks import WallClock
from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually
from tests.support.yard import Reply, Yard

HOUR, DAY = 3600, 86_400


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> WallClock:
    return WallClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, clock: WallClock) -> Iterator[Yard]:
    folder: Path = tmp_path_factory.mktemp("yard")
    with Yard(folder, environment=clock.environment) as running:
        running.deploy("sim", options={"slots": 16, "ttft_ms": 1, "itl_ms": 10})
        yield running


@pytest.fixture(autouse=True)
def _true_again(clock: WallClock) -> Iterator[None]:
    yield
    clock.set(0)


def into_next_month(clock: WallClock, months: int = 1) -> int:
    """Return the shift to the first hour of the next month, or of one after it."""
    now = datetime.fromtimestamp(clock.unix_s() - clock.shift_s, UTC)
    month = now.month - 1 + months
    first = datetime(now.year + month // 12, month % 12 + 1, 1, 0, 30, tzinfo=UTC)
    return round((first - now).total_seconds())


def usage_by(yard: Yard, dimension: str, **asked: object) -> dict[str, int]:
    query = "&".join(f"{name}={value}" for name, value in asked.items())
    report = yard.get(f"/v1/usage?group_by={dimension}&since=0&until=99999999999&{query}")
    return {entry[dimension]: entry["requests"] for entry in report["data"]}


async def test_no_stream_drops_and_usage_is_of_the_time_at_which_a_request_began(yard: Yard, clock: WallClock) -> None:
    assert abs(datetime.now(UTC).timestamp() - clock.unix_s()) < 5
    began: list[tuple[Any, float]] = []
    async with Load(yard.port, yard.new_key()) as load:
        for shift_s in (0, -HOUR, DAY, into_next_month(clock), 0):
            clock.set(shift_s)
            batch = [load.start(chat("sim", f"tell [[sim: tokens=60]] {shift_s}", stream=True)) for _ in range(3)]
            began += [(exchange, clock.unix_s()) for exchange in batch]
            # Each is under way when the clock is set again, and then again: no deadline hangs on the date.
            for exchange in batch:
                await load.delivered(exchange, 5)
        await load.finish()
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
        check_ledger(yard, load.exchanges)
    expected: dict[str, int] = {}
    for exchange, at in began:
        row = yard.row_of(exchange.request_id)
        assert row["created_at"] == pytest.approx(at, abs=10)
        assert row["hour"] <= row["created_at"] < row["hour"] + HOUR
        assert 0 <= row["ttft_ms"] <= row["latency_ms"] <= 60_000
        assert row["settled_at"] - row["created_at"] == pytest.approx(row["latency_ms"] / 1000, abs=0.001)
        month = datetime.fromtimestamp(row["created_at"], UTC).strftime("%Y-%m")
        expected[month] = expected.get(month, 0) + 1
    assert usage_by(yard, "month") == expected
    assert sum(usage_by(yard, "day").values()) == sum(usage_by(yard, "hour").values()) == len(began)


def ask(yard: Yard, key: str, tokens: int = 4) -> Reply:
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": f"a [[sim: tokens={tokens}]]"}],
        "max_tokens": tokens,
    }
    return yard.call("POST", "/v1/chat/completions", body, key=key)


def is_over(reply: Reply) -> bool:
    return reply.status == 429 and reply.json()["error"]["code"] == "insufficient_quota"


def test_a_month_rolls_over_once_however_often_the_clock_comes_back(yard: Yard, clock: WallClock) -> None:
    key = yard.new_key(name="monthly", limits={"tokens_per_month": 150})
    key_id = next(one["id"] for one in yard.get("/v1/keys?limit=100")["data"] if one["name"] == "monthly")

    def spend() -> int:
        """Use the quota of this month up; return how many requests that took."""
        taken = 0
        while (reply := eventually(judged, 30, "what is spent of the quota is known")).status == 200:
            taken += 1
        assert is_over(reply), reply.body
        return taken

    def judged() -> Reply | None:
        reply = ask(yard, key)
        return None if reply.status == 503 and b"quota_unavailable" in reply.body else reply

    # Gateways have seen the next month, perhaps, in the test before: this one begins there, wherever they are.
    clock.set(into_next_month(clock))
    first = spend()
    assert first > 0
    clock.set(into_next_month(clock, 2))
    second = spend()
    assert second == first, "a new month has the whole quota"
    for shift_s in (into_next_month(clock), 0, into_next_month(clock, 2), -HOUR):
        clock.set(shift_s)
        assert spend() == 0, "no month is new for a second time"
    clock.set(0)
    months = eventually(
        lambda: (seen := usage_by(yard, "month", key=key_id)) and sum(seen.values()) == 2 * first and seen,
        30,
        "all are in the ledger",
    )
    assert list(months.values()) == [first, second]


def test_a_clock_that_is_set_refills_no_minute(yard: Yard, clock: WallClock) -> None:
    key = yard.new_key(name="hasty", limits={"requests_per_minute": 2})
    assert [ask(yard, key).status for _ in range(4)] == [200, 200, 429, 429]
    for shift_s in (DAY, -HOUR, into_next_month(clock)):
        clock.set(shift_s)
        assert ask(yard, key).status == 429


def test_a_key_that_expired_stays_so_and_a_new_one_goes_by_the_clock(yard: Yard, clock: WallClock) -> None:
    key = yard.new_key(name="short", expires_at=round(clock.unix_s()) + 6 * HOUR)
    assert ask(yard, key).status == 200
    for shift_s in (DAY, 0, -HOUR, into_next_month(clock), 0):
        clock.set(shift_s)
        assert ask(yard, key).status == 401
    again = yard.new_key(name="short again", expires_at=round(clock.unix_s()) + 6 * HOUR)
    assert ask(yard, again).status == 200


def test_the_books_balance_behind_a_clock_that_leapt(yard: Yard, clock: WallClock) -> None:
    key = yard.new_key(name="balanced")
    for shift_s in (DAY, 0, -HOUR, into_next_month(clock), 0):
        clock.set(shift_s)
        assert ask(yard, key).status == 200
    clock.set(0)
    span = f"since={int(clock.unix_s()) - 2 * DAY}&until={int(clock.unix_s()) + 40 * DAY}"

    def compared() -> Any:
        result = yard.get(f"/v1/reconciliation?{span}")
        return result if result["checks"][0]["compared"] else None

    result = eventually(compared, 30, "the journal is in the ledger")
    assert [check for check in result["checks"] if check["found"] or check["problem"]] == []
    assert result["balances"]
