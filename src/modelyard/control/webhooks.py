"""Telling tenants what happened: webhooks after the Standard Webhooks specification.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md

A delivery is due in the database until its receiver answered with 2xx or three
days have passed, so it survives whatever happens here; it may come twice, under
one ``webhook-id``. Receivers that fail have few turns of their own, so that
those that are down, or slow, delay nobody else's. Secrets are derived from the
pepper file and a salt, so a copy of the database alone signs nothing.
"""

import asyncio
import base64
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable

import msgspec

from modelyard.clock import Clock
from modelyard.config import ControlConfig
from modelyard.control.tasks import KeyedTasks, boundary
from modelyard.domain.events import EventType, envelope
from modelyard.domain.webhooks import Attempt, Delivery, DeliveryStatus, Due, Settled, SigningSecret, Webhook
from modelyard.ids import new_id
from modelyard.observe.control_metrics import ControlMetrics
from modelyard.policy.webhooks import after, reason_to_disable, retry_after_s
from modelyard.stores import Backlog, EventStore, WebhookStore
from modelyard.web.fetcher import Bounds, Fetcher, FetchError

TIMEOUT_S = 10.0
"""Longest time of an attempt, the whole answer included."""
ANSWER_BYTES_MAX = 4096
ANSWER_CHARACTERS_KEPT = 300
SENDING_MAX = 64
"""Deliveries under way at once to receivers that take them."""
FAILING_MAX = 16
"""Beside those, to receivers that failed at the last attempt."""
TENANT_SENDING_MAX = 16
LANE_SENDING_MAX = 4
"""To one webhook; to one that fails it is one."""
PAUSE_S_MAX = 2.0
"""Between two looks at what is due: a cause in another process wakes nobody here."""
PAUSE_S_MIN = 0.05
BUSY_PAUSE_S = 1.0
TEST_GRACE_S = 10.0
"""After which a test whose sender was killed is sent by the loop."""
MEASURE_S = 15.0
"""Between two looks at how much waits, for the metrics."""
FORGET_S = 300.0
FORGET_AT_ONCE = 500
ADOPT_AT_ONCE = 500

_log = logging.getLogger(__name__)

OnDisabled = Callable[[str, str, str, str], Awaitable[None]]


