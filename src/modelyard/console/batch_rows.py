"""Batches as the console lists them."""

from dataclasses import dataclass

from modelyard.console.views import ConsoleContext, usd
from modelyard.domain.batches import Batch, view
from modelyard.domain.tenants import Identity

BATCHES_SHOWN = 100
NO_FACTOR = 1.0


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch in the listing; ``finish_at`` is a forecast while it runs and the truth after it."""

    id: str
    tenant_id: str
    status: str
    trouble: str
    """What is wrong with its file, the first of it."""
    endpoint: str
    model: str
    total: int
    completed: int
    failed: int
    created_at: float
    finish_at: float | None
    is_over: bool
    cost_forecast: str

    @property
    def percent(self) -> int:
        """How much of it is answered."""
        return 100 * (self.completed + self.failed) // self.total if self.total else 0


async def batch_rows(context: ConsoleContext, identity: Identity) -> list[BatchRow]:
    """Return the newest batches that ``identity`` may see."""
    now = context.clock.unix_s()
    found = await context.batches.batches(tenant_id=identity.visible_tenant, limit=BATCHES_SHOWN, after=None)
    return [_row(batch, now) for batch in found]


def _row(batch: Batch, now: float) -> BatchRow:
    shown = view(batch, price_factor=NO_FACTOR, now=now)
    coming = shown.modelyard.forecast
    first = batch.errors[0] if batch.errors else None
    ends = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    return BatchRow(
        id=batch.id,
        tenant_id=batch.tenant_id,
        status=batch.status.value,
        trouble="" if first is None else first.message if first.line is None else f"line {first.line}: {first.message}",
        endpoint=batch.endpoint,
        model=batch.model,
        total=batch.counts.total,
        completed=batch.counts.completed,
        failed=batch.counts.failed,
        created_at=batch.created_at,
        finish_at=next((at for at in ends if at is not None), None if coming is None else coming.finish_at),
        is_over=batch.status.is_over,
        cost_forecast="" if batch.forecast is None else usd(batch.forecast.cost_nanousd),
    )
