"""``GET /v1/status``: is everything in order, on one page."""

import asyncio
from collections import Counter

import msgspec

import modelyard
from modelyard.control.api.access import callable_endpoints
from modelyard.control.context import Context
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica
from modelyard.domain.routing_table import Heartbeat
from modelyard.domain.tenants import Scope
from modelyard.metering.delivery import backlog_bytes
from modelyard.metering.events import SinkStatus
from modelyard.observe.rounds import RoundStatus
from modelyard.policy.takeovers import takeovers
from modelyard.stores import StoreUnavailableError
from modelyard.web.routes import AnyRoute, Call, Empty, Route


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One connected gateway, and what it does for the endpoints that the caller may see."""

    id: str
    queued: int
    in_flight: int


class DatabaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the database answers."""

    is_healthy: bool
    reason: str


class JournalStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is not yet in the ledger."""

    backlog_bytes: int
    open_requests: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the platform."""

    object: str = "status"
    version: str
    uptime_s: int
    gateways: list[GatewayStatus]
    endpoints: dict[str, int] | None
    """How many of the caller's endpoints are in each status; null while the database does not answer."""
    replicas: dict[str, int] | None
    """How many of their replicas are in each state."""
    moving: int | None
    """How many replicas move: for each, another one loads elsewhere."""
    database: DatabaseStatus
    journal: JournalStatus | None
    """Null for whoever is no admin, too: it is of all tenants."""
    reconcile: RoundStatus | None
    """How long the controller's rounds take; for admins."""
    sinks: list[SinkStatus] | None
    """How sinks of usage stand, with their alarms; for admins."""


class StatusPage:
    """The route of the status."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._started_s = context.clock.monotonic_s()

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        return [Route("GET", "/v1/status", Scope.MANAGE, "State of the platform", self.get, Empty, Empty, Status)]

    async def get(self, call: Call[Empty, Empty]) -> Status:
        """Return the state; it answers while the database does not, since that is when it is asked for."""
        context = self._context
        health = context.health()
        endpoints: list[Endpoint] | None = None
        replicas: list[Replica] | None = None
        journal = None
        is_operator = call.identity.visible_tenant is None
        try:
            endpoints = await callable_endpoints(context.store, call.identity.visible_tenant)
            replicas = [replica for replica in await context.store.replicas() if not replica.is_tombstone]
            journal = await self._journal() if is_operator else None
        except StoreUnavailableError as error:
            health = Heartbeat(is_authoritative=False, reason=health.reason or str(error))
        ids = {endpoint.id for endpoint in endpoints or ()}
        return Status(
            version=modelyard.__version__,
            uptime_s=int(context.clock.monotonic_s() - self._started_s),
            gateways=[
                GatewayStatus(
                    id=gateway_id,
                    queued=sum(one.queued for one in report.endpoints if one.endpoint_id in ids),
                    in_flight=sum(one.in_flight for one in report.endpoints if one.endpoint_id in ids),
                )
                for gateway_id, report in sorted(context.gateways().items())
            ],
            endpoints=None if endpoints is None else Counter(endpoint.status.value for endpoint in endpoints),
            replicas=None
            if replicas is None
            else Counter(replica.state.value for replica in replicas if replica.endpoint_id in ids),
            moving=None if replicas is None else len(takeovers(one for one in replicas if one.endpoint_id in ids)),
            database=DatabaseStatus(is_healthy=health.is_authoritative, reason=health.reason),
            journal=journal,
            reconcile=context.rounds() if is_operator else None,
            sinks=context.books.statuses() if is_operator else None,
        )

    async def _journal(self) -> JournalStatus:
        usage, folder = self._context.usage, self._context.data.journal
        waiting = await asyncio.to_thread(backlog_bytes, folder, await usage.positions())
        return JournalStatus(backlog_bytes=waiting, open_requests=await usage.open_requests())
