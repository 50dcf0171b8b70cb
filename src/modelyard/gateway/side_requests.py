"""Requests to engines that answer no client: probes of ejected replicas, and shadow copies.

A probe is a real request for one token: a replica whose health page answers
may still be unable to generate. A shadow copy shows how another version copes
with live traffic; what it answers is counted and thrown away. Neither is
billed.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from modelyard.gateway import engine_errors, engine_request
from modelyard.gateway.responses import ResponseHead
from modelyard.gateway.upstream import UpstreamConnection
from modelyard.policy.breaker import Failure
from modelyard.policy.dispatch import ReplicaLoad
from modelyard.policy.job import Job

if TYPE_CHECKING:
    from modelyard.gateway.catalog import EndpointState
    from modelyard.gateway.exchange import Exchange
    from modelyard.gateway.flow import Gateway

PROBE_TIMEOUT_S = 10.0
GUEST_MISSING = "the engine does not have this guest"
"""Why a seat fails whose engine does not know the model: it was evicted, or the replica began anew."""
_PROBES = {
    "/v1/chat/completions": b'{"model":"%b","max_tokens":1,"messages":[{"role":"user","content":"Hi"}]}',
    "/v1/completions": b'{"model":"%b","max_tokens":1,"prompt":"Hi"}',
    "/v1/embeddings": b'{"model":"%b","input":"Hi"}',
}
"""A request for one token, by the routes that an engine may have."""

_log = logging.getLogger(__name__)


class SideRequest:
    """One such request; ``done`` is called exactly once, with whether the engine gave a good answer."""

    __slots__ = ("_body", "_connection", "_done", "_gateway", "_replica", "_request_id", "_route", "deadline_s")

    def __init__(
        self,
        gateway: "Gateway",
        replica: ReplicaLoad,
        *,
        route: str,
        body: bytes,
        timeout_s: float,
        done: Callable[[bool, str, Failure], None],
    ) -> None:
        self._gateway = gateway
        self._replica = replica
        self._route = route
        self._body = body
        self._request_id = f"side-{gateway.ids.next()}"
        self._connection: UpstreamConnection | None = None
        self._done: Callable[[bool, str, Failure], None] | None = done
        self.deadline_s = gateway.clock.monotonic_s() + timeout_s
        gateway.side_requests.add(self)
        route_of = replica.route
        address = (route_of.host, route_of.port)
        connection = gateway.pool.take(address)
        if connection is None:
            gateway.pool.open(address, self, timeout_s=gateway.settings.connect_timeout_s)
        else:
            self.connected(connection)

    def __repr__(self) -> str:
        return f"<SideRequest {self._request_id} {self._route} at {self._replica.route.id}>"

    def connected(self, connection: UpstreamConnection) -> None:
        """Send."""
        if self._done is None:
            self._gateway.pool.put(connection)
            return
        self._connection = connection
        head = engine_request.head_of(
            self._gateway, self._replica, self._route, request_id=self._request_id, length=len(self._body)
        )
        connection.send(self, head, self._body)

    def unreachable(self, address: tuple[str, int], reason: str) -> None:
        """End."""
        self._end(is_good=False, reason=reason)

    def wants_stream(self, head: ResponseHead) -> bool:
        """Take everything whole: nobody waits for its pieces."""
        return False

    def answer(self, head: ResponseHead, body: bytes) -> None:
        """End."""
        self._connection = None
        if self._replica.route.seat_of and engine_errors.lacks_guest(head, body):
            self._end(is_good=False, reason=GUEST_MISSING, kind=Failure.MISSING)
        else:
            reason = engine_errors.reason_of(head, body)
            self._end(is_good=head.status < 500, reason=reason, kind=Failure.BAD_ANSWER)

    def stream(self, data: bytes) -> None:
        """Cannot happen: no stream was wanted."""

    def lost(self, *, is_clean: bool, has_answered: bool) -> None:
        """End."""
        self._connection = None
        self._end(is_good=False, reason="connection lost")

    def malformed(self, reason: str) -> None:
        """End."""
        self._connection = None
        self._end(is_good=False, reason=reason, kind=Failure.BAD_ANSWER)

    def check_time(self, now_s: float) -> None:
        """End when it took too long."""
        if now_s >= self.deadline_s:
            self._end(is_good=False, reason="timeout", kind=Failure.SILENT)

    def cancel(self) -> None:
        """End without a verdict: the gateway stops."""
        self._done = None
        self._end(is_good=False, reason="cancelled")

    def _end(self, *, is_good: bool, reason: str, kind: Failure = Failure.UNREACHABLE) -> None:
        self._gateway.side_requests.discard(self)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        done, self._done = self._done, None
        if done is not None:
            done(is_good, reason, kind)


def probe(gateway: "Gateway", endpoint: "EndpointState[Exchange]", replica: ReplicaLoad) -> None:
    """Ask a replica that pauses after a failure for one token, and tell its dispatcher how that went."""
    dispatcher = endpoint.dispatcher
    route = next((route for route in _PROBES if route in endpoint.route.routes), None)
    if route is None:
        # Nothing harmless can be asked of it: the next request is the trial, and its failure ejects for longer.
        dispatcher.probed(replica, is_good=True, now_s=gateway.clock.monotonic_s())
        return

    def done(is_good: bool, reason: str, kind: Failure) -> None:  # noqa: FBT001 - called back
        _log.info("probe of %s: %s", replica.route.id, "it answers" if is_good else reason)
        dispatcher.probed(replica, is_good=is_good, kind=kind, reason=reason, now_s=gateway.clock.monotonic_s())

    replica.probe_began()
    name = (replica.route.model_name or endpoint.route.name).encode()
    SideRequest(gateway, replica, route=route, body=_PROBES[route] % name, timeout_s=PROBE_TIMEOUT_S, done=done)


def shadow(exchange: "Exchange", body: bytes) -> None:
    """Send a copy of a request to each shadow release that wants this one and has room."""
    gateway = exchange.gateway
    endpoint = exchange.endpoint
    dispatcher = endpoint.dispatcher
    for replica, copy in dispatcher.shadows(exchange.job, now_s=gateway.clock.monotonic_s()):

        def done(  # called back
            is_good: bool,  # noqa: FBT001
            reason: str,
            kind: Failure,
            replica: ReplicaLoad = replica,
            copy: Job = copy,
        ) -> None:
            now_s = gateway.clock.monotonic_s()
            gateway.metrics.shadowed(endpoint.route.name, replica.version_id, is_good=is_good)
            if kind is Failure.MISSING:
                dispatcher.failed(replica, kind, reason, now_s=now_s)
                gateway.presence.report_now()
            dispatcher.drop_shadow(replica, copy, now_s=now_s)

        route = engine_request.path_at(exchange, replica)
        timeout_s = endpoint.patience.total_s
        named = engine_request.body_at(exchange, body, replica)
        SideRequest(gateway, replica, route=route, body=named, timeout_s=timeout_s, done=done)
