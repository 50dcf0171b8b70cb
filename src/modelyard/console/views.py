"""What the pages show, read from the stores; a signed-in key sees its tenant, an admin key everything."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from modelyard.clock import Clock
from modelyard.config import Config
from modelyard.console.session import SessionContext
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.demand import Report
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Release, Stage
from modelyard.domain.fleet import SEAT_STATES, Replica, ReplicaState, seats_of
from modelyard.domain.tenants import ApiKey, Identity
from modelyard.domain.usage import NANO_PER_USD, UsageBucket
from modelyard.domain.webhooks import Delivery, Webhook
from modelyard.engines import Engines
from modelyard.policy.money import decimal
from modelyard.policy.releases import serving_release
from modelyard.stores import BatchStore, BillingStore, Event, UsageStore, WebhookStore

EVENTS_SHOWN = 50
WEBHOOKS_SHOWN = 200
DELIVERIES_SHOWN = 50
INVOICES_SHOWN = 200


class WebhookDesk(Protocol):
    """Who keeps and tells webhooks."""

    @property
    def store(self) -> WebhookStore:
        """Webhooks and deliveries."""
        ...

    def wake(self) -> None:
        """Look at once for what is due."""
        ...

    async def rotate(self, webhook_id: str, *, overlap_s: float) -> tuple[Webhook, str] | None:
        """Replace a secret, and return both."""
        ...


class ConsoleContext(SessionContext, Protocol):
    """What the console needs of the controller."""

    @property
    def config(self) -> Config:
        """The settings."""
        ...

    @property
    def usage(self) -> UsageStore:
        """The ledger."""
        ...

    @property
    def batches(self) -> BatchStore:
        """Batches."""
        ...

    @property
    def billing(self) -> BillingStore:
        """Credit, budgets, invoices."""
        ...

    @property
    def webhooks(self) -> WebhookDesk:
        """Webhooks."""
        ...

    @property
    def gateways(self) -> Callable[[], dict[str, Report]]:
        """The last report of each connected gateway."""
        ...

    @property
    def engines(self) -> Engines:
        """What versions run on."""
        ...


@dataclass(frozen=True, slots=True)
class EndpointRow:
    """An endpoint in a listing."""

    endpoint: Endpoint
    version: ModelVersion | None
    replicas: Sequence[Replica]
    queued: int
    in_flight: int
    releases: Sequence[tuple[str, str]] = ()
    """Name and share of each version; told where there are several."""
    host: str = ""
    """Of a guest: the endpoint on whose replicas it sits; its ``replicas`` are its seats there."""
    host_page: str = ""
    """Its id, where the reader may see it."""
    guests: Sequence["GuestRow"] = ()
    """Of a host: who sits on its replicas."""
    seats: int = 0
    """Of a host: the guests that its ready replicas hold, one replica at least."""

    @property
    def is_guest(self) -> bool:
        """Whether it sits on the replicas of another."""
        return bool(self.endpoint.host_id)

    @property
    def ready(self) -> int:
        """Replicas that answer what has weight: those that fallbacks and shadows have are not of its size."""
        return sum(one.state is ReplicaState.READY and one.version_id not in self._beside for one in self.replicas)

    @property
    def ready_beside(self) -> int:
        """Replicas of fallbacks and shadows that answer."""
        return sum(one.state is ReplicaState.READY and one.version_id in self._beside for one in self.replicas)

    @property
    def _beside(self) -> set[str]:
        return {one.version_id for one in self.endpoint.releases if not one.weight and (one.fallback or one.shadow)}

    @property
    def stage(self) -> str:
        """How far it is, like ``loading 42 %, about 8 s``; of one that is stopped, why."""
        progress = self.endpoint.progress
        if self.endpoint.status is EndpointStatus.STOPPED and progress.reason:
            return progress.reason
        text = progress.stage.value
        if progress.stage is not Stage.READY:
            text += f" {progress.percent} %" if progress.percent is not None else ""
            text += f", about {max(1, round(progress.eta_s))} s" if progress.eta_s is not None else ""
        return f"{text} ({progress.reason})" if progress.reason else text


@dataclass(frozen=True, slots=True)
class GuestRow:
    """A guest on a replica of its host."""

    name: str
    """"" for one of another tenant."""
    endpoint_id: str
    state: ReplicaState
    since: float
    replica_id: str


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key in a listing, without its hash."""

    id: str
    last4: str
    name: str
    tenant_id: str
    scopes: str
    models: str
    limits: str
    created_at: int
    expires_at: int | None
    status: str


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One model on one day."""

    day: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: str


@dataclass(frozen=True, slots=True)
class InvoiceRow:
    """An invoice in a listing."""

    id: str
    number: str
    tenant_id: str
    month: str
    total: str
    credited: str
    currency: str
    due_at: int | None


@dataclass(frozen=True, slots=True)
class WebhookRow:
    """A webhook in a listing."""

    webhook: Webhook
    pending: int

    @property
    def status(self) -> str:
        """``enabled``, ``failing`` or ``disabled``."""
        if not self.webhook.is_enabled:
            return "disabled"
        return "enabled" if self.webhook.failing_since is None else "failing"

    @property
    def why(self) -> str:
        """Why it is not enabled, or what it is about; "" where all is well."""
        webhook = self.webhook
        if not webhook.is_enabled:
            return webhook.disabled_reason or "its owner disabled it"
        return "" if webhook.failing_since is None else f"it took nothing since {moment(webhook.failing_since)} UTC"


async def webhook_rows(context: ConsoleContext, identity: Identity) -> list[WebhookRow]:
    """Return the webhooks that ``identity`` may see, oldest first."""
    store, tenant_id = context.webhooks.store, identity.visible_tenant
    found = await store.webhooks(tenant_id=tenant_id)
    pending = await store.pending(tenant_id=tenant_id)
    return [WebhookRow(one, pending.get(one.id, 0)) for one in found[:WEBHOOKS_SHOWN]]


async def webhook_row(context: ConsoleContext, identity: Identity, webhook_id: str) -> WebhookRow | None:
    """Return one, None where ``identity`` may not see it."""
    store = context.webhooks.store
    webhook = await store.webhook(webhook_id, tenant_id=identity.visible_tenant)
    if webhook is None:
        return None
    return WebhookRow(webhook, (await store.pending(tenant_id=webhook.tenant_id)).get(webhook.id, 0))


def answer_of(delivery: Delivery) -> str:
    """Return what the receiver answered last."""
    if not delivery.attempts:
        return ""
    last = delivery.attempts[-1]
    status = "" if last.status_code is None else f"HTTP {last.status_code}"
    return ": ".join(part for part in (status, last.error or last.answer) if part)


async def invoice_rows(context: ConsoleContext, identity: Identity) -> list[InvoiceRow]:
    """Return the newest invoices and drafts that ``identity`` may see."""
    tenant_id = identity.visible_tenant
    credited: dict[str, int] = {}
    for note in await context.billing.credit_notes(tenant_id=tenant_id, invoice_id=None):
        credited[note.invoice_id] = credited.get(note.invoice_id, 0) + note.total
    return [
        InvoiceRow(
            one.id,
            one.number,
            one.tenant_id,
            one.month,
            decimal(one.total, one.currency),
            decimal(credited[one.id], one.currency) if one.id in credited else "",
            one.currency,
            one.due_at,
        )
        for one in await context.billing.invoices(tenant_id=tenant_id, month=None, limit=INVOICES_SHOWN, after="")
    ]


async def endpoint_rows(context: ConsoleContext, identity: Identity) -> list[EndpointRow]:
    """Return the endpoints that ``identity`` may see."""
    tenant_id = identity.visible_tenant
    versions = {version.id: version for version in await context.store.versions(tenant_id=tenant_id)}
    replicas = await context.store.replicas()
    seats = seats_of(replicas)
    endpoints = {endpoint.id: endpoint for endpoint in await context.store.endpoints()}  # a host may be another's
    visible = [endpoint.id for endpoint in await context.store.endpoints(tenant_id=tenant_id)]
    demand = [row for report in context.gateways().values() for row in report.endpoints]
    return [
        EndpointRow(
            endpoint,
            versions.get(serving.version_id) if (serving := serving_release(endpoint)) else None,
            own := seats.get(endpoint.id, []) if endpoint.host_id else _replicas_of(endpoint, replicas),
            sum(row.queued for row in demand if row.endpoint_id == endpoint.id),
            sum(row.in_flight for row in demand if row.endpoint_id == endpoint.id),
            [(_name_of(release, versions), _share_of(release)) for release in endpoint.releases],
            host=host.name if (host := endpoints.get(endpoint.host_id)) else "",
            host_page=endpoint.host_id if endpoint.host_id in visible else "",
            guests=[] if endpoint.host_id else _guests(endpoint, own, endpoints),
            seats=_seats(context, versions.get(serving.version_id) if serving else None, endpoint, own),
        )
        for endpoint in map(endpoints.get, visible)
        if endpoint is not None and not endpoint.pool
    ]


def _replicas_of(endpoint: Endpoint, replicas: Sequence[Replica]) -> list[Replica]:
    return [replica for replica in replicas if replica.endpoint_id == endpoint.id and not replica.is_tombstone]


def _guests(host: Endpoint, own: Sequence[Replica], endpoints: Mapping[str, Endpoint]) -> list[GuestRow]:
    """Return who sits on the replicas of ``host``, by name where they are its owner's."""
    return [
        GuestRow(guest.name if is_own else "", guest.id if is_own else "", SEAT_STATES[seat.state], seat.since, one.id)
        for one in own
        for seat in one.guests
        for guest in (endpoints.get(seat.endpoint_id, host),)
        for is_own in (guest is not host and guest.tenant_id == host.tenant_id,)
    ]


