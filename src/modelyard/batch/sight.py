"""What is known of a model when a batch for it is submitted: its last answers, its replicas, its price."""

from collections.abc import Sequence

import msgspec

from modelyard.clock import Clock
from modelyard.domain.batches import Batch, Forecast
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import THERE
from modelyard.domain.prices import PriceEntry
from modelyard.domain.usage import Price, UsageFilter, UsageStatus
from modelyard.policy.batch_forecast import SAMPLES_MIN, Seen, Work, forecast
from modelyard.policy.pricelist import line_price
from modelyard.stores import BatchStore, BillingStore, ControlStore, UsageStore

HOUR_S = 3600
LOOK_BACK_S = 24 * HOUR_S
ROWS_MAX = 1000
"""Newest answers of the model that are looked at for how long they took."""


class Sight:
    """Reads what forecasts are made from; beside the stored prices there are the ``configured`` ones."""

    def __init__(
        self,
        *,
        store: BatchStore,
        control: ControlStore,
        usage: UsageStore,
        billing: BillingStore,
        configured: Sequence[PriceEntry],
        factor_micro: int,
        concurrency: int,
        clock: Clock,
    ) -> None:
        self._store = store
        self._control = control
        self._usage = usage
        self._billing = billing
        self._configured = configured
        self._factor_micro = factor_micro
        self._concurrency = concurrency
        self._clock = clock

    async def forecast(self, batch: Batch, model: str, work: Work) -> Forecast:
        """Return what a batch will take that asks ``model``, the name or id of an endpoint, for ``work``."""
        endpoint = _of(await self._control.endpoints(), batch.tenant_id, model)
        name = model if endpoint is None else endpoint.name
        seen = Seen() if endpoint is None else await self._seen(batch, endpoint, model)
        version = "" if endpoint is None else await self._version(endpoint)
        price = await self._price(batch.tenant_id, name, version)
        return forecast(work, seen, price, concurrency=self._concurrency)

    async def _version(self, endpoint: Endpoint) -> str:
        """Return the label of the version that answers most requests: it may have a price of its own."""
        most = max(endpoint.releases, key=lambda release: release.weight, default=None)
        versions = await self._control.versions()
        return next((one.version for one in versions if most is not None and one.id == most.version_id), "")

    async def _price(self, tenant_id: str, name: str, version: str) -> Price:
        return line_price(
            [*self._configured, *await self._billing.prices()],
            tenant_id=tenant_id,
            model=name,
            version=version,
            factor_micro=self._factor_micro,
            now_unix_s=self._clock.unix_s(),
        )

    async def _seen(self, batch: Batch, endpoint: Endpoint, model: str) -> Seen:
        now = self._clock.unix_s()
        # Whole hours: of them there are sums, however many requests there were.
        until = (int(now) // HOUR_S + 1) * HOUR_S
        sums = await self._usage.usage(
            tenant_id=None,
            key_id=None,
            model=None,
            since=until - LOOK_BACK_S,
            until=until,
            group_by=("status",),
            where=UsageFilter(endpoint_ids=(endpoint.id,), routes=(batch.endpoint,)),
        )
        good = next((one for one in sums if one.group["status"] == UsageStatus.SUCCESS), None)
        if good is None:
            return Seen()
        # A guest answers on the replicas of its host.
        replicas = await self._control.replicas(endpoint_id=endpoint.host_id or endpoint.id)
        return Seen(
            answers=good.requests,
            output_tokens=good.completion_tokens / good.requests,
            seconds=await self._seconds(batch, endpoint, now - LOOK_BACK_S),
            slots=sum(replica.slots for replica in replicas if replica.state in THERE),
            lines_ahead=await self._store.ahead(_named(batch, model)),
            units=sum(good.units.values()) / good.requests,
        )

    async def _seconds(self, batch: Batch, endpoint: Endpoint, since: float) -> float | None:
        """Return how long an answer takes; None where too few were seen."""
        rows = await self._usage.rows(tenant_id=None, since=since, limit=ROWS_MAX, endpoint_id=endpoint.id)
        mine = [row for row in rows if row.route == batch.endpoint and row.status is UsageStatus.SUCCESS]
        # Lines of batches wait in line, and give way: their time says more of the others than of the model.
        alone = [row for row in mine if not row.batch_id]
        looked_at = alone if len(alone) >= SAMPLES_MIN else mine
        if len(looked_at) < SAMPLES_MIN:
            return None
        return sum(row.latency_ms for row in looked_at) / len(looked_at) / 1000


def _of(endpoints: list[Endpoint], tenant_id: str, model: str) -> Endpoint | None:
    """Return the endpoint that a tenant calls ``model``: its own before a shared one."""
    named = [one for one in endpoints if model in (one.name, one.id) and not one.is_deleted]
    own = [one for one in named if one.tenant_id == tenant_id]
    return next(iter(own or [one for one in named if one.is_shared]), None)


def _named(batch: Batch, model: str) -> Batch:
    return msgspec.structs.replace(batch, model=model)
