"""One inference request from its replica to its bill: forward, relay, meter.

An exchange owns what was taken for its request: the reservation of its key, a
place in line or a slot of a replica, a connection. ``_end`` is the one way
out; it gives everything back and writes the settlement, exactly once, before
the last byte of the answer goes to the client.

A replica that fails before anything reached the client is replaced by another
one, and where the text alone holds the state of the answer also after that
(``recovery.py``); otherwise a failure becomes an error event, never a clean
end.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from modelyard import errors
from modelyard.domain.usage import UsageStatus
from modelyard.domain.why import Line, Move
from modelyard.errors import ApiError
from modelyard.gateway import (
    aliases,
    answers,
    billing,
    engine_errors,
    engine_request,
    memory,
    recovery,
    side_requests,
    waiting,
)
from modelyard.gateway.accounts import KeyState, Reservation
from modelyard.gateway.billing import Outcome
from modelyard.gateway.catalog import EndpointState
from modelyard.gateway.coalescing import Coalescer
from modelyard.gateway.openai.call import Call, answer_type
from modelyard.gateway.progress import NO_STREAM, StreamProgress
from modelyard.gateway.relay import EngineStreamError, StreamRelay, as_chunk, give_back
from modelyard.gateway.reply import StreamReply
from modelyard.gateway.responses import ResponseHead
from modelyard.gateway.routes import body_of_error
from modelyard.gateway.server import ClientConnection
from modelyard.gateway.sse import Usage
from modelyard.gateway.upstream import UpstreamConnection
from modelyard.policy.breaker import Failure
from modelyard.policy.dispatch import ReplicaLoad, Verdict
from modelyard.policy.job import NEVER_S, Job
from modelyard.policy.pricelist import Sheet

if TYPE_CHECKING:
    from modelyard.gateway.flow import Gateway

_log = logging.getLogger(__name__)


class Exchange:
    """The request, its way and its state. Times are monotonic seconds unless they say unix."""

    __slots__ = (
        "_coalescer", "_waits_for", "arrived_s", "arrived_unix_s", "attempts", "batch_line", "begun_on", "body", "call",
        "client", "comment_due_s", "connection", "deadline_s", "endpoint", "failed_on", "first_body", "gateway",
        "gave_way", "has_intent", "is_over", "is_reopening", "job", "key", "line", "may_make_way", "moves", "prices",
        "progress", "prompt_estimate", "queued_s", "refusal", "relay", "replica", "reply", "request_id", "reservation",
        "route", "stalled_since_s", "total_deadline_s", "was_sent",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913, PLR0917 - the facts of one request; by position, which is twice as fast
        self,
        gateway: "Gateway",
        client: ClientConnection,
        request_id: str,
        key: KeyState,
        endpoint: "EndpointState[Exchange]",
        call: Call,
        route: str,
        job: Job,
        reservation: Reservation,
        prices: Sheet,
        now_s: float,
    ) -> None:
        self.gateway = gateway
        self.client = client
        self.request_id = request_id
        self.key = key
        self.endpoint = endpoint
        self.call = call
        self.route = route
        self.job = job
        self.prompt_estimate = job.prompt_tokens
        self.reservation = reservation
        self.prices = prices
        self.arrived_s = now_s
        self.arrived_unix_s = reservation.at_unix_s
        self.queued_s = 0.0
        self.attempts = self.gave_way = 0
        self.begun_on = self.batch_line = ""
        self.is_over = self.may_make_way = False
        self.comment_due_s = self.deadline_s = NEVER_S
        self.total_deadline_s = NEVER_S
        self.stalled_since_s = NEVER_S
        self._waits_for = recovery.ANSWER
        self.body = b""
        self.first_body = b""
        self.connection: UpstreamConnection | None = None
        self.failed_on: list[ReplicaLoad] = []
        self.has_intent = self.was_sent = self.is_reopening = False
        self.relay: StreamRelay | None = None
        self.reply: StreamReply | None = None
        self.replica: ReplicaLoad | None = None
        self._coalescer: Coalescer | None = None
        self.line: Line | None = None
        self.moves: list[Move] | None = None
        self.refusal: memory.Refused | None = None
        self.progress = StreamProgress(now_s) if call.is_stream else NO_STREAM

    def __repr__(self) -> str:
        place = self.replica.route.id if self.replica else "in line"
        return f"<Exchange {self.request_id}: {self.endpoint.route.name}, {place}, attempt {self.attempts}>"

    # --- forwarding ---

    def dispatch(self, replica: ReplicaLoad) -> None:
        """Send the request to ``replica``, whose slot is taken."""
        self.replica = replica
        self.comment_due_s = NEVER_S
        self.attempts += 1
        if self.batch_line:
            self.endpoint.batch_lines[self] = None
        if self.has_intent:
            self._forward()
            return
        self.has_intent = True
        self.begun_on = replica.version_id
        now_s = self.gateway.clock.monotonic_s()
        self.queued_s = now_s - self.arrived_s
        self.total_deadline_s = now_s + self.endpoint.patience.total_s
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
            self.gateway.pool.open(address, self, timeout_s=self.endpoint.patience.connect_s)
        else:
            self._send(connection, self.replica)

    def connected(self, connection: UpstreamConnection) -> None:
        """Write the request to a connection that was opened for it."""
        replica = self.replica
        if self.is_over or replica is None or connection.address != (replica.route.host, replica.route.port):
            # Opened for a request that has gone meanwhile; it serves the next one.
            self.gateway.pool.put(connection)
        else:
            self._send(connection, replica)

    def _send(self, connection: UpstreamConnection, replica: ReplicaLoad) -> None:
        self.connection = connection
        self.is_reopening = False
        if self.client.is_paused:
            # It has not read its last answer yet, and will not be told again that it is behind.
            self.client_paused()
        call = self.call
        if not self.body:
            self.body = self.first_body = engine_request.body_of(self)
        if self.endpoint.dispatcher.has_shadow and not self.was_sent:
            side_requests.shadow(self, self.body)
        if call.is_stream:
            self.progress.wait(self)
        self.was_sent = True
        body = engine_request.body_at(self, self.body, replica)
        head = engine_request.head_of(
            self.gateway,
            replica,
            engine_request.path_at(self, replica),
            request_id=self.request_id,
            length=len(body),
            content_type=call.content_type,
        )
        connection.send(self, head, body)

    def unreachable(self, address: tuple[str, int], reason: str) -> None:
        """Go elsewhere: no connection could be opened; that says nothing of a replica it has moved on to."""
        replica = self.replica
        is_ours = replica is not None and address == (replica.route.host, replica.route.port)
        if is_ours and not self.is_over and self.connection is None:
            recovery.not_reached(self, reason)

    # --- the engine's answer ---

    def wants_stream(self, head: ResponseHead) -> bool:
        """Relay a stream as it comes; everything else is small and taken whole."""
        if not self.call.is_stream or head.status != 200 or not head.content_type.startswith(b"text/event-stream"):
            return False
        if self.reply is None:
            self.reply = StreamReply(
                self.call,
                self.request_id,
                is_chat=(self.call.engine_route or self.route) == "/v1/chat/completions",
                keeps_text=recovery.keeps_text(self),
            )
            if self.endpoint.route.serving.coalesce_ms:
                self._coalescer = Coalescer(self.client.write_stream, self.endpoint.route.serving.coalesce_ms / 1000)
        alias = self.replica.route.model_name if self.replica is not None else ""
        self.relay = self.reply.relay(is_chunked=head.is_chunked, alias=alias, name=self.endpoint.route.name)
        return True

    def answer(self, head: ResponseHead, body: bytes) -> None:
        """Take a whole response: an answer, or an error."""
        self.connection = None
        if self.is_over:
            return
        if head.status == 200 and not self.call.is_stream:
            self._answer_whole(head, body)
        elif self.replica is not None and self.replica.route.seat_of and engine_errors.lacks_guest(head, body):
            recovery.unseated(self)
        else:
            if engine_errors.is_full(head, body) and recovery.put_back(self):
                return
            if engine_errors.blames_request(head, body):
                self.replica_answered()
            else:
                self.replica_failed(Failure.BAD_ANSWER, engine_errors.reason_of(head, body))
            may_retry = head.status == 503 or (head.status == 429 and not self.has_begun)
            if may_retry and recovery.retry(self, f"engine answered {head.status}"):
                return
            # Whoever has half of an answer cannot be told that the question was wrong.
            alias = self.replica.route.model_name if self.replica is not None else ""
            refusal = engine_errors.translate(head, body, self.endpoint.route.name, alias)
            self.fail(errors.engine_lost() if self.has_begun else refusal)

    def stream(self, data: bytes) -> None:
        """Relay a read of a stream."""
        relay = self.relay
        if relay is None or self.is_over:
            return
        try:
            out = relay.feed(data)
        except EngineStreamError as error:
            recovery.broke(self, errors.bad_engine_response(str(error)))
            return
        if relay.tokens >= self.progress.next_mark:
            self.progress.note(self, relay)
        if out is data:
            # The steady state: whole events, nothing of interest in them. Deadlines are the sweep's business.
            if self._coalescer is None:
                self.client.write_stream(out)
            else:
                self._coalescer.add(out)
        else:
            self._pass_on(relay, out)

    def _pass_on(self, relay: StreamRelay, out: bytes) -> None:
        """Send what a read left for the client, and act on what it said."""
        if out:
            if not self.client.is_streaming:
                self.client.start_stream(answers.stream_headers(self))
            if not relay.is_done:
                (self.client.write_stream if self._coalescer is None else self._coalescer.add)(out)
                out = b""
        if relay.error is not None:
            recovery.broke(self, errors.engine_error())
        elif relay.is_done and not relay.has_begun:
            recovery.broke(self, errors.bad_engine_response("an empty stream"))
        elif relay.is_done or (relay.is_ended and relay.has_finish):
            self.finish_stream(relay, out)
        elif relay.is_ended:
            self.lost(is_clean=True, has_answered=True)

    def lost(self, *, is_clean: bool, has_answered: bool) -> None:
        """Deal with a connection that ended before the answer did."""
        connection, self.connection = self.connection, None
        if self.is_over:
            return
        if connection is not None:
            # Still open when only the body ended, without the answer's end.
            connection.abort()
        relay = self.relay
        if relay is not None and relay.has_finish:
            self.finish_stream(relay, b"")
        else:
            recovery.lost(self, is_stale=connection is not None and connection.is_reused and not has_answered)

    def malformed(self, reason: str) -> None:
        """Deal with a response that is not HTTP or too long."""
        self.connection = None
        if not self.is_over:
            self.replica_failed(Failure.BAD_ANSWER, reason)
            self.fail(errors.bad_engine_response(reason))

    # --- the client ---

    def client_left(self) -> None:
        """Abort the engine at once and bill what was generated."""
        if not self.is_over:
            self._end(billing.CLIENT_CLOSED, lambda: None)

    def client_paused(self) -> None:
        """Hold the engine's stream back."""
        self.stalled_since_s = self.gateway.clock.monotonic_s()
        if self.connection is not None:
            self.connection.pause()

    def client_resumed(self) -> None:
        """Let the engine's stream go on."""
        self.stalled_since_s = NEVER_S
        if self.connection is not None:
            self.connection.resume()
            if self.call.is_stream:
                self.progress.wait(self)

    def flush(self) -> None:
        """Write what is held of the stream, before anything else is written."""
        if self._coalescer is not None:
            self._coalescer.flush()

    # --- time ---

    def check_time(self, now_s: float) -> None:
        """Act on what is due; called by the sweep."""
        if now_s >= self.comment_due_s:
            waiting.comment(self)
        if self.stalled_since_s != NEVER_S:
            if now_s - self.stalled_since_s > self.gateway.settings.write_stall_timeout_s:
                self.client.abort()
                self.client_left()
            return
        if self.relay is not None:
            self.progress.check(self, self.relay, now_s)
        if now_s >= self.total_deadline_s:
            recovery.took_too_long(self)
        elif now_s >= self.deadline_s:
            recovery.silent(self, self._waits_for)

    def wait_for(self, what: str, limit_s: float) -> None:
        """Expect ``what`` of the engine within ``limit_s``."""
        self._waits_for = what
        self.deadline_s = self.gateway.clock.monotonic_s() + limit_s

    # --- ends ---

    def fail(self, error: ApiError) -> None:
        """End without an answer: an error response, or an error event when the stream's head is out."""
        if self.is_over:
            return
        status = UsageStatus.TIMEOUT if error.status == 504 else UsageStatus.ERROR
        _log.info("failed: %s %s", error.status, error.code, extra={"request_id": self.request_id})
        self.refusal = memory.refused_of(error)

        def say() -> None:
            if self.client.is_streaming:
                self.flush()
                last = answers.error_event(self, error)
                self.client.end_stream(as_chunk(last), is_last=True)
            else:
                body = body_of_error(self.route, error, self.request_id)
                self.client.respond(error.status, answers.exchange_error_headers(self, error), body)

        self._end(Outcome(status, error.status, error.code or "error"), say)

    def _answer_whole(self, head: ResponseHead, body: bytes) -> None:
        if self.replica is not None:
            body = aliases.for_client(body, self.endpoint.route.name, self.replica.route.model_name)
        try:
            usage, body = engine_errors.read_answer(self.call, head, body, self.request_id)
        except engine_errors.NotAnAnswerError as error:
            self.replica_failed(Failure.BAD_ANSWER, str(error))
            self.fail(errors.bad_engine_response(str(error)))
            return
        self.replica_answered()
        usage, is_estimated = billing.usage_or_estimate(self, usage, body)
        content_type = answer_type(head.content_type) if self.call.is_passthrough else b""
        self._end(
            billing.SUCCESS,
            lambda: self.client.respond(200, answers.answer_headers(self, content_type), body),
            usage=usage,
            is_estimated=is_estimated,
            answer=body,
        )

    def finish_stream(self, relay: StreamRelay, out: bytes) -> None:
        """End a stream whose answer is complete."""
        self.replica_answered()
        reply = self.reply
        assert reply is not None, "a stream has a reply"
        is_estimated = relay.usage is None or reply.is_continued
        usage = reply.usage(relay) or billing.estimate(self, relay.tokens)
        last = reply.finish(relay, usage)

        def say() -> None:
            if not self.client.is_streaming:
                self.client.start_stream(answers.stream_headers(self))
            self.flush()
            self.client.end_stream(out + (as_chunk(last) if last else b""))

        self._end(billing.SUCCESS, say, usage=usage, is_estimated=is_estimated)

    def _end(
        self,
        outcome: Outcome,
        say: Callable[[], None],
        *,
        usage: Usage | None = None,
        is_estimated: bool = False,
        answer: bytes = b"",
    ) -> None:
        """Give everything back and settle, then ``say`` the last bytes; the only way an exchange ends."""
        assert not self.is_over, "ended twice"
        self.is_over = True
        gateway = self.gateway
        now_s = gateway.clock.monotonic_s()
        if self.connection is not None:
            self.drop_connection(keep=usage is not None)
        if self._coalescer is not None and outcome is billing.CLIENT_CLOSED:
            self._coalescer.drop()
        if usage is None:
            usage = billing.partial_usage(self, outcome)
            is_estimated = bool(usage.prompt_tokens or usage.completion_tokens)
        units, unit = self.call.units_of(answer) if answer and self.call.meter is not None else (0.0, billing.NO_UNIT)
        if self.has_intent:
            billing.settle(
                self, outcome, usage, now_s=now_s, is_estimated=is_estimated, units=units, unit=unit, then=say
            )
        billing.give_back(self, usage, units, now_s)
        gateway.memory.ended(self, outcome, usage, units, now_s)
        gateway.exchanges.pop(self, None)
        endpoint = self.endpoint
        if self.batch_line:
            endpoint.batch_lines.pop(self, None)
        endpoint.in_flight -= 1
        endpoint.last_request_s = now_s
        gateway.metrics.ended(self.route, endpoint.route.name, outcome.http_status, now_s - self.arrived_s)
        replica, self.replica = self.replica, None
        if replica is not None:
            prompt, output = usage.prompt_tokens, usage.completion_tokens or 0
            endpoint.dispatcher.finish(replica, self.job, now_s=now_s, prompt_tokens=prompt, output_tokens=output)
        else:
            endpoint.dispatcher.leave(self, now_s=now_s)
        if not self.has_intent:
            say()

    def drop_connection(self, *, keep: bool = False) -> None:
        """Give the connection back, or abort it (and with it what the engine still generates)."""
        connection, self.connection = self.connection, None
        if connection is None:
            return
        # A connection whose reading is paused would fail its next request.
        give_back(connection, self.relay if keep and self.stalled_since_s == NEVER_S else None)

    # --- small things ---

    def began(self, now_s: float) -> None:
        """Tell the dispatcher that the first token is there."""
        if self.replica is not None:
            self.endpoint.dispatcher.began(self.replica, self.job, now_s=now_s)

    def grew(self, tokens: int) -> None:
        """Tell the dispatcher how long the answer is by now."""
        if self.replica is not None:
            self.endpoint.dispatcher.grew(self.replica, self.job, tokens)

    @property
    def has_begun(self) -> bool:
        """Say whether the client has any of the answer."""
        return self.relay is not None and self.relay.has_begun

    def replica_answered(self) -> None:
        """Tell the dispatcher that the replica does its work; an answer that blames the request is one too."""
        if self.replica is not None:
            self.endpoint.dispatcher.succeeded(self.replica)
        if self.gateway.suspects.has_any:
            recovery.answered(self)

    def replica_failed(self, kind: Failure, reason: str) -> None:
        """Tell the dispatcher how the replica failed."""
        if self.replica is not None:
            now_s = self.gateway.clock.monotonic_s()
            self.endpoint.dispatcher.failed(self.replica, kind, reason, now_s=now_s)

    def turned_away(self, verdict: Verdict) -> None:
        """Take the news that the place in line is lost."""
        waiting.turned_away(self, verdict)