def _seats(context: ConsoleContext, version: ModelVersion | None, endpoint: Endpoint, own: Sequence[Replica]) -> int:
    engine = context.engines.get(version.framework) if version is not None and not endpoint.host_id else None
    if version is None or engine is None:
        return 0
    ready = sum(replica.state is ReplicaState.READY for replica in own)
    try:
        return max(1, ready) * engine.guests_max(version.options)
    except ValueError:
        return 0


def _name_of(release: Release, versions: Mapping[str, ModelVersion]) -> str:
    version = versions.get(release.version_id)
    return f"{version.version} on {version.framework}" if version else release.version_id


def _share_of(release: Release) -> str:
    if release.shadow:
        return f"copies of {release.shadow} % of the requests"
    if release.fallback:
        return "what the others have no room for"
    return f"{release.weight} % of the requests" if release.weight else "no requests"


async def endpoint_events(context: ConsoleContext, endpoint: Endpoint) -> list[Event]:
    """Return the newest events, newest first."""
    return (await context.store.events(endpoint.id, limit=EVENTS_SHOWN))[::-1]


async def key_rows(context: ConsoleContext, identity: Identity) -> list[KeyRow]:
    """Return the keys that ``identity`` may see."""
    now = context.clock.unix_s()
    return [_key(key, now) for key in await context.store.keys(tenant_id=identity.visible_tenant)]


