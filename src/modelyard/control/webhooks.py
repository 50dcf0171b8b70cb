"""Telling callers that a request of theirs has ended: webhooks after the Standard Webhooks specification.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md

A message is due in the database until somebody answered it with 2xx, so it
survives whatever happens here; it may come twice, under one ``webhook-id``.
It holds no prompt and no answer, only the id to ask for. Secrets are derived
from the pepper file and a salt, so a copy of the database alone signs nothing.
"""

import asyncio
import base64
import hashlib
import hmac
import logging
from collections.abc import Callable

import msgspec

from modelyard.clock import Clock
from modelyard.control.tasks import KeyedTasks, boundary
from modelyard.domain.requests import Attempt, KeptRequest, RequestStatus, Webhook, WebhookSecret, WebhookStatus
from modelyard.policy.webhooks import next_try
from modelyard.stores import RequestStore
from modelyard.web.fetcher import Bounds, Fetcher, FetchError

TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 4096
SENDING_MAX = 64
TENANT_SENDING_MAX = 4
"""Messages of one tenant under way at once: its slow receiver must not hold up the others'."""
ATTEMPTS_KEPT = 20
PAUSE_S_MAX = 30.0
PAUSE_S_MIN = 0.05
BUSY_PAUSE_S = 1.0
GONE = 410

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class EventData(msgspec.Struct, frozen=True):
    """What the event is about."""

    id: str
    status: RequestStatus
    model: str
    object: str = "request"


class Event(msgspec.Struct, frozen=True):
    """The body of a webhook."""

    id: str
    type: str
    created_at: int
    data: EventData
    object: str = "event"


class WebhookSender:
    """Sends what is due. ``chance`` is uniform in [0, 1)."""

    def __init__(
        self, *, store: RequestStore, fetcher: Fetcher, pepper: bytes, clock: Clock, chance: Callable[[], float]
    ) -> None:
        self.fetcher = fetcher
        self._store = store
        self._pepper = pepper
        self._clock = clock
        self._chance = chance
        self._woken = asyncio.Event()

    def __repr__(self) -> str:
        return f"<WebhookSender {self.fetcher}>"

    def wake(self) -> None:
        """Look at once for what is due."""
        self._woken.set()

    async def run(self) -> None:
        """Send until cancelled; what is under way is then sent again by the next controller."""
        async with asyncio.TaskGroup() as group:
            sending = KeyedTasks(group, on_end=self.wake)
            while True:
                pause_s = PAUSE_S_MAX
                self._woken.clear()
                with boundary("the sending of webhooks"):
                    pause_s = await self._round(sending)
                try:
                    async with asyncio.timeout(pause_s):
                        await self._woken.wait()
                except TimeoutError:
                    continue
                await asyncio.sleep(PAUSE_S_MIN)

    async def _round(self, sending: KeyedTasks) -> float:
        """Begin what is due and has room; return the pause until the next round."""
        now = self._clock.unix_s()
        busy = sending.keys()
        for request in await self._store.due_webhooks(now=now, limit=SENDING_MAX, of_tenant=TENANT_SENDING_MAX):
            if request.id not in busy:
                sending.spawn(request.id, lambda request=request: self.send(request))  # type: ignore[misc]  # bound now
        if sending.keys():
            return BUSY_PAUSE_S
        due = await self._store.next_webhook()
        return PAUSE_S_MAX if due is None else min(max(due - now, PAUSE_S_MIN), PAUSE_S_MAX)

    async def send(self, request: KeptRequest) -> None:
        """Send the message of ``request`` once, and store what came of it.

        Raises:
            StoreUnavailableError: it counts as not sent.
        """
        webhook = request.webhook
        assert webhook is not None, "it is due"
        now = self._clock.unix_s()
        body = event_body(request)
        secret = await self._store.webhook_secret(request.tenant_id)
        headers = signed_headers(webhook.event_id, int(now), body, keys_of(self._pepper, secret, now=now))
        bounds = Bounds(timeout_s=TIMEOUT_S, bytes_max=ANSWER_BYTES_MAX, is_cut=True)
        try:
            answer = await self.fetcher.fetch("POST", webhook.url, bounds=bounds, headers=headers, body=body)
        except FetchError as error:
            attempt = Attempt(now, None, str(error))
        else:
            attempt = Attempt(now, answer.status)
        after = self._after(webhook, attempt)
        _log.info(
            "webhook %s: %s", after.status.value, attempt.status_code or attempt.error, extra={"request_id": request.id}
        )
        await self._store.put_webhook(request.id, after)

    def _after(self, webhook: Webhook, attempt: Attempt) -> Webhook:
        """Return the webhook after ``attempt``."""
        tries = webhook.tries + 1
        since = attempt.at if webhook.since is None else webhook.since
        status, due = WebhookStatus.DELIVERED, None
        if attempt.status_code is None or not 200 <= attempt.status_code < 300:
            now = self._clock.unix_s()
            due = next_try(tries, since=since, now=now, chance=self._chance())
            if attempt.status_code == GONE:
                due = None  # the receiver says that it will never want it
            status = WebhookStatus.FAILED if due is None else WebhookStatus.PENDING
        return msgspec.structs.replace(
            webhook,
            status=status,
            due_at=due,
            since=since,
            tries=tries,
            attempts=(*webhook.attempts, attempt)[-ATTEMPTS_KEPT:],
        )


def event_body(request: KeptRequest) -> bytes:
    """Return the message about the end of ``request``: the same bytes at every try."""
    assert request.webhook is not None, "it has one"
    return _encode(
        Event(
            request.webhook.event_id,
            f"request.{request.status.value}",
            int(request.finished_at or request.created_at),
            EventData(request.id, request.status, request.model),
        )
    )


def secret_of(pepper: bytes, tenant_id: str, salt: str) -> bytes:
    """Return the key that signs a tenant's webhooks."""
    return hmac.digest(pepper, f"webhook secret\0{tenant_id}\0{salt}".encode(), hashlib.sha256)


def shown(key: bytes) -> str:
    """Return a secret as receivers take it."""
    return "whsec_" + base64.b64encode(key).decode()


def keys_of(pepper: bytes, secret: WebhookSecret, *, now: float) -> list[bytes]:
    """Return the keys to sign with: the present one, and the one before while it overlaps."""
    keys = [secret_of(pepper, secret.tenant_id, secret.salt)]
    if secret.previous_salt is not None and (secret.previous_expires_at or 0) > now:
        keys.append(secret_of(pepper, secret.tenant_id, secret.previous_salt))
    return keys


def signed_headers(event_id: str, unix_s: int, body: bytes, keys: list[bytes]) -> dict[str, str]:
    """Return the headers of a message, signed with each of ``keys``."""
    content = f"{event_id}.{unix_s}.".encode() + body
    signatures = [base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode() for key in keys]
    return {
        "content-type": "application/json",
        "webhook-id": event_id,
        "webhook-timestamp": str(unix_s),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }
