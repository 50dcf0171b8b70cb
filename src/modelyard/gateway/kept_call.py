"""One kept request: what stands between its exchange and its client.

It claims the request at the controller, has it admitted, takes its answer, has
that stored, and passes it to the caller if that one still waits.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from modelyard import errors
from modelyard.domain.requests import (
    CLAIM_PATH,
    FINISH_PATH,
    Claim,
    ClaimReply,
    Finish,
    KeptRequest,
    RequestStatus,
    view,
)
from modelyard.errors import ApiError
from modelyard.gateway import answers
from modelyard.gateway.control_calls import ControlAwayError, ControlRefusedError
from modelyard.gateway.preferences import Preferences, fingerprint
from modelyard.policy.job import NEVER_S

if TYPE_CHECKING:
    from modelyard.gateway.detached import KeptRequests
    from modelyard.gateway.exchange import Exchange
    from modelyard.gateway.server import ClientConnection, Request

CLAIM_TIMEOUT_S = 5.0
DUPLICATE_WAIT_S = 15.0
"""Longest that one question waits at the controller for the end of an earlier request."""
SAVE_TIMEOUT_S = 10.0
SAVE_S_MAX = 600.0
"""How long an answer is offered to a controller that is away."""
SAVED_S_MAX = 2.0
"""Longest that a caller who waits is held until its answer is stored."""

_RETRYABLE = frozenset({408, 409, 425, 429})
_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class Answer(NamedTuple):
    """An answer as it goes to a client."""

    status: int
    headers: bytes
    body: bytes


class KeptCall:
    """One kept request. Towards its exchange it is the client; towards the client it is what answers."""

    __slots__ = (
        "_client",
        "_fingerprint",
        "_is_admitted",
        "_is_cancelled",
        "_kept",
        "_preferences",
        "_record",
        "current",
        "exchange",
        "is_paused",
        "is_streaming",
        "is_told",
        "release_s",
    )

    def __init__(
        self,
        kept: "KeptRequests",
        client: "ClientConnection",
        request: "Request",
        exchange: "Exchange",
        preferences: Preferences,
    ) -> None:
        self.exchange = exchange
        self.current: object = None
        self.is_paused = False
        self.is_streaming = False
        self.is_told = False
        """Whether the controller knows that it runs."""
        self.release_s = NEVER_S
        self._kept = kept
        self._client: ClientConnection | None = client
        content_type = request.header(b"content-type") or b""
        self._fingerprint = fingerprint(exchange.route, content_type, request.body, is_async=preferences.is_async)
        self._preferences = preferences
        self._record: KeptRequest | None = None
        self._is_admitted = False
        self._is_cancelled = False

    def __repr__(self) -> str:
        state = "running" if self.exchange.attempts else "queued" if self._is_admitted else "claiming"
        return f"<KeptCall {self.exchange.request_id}: {state}{'' if self._client else ', detached'}>"

    @property
    def has_news(self) -> bool:
        """Say whether it runs and the controller does not know."""
        return not self.is_told and self.exchange.attempts > 0

    # --- what an exchange does with its client ---

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Take the answer."""
        self.release_s = NEVER_S
        self._kept.spawn(self._keep(Answer(status, headers, body)))

    def start_stream(self, headers: bytes) -> None:
        """Cannot happen: streams are not kept."""
        raise AssertionError("a kept request does not stream")

    def write_stream(self, chunks: bytes) -> None:
        """Cannot happen."""
        raise AssertionError("a kept request does not stream")

    def end_stream(self, chunks: bytes, *, is_last: bool = False) -> None:
        """Cannot happen."""
        raise AssertionError("a kept request does not stream")

    def abort(self) -> None:
        """Cannot happen: it is never behind in reading."""
        raise AssertionError("a kept request does not stream")

    # --- what the client's connection tells ---

    def client_left(self) -> None:
        """Go on without it: the answer is kept for when it asks again."""
        self._client = None

    def client_paused(self) -> None:
        """Nothing is written before the answer."""

    def client_resumed(self) -> None:
        """Nothing is written before the answer."""

    # --- the claim ---

    async def claim(self) -> None:
        """Ask the controller who runs this request, and act on it."""
        gateway = self._kept.gateway
        deadline_s = gateway.clock.monotonic_s() + self._patience_s()
        wait_s = 0.0  # at first: most are new, and their answer comes at once or the controller is away
        try:
            while True:
                is_last = gateway.clock.monotonic_s() + wait_s >= deadline_s
                if self._decide(await self._ask(wait_s), is_last=is_last):
                    return
                wait_s = min(max(0.0, deadline_s - gateway.clock.monotonic_s()), DUPLICATE_WAIT_S)
        except ControlAwayError as error:
            self._refuse(errors.control_unavailable())
            if error.was_sent:
                # It may have been taken: nobody is to wait for it.
                await self._finish(self._dropped())
        except ControlRefusedError as error:
            self._pass_on(error)
        except Exception:  # noqa: BLE001 - boundary: one request must not end the worker
            _log.exception("a request could not be claimed", extra={"request_id": self.exchange.request_id})
            if self._is_admitted:
                self.exchange.fail(errors.internal_error(self.exchange.request_id))
            else:
                self._refuse(errors.internal_error(self.exchange.request_id))
                await self._finish(self._dropped())

    def _decide(self, reply: ClaimReply, *, is_last: bool) -> bool:
        """Act on the controller's word; False is to ask again."""
        if reply.is_new:
            self._admit(reply.request)
        elif self._client is None:
            self._drop()
        elif reply.request.status.is_over or (self._preferences.is_async and (is_last or not self._patience_s())):
            self._replay(reply.request)
        elif is_last:
            self._refuse(errors.idempotency_key_in_use())
        else:
            return False
        return True

    async def _ask(self, wait_s: float) -> ClaimReply:
        exchange, preferences = self.exchange, self._preferences
        claim = Claim(
            id=exchange.request_id,
            tenant_id=exchange.key.record.tenant_id,
            key_id=exchange.key.record.id,
            instance=self._kept.instance,
            route=exchange.route,
            model=exchange.endpoint.route.name,
            fingerprint=self._fingerprint,
            is_detached=preferences.is_async,
            idempotency_key=preferences.idempotency_key,
            webhook_url=preferences.webhook_url,
            wait_s=wait_s,
        )
        return await self._kept.calls.ask(CLAIM_PATH, claim, ClaimReply, timeout_s=CLAIM_TIMEOUT_S + wait_s)

    def _patience_s(self) -> float:
        """Return how long the caller waits for the end of an earlier request with its key."""
        if self._preferences.wait_s is not None:
            return self._preferences.wait_s
        if self._preferences.is_async:
            return 0.0
        settings, endpoint = self._kept.gateway.settings, self.exchange.endpoint
        queue_s = settings.load_wait_s if endpoint.dispatcher.is_cold else settings.queue_wait_s
        return queue_s + endpoint.patience.total_s

    def _admit(self, record: KeptRequest) -> None:
        """Run the request: it is ours."""
        self._record = record
        gateway, preferences = self._kept.gateway, self._preferences
        refusal: ApiError | None = None
        if self._is_cancelled:
            refusal = errors.request_cancelled()
        elif gateway.is_draining:
            refusal = errors.shutting_down()
        if refusal is not None or self._client is None:
            # Nobody was told of it, so nobody asks for it.
            self._refuse(refusal or errors.internal_error(record.id))
            self._kept.spawn(self._finish(self._dropped()))
            return
        self._is_admitted = True
        # It may have waited for the end of an earlier one; its time in line begins now.
        self.exchange.arrived_s = gateway.clock.monotonic_s()
        # Nobody who is told "later" waits; whoever waits may say how long.
        gateway.admit(self.exchange, None if preferences.is_async else preferences.wait_s)
        if self.exchange.is_over or not preferences.is_async:
            return
        if preferences.wait_s:
            self.release_s = gateway.clock.monotonic_s() + preferences.wait_s
        else:
            self.accept()

    # --- ends towards the client ---

    def accept(self) -> None:
        """Tell the caller where its answer will be."""
        self.release_s = NEVER_S
        client, record = self._take_client(), self._record
        if client is None or record is None:
            return
        exchange = self.exchange
        if exchange.attempts:
            record = msgspec.structs.replace(record, status=RequestStatus.RUNNING)
        lines = answers.answer_headers(exchange) + self._applied(record.id)
        eta_s = exchange.endpoint.route.progress.eta_s
        if exchange.endpoint.dispatcher.is_cold and eta_s is not None:
            lines += b"retry-after: %d\r\n" % max(1, round(eta_s))
        client.respond(202, lines, _encode(view(record)))

    def cancel(self) -> None:
        """End it: its owner does not want it any more."""
        self._is_cancelled = True
        if not self._is_admitted or self.exchange.is_over:
            return
        self.exchange.client_left()
        self._kept.active.pop(self.exchange.request_id, None)
        if (client := self._take_client()) is not None:
            self._kept.gateway.refuse(client, errors.request_cancelled(), self.exchange.request_id)

    def refuse_waiting(self) -> None:
        """Refuse a request that is not ours to run; whoever sent it may ask another gateway."""
        if not self._is_admitted:
            self._refuse(errors.shutting_down())

    def _applied(self, request_id: str) -> bytes:
        wait = b", wait=%d" % self._preferences.wait_s if self._preferences.wait_s else b""
        return b"location: /v1/requests/%b\r\npreference-applied: respond-async%b\r\n" % (request_id.encode(), wait)

    def _replay(self, record: KeptRequest) -> None:
        """Answer with what an earlier request with the same key was answered."""
        self._drop()
        if (client := self._take_client()) is None:
            return
        lines = b"x-request-id: %b\r\nidempotency-replayed: true\r\n" % record.id.encode()
        if record.is_detached:
            lines = b"content-type: application/json\r\n" + lines + self._applied(record.id)
            client.respond(202, lines, _encode(view(record)))
        else:
            client.respond(
                record.http_status, b"content-type: %b\r\n%b" % (record.content_type.encode(), lines), record.answer
            )

    def _refuse(self, refusal: ApiError) -> None:
        self._drop()
        if (client := self._take_client()) is not None:
            exchange = self.exchange
            gateway, endpoint = self._kept.gateway, exchange.endpoint
            gateway.memory.turned_away(
                exchange.request_id, exchange.route, refusal, exchange.key, endpoint.route.name, endpoint,
                exchange.arrived_unix_s,
            )  # fmt: skip
            gateway.refuse(client, refusal, exchange.request_id, route=exchange.route)

    def _pass_on(self, refused: ControlRefusedError) -> None:
        """Answer with the controller's own refusal."""
        self._drop()
        if (client := self._take_client()) is None:
            return
        lines = b"content-type: application/json\r\nx-request-id: %b\r\n" % self.exchange.request_id.encode()
        if refused.retry_after:
            lines += b"retry-after: %b\r\n" % refused.retry_after
        if refused.should_retry:
            lines += b"x-should-retry: %b\r\n" % refused.should_retry
        client.respond(refused.status, lines, refused.body)

    def _take_client(self) -> "ClientConnection | None":
        client, self._client = self._client, None
        return client

    def _drop(self) -> None:
        """Give back what was reserved for a request that does not run."""
        self._kept.active.pop(self.exchange.request_id, None)
        if not self.exchange.is_over:
            self.exchange.is_over = True
            now_s = self._kept.gateway.clock.monotonic_s()
            self.exchange.reservation.settle(0, 0, 0, now_s=now_s)

    # --- the end of a run ---

    async def _keep(self, answer: Answer) -> None:
        """Have the answer stored, and give it to the caller who still waits."""
        finish = self._finish_of(answer)
        storing = asyncio.get_running_loop().create_task(self._finish(finish))
        try:
            await asyncio.wait((storing,), timeout=SAVED_S_MAX if self._client is not None else None)
            if (client := self._take_client()) is not None:
                client.respond(*answer)
            await storing
        finally:
            storing.cancel()
            self._kept.active.pop(self.exchange.request_id, None)

    def _finish_of(self, answer: Answer) -> Finish:
        exchange = self.exchange
        is_good = 200 <= answer.status < 300
        if not is_good and not exchange.attempts and self._client is not None and self._preferences.is_async:
            # Refused before the caller was told "later": it gets the refusal itself.
            return self._dropped()
        if len(answer.body) > self._kept.gateway.settings.kept_answer_bytes_max:
            return Finish(
                id=exchange.request_id, status=RequestStatus.FAILED, code="answer_too_large", is_released=True
            )
        return Finish(
            id=exchange.request_id,
            status=RequestStatus.SUCCEEDED if is_good else RequestStatus.FAILED,
            http_status=answer.status,
            content_type=_content_type(answer.headers),
            answer=answer.body,
            # What may succeed at the next try must not stand in its way.
            is_released=answer.status >= 500 or answer.status in _RETRYABLE,
        )

    def _dropped(self) -> Finish:
        return Finish(id=self.exchange.request_id, status=RequestStatus.FAILED, is_dropped=True)

    async def _finish(self, finish: Finish) -> None:
        """Tell the controller, again while it is away."""
        clock = self._kept.gateway.clock
        deadline_s = clock.monotonic_s() + SAVE_S_MAX
        pause_s = 0.1
        while True:
            try:
                await self._kept.calls.ask(FINISH_PATH, finish, type(None), timeout_s=SAVE_TIMEOUT_S)
            except (ControlAwayError, ControlRefusedError) as error:
                is_final = isinstance(error, ControlRefusedError) and error.status < 500
                if is_final or clock.monotonic_s() > deadline_s:
                    _log.error("an answer could not be kept: %s", error, extra={"request_id": finish.id})
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, 2.0)
            else:
                return


def _content_type(headers: bytes) -> str:
    for line in headers.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-type":
            return value.strip().decode("latin-1")
    return ""
