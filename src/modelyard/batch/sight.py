"""What is known of a model when a batch for it is submitted: its last answers, its replicas, its price."""

from collections.abc import Sequence

import msgspec

from modelyard.clock import Clock
from modelyard.domain.batches import Batch, Forecast
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import ReplicaState
from modelyard.domain.prices import PriceEntry
from modelyard.domain.usage import Price, UsageStatus
from modelyard.policy.batch_forecast import Seen, Work, forecast
from modelyard.policy.pricelist import line_price
from modelyard.stores import BatchStore, BillingStore, ControlStore, UsageStore

LOOK_BACK_S = 86_400.0
ROWS_MAX = 1000
"""Newest rows of the ledger that are looked at; other models' are among them."""


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
        price = await self._price(batch.tenant_id, name)
        return forecast(work, seen, price, concurrency=self._concurrency)

    async def _price(self, tenant_id: str, name: str) -> Price:
        return line_price(
            [*self._configured, *await self._billing.prices()],
            tenant_id=tenant_id,
            model=name,
            factor_micro=self._factor_micro,
            now_unix_s=self._clock.unix_s(),
        )

    async def _seen(self, batch: Batch, endpoint: Endpoint, model: str) -> Seen:
        since = self._clock.unix_s() - LOOK_BACK_S
        rows = await self._usage.rows(tenant_id=None, since=since, limit=ROWS_MAX)
        mine = [
            row
            for row in rows
            if row.endpoint_id == endpoint.id and row.route == batch.endpoint and row.status is UsageStatus.SUCCESS
        ]
        replicas = await self._control.replicas(endpoint_id=endpoint.id)
        ahead = await self._store.ahead(_named(batch, model))
        count = max(1, len(mine))
        return Seen(
            answers=len(mine),
            output_tokens=sum(row.completion_tokens for row in mine) / count,
            seconds=sum(row.latency_ms for row in mine) / count / 1000,
            slots=sum(replica.slots for replica in replicas if replica.state is ReplicaState.READY),
            lines_ahead=ahead,
        )


def _of(endpoints: list[Endpoint], tenant_id: str, model: str) -> Endpoint | None:
    """Return the endpoint that a tenant calls ``model``: its own before a shared one."""
    named = [one for one in endpoints if model in (one.name, one.id) and not one.is_deleted]
    own = [one for one in named if one.tenant_id == tenant_id]
    return next(iter(own or [one for one in named if one.is_shared]), None)


def _named(batch: Batch, model: str) -> Batch:
    return msgspec.structs.replace(batch, model=model)
