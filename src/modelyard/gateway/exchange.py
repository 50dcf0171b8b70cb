"""One inference request from its replica to its bill: forward, relay, meter.

An exchange owns what was taken for its request: the reservation of its key, a
place in line or a slot of a replica, a connection. ``_end`` is the one way
out; it gives everything back and writes the settlement, exactly once, before
the last byte of the answer goes to the client.

A replica that fails before anything reached the client is replaced by another
one; after that a failure becomes an error event, never a clean end.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from modelyard import errors
from modelyard.domain.usage import UsageStatus
from modelyard.errors import ApiError
from modelyard.gateway import answers, billing, engine_errors, engine_request
from modelyard.gateway.accounts import KeyState
from modelyard.gateway.billing import Outcome
from modelyard.gateway.catalog import EndpointState
from modelyard.gateway.openai.call import Call
from modelyard.gateway.progress import StreamProgress
from modelyard.gateway.relay import EngineStreamError, StreamRelay, as_chunk
from modelyard.gateway.responses import ResponseHead
from modelyard.gateway.server import ClientConnection
from modelyard.gateway.sse import Usage
from modelyard.gateway.upstream import UpstreamConnection
from modelyard.policy.dispatch import ReplicaLoad, Verdict
from modelyard.policy.limits import settle

if TYPE_CHECKING:
    from modelyard.gateway.flow import Gateway

_log = logging.getLogger(__name__)

ATTEMPTS_MAX = 3
NEVER_S = float("inf")
_TIMEOUTS = {
    "first token": errors.first_token_timeout,
    "next token": errors.token_timeout,
    "complete answer": errors.total_timeout,
}
_SUCCESS = Outcome(UsageStatus.SUCCESS, 200, "")
_CLIENT_CLOSED = Outcome(UsageStatus.CLIENT_CLOSED, 499, "client_closed")


def _say_nothing() -> None:
    """End towards a client that has gone."""


class Exchange:
    """The request, its way and its state. Times are monotonic seconds unless they say unix."""

    __slots__ = (
        "_body",
        "_connection",
        "_failed_on",
        "_waits_for",
        "arrived_s",
        "arrived_unix_s",
        "attempts",
        "call",
        "client",
        "comment_due_s",
        "deadline_s",
        "endpoint",
        "gateway",
        "has_intent",
        "is_over",
        "key",
        "progress",
        "prompt_estimate",
        "relay",
        "replica",
        "request_id",
        "reserved_tokens",
        "route",
        "stalled_since_s",
        "total_deadline_s",
        "was_sent",
    )

    def __init__(  # noqa: PLR0913 - the facts of one request, gathered once
        self,
        gateway: "Gateway",
        *,
        client: ClientConnection,
        request_id: str,
        key: KeyState,
        endpoint: "EndpointState[Exchange]",
        call: Call,
        route: str,
        prompt_estimate: int,
        reserved_tokens: int,
    ) -> None:
        self.gateway = gateway
        self.client = client
        self.request_id = request_id
        self.key = key
        self.endpoint = endpoint
        self.call = call
        self.route = route
        self.prompt_estimate = prompt_estimate
        self.reserved_tokens = reserved_tokens
        self.arrived_s = gateway.clock.monotonic_s()
        self.arrived_unix_s = gateway.clock.unix_s()
        self.attempts = 0
        self.is_over = False
        self.comment_due_s = NEVER_S
        self.deadline_s = NEVER_S
        self.total_deadline_s = NEVER_S
        self.stalled_since_s = NEVER_S
        self._waits_for = "complete answer"
        self._body = b""
        self._connection: UpstreamConnection | None = None
        self._failed_on: list[ReplicaLoad] = []
        self.has_intent = False
        self.was_sent = False
        self.relay: StreamRelay | None = None
        self.replica: ReplicaLoad | None = None
        self.progress = StreamProgress(self.arrived_s)

    def __repr__(self) -> str:
        place = self.replica.route.id if self.replica else "in line"
        return f"<Exchange {self.request_id}: {self.endpoint.route.name}, {place}, attempt {self.attempts}>"

    # --- waiting ---

    def wait(self, *, is_cold: bool) -> None:
        """Stand in line; a stream that waits for a cold model is told about the load."""
        if is_cold and self.call.is_stream:
            self.client.start_stream(answers.stream_headers(self))
            self.comment()

    def comment(self) -> None:
        """Send ``: loading 42 %, ~8 s`` to a stream that waits."""
        self.client.write_stream(as_chunk(answers.loading_comment(self.endpoint.route.progress)))
        self.comment_due_s = self.gateway.clock.monotonic_s() + self.gateway.settings.loading_comment_s

    def wait_expired(self) -> None:
        """Give up the place in line."""
        waited_s = self.gateway.clock.monotonic_s() - self.arrived_s
        route = self.endpoint.route
        if self.endpoint.dispatcher.is_cold:
            self.fail(errors.model_loading(route.name, retry_after_s=route.progress.eta_s or 30.0))
        else:
            self.fail(errors.queue_timeout(route.name, waited_s, retry_after_s=self.endpoint.retry_after_s()))

    # --- forwarding ---

    def dispatch(self, replica: ReplicaLoad) -> None:
        """Send the request to ``replica``, whose slot is taken."""
        self.replica = replica
        self.comment_due_s = NEVER_S
        self.attempts += 1
        if self.has_intent:
            self._forward()
            return
        self.has_intent = True
        self.total_deadline_s = self.gateway.clock.monotonic_s() + self.gateway.settings.total_timeout_s
        self.gateway.journal.begin(billing.intent_of(self, replica), self._recorded)

    def _recorded(self, is_written: bool) -> None:  # noqa: FBT001 - called back by the journal
        """Go on once the intent is written; without it nothing could be billed, so nothing is sent."""
        if self.is_over:
            return
        if not is_written:
            self.has_intent = False
            self.fail(errors.storage_full())
            return
        try:
            self._forward()
        except Exception:  # noqa: BLE001 - boundary: a bug here must not leave the request hanging
            _log.exception("a request could not be forwarded", extra={"request_id": self.request_id})
            self.fail(errors.internal_error(self.request_id))

    def _forward(self) -> None:
        assert self.replica is not None, "forwarded without a replica"
        address = (self.replica.route.host, self.replica.route.port)
        connection = self.gateway.pool.take(address)
        if connection is None:
            self.gateway.pool.open(address, self)
        else:
            self.connected(connection)

    def connected(self, connection: UpstreamConnection) -> None:
        """Write the request to an open connection."""
        replica = self.replica
        if self.is_over or replica is None or connection.address != (replica.route.host, replica.route.port):
            # Opened for a request that has gone meanwhile; it serves the next one.
            self.gateway.pool.put(connection)
            return
        self._connection = connection
        if self.client.is_paused:
            # It has not read its last answer yet, and will not be told again that it is behind.
            self.client_paused()
        if not self._body:
            self._body = engine_request.body_of(self)
        if self.call.is_stream:
            self.wait_for("first token", self.gateway.settings.first_token_timeout_s)
        self.was_sent = True
        connection.send(self, engine_request.head_of(self, replica, len(self._body)) + self._body)

    def unreachable(self, reason: str) -> None:
        """Go elsewhere: no connection could be opened."""
        if not self.is_over:
            self._replica_failed(reason)

    # --- the engine's answer ---

    def wants_stream(self, head: ResponseHead) -> bool:
        """Relay a stream as it comes; everything else is small and taken whole."""
        if not self.call.is_stream or head.status != 200 or not head.content_type.startswith(b"text/event-stream"):
            return False
        self.relay = StreamRelay(
            is_chunked=head.is_chunked,
            is_chat=self.route == "/v1/chat/completions",
            wants_usage=self.call.wants_usage,
        )
        return True

    def answer(self, head: ResponseHead, body: bytes) -> None:
        """Take a whole response: an answer, or an error."""
        self._connection = None
        if self.is_over:
            return
        if head.status == 200 and not self.call.is_stream:
            self._answer_whole(body)
        elif head.status == 503 and self._retry("engine answered 503"):
            return
        else:
            reason = f"engine answered {head.status}"
            self._count_outcome(is_good=head.status < 500, reason=reason, has_answered=True)
            self.fail(engine_errors.translate(head, body, self.endpoint.route.name))

    def stream(self, data: bytes) -> None:
        """Relay a read of a stream."""
        relay = self.relay
        if relay is None or self.is_over:
            return
        try:
            out = relay.feed(data)
        except EngineStreamError as error:
            self._stream_broke(errors.bad_engine_response(str(error)))
            return
        if relay.tokens >= self.progress.next_mark:
            self.progress.note(self, relay)
        if out is data:
            # The steady state: whole events, nothing of interest in them. Deadlines are the sweep's business.
            self.client.write_stream(out)
        else:
            self._pass_on(relay, out)

    def _pass_on(self, relay: StreamRelay, out: bytes) -> None:
        """Send what a read left for the client, and act on what it said."""
        if out:
            if not self.client.is_streaming:
                self.client.start_stream(answers.stream_headers(self))
            if not relay.is_done:
                self.client.write_stream(out)
                out = b""
        if relay.error is not None:
            self._stream_broke(errors.engine_error())
        elif relay.is_done and not relay.has_begun:
            self._stream_broke(errors.bad_engine_response("an empty stream"))
        elif relay.is_done or (relay.is_ended and relay.has_finish):
            self._finish_stream(relay, out)
        elif relay.is_ended:
            self.lost(is_clean=True, has_answered=True)

    def lost(self, *, is_clean: bool, has_answered: bool) -> None:
        """Deal with a connection that ended before the answer did."""
        connection, self._connection = self._connection, None
        if self.is_over:
            return
        if connection is not None:
            # Still open when only the body ended, without the answer's end.
            connection.abort()
        relay = self.relay
        if relay is not None and is_clean and relay.has_finish:
            self._finish_stream(relay, b"")
        elif relay is not None and relay.has_begun:
            self._count_outcome(is_good=False, reason="connection lost in a stream")
            self._stream_broke(errors.engine_lost())
        elif connection is not None and connection.is_reused and not has_answered and self.replica is not None:
            # The engine closed an idle connection just as we wrote into it; that is nobody's failure.
            address = connection.address
            self.gateway.pool.open(address, self)
        else:
            self._replica_failed("connection lost")

    def malformed(self, reason: str) -> None:
        """Deal with a response that is not HTTP or too long."""
        self._connection = None
        if not self.is_over:
            self._count_outcome(is_good=False, reason=reason, has_answered=True)
            self.fail(errors.bad_engine_response(reason))

    # --- the client ---

    def client_left(self) -> None:
        """Abort the engine at once and bill what was generated."""
        if not self.is_over:
            self._end(_CLIENT_CLOSED, _say_nothing)

    def client_paused(self) -> None:
        """Hold the engine's stream back."""
        self.stalled_since_s = self.gateway.clock.monotonic_s()
        if self._connection is not None:
            self._connection.pause()

    def client_resumed(self) -> None:
        """Let the engine's stream go on."""
        self.stalled_since_s = NEVER_S
        if self._connection is not None:
            self._connection.resume()
            if self.relay is not None:
                self.wait_for("next token", self.gateway.settings.token_timeout_s)

    # --- time ---

    def check_time(self, now_s: float) -> None:
        """Act on what is due; called by the sweep."""
        if now_s >= self.comment_due_s:
            self.comment()
        if self.stalled_since_s != NEVER_S:
            if now_s - self.stalled_since_s > self.gateway.settings.write_stall_timeout_s:
                self.client.abort()
                self.client_left()
            return
        if self.relay is not None:
            self.progress.check(self, self.relay, now_s)
        if now_s >= self.total_deadline_s:
            self._timed_out("complete answer", self.gateway.settings.total_timeout_s)
        elif now_s >= self.deadline_s:
            settings = self.gateway.settings
            limit_s = settings.token_timeout_s if self._relay_has_begun else settings.first_token_timeout_s
            self._timed_out(self._waits_for, limit_s)

    # --- ends ---

    def fail(self, error: ApiError) -> None:
        """End without an answer: an error response, or an error event when the stream's head is out."""
        if self.is_over:
            return
        status = UsageStatus.TIMEOUT if error.status == 504 else UsageStatus.ERROR
        fields = {"request_id": self.request_id, "endpoint_id": self.endpoint.route.id}
        _log.info("failed: %s %s", error.status, error.code, extra=fields)

        def say() -> None:
            if self.client.is_streaming:
                self.client.end_stream(as_chunk(b"data: " + error.body() + b"\n\n"), is_last=True)
            else:
                self.client.respond(error.status, answers.exchange_error_headers(self, error), error.body())

        self._end(Outcome(status, error.status, error.code or "error"), say)

    def _answer_whole(self, body: bytes) -> None:
        try:
            usage = engine_errors.usage_of(body)
        except engine_errors.NotAnAnswerError as error:
            self._count_outcome(is_good=False, reason=str(error), has_answered=True)
            self.fail(errors.bad_engine_response(str(error)))
            return
        self._count_outcome(is_good=True, reason="")
        is_estimated = usage is None
        if usage is None:
            usage = billing.estimate(self, engine_errors.count_tokens(body))
        self._end(
            _SUCCESS,
            lambda: self.client.respond(200, answers.answer_headers(self), body),
            usage=usage,
            is_estimated=is_estimated,
        )

    def _finish_stream(self, relay: StreamRelay, out: bytes) -> None:
        self._count_outcome(is_good=True, reason="")
        usage = relay.usage or billing.estimate(self, relay.tokens)
        last = relay.finish(usage)

        def say() -> None:
            if not self.client.is_streaming:
                self.client.start_stream(answers.stream_headers(self))
            self.client.end_stream(out + as_chunk(last))

        self._end(_SUCCESS, say, usage=usage, is_estimated=relay.usage is None)

    def _stream_broke(self, error: ApiError) -> None:
        relay = self.relay
        if relay is not None and not relay.has_begun and error.code != "engine_error" and self._retry(error.message):
            return
        self.fail(error)

    def _replica_failed(self, reason: str) -> None:
        self._count_outcome(is_good=False, reason=reason)
        if not self._retry(reason):
            self.fail(errors.engine_unavailable(self.endpoint.route.name))

    def _timed_out(self, what: str, limit_s: float) -> None:
        """End or move on after silence; a long answer that hits the total limit says nothing about the replica."""
        if self.relay is not None and self.relay.has_finish:
            self._finish_stream(self.relay, b"")
            return
        if self.gateway.clock.monotonic_s() < self.total_deadline_s:
            self._count_outcome(is_good=False, reason=f"no {what} in time")
            if self._retry(f"no {what}"):
                return
        self.fail(_TIMEOUTS[what](limit_s))

    def _retry(self, reason: str) -> bool:
        """Move on to another replica if there is one that may help; say whether that is under way."""
        replica = self.replica
        if replica is None or self._relay_has_begun or self.attempts >= ATTEMPTS_MAX:
            return False
        dispatcher = self.endpoint.dispatcher
        now_s = self.gateway.clock.monotonic_s()
        self._failed_on.append(replica)
        self._drop_connection()
        self.relay = None
        deadline_s = now_s + self.gateway.settings.queue_wait_s
        verdict = dispatcher.retry(self, failed_on=self._failed_on, now_s=now_s, deadline_s=deadline_s)
        if verdict is None:
            return False
        self.replica = None
        self.deadline_s = NEVER_S
        fields = {"request_id": self.request_id, "replica_id": replica.route.id}
        _log.warning("retry on another replica: %s", reason, extra=fields)
        self.gateway.metrics.retried(self.endpoint.route.name)
        if isinstance(verdict, ReplicaLoad):
            self.dispatch(verdict)
            return True
        return verdict is Verdict.WAIT

    def _end(
        self, outcome: Outcome, say: Callable[[], None], *, usage: Usage | None = None, is_estimated: bool = False
    ) -> None:
        """Give everything back and settle, then ``say`` the last bytes; the only way an exchange ends."""
        assert not self.is_over, "ended twice"
        self.is_over = True
        gateway = self.gateway
        now_s = gateway.clock.monotonic_s()
        self._drop_connection(keep=usage is not None)
        if usage is None:
            usage = billing.partial_usage(self, outcome)
            is_estimated = bool(usage.prompt_tokens or usage.completion_tokens)
        if self.has_intent:
            billing.settle(self, outcome, usage, now_s=now_s, is_estimated=is_estimated, then=say)
        settle(
            self.key.allowances,
            reserved_tokens=self.reserved_tokens,
            used_tokens=usage.prompt_tokens + (usage.completion_tokens or 0),
        )
        gateway.exchanges.discard(self)
        endpoint = self.endpoint
        endpoint.in_flight -= 1
        endpoint.last_request_s = now_s
        gateway.metrics.ended(
            route=self.route, model=endpoint.route.name, status=outcome.http_status, seconds=now_s - self.arrived_s
        )
        replica, self.replica = self.replica, None
        if replica is not None:
            endpoint.dispatcher.finish(replica, now_s=now_s)
        else:
            endpoint.dispatcher.leave(self)
        if not self.has_intent:
            say()

    def _drop_connection(self, *, keep: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        relay = self.relay
        # A connection whose reading is paused, or that said more than its answer, would fail its next request.
        if not keep or relay is None or relay.has_excess or self.stalled_since_s != NEVER_S:
            connection.abort()
        elif relay.is_ended:
            connection.release()
        elif relay.is_chunked:
            connection.linger(relay.skip)
        else:
            connection.abort()

    # --- small things ---

    @property
    def _relay_has_begun(self) -> bool:
        return self.relay is not None and self.relay.has_begun

    def wait_for(self, what: str, limit_s: float) -> None:
        """Expect ``what`` of the engine within ``limit_s``."""
        self._waits_for = what
        self.deadline_s = self.gateway.clock.monotonic_s() + limit_s

    def _count_outcome(self, *, is_good: bool, reason: str, has_answered: bool = False) -> None:
        replica = self.replica
        if replica is None:
            return
        dispatcher = self.endpoint.dispatcher
        if is_good:
            if replica.failures:
                dispatcher.succeeded(replica)
        else:
            now_s = self.gateway.clock.monotonic_s()
            dispatcher.failed(replica, reason, now_s=now_s, has_answered=has_answered)
