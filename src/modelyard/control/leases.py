"""The desk that divides limits among the gateway workers of this machine (``policy/leases.py``)."""

import asyncio
from collections.abc import Callable, Iterable

from modelyard.clock import Clock
from modelyard.domain.demand import Report
from modelyard.domain.leases import NOBODY
from modelyard.domain.routing_table import RoutingTable
from modelyard.domain.tenants import ApiKey, Rates, Tenant
from modelyard.policy.leases import LeaseDesk, kinds
from modelyard.stores import TableFeed

INTERVAL_S = 0.2


class LeaseOffice:
    """Hears what gateways want and gives them leases over ``feed``; ``table`` is the newest routing table."""

    def __init__(self, *, feed: TableFeed, table: Callable[[], RoutingTable], workers: int, clock: Clock) -> None:
        self._feed = feed
        self._table = table
        self._clock = clock
        self._revision = -1
        self._desk = LeaseDesk(workers=workers, began_s=clock.monotonic_s())
        feed.on_report(self._hear)

    def __repr__(self) -> str:
        return f"<LeaseOffice on revision {self._revision}>"

    async def run(self) -> None:
        """Divide and give until cancelled."""
        while True:
            table = self._table()
            if table.revision != self._revision:
                self._revision = table.revision
                self._desk.limit(accounts_of(table.tenants, table.keys))
            for gateway_id, leases in self._desk.give(self._clock.monotonic_s()).items():
                self._feed.lease(gateway_id, leases)
            await asyncio.sleep(INTERVAL_S)

    def _hear(self, gateway_id: str, report: Report) -> None:
        if report.leases.worker == NOBODY:
            self._desk.lose(gateway_id)
        else:
            self._desk.hear(gateway_id, report.leases)


def accounts_of(tenants: Iterable[Tenant], keys: Iterable[ApiKey]) -> dict[str, Rates]:
    """Return the limits in time of all keys, tenants and their models by the name of the account."""
    found: dict[str, Rates] = {}
    bounded = [(tenant.id, tenant.limits) for tenant in tenants] + [(key.id, key.limits) for key in keys]
    for owner_id, limits in bounded:
        found[owner_id] = limits
        for model, rates in limits.models.items():
            found[f"{owner_id}/{model}"] = rates
    return {name: rates for name, rates in found.items() if kinds(rates) != (None, None, None)}