async def usage_rows(context: ConsoleContext, identity: Identity, *, days: int) -> tuple[list[UsageRow], str]:
    """Return usage by day and model for the last ``days``, newest day first, and the total cost."""
    now = context.clock.unix_s()
    buckets = await context.usage.usage(
        tenant_id=identity.visible_tenant,
        key_id=None,
        model=None,
        since=_midnight(now) - (days - 1) * 86400,
        until=now + 1,
        group_by=("day", "model"),
    )
    rows = sorted(map(_usage, buckets), key=lambda row: (row.day, row.model), reverse=True)
    return rows, usd(sum(bucket.cost_nanousd for bucket in buckets))


def usd(nanousd: int) -> str:
    """Return nano-units as a number, exactly, and with as many digits for all, so that they stand in a column."""
    whole, rest = divmod(nanousd, NANO_PER_USD)
    return f"{whole:,}.{rest:09d}"


def moment(unix_s: float) -> str:
    """Return a time for people, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def age(clock: Clock) -> Callable[[float], str]:
    """Return a function from unix seconds to "5 min"."""

    def since(unix_s: float) -> str:
        seconds = max(0, int(clock.unix_s() - unix_s))
        for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
            if seconds >= size:
                return f"{seconds // size} {unit}"
        return f"{seconds} s"

    return since


def _midnight(now: float) -> float:
    return math.floor(now / 86400) * 86400


def _key(key: ApiKey, now: float) -> KeyRow:
    limits = key.limits
    bounds = (
        (limits.requests_per_minute, "requests/min"),
        (limits.tokens_per_minute, "tokens/min"),
        (limits.concurrency, "at once"),
    )
    expired = key.expires_at is not None and key.expires_at <= now
    return KeyRow(
        id=key.id,
        last4=key.last4,
        name=key.name,
        tenant_id=key.tenant_id,
        scopes=", ".join(key.scopes),
        models="all" if key.models is None else ", ".join(key.models),
        limits=", ".join(f"{most} {unit}" for most, unit in bounds if most is not None) or "none",
        created_at=key.created_at,
        expires_at=key.expires_at,
        status="revoked" if key.revoked_at is not None else "expired" if expired else "active",
    )


def _usage(bucket: UsageBucket) -> UsageRow:
    return UsageRow(
        bucket.group["day"],
        bucket.group["model"],
        bucket.requests,
        bucket.prompt_tokens,
        bucket.cached_tokens,
        bucket.completion_tokens,
        usd(bucket.cost_nanousd),
    )
