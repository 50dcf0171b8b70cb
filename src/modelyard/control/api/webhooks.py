"""Webhooks: where a tenant is told of its events, and the secret for the URLs that come with requests."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from modelyard.control.api.access import missing
from modelyard.control.api.webhook_views import (
    SecretView,
    WebhookView,
    check_description,
    check_types,
    secret_view,
    webhook_view,
)
from modelyard.control.context import Context
from modelyard.control.webhooks import rotated
from modelyard.domain.events import EventType
from modelyard.domain.tenants import Scope
from modelyard.domain.webhooks import (
    Delivery,
    DeliveryStatus,
    DeliveryView,
    SigningSecret,
    Webhook,
    delivery_view,
    well,
)
from modelyard.errors import conflict, invalid_value
from modelyard.ids import new_id
from modelyard.policy.addresses import URL_LENGTH_MAX
from modelyard.web.fetcher import FetchError
from modelyard.web.paging import Page, Paging, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

WEBHOOKS_MAX = 20
"""Of one tenant: each event costs a delivery to each that wants it."""
REPLAYED_MAX = 2000
"""Deliveries that one replay makes due; the next one goes on behind them."""

_TYPES = ", ".join(kind.value for kind in EventType if kind is not EventType.WEBHOOK_TEST)

Url = Annotated[
    str,
    msgspec.Meta(max_length=URL_LENGTH_MAX, description="Where events are sent: https, or http in private networks."),
]
Types = Annotated[
    tuple[str, ...], msgspec.Meta(description=f"Types of events, like 'batch.*' or '*'. There are: {_TYPES}.")
]
Description = Annotated[str, msgspec.Meta(description="What it is for.")]


class NewWebhook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A webhook to add."""

    url: Url
    event_types: Types = ("*",)
    description: Description = ""
    enabled: bool = True


class ChangedWebhook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to change; null or missing: as it was. To enable one again forgets its failures."""

    url: Url | None = None
    event_types: Types | None = None
    description: Description | None = None
    enabled: bool | None = None


class RotateSecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to rotate."""

    overlap_seconds: Annotated[
        int, msgspec.Meta(ge=0, le=7 * 86_400, description="Time in which messages are signed with both secrets.")
    ] = 86_400


class DeliveryQuery(Paging, frozen=True, forbid_unknown_fields=True):
    """Which deliveries."""

    status: Annotated[
        Literal["", "pending", "delivered", "failed"], msgspec.Meta(description="Only those that are so; empty: all.")
    ] = ""


class ReplayRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to send again."""

    since: Annotated[float, msgspec.Meta(ge=0, description="Unix time of the oldest event.")]
    delivered_too: Annotated[
        bool, msgspec.Meta(description="Also what its receiver took already; else only what it does not have.")
    ] = False
    after: Annotated[
        str | None, msgspec.Meta(description="'last_event_id' of the replay before, to go on behind it.")
    ] = None


class ReplayView(msgspec.Struct, frozen=True):
    """How many deliveries are due now; ``has_more``: ask again with ``after`` = ``last_event_id``."""

    count: int
    has_more: bool
    last_event_id: str | None
    object: str = "webhook.replay"


class DeletedWebhook(msgspec.Struct, frozen=True):
    """The answer to a deletion."""

    id: str
    object: str = "webhook"
    deleted: bool = True


EXAMPLE = {"url": "https://example.com/hooks", "event_types": ["batch.*", "budget.exceeded"]}


class Webhooks:
    """The routes of webhooks."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.webhooks.store

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes; that of the tenant's secret before those that take an id in its place."""
        every, manage = "/v1/webhooks", Scope.MANAGE
        one, secret, hour = f"{every}/{{webhook_id}}", f"{every}/secret", {"overlap_seconds": 3600}
        told = f"{one}/deliveries"
        again, since, on = f"{told}/{{delivery_id}}/redeliver", {"since": 1_795_953_600}, {"enabled": True}
        view, page = WebhookView, Page[DeliveryView]
        new_secret, get_secret, set_secret = "Rotate that secret", self.get_secret, self.rotate_secret
        return [
            Route("GET", secret, manage, "Get the secret of requests' webhooks", get_secret, Empty, Empty, SecretView),
            Route(
                "POST", f"{secret}/rotate", manage, new_secret, set_secret, RotateSecret, Empty, SecretView, 200, hour
            ),
            Route("GET", every, manage, "List webhooks", self.page, Empty, Paging, Page[WebhookView]),
            Route("POST", every, manage, "Add a webhook", self.add, NewWebhook, Empty, view, 201, EXAMPLE),
            Route("GET", one, manage, "Get a webhook", self.get, Empty, Empty, view),
            Route("PATCH", one, manage, "Change a webhook", self.change, ChangedWebhook, Empty, view, 200, on),
            Route("DELETE", one, manage, "Delete a webhook", self.delete, Empty, Empty, DeletedWebhook),
            Route(
                "POST", f"{one}/rotate", manage, "Rotate its secret", self.rotate, RotateSecret, Empty, view, 200, hour
            ),
            Route("POST", f"{one}/test", manage, "Send a test, now and once", self.test, Empty, Empty, DeliveryView),
            Route("GET", told, manage, "List its deliveries", self.deliveries, Empty, DeliveryQuery, page),
            Route("POST", again, manage, "Send one again", self.redeliver, Empty, Empty, DeliveryView, 202),
            Route(
                "POST",
                f"{one}/replay",
                manage,
                "Send again what happened since",
                self.replay,
                ReplayRequest,
                Empty,
                ReplayView,
                202,
                since,
            ),
        ]

    async def page(self, call: Call[Empty, Paging]) -> Page[WebhookView]:
        """Return webhooks, oldest first."""
        tenant_id = call.identity.visible_tenant
        found = await self._store.webhooks(tenant_id=tenant_id)
        rows, has_more = page_of(found, limit=call.query.limit, after=call.query.after, id_of=lambda one: one.id)
        pending, now = await self._store.pending(tenant_id=tenant_id), self._context.clock.unix_s()
        return Page([webhook_view(one, pending.get(one.id, 0), now=now) for one in rows], has_more)

    async def add(self, call: Call[NewWebhook, Empty]) -> WebhookView:
        """Add a webhook; its secret is shown here and at a rotation, and nowhere else."""
        wanted, now = call.body, self._context.clock.unix_s()
        webhook = Webhook(
            id=new_id("wh_"),
            tenant_id=call.identity.tenant_id,
            url=await self._checked(wanted.url),
            types=check_types(wanted.event_types),
            created_at=now,
            description=check_description(wanted.description),
            is_enabled=wanted.enabled,
            secret=SigningSecret(new_id("")),
        )
        if not await self._store.add_webhook(webhook, most=WEBHOOKS_MAX):
            raise conflict(
                f"This tenant has {WEBHOOKS_MAX} webhooks, which is the most. Delete one, or change its URL."
            )
        return webhook_view(webhook, 0, now=now, pepper=self._context.pepper)

    async def get(self, call: Call[Empty, Empty]) -> WebhookView:
        """Return one."""
        return await self._view(await self._find(call))

    async def change(self, call: Call[ChangedWebhook, Empty]) -> WebhookView:
        """Change what is given. What waits for one that is disabled is given up; a replay brings it back."""
        wanted = call.body
        webhook = await self._find(call)
        changes: dict[str, object] = {}
        if wanted.url is not None:
            changes["url"] = await self._checked(wanted.url)
        if wanted.event_types is not None:
            changes["types"] = check_types(wanted.event_types)
        if wanted.description is not None:
            changes["description"] = check_description(wanted.description)
        if wanted.enabled is not None:
            changes["is_enabled"] = wanted.enabled

        def change(before: Webhook) -> Webhook:
            after = msgspec.structs.replace(before, **changes)
            if after.url != before.url:  # what failed there says nothing of the new place
                after = msgspec.structs.replace(after, failing_since=None, failures=0, quiet_until=None)
            return well(after) if wanted.enabled and not before.is_enabled else after

        changed = await self._changed(webhook, change)
        self._context.webhooks.wake()
        return await self._view(changed)

    async def delete(self, call: Call[Empty, Empty]) -> DeletedWebhook:
        """Forget one and its deliveries."""
        webhook = await self._find(call)
        await self._store.remove_webhook(webhook.id)
        return DeletedWebhook(webhook.id)

    async def rotate(self, call: Call[RotateSecret, Empty]) -> WebhookView:
        """Replace the secret; the present one goes on signing for a while."""
        found = await self._find(call)
        done = await self._context.webhooks.rotate(found.id, overlap_s=call.body.overlap_seconds)
        if done is None:
            raise missing("webhook", found.id)
        now, pepper = self._context.clock.unix_s(), self._context.pepper
        return webhook_view(done[0], await self._pending(done[0]), now=now, pepper=pepper)

    async def test(self, call: Call[Empty, Empty]) -> DeliveryView:
        """Send a ``webhook.test`` and return what came of it; a webhook that is disabled can be tested too."""
        return delivery_view(await self._context.webhooks.test(await self._find(call)))

    async def deliveries(self, call: Call[Empty, DeliveryQuery]) -> Page[DeliveryView]:
        """Return the newest first."""
        webhook, query = await self._find(call), call.query
        after = None
        if query.after and (after := await self._store.delivery(query.after, webhook_id=webhook.id)) is None:
            raise invalid_value("after", "no object of this list has this id")
        status = DeliveryStatus(query.status) if query.status else None
        rows = await self._store.deliveries(webhook.id, status=status, limit=query.limit + 1, after=after)
        return Page([delivery_view(one) for one in rows[: query.limit]], has_more=len(rows) > query.limit)

    async def redeliver(self, call: Call[Empty, Empty]) -> DeliveryView:
        """Make a delivery due now, with a new span of retries under the same event id."""
        webhook = _enabled(await self._find(call))
        delivery = await self._delivery(webhook, call.path("delivery_id"))
        await self._store.redeliver(delivery.id, now=self._context.clock.unix_s())
        self._context.webhooks.wake()
        return delivery_view(await self._delivery(webhook, delivery.id))

    async def replay(self, call: Call[ReplayRequest, Empty]) -> ReplayView:
        """Make due what happened since then, that the webhook wants."""
        webhook, wanted = _enabled(await self._find(call)), call.body
        if wanted.after is not None and await self._context.events.time_of(wanted.after, webhook.tenant_id) is None:
            raise invalid_value("after", "no event has this id; give the 'last_event_id' of the replay before")
        done = await self._store.replay(
            webhook,
            since=wanted.since,
            after=wanted.after,
            now=self._context.clock.unix_s(),
            limit=REPLAYED_MAX,
            delivered_too=wanted.delivered_too,
        )
        self._context.webhooks.wake()
        return ReplayView(done.count, done.last_event_id is not None, done.last_event_id)

    async def get_secret(self, call: Call[Empty, Empty]) -> SecretView:
        """Return the secret that signs what goes to the URLs that come with requests."""
        tenant_id = call.identity.tenant_id
        return self._secret_view(tenant_id, await self._store.secret(tenant_id))

    async def rotate_secret(self, call: Call[RotateSecret, Empty]) -> SecretView:
        """Replace that secret; the present one goes on signing for a while."""
        tenant_id, now = call.identity.tenant_id, self._context.clock.unix_s()
        new = rotated(await self._store.secret(tenant_id), now=now, overlap_s=call.body.overlap_seconds)
        await self._store.put_secret(tenant_id, new)
        return self._secret_view(tenant_id, new)

    def _secret_view(self, tenant_id: str, secret: SigningSecret) -> SecretView:
        return secret_view(tenant_id, secret, self._context.pepper, now=self._context.clock.unix_s())

    async def _view(self, webhook: Webhook) -> WebhookView:
        return webhook_view(webhook, await self._pending(webhook), now=self._context.clock.unix_s())

    async def _pending(self, webhook: Webhook) -> int:
        return (await self._store.pending(tenant_id=webhook.tenant_id)).get(webhook.id, 0)

    async def _changed(self, webhook: Webhook, change: Callable[[Webhook], Webhook]) -> Webhook:
        after = await self._store.change_webhook(webhook.id, change)
        if after is None:
            raise missing("webhook", webhook.id)
        return after

    async def _find(self, call: Call[Any, Any]) -> Webhook:
        """Return the webhook that the path names.

        Raises:
            ApiError: 404.
        """
        webhook_id = call.path("webhook_id")
        webhook = await self._store.webhook(webhook_id, tenant_id=call.identity.visible_tenant)
        if webhook is None:
            raise missing("webhook", webhook_id)
        return webhook

    async def _delivery(self, webhook: Webhook, delivery_id: str) -> Delivery:
        delivery = await self._store.delivery(delivery_id, webhook_id=webhook.id)
        if delivery is None:
            raise missing("delivery", delivery_id)
        return delivery

    async def _checked(self, url: str) -> str:
        try:
            await self._context.webhooks.fetcher.check(url)
        except FetchError as error:
            raise invalid_value("url", str(error)) from None
        return url


def _enabled(webhook: Webhook) -> Webhook:
    """Return ``webhook``.

    Raises:
        ApiError: 409, it is disabled: it would be told nothing.
    """
    if not webhook.is_enabled:
        raise conflict(f"Webhook '{webhook.id}' is disabled. Enable it first (PATCH with 'enabled': true).")
    return webhook
