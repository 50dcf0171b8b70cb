"""What a forecast is made from: this model's own answers, the replicas that give them, and the price of its lines."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from modelyard.batch.sight import Sight
from modelyard.clock import ManualClock
from modelyard.domain.batches import Batch, Forecast
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Endpoint, Release, Scaling
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.prices import PriceEntry
from modelyard.domain.tenants import Tenant
from modelyard.domain.usage import Intent, JournalRecord, Price, Settle, Unit, UsageStatus
from modelyard.policy.batch_forecast import Work
from modelyard.stores import JournalPosition
from modelyard.stores.sql import (
    Database,
    SqlBatchStore,
    SqlBillingStore,
    SqlControlStore,
    SqlUsageStore,
    open_database,
    usage_reports,
)

NOW = 1_000_000.0
RERANK = "/v1/rerank"
BATCH = Batch("batch_1", "ten", "key", RERANK, "file-x", "24h", NOW, NOW + 86_400)
WORK = Work(lines=100, characters=400, output_max=None, generates=False)


@dataclass
class Known:
    """What there is, with a way to say more."""

    database: Database
    at: int = 0

    async def endpoint(self, name: str, *, host: str = "") -> None:
        """Add an endpoint with one version and, if it is no guest, a replica of four slots."""
        version = ModelVersion(f"ver-{name}", "ten", name, "7", "simulated", Artifact("file:///x"), {}, 1)
        endpoint = Endpoint(
            f"ep-{name}", "ten", name, (Release(version.id),), Scaling(), 1, host_id=f"ep-{host}" if host else ""
        )
        control = SqlControlStore(self.database)
        await control.add_deployment(version, endpoint)
        if not host:
            ready = Replica(f"rep-{name}", endpoint.id, version.id, 0, 1, ReplicaState.READY, NOW, slots=4)
            await control.put_replica(ready)

    async def answers(self, name: str, count: int, *, batch: str = "", ms: float = 2000.0) -> None:
        """Let a model have answered, with ten tokens and three pairs each."""
        records: list[JournalRecord] = []
        for _ in range(count):
            self.at += 1
            line = f"{batch}/{self.at}" if batch else ""
            when = NOW - 1000 + self.at
            intent = Intent(
                f"r{self.at:05}", when, "other", "k", f"ep-{name}", name, "v", RERANK, False, 1, 1, Price(), line
            )
            settle = Settle(
                intent.request_id,
                when,
                5,
                0,
                10,
                UsageStatus.SUCCESS,
                200,
                "",
                None,
                ms,
                "r",
                1,
                False,
                3.0,
                Unit.PAIRS,
            )
            records += [intent, settle]
        await SqlUsageStore(self.database).apply(records, JournalPosition("g", "1", self.at))

    async def forecast(self, model: str, *prices: PriceEntry, work: Work = WORK) -> Forecast:
        """Return the forecast of a batch."""
        sight = Sight(
            store=SqlBatchStore(self.database),
            control=SqlControlStore(self.database),
            usage=SqlUsageStore(self.database),
            billing=SqlBillingStore(self.database),
            configured=prices,
            factor_micro=500_000,
            concurrency=64,
            clock=ManualClock(start_s=NOW),
        )
        return await sight.forecast(BATCH, model, work)


@pytest.fixture
async def known(tmp_path: Path) -> AsyncIterator[Known]:
    database = open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5.0)
    await SqlControlStore(database).add_tenant(Tenant("ten", "acme", 1))
    yield Known(database)
    await database.close()


async def test_the_answers_of_other_models_do_not_hide_those_of_this_one(known: Known) -> None:
    await known.endpoint("mine")
    await known.answers("mine", 10)
    await known.answers("another", 1500, ms=9.0)
    found = await known.forecast("mine")
    assert found.seconds == 100 * 2.0 / 4
    assert found.basis == "its last 10 answers, 2 s each, 4 at once"


async def test_how_long_one_takes_is_looked_for_among_few_rows(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_reports, "LOOKED_AT", 50)
    await known.endpoint("mine")
    await known.answers("mine", 10)
    await known.answers("another", 100)
    found = await known.forecast("mine")
    assert (found.seconds, found.basis) == (None, "its last 10 answers, 4 at once")


async def test_lines_of_batches_that_waited_do_not_tell_how_long_one_takes(known: Known) -> None:
    await known.endpoint("mine")
    await known.answers("mine", 10, ms=1000.0)
    await known.answers("mine", 50, batch="batch_0", ms=30_000.0)
    assert (await known.forecast("mine")).seconds == 100 * 1.0 / 4


async def test_a_guest_has_the_slots_of_its_host(known: Known) -> None:
    await known.endpoint("host")
    await known.endpoint("guest", host="host")
    await known.answers("guest", 10)
    assert (await known.forecast("guest")).seconds == 100 * 2.0 / 4


async def test_what_is_billed_beside_tokens_and_by_the_request_is_in_the_cost(known: Known) -> None:
    await known.endpoint("mine")
    price = PriceEntry("p", "mine", Price(unit=2_000_000, request=8), effective_from=0)
    unknown = await known.forecast("mine", price)
    assert unknown.cost_nanousd == 100 * 4
    assert "what is billed beside tokens is left out" in unknown.basis
    await known.answers("mine", 10)
    assert (await known.forecast("mine", price)).cost_nanousd == 100 * 4 + 100 * 3 * 1


async def test_the_price_is_that_of_the_version_and_of_whatever_name_the_lines_use(known: Known) -> None:
    await known.endpoint("mine")
    for_all = PriceEntry("a", "*", Price(input=1_000_000), effective_from=0)
    mine = PriceEntry("m", "mine", Price(input=4_000_000, batch_micro=250_000), effective_from=0)
    version = PriceEntry("v", "mine", Price(input=1_000_000, batch_micro=800_000), effective_from=0, version="7")
    assert (await known.forecast("mine", for_all)).factor_micro == 500_000
    for name in ("mine", "ep-mine"):
        found = await known.forecast(name, for_all, mine)
        assert (found.factor_micro, found.cost_nanousd) == (250_000, 100)
        found = await known.forecast(name, for_all, mine, version)
        assert (found.factor_micro, found.cost_nanousd) == (800_000, 80)
