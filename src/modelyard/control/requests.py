"""Who may run a request whose answer is kept, and what became of it.

Gateways claim, run and finish; this is the one place that knows all of them.
A gateway with claimed requests gives a sign of life twice a second; what
belongs to one that fell silent is ended as interrupted, so that nobody polls
for an answer that will never come. Whoever waits for the end of another
request is woken by it.
"""

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from modelyard import errors
from modelyard.clock import Clock
from modelyard.config import ControlConfig
from modelyard.control.tasks import boundary
from modelyard.control.webhooks import WebhookSender
from modelyard.domain.requests import (
    Claim,
    ClaimReply,
    Finish,
    KeptRequest,
    RequestStatus,
    RequestWebhook,
    Sync,
    SyncReply,
)
from modelyard.ids import new_id
from modelyard.stores import RequestStore
from modelyard.web.fetcher import FetchError

SILENCE_S_MAX = 10.0
"""A gateway with claimed requests is gone after this long without a sign of life; they come twice a second."""
CHECK_S = 1.0
DROPPED_S = 120.0
"""How long a claim that was taken back is remembered; longer than any claim is on its way."""
HELD_S = 1.0
"""How old the count of what a tenant has may be; its bounds are soft, and counting at every claim would be dear."""
CLAIM_S_MAX = 30.0
"""Time after which a claimed request must be known to its gateway."""
FORGET_S = 60.0
WAIT_S_MAX = 20.0
"""Longest that one claim waits for the end of an earlier request; the gateway asks again."""
LOOK_S = 1.0
"""Pause between two looks at a request that is waited for, should its end be told to another controller."""
CANCELLED_S = 60.0
"""How long a gateway is told that a request was cancelled."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """What a tenant had at ``looked_s``; ``count`` goes on with what it claims."""

    looked_s: float
    count: int
    size: int


class RequestDesk:
    """Gives claims and takes ends. ``webhooks`` is told of each."""

    def __init__(self, *, store: RequestStore, webhooks: WebhookSender, settings: ControlConfig, clock: Clock) -> None:
        self.store = store
        self._webhooks = webhooks
        self._settings = settings
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._active: dict[str, frozenset[str]] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._held: dict[str, _Held] = {}
        self._dropped: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<RequestDesk: {len(self._heard)} gateways, {len(self._ends)} requests waited for>"

    async def claim(self, claim: Claim) -> ClaimReply:
        """Let a request run, or return the earlier one with its idempotency key, at its end if that comes in time.

        Raises:
            ApiError: 400 for another request under the key or a bad webhook URL, 429 when too much is kept.
            StoreUnavailableError: nothing was claimed.
        """
        begun_s = self._heard[claim.instance] = self._clock.monotonic_s()
        if claim.webhook_url:
            await self._check_webhook(claim.webhook_url)
        held = await self._held_by(claim.tenant_id)
        now = self._clock.unix_s()
        request = KeptRequest(
            id=claim.id,
            tenant_id=claim.tenant_id,
            key_id=claim.key_id,
            instance=claim.instance,
            route=claim.route,
            model=claim.model,
            fingerprint=claim.fingerprint,
            created_at=now,
            expires_at=now + self._settings.kept_s,
            is_detached=claim.is_detached,
            idempotency_key=claim.idempotency_key,
            webhook=RequestWebhook(claim.webhook_url, new_id("evt_")) if claim.webhook_url else None,
        )
        earlier = await self.store.claim(request)
        if earlier is None and claim.id in self._dropped:
            # Its gateway gave up before it was read, and nobody will run it.
            await self.finish(Finish(id=claim.id, status=RequestStatus.FAILED, is_dropped=True))
            raise errors.control_unavailable()
        if earlier is None:
            held.count += 1
            return ClaimReply(request=request, is_new=True)
        if earlier.fingerprint != claim.fingerprint:
            raise errors.idempotency_key_reused()
        if not earlier.status.is_over and claim.wait_s > 0:
            earlier = await self._end_of(earlier, min(claim.wait_s, WAIT_S_MAX))
            if earlier is None:
                # It failed and left the key to the next try, which is this one.
                left_s = max(0.0, claim.wait_s - (self._clock.monotonic_s() - begun_s))
                return await self.claim(msgspec.structs.replace(claim, wait_s=left_s))
        return ClaimReply(request=earlier, is_new=False)

    async def finish(self, finish: Finish) -> None:
        """End a request."""
        if finish.is_dropped:
            # The claim that it takes back may still be on its way: this is noted before anything else happens.
            self._dropped[finish.id] = self._clock.monotonic_s()
        if await self.store.finish(finish, now=self._clock.unix_s()):
            self._told(finish.id)
        elif not finish.is_dropped:
            _log.info("a request ended that was over already", extra={"request_id": finish.id})

    async def sync(self, sync: Sync) -> SyncReply:
        """Take a sign of life, and say what was cancelled meanwhile."""
        self._heard[sync.instance] = self._clock.monotonic_s()
        self._active[sync.instance] = frozenset(sync.active)
        await self.store.begin(sync.running)
        since = self._clock.unix_s() - CANCELLED_S
        return SyncReply(await self.store.cancelled(sync.instance, since=since))

    async def cancel(self, request: KeptRequest) -> None:
        """End a request whose owner does not want it any more; its gateway learns it with its next sign of life."""
        end = Finish(id=request.id, status=RequestStatus.CANCELLED, code="cancelled", is_released=True)
        if await self.store.finish(end, now=self._clock.unix_s()):
            self._told(request.id)

    async def run(self) -> None:
        """End what belongs to gateways that are gone, and forget what is old, until cancelled."""
        forgot_s = float("-inf")
        while True:
            with boundary("the watch over kept requests"):
                await self.end_interrupted()
                if self._clock.monotonic_s() - forgot_s >= FORGET_S:
                    await self.store.forget(before=self._clock.unix_s())
                    forgot_s = self._clock.monotonic_s()
            await asyncio.sleep(CHECK_S)

    async def end_interrupted(self) -> None:
        """End what belongs to gateways that are gone.

        Raises:
            StoreUnavailableError: it is tried again.
        """
        now_s = self._clock.monotonic_s()
        instances = set()
        for request in await self.store.open_requests():
            instances.add(request.instance)
            # One that was never heard gets the whole time from now: this controller may have just begun.
            is_silent = now_s - self._heard.setdefault(request.instance, now_s) > SILENCE_S_MAX
            if not is_silent and not self._is_lost(request):
                continue
            _log.warning("interrupted: no gateway runs it any more", extra={"request_id": request.id})
            end = Finish(id=request.id, status=RequestStatus.FAILED, code="interrupted", is_released=True)
            await self.finish(end)
        for instance, heard_s in list(self._heard.items()):
            if instance not in instances and now_s - heard_s > SILENCE_S_MAX:
                del self._heard[instance]
                self._active.pop(instance, None)
        for request_id, dropped_s in list(self._dropped.items()):
            if now_s - dropped_s > DROPPED_S:
                del self._dropped[request_id]

    def _is_lost(self, request: KeptRequest) -> bool:
        """Say whether its gateway lives and does not know it: a claim or an end that never arrived."""
        active = self._active.get(request.instance)
        age_s = self._clock.unix_s() - request.created_at
        return active is not None and request.id not in active and age_s > CLAIM_S_MAX

    async def _held_by(self, tenant_id: str) -> _Held:
        """Return what is kept of a tenant that may have more kept.

        Raises:
            ApiError: 429, it may not.
        """
        now_s = self._clock.monotonic_s()
        held = self._held.get(tenant_id)
        if held is None or now_s - held.looked_s > HELD_S:
            held = self._held[tenant_id] = _Held(now_s, *await self.store.held(tenant_id))
        if held.count >= self._settings.kept_requests_max or held.size >= self._settings.kept_bytes_max:
            raise errors.kept_requests_full(retry_after_s=60)
        return held

    def _told(self, request_id: str) -> None:
        self._webhooks.wake()
        if (end := self._ends.get(request_id)) is not None:
            end.set()

    async def _end_of(self, request: KeptRequest, wait_s: float) -> KeptRequest | None:
        """Return ``request`` as it is at its end or when time is up; None when its key was released."""
        end = self._ends.setdefault(request.id, asyncio.Event())
        deadline_s = self._clock.monotonic_s() + wait_s
        try:
            while True:
                now = await self.store.request(request.id, tenant_id=request.tenant_id)
                if now is None or now.idempotency_key is None:
                    return None
                left_s = deadline_s - self._clock.monotonic_s()
                if now.status.is_over or left_s <= 0:
                    return now
                try:
                    async with asyncio.timeout(min(left_s, LOOK_S)):
                        await end.wait()
                except TimeoutError:
                    continue
        finally:
            # Those who wait hold the event themselves; the next one makes another.
            self._ends.pop(request.id, None)

    async def _check_webhook(self, url: str) -> None:
        try:
            await self._webhooks.fetcher.check(url)
        except FetchError as error:
            raise errors.invalid_value("X-Modelyard-Webhook", str(error)) from None
