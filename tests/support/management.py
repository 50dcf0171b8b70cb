"""The management API in one process, on real stores and a real fleet; no gateway, no reconciler.

``Management.client(identity)`` speaks to it as a gateway would.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from starlette.applications import Starlette

from modelyard.clock import ManualClock
from modelyard.config import Config, DataDirectory
from modelyard.console import build_console
from modelyard.control.api import build_api
from modelyard.control.artifacts import ArtifactStore, Sources
from modelyard.control.billing import BillingDesk
from modelyard.control.books import Books
from modelyard.control.context import Context
from modelyard.control.files import FileDesk
from modelyard.control.part_files import PartFiles
from modelyard.control.requests import RequestDesk
from modelyard.control.terms import TermsDesk
from modelyard.control.uploads import UploadDesk
from modelyard.control.webhooks import WebhookSender
from modelyard.domain.demand import Report
from modelyard.domain.routing_table import Heartbeat
from modelyard.domain.tenants import (
    IDENTITY_HEADER,
    INTERNAL_TOKEN_HEADER,
    PLATFORM,
    ApiKey,
    Identity,
    Scope,
    Tenant,
)
from modelyard.domain.why import RequestStory
from modelyard.engines.simulated import SimulatedEngine
from modelyard.fleet.local import LocalFleet
from modelyard.ids import hash_secret, new_api_key
from modelyard.policy.addresses import networks
from modelyard.policy.signals import Signals
from modelyard.stores.contents import DiskContents
from modelyard.stores.sql import (
    SqlBatchStore,
    SqlBillingStore,
    SqlBookStore,
    SqlControlStore,
    SqlEventStore,
    SqlFileStore,
    SqlRequestStore,
    SqlUploadStore,
    SqlUsageStore,
    SqlWebhookStore,
    open_database,
)
from modelyard.web.fetcher import Fetcher

TOKEN = "internal-token-of-the-tests"
PEPPER = b"p" * 32
URL = "http://127.0.0.1:8484"


class WeighedEngine(SimulatedEngine):
    """The simulated engine, but with weights that it looks at: the magic of a GGUF file."""

    name = "weighed"
    needs_artifact = True
    computes_on_gpus = True

    def check_artifact(self, file: Path) -> None:
        with file.open("rb") as reader:
            if reader.read(4) != b"GGUF":
                raise ValueError("this is no GGUF file")


class BrokenEngine(SimulatedEngine):
    """An engine whose program is not installed."""

    name = "broken"

    def missing(self) -> str:
        return "the package 'broken' is not installed; run: pip install broken"


@dataclass
class Management:
    """A running API with what the tests need to look behind it."""

    app: Starlette
    context: Context
    clock: ManualClock
    waked: list[float] = field(default_factory=list)
    refreshed: list[float] = field(default_factory=list)
    gateways: dict[str, Report] = field(default_factory=dict)
    stories: dict[str, RequestStory] = field(default_factory=dict)

    def client(self, identity: Identity | None, *, token: str | None = TOKEN) -> httpx2.AsyncClient:
        """Return a client whose requests look like a gateway's for ``identity``."""
        headers = {"x-modelyard-url": URL}
        if token is not None:
            headers[INTERNAL_TOKEN_HEADER] = token
        if identity is not None:
            headers[IDENTITY_HEADER] = msgspec.json.encode(identity).decode()
        transport = httpx2.ASGITransport(app=self.app)
        return httpx2.AsyncClient(transport=transport, base_url=URL, headers=headers)

    async def call(self, identity: Identity | None, method: str, path: str, body: Any = None) -> httpx2.Response:
        """Send one request."""
        async with self.client(identity) as client:
            return (
                await client.request(method, path, json=body)
                if body is not None
                else await client.request(method, path)
            )

    async def tenant(self, name: str) -> str:
        """Add a tenant."""
        tenant = Tenant(id=f"ten-{name}", name=name, created_at=int(self.clock.unix_s()))
        await self.context.store.add_tenant(tenant)
        return tenant.id

    async def key(self, tenant_id: str, *scopes: Scope, models: tuple[str, ...] | None = None) -> tuple[Identity, str]:
        """Add a key."""
        text, parsed = new_api_key()
        key = ApiKey(
            id=parsed.key_id,
            tenant_id=tenant_id,
            name="a key",
            secret_hash=hash_secret(PEPPER, parsed.secret),
            scopes=scopes,
            created_at=int(self.clock.unix_s()),
            last4=text[-4:],
            models=models,
        )
        await self.context.store.add_key(key)
        return Identity(key.id, tenant_id, scopes), text