class WebhookSender:
    """Sends what is due, and forgets what is old. ``chance`` is uniform in [0, 1).

    ``on_disabled``, where it is set, hears of each webhook that is disabled: its id, its tenant, where it led, and why.
    """

    def __init__(
        self,
        *,
        store: WebhookStore,
        events: EventStore,
        fetcher: Fetcher,
        settings: ControlConfig,
        pepper: bytes,
        clock: Clock,
        chance: Callable[[], float],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.store = store
        self.fetcher = fetcher
        self._events = events
        self._settings = settings
        self._pepper = pepper
        self._clock = clock
        self._chance = chance
        self._timeout_s = timeout_s
        self.on_disabled: OnDisabled | None = None
        self._woken = asyncio.Event()
        self.metrics = ControlMetrics()
        self.metrics.webhooks_waiting = self._waiting
        self._backlog: Backlog | None = None

    def __repr__(self) -> str:
        return f"<WebhookSender {self.fetcher}>"

    def wake(self) -> None:
        """Look at once for what is due."""
        self._woken.set()

    async def run(self) -> None:
        """Send until cancelled; what is under way is then sent again by the next controller."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep(), name="the keeping of events")
            group.create_task(self._measure(), name="the measuring of webhooks")
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
        next_due = await self.store.next_due()
        if next_due is None or next_due > now:
            pause_s = PAUSE_S_MAX if next_due is None else min(max(next_due - now, PAUSE_S_MIN), PAUSE_S_MAX)
            return min(pause_s, BUSY_PAUSE_S) if sending.keys() else pause_s
        for is_failing, limit, of_lane in ((False, SENDING_MAX, LANE_SENDING_MAX), (True, FAILING_MAX, 1)):
            found = await self.store.due(
                now=now, limit=limit, of_lane=of_lane, of_tenant=TENANT_SENDING_MAX, is_failing=is_failing
            )
            for due in found:
                # A receiver that just began to fail has changed sides with what is under way to it.
                if len(sending.keys()) < SENDING_MAX + FAILING_MAX:
                    sending.spawn(due.delivery.id, lambda due=due: self._send(due))  # type: ignore[misc]  # bound now
        return BUSY_PAUSE_S

    async def _send(self, due: Due) -> None:
        await self.send(due)

    async def send(self, due: Due) -> Delivery:
        """Attempt a delivery once, store what came of it and return it.

        Raises:
            StoreUnavailableError: it counts as not attempted.
        """
        begun_s, now = self._clock.monotonic_s(), self._clock.unix_s()
        body = envelope(due.event)
        headers = signed_headers(due.event.id, int(now), body, keys_of(self._pepper, due.signer, due.secret, now=now))
        bounds = Bounds(timeout_s=self._timeout_s, bytes_max=ANSWER_BYTES_MAX, is_cut=True)
        status, error, answered, pause_s = None, "", b"", 0.0
        try:
            answer = await self.fetcher.fetch("POST", due.url, bounds=bounds, headers=headers, body=body)
        except FetchError as failure:
            error = str(failure)
        else:
            status, answered = answer.status, answer.body
            error = "redirects are not followed; give the URL that it leads to" if 300 <= status < 400 else ""
            pause_s = retry_after_s(status, answer.retry_after, now=self._clock.unix_s())
        took_ms = round((self._clock.monotonic_s() - begun_s) * 1000)
        return await self._settle(due, Attempt(now, status, error, took_ms, snippet(answered), pause_s))

    async def _settle(self, due: Due, attempt: Attempt) -> Delivery:
        told = after(due.delivery, attempt, now=self._clock.unix_s(), chance=self._chance())
        failing_s = self._settings.webhook_failing_s
        tried_s = 0.0 if due.delivery.since is None else attempt.at - due.delivery.since
        reason = reason_to_disable(attempt, failing_since=due.failing_since, failing_s=failing_s, tried_s=tried_s)
        _log.info(
            "webhook %s, %s: %s", told.event_id, told.status.value, attempt.status_code or attempt.error or "no answer"
        )
        await self.store.settle(Settled(told, attempt, reason))
        self.metrics.delivered("retried" if told.status is DeliveryStatus.PENDING else told.status.value)
        is_test = told.event_type is EventType.WEBHOOK_TEST
        if reason and told.webhook_id is not None and self.on_disabled is not None and not is_test:
            with boundary("the telling of a disabled webhook"):
                await self.on_disabled(told.webhook_id, told.tenant_id, due.url, reason)
        return told

    async def test(self, webhook: Webhook) -> Delivery:
        """Send a test to ``webhook`` now, once, and return what came of it.

        Raises:
            StoreUnavailableError: nothing was sent, or it is not known what came of it.
        """
        now = self._clock.unix_s()
        return await self.send(await self.store.add_test(webhook, now=now, due_at=now + self._timeout_s + TEST_GRACE_S))

    async def rotate(self, webhook_id: str, *, overlap_s: float) -> tuple[Webhook, str] | None:
        """Replace a webhook's secret, and return both; the one before goes on signing for a while. None: it is gone.

        Raises:
            StoreUnavailableError: it has the secret that it had.
        """
        now = self._clock.unix_s()

        def change(before: Webhook) -> Webhook:
            return msgspec.structs.replace(before, secret=rotated(before.secret, now=now, overlap_s=overlap_s))

        webhook = await self.store.change_webhook(webhook_id, change)
        if webhook is None:
            return None
        return webhook, shown(keys_of(self._pepper, webhook.id, webhook.secret, now=now)[0])

    async def _keep(self) -> None:
        """Take over what a release before this one left, then forget what is old, until cancelled."""
        while True:
            with boundary("the keeping of events"):
                while await self.store.adopt(limit=ADOPT_AT_ONCE) == ADOPT_AT_ONCE:
                    continue
                await self.forget()
            await asyncio.sleep(FORGET_S)

    async def _measure(self) -> None:
        """Look how much waits, until cancelled."""
        while True:
            with boundary("the measuring of webhooks"):
                self._backlog = await self.store.backlog()
            await asyncio.sleep(MEASURE_S)

    def _waiting(self) -> tuple[int, float] | None:
        backlog = self._backlog
        if backlog is None:
            return None
        return backlog.count, 0.0 if backlog.oldest_at is None else self._clock.unix_s() - backlog.oldest_at

    async def forget(self) -> None:
        """Forget the events that are old, by parts: other writes go between.

        Raises:
            StoreUnavailableError: the rest is forgotten later.
        """
        # A kept request shows what became of its webhook.
        kept_s = max(self._settings.events_kept_s, self._settings.kept_s)
        before = self._clock.unix_s() - kept_s
        while await self._events.forget_events(before=before, limit=FORGET_AT_ONCE) == FORGET_AT_ONCE:
            continue


def snippet(body: bytes) -> str:
    """Return how an answer begins, as text that can be shown."""
    text = body[: 4 * ANSWER_CHARACTERS_KEPT].decode("utf-8", "replace")
    return "".join(one if one.isprintable() else " " for one in text)[:ANSWER_CHARACTERS_KEPT].strip()


def secret_of(pepper: bytes, owner: str, salt: str) -> bytes:
    """Return the key that signs for ``owner``: a webhook, or a tenant for the URLs that come with its requests."""
    return hmac.digest(pepper, f"webhook secret\0{owner}\0{salt}".encode(), hashlib.sha256)


def shown(key: bytes) -> str:
    """Return a secret as receivers take it."""
    return "whsec_" + base64.b64encode(key).decode()


def rotated(secret: SigningSecret, *, now: float, overlap_s: float) -> SigningSecret:
    """Return another secret; the present one goes on signing for a while."""
    return SigningSecret(new_id(""), secret.salt, now + overlap_s)


def keys_of(pepper: bytes, owner: str, secret: SigningSecret, *, now: float) -> list[bytes]:
    """Return the keys to sign with: the present one, and the one before while it overlaps."""
    keys = [secret_of(pepper, owner, secret.salt)]
    if secret.previous_salt is not None and (secret.previous_expires_at or 0) > now:
        keys.append(secret_of(pepper, owner, secret.previous_salt))
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
