"""The sending of webhooks in virtual time: real stores, real HTTP, a clock that moves from one attempt to the next."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from modelyard.clock import ManualClock
from modelyard.config import ControlConfig
from modelyard.control.webhooks import LANE_SENDING_MAX, WebhookSender, keys_of, shown
from modelyard.domain.events import EventType
from modelyard.domain.tenants import Tenant
from modelyard.domain.webhooks import Delivery, Due, SigningSecret, Webhook
from modelyard.policy.addresses import networks
from modelyard.stores.sql import (
    Database,
    SqlControlStore,
    SqlEventStore,
    SqlRequestStore,
    SqlWebhookStore,
    open_database,
)
from modelyard.web.fetcher import Fetcher

PEPPER = b"p" * 32
TENANTS = ("ten-a", "ten-b")


@dataclass
class Site:
    """A sender and what it works on."""

    database: Database
    control: SqlControlStore
    requests: SqlRequestStore
    events: SqlEventStore
    webhooks: SqlWebhookStore
    clock: ManualClock
    sender: WebhookSender

    async def add(self, url: str, webhook_id: str = "wh_1", *, tenant_id: str = "ten-a", types: str = "*") -> Webhook:
        """Add a webhook."""
        webhook = Webhook(
            id=webhook_id,
            tenant_id=tenant_id,
            url=url,
            types=(types,),
            created_at=self.clock.unix_s(),
            secret=SigningSecret("salt"),
        )
        assert await self.webhooks.add_webhook(webhook, most=100)
        return webhook

    async def happen(self, object_id: str = "batch_1", *, tenant_id: str = "ten-a") -> str:
        """Let a batch be completed; return the event's id."""
        kind = EventType.BATCH_COMPLETED
        return await self.events.add(tenant_id, kind, {"id": object_id}, now=self.clock.unix_s())

    async def webhook(self, webhook_id: str = "wh_1") -> Webhook:
        """Return a webhook as it is now."""
        webhook = await self.webhooks.webhook(webhook_id, tenant_id=None)
        assert webhook is not None
        return webhook

    async def secret(self, webhook_id: str = "wh_1") -> str:
        """Return what a receiver checks signatures with."""
        webhook = await self.webhook(webhook_id)
        return shown(keys_of(PEPPER, webhook_id, webhook.secret, now=self.clock.unix_s())[0])

    async def deliveries(self, webhook_id: str = "wh_1") -> list[Delivery]:
        """Return its deliveries, newest first."""
        return await self.webhooks.deliveries(webhook_id, status=None, limit=1000, after=None)

    async def due(self) -> list[Due]:
        """Return what is due now, as much as the loop would send at once."""
        found: list[Due] = []
        for is_failing, of_lane in ((False, LANE_SENDING_MAX), (True, 1)):
            found += await self.webhooks.due(
                now=self.clock.unix_s(), limit=1000, of_lane=of_lane, of_tenant=1000, is_failing=is_failing
            )
        return found

    async def run_until(self, unix_s: float) -> None:
        """Attempt what becomes due until then, each at its time; the clock stands there at the end."""
        while (at := await self.webhooks.next_due()) is not None and at <= unix_s:
            # A float that went through the difference may fall short of what it came from.
            self.clock.advance(max(0.0, at - self.clock.unix_s()) + 0.001)
            for due in await self.due():
                await self.sender.send(due)
        self.clock.advance(max(0.0, unix_s - self.clock.unix_s()))


@asynccontextmanager
async def site(folder: Path, *, timeout_s: float = 5.0, **settings: float) -> AsyncIterator[Site]:
    """Yield a site whose time begins now; ``settings`` are those of ``[control]``."""
    database = open_database(f"sqlite:///{folder / 'db.sqlite'}", timeout_s=5)
    control, events, webhooks = SqlControlStore(database), SqlEventStore(database), SqlWebhookStore(database)
    for tenant in TENANTS:
        await control.add_tenant(Tenant(tenant, tenant, 1))
    clock = ManualClock(start_s=float(int(time.time())))
    sender = WebhookSender(
        store=webhooks,
        events=events,
        fetcher=Fetcher(networks(["127.0.0.0/8"])),
        settings=msgspec.structs.replace(ControlConfig(), **settings),
        pepper=PEPPER,
        clock=clock,
        chance=lambda: 0.5,
        timeout_s=timeout_s,
    )
    try:
        yield Site(database, control, SqlRequestStore(database), events, webhooks, clock, sender)
    finally:
        await control.close()
