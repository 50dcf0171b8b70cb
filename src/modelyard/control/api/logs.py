"""Logs of an endpoint's replicas: what was written, and what comes.

Lines are an engine's own, so they are untrusted: escape sequences that could
repaint a terminal are taken out. With several replicas each line begins with
the id of its own.
"""

import re
from typing import Annotated

import msgspec
from starlette.responses import PlainTextResponse, Response

from modelyard.control.api.access import find_endpoint, missing
from modelyard.control.api.log_following import follow, follow_one, written
from modelyard.control.context import Context
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.tenants import Scope
from modelyard.web.routes import AnyRoute, Call, Empty, Route
from modelyard.web.streams import event_stream

TAIL_MAX = 10_000
LINE_LENGTH_MAX = 8192
REPLICAS_SHOWN_MAX = 64

_REPLICA_ID = re.compile(r"rep-[a-z0-9]{1,12}-[a-z0-9]{1,8}-\d{1,9}-\d{1,9}")
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[PX^_][^\x1b]*(?:\x1b\\)?|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


class LogsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which lines."""

    tail: Annotated[int, msgspec.Meta(ge=0, le=TAIL_MAX, description="Last lines of each replica.")] = 200
    follow: Annotated[bool, msgspec.Meta(description="Go on with what comes, as server-sent events.")] = False
    replica: Annotated[str, msgspec.Meta(description="Only this replica, also one that is gone.")] = ""


class Logs:
    """The route of logs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        path, summary = "/v1/endpoints/{endpoint:path}/logs", "Logs of the replicas"
        return [Route("GET", path, Scope.MANAGE, summary, self.logs, Empty, LogsQuery, str, media_type="text/plain")]

    async def logs(self, call: Call[Empty, LogsQuery]) -> Response:
        """Return lines as text, or as events while ``follow``."""
        fleet, query = self._context.fleet, call.query
        endpoint = await find_endpoint(self._context.store, call.identity, call.path("endpoint"))
        if query.replica:
            _check_replica(endpoint, query.replica)
            if query.follow:
                return event_stream(follow_one(fleet, query.replica, query.tail), clean)
        elif query.follow:
            return event_stream(follow(fleet, lambda: self._replicas(endpoint), query.tail), clean)
        replicas = [query.replica] if query.replica else await self._replicas(endpoint)
        lines: list[str] = []
        for replica_id in replicas:
            prefix = f"{replica_id}: " if len(replicas) > 1 else ""
            lines += [prefix + clean(line) for line in (await written(fleet, replica_id, query.tail))[0]]
        text = "".join(f"{line}\n" for line in lines)
        return PlainTextResponse(text, headers={"cache-control": "no-store", "x-content-type-options": "nosniff"})

    async def _replicas(self, endpoint: Endpoint) -> list[str]:
        replicas = await self._context.store.replicas(endpoint_id=endpoint.id)
        newest = sorted(replicas, key=lambda replica: replica.started_at)[-REPLICAS_SHOWN_MAX:]
        return [replica.id for replica in newest]


def clean(line: str) -> str:
    """Return ``line`` without escape sequences and control characters, cut to a length."""
    return _ESCAPES.sub("", line[:LINE_LENGTH_MAX])


def _check_replica(endpoint: Endpoint, replica_id: str) -> None:
    # The id becomes a folder's name, and the start of it is the only tie to the endpoint once the replica is gone.
    mine = f"rep-{endpoint.id.removeprefix('ep-')[:12]}-"
    if _REPLICA_ID.fullmatch(replica_id) is None or not replica_id.startswith(mine):
        raise missing("replica", replica_id)