@asynccontextmanager
async def management(folder: Path, config: Config | None = None) -> AsyncIterator[Management]:
    """Yield the API on a fresh database under ``folder``, with the operator's tenant."""
    data = DataDirectory(folder / "data")
    data.create()
    clock = ManualClock(start_s=float(int(time.time())))
    database = open_database(f"sqlite:///{data.database}", timeout_s=5.0)
    waked: list[float] = []
    refreshed: list[float] = []
    gateways: dict[str, Report] = {}
    stories: dict[str, RequestStory] = {}

    async def recall(request_id: str) -> RequestStory | None:
        return stories.get(request_id)

    async def refresh() -> None:
        refreshed.append(clock.unix_s())

    engines = (SimulatedEngine(), WeighedEngine(), BrokenEngine())
    settings = config or Config()
    requests = SqlRequestStore(database)
    fetcher = Fetcher(networks(settings.fetch.private_networks))
    events = SqlEventStore(database)
    webhooks = WebhookSender(
        store=SqlWebhookStore(database),
        events=events,
        fetcher=fetcher,
        settings=settings.control,
        pepper=PEPPER,
        clock=clock,
        chance=lambda: 0.5,
    )
    store = SqlControlStore(database)
    artifacts = ArtifactStore(data.artifacts, Sources(fetcher, settings.fetch, now_s=clock.unix_s))
    uploads = UploadDesk(
        store=SqlUploadStore(database),
        versions=store,
        artifacts=artifacts,
        files=PartFiles(data.uploads),
        settings=settings.control,
        clock=clock,
    )
    billing = SqlBillingStore(database)
    terms = TermsDesk(billing, settings.billing, clock)
    usage = SqlUsageStore(database)
    desk = BillingDesk(
        store=billing,
        usage=usage,
        control=store,
        terms=terms,
        settings=settings.billing,
        refresh=refresh,
        wake=lambda: None,
        clock=clock,
    )
    context = Context(
        config=settings,
        data=data,
        store=store,
        usage=usage,
        books=Books(SqlBookStore(database)),
        requests=RequestDesk(store=requests, webhooks=webhooks, settings=settings.control, clock=clock),
        events=events,
        webhooks=webhooks,
        uploads=uploads,
        batches=SqlBatchStore(database),
        files=FileDesk(store=SqlFileStore(database), contents=DiskContents(data.files), config=settings, clock=clock),
        fleet=LocalFleet(data.replicas, clock),
        engines={engine.name: engine for engine in engines},
        artifacts=artifacts,
        clock=clock,
        pepper=PEPPER,
        internal_token=TOKEN,
        wake=lambda: waked.append(clock.unix_s()),
        refresh=refresh,
        health=lambda: Heartbeat(is_authoritative=True),
        billing=billing,
        terms=terms,
        billing_desk=desk,
        gateways=lambda: gateways,
        signals=Signals(clock),
        recall=recall,
    )
    await context.store.add_tenant(Tenant(id=PLATFORM, name=PLATFORM, created_at=int(clock.unix_s())))
    app = build_api(context, build_console(context))
    try:
        yield Management(app, context, clock, waked, refreshed, gateways, stories)
    finally:
        await uploads.close()
        await context.store.close()
