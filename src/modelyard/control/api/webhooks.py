"""The secret that a tenant's webhooks are signed with."""

from typing import Annotated

import msgspec

from modelyard.control.context import Context
from modelyard.control.webhooks import secret_of, shown
from modelyard.domain.requests import WebhookSecret
from modelyard.domain.tenants import Scope
from modelyard.ids import new_id
from modelyard.web.routes import AnyRoute, Call, Empty, Route

_PATH = "/v1/webhooks/secret"


class RotateSecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to rotate."""

    overlap_seconds: Annotated[
        int, msgspec.Meta(ge=0, le=7 * 86_400, description="Time in which messages are signed with both secrets.")
    ] = 86_400


class SecretView(msgspec.Struct, frozen=True):
    """The secret of the caller's tenant. ``previous_expires_at`` is unix seconds."""

    secret: str
    previous_expires_at: int | None = None
    object: str = "webhook.secret"


class Webhooks:
    """The routes of webhooks."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        manage, rotate, example = Scope.MANAGE, f"{_PATH}/rotate", {"overlap_seconds": 3600}
        return [
            Route("GET", _PATH, manage, "Get the webhook secret", self.get, Empty, Empty, SecretView),
            Route("POST", rotate, manage, "Rotate it", self.rotate, RotateSecret, Empty, SecretView, 200, example),
        ]

    async def get(self, call: Call[Empty, Empty]) -> SecretView:
        """Return the secret."""
        return self._view(await self._context.requests.store.webhook_secret(call.identity.tenant_id))

    async def rotate(self, call: Call[RotateSecret, Empty]) -> SecretView:
        """Replace the secret; the present one goes on signing for a while."""
        store = self._context.requests.store
        old = await store.webhook_secret(call.identity.tenant_id)
        until = self._context.clock.unix_s() + call.body.overlap_seconds
        new = WebhookSecret(old.tenant_id, new_id(""), old.salt, until)
        await store.put_webhook_secret(new)
        return self._view(new)

    def _view(self, secret: WebhookSecret) -> SecretView:
        key = secret_of(self._context.pepper, secret.tenant_id, secret.salt)
        until = secret.previous_expires_at
        if until is not None and until <= self._context.clock.unix_s():
            until = None
        return SecretView(shown(key), None if until is None else int(until))
