"""What a request costs is what held when it arrived, whatever happens while it runs."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.unit.gateway.test_fallbacks import ANSWER, Fallen, asked

from modelyard.domain.prices import Tariff
from modelyard.domain.routing_table import RoutingTable, Spent, Tidings
from modelyard.domain.tenants import Limits, model_subject
from modelyard.domain.usage import Intent, Price
from modelyard.policy.utc import day_name, day_of, month_name

CHEAP, DEAR, OWN = Price(input=1_000_000), Price(input=9_000_000), Price(input=5_000_000)


class Priced(Fallen):
    """The same two releases, with a price that changes ten seconds after the start."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.at = int(self.clock.unix_s()) + 10
        self.price(Tariff("", "", self.at, 0, DEAR), Tariff("", "", 0, 0, CHEAP))

    def price(self, *tariffs: Tariff) -> None:
        table = self.gateway.catalog.table
        assert table is not None
        (route,) = table.endpoints
        self.revision += 1
        new = RoutingTable(
            "e", self.revision, table.tenants, table.keys, (msgspec.structs.replace(route, tariffs=tariffs),)
        )
        self.gateway.catalog.take(new, now_s=self.clock.monotonic_s())

    def bound(self, limits: Limits) -> None:
        """Give the key limits, of which nothing is used."""
        accounts, table = self.gateway.catalog.accounts, self.gateway.catalog.table
        assert table is not None
        (key,) = table.keys
        accounts.attach(self.journal)
        accounts.take(table.tenants, [msgspec.structs.replace(key, limits=limits)], now_s=self.clock.monotonic_s())
        source, position, now = accounts.quotas.source, self.journal.position, self.clock.unix_s()
        assert position is not None
        subjects = (key.id, *(model_subject(key.id, model) for model in limits.model_budgets))
        day, month = day_name(day_of(now)), month_name(day_of(now))
        spent = tuple(Spent(subject, day, month, 0, 0, 0, 0, source) for subject in subjects)
        accounts.hear(Tidings(spent=spent, delivered={source: position}), now_unix_s=now)

    def billed(self) -> list[Price]:
        return [one.price for one in self.records() if isinstance(one, Intent)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Priced]:
    bench = Priced(tmp_path)
    yield bench
    bench.assert_at_rest()
    bench.journal.close()


def test_a_price_changes_on_the_second_without_a_new_table(bench: Priced) -> None:
    for seconds in (9.9, 0.1):
        bench.clock.advance(seconds)
        asked(bench)
        bench.pool.opened[-1][0].data_received(ANSWER)
    assert bench.billed() == [CHEAP, DEAR]


def test_a_request_keeps_the_price_of_its_arrival_when_the_table_changes_and_when_it_moves(bench: Priced) -> None:
    asked(bench)
    (exchange,) = bench.gateway.exchanges
    bench.price(Tariff("", "", 0, 0, OWN))
    bench.clock.advance(20)
    assert exchange.prices.most == CHEAP
    bench.pool.opened[0][0].data_received(b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}")
    assert bench.went_to() == ["own", "theirs"]
    bench.pool.opened[1][0].data_received(ANSWER)
    (settle,) = bench.settled()
    assert (settle.version_id, settle.price) == ("w", CHEAP)
    client = asked(bench)
    assert bench.billed()[-1] == OWN
    client.connection_lost(None)


def test_a_tenant_pays_its_own_price_and_what_may_answer_is_reserved_at_the_dearest(bench: Priced) -> None:
    bench.price(Tariff("t", "", 0, 0, OWN), Tariff("", "w", 0, 0, DEAR), Tariff("", "", 0, 0, CHEAP))
    assert bench.endpoint.sheet("t", 0.0).most == OWN
    other = bench.endpoint.sheet("somebody", 0.0)
    assert (other.of("v"), other.of("w"), other.most) == (CHEAP, DEAR, DEAR)
    assert bench.endpoint.sheet("t", 0.0) is bench.endpoint.sheet("t", 5.0), "looked up once while it holds"


def test_lines_of_batches_pay_their_share_which_is_made_once_while_a_price_holds(bench: Priced) -> None:
    half = Price(input=500_000, batch_micro=500_000)
    first = bench.endpoint.batch_sheet("t", float(bench.at) - 5, 500_000)
    assert first.most == half
    assert bench.endpoint.batch_sheet("t", float(bench.at) - 4, 500_000) is first
    changed = bench.endpoint.batch_sheet("t", float(bench.at) + 1, 500_000)
    assert changed.most == Price(input=4_500_000, batch_micro=500_000)
    bench.price(Tariff("t", "", 0, 0, OWN), Tariff("", "", 0, 0, CHEAP))
    assert bench.endpoint.batch_sheet("t", float(bench.at) + 2, 500_000).most.input == 2_500_000
    assert bench.endpoint.batch_sheet("other", float(bench.at) + 2, 500_000).most == half


@pytest.mark.parametrize("limits", [Limits(tokens_per_day=10**9), Limits(model_budgets={"m": 10**15})])
def test_a_request_is_billed_at_the_price_of_the_day_on_which_it_is_booked(bench: Priced, limits: Limits) -> None:
    """A quota's day never begins twice: behind a clock that was set back, requests count on the new day."""
    midnight = (int(bench.clock.unix_s()) // 86_400 + 1) * 86_400
    bench.price(Tariff("", "", midnight, 0, DEAR), Tariff("", "", 0, 0, CHEAP))
    bench.bound(limits)
    bench.clock.advance(midnight + 5 - bench.clock.unix_s())
    asked(bench)
    bench.pool.opened[-1][0].data_received(ANSWER)
    bench.clock.elapsed_s -= 10
    asked(bench)
    bench.pool.opened[-1][0].data_received(ANSWER)
    intents = [one for one in bench.records() if isinstance(one, Intent)]
    assert [(one.at, one.price) for one in intents] == [(midnight + 5, DEAR), (midnight, DEAR)]
