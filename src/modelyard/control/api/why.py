"""Why a request went the way it went: asked of the gateways, told in words and numbers.

Gateways remember the last some thousands; what they have forgotten is told
from the ledger, as far as it has it. Of an endpoint that is another tenant's,
replicas and their load are left out.
"""

import re
from datetime import UTC, datetime

import msgspec

from modelyard.control.api.access import missing
from modelyard.control.context import Context
from modelyard.domain.tenants import Identity, Scope
from modelyard.domain.usage import UsageRow
from modelyard.domain.why import REQUEST_ID_LENGTH_MAX, Bound, Considered, Fact, Line, Move, RequestStory
from modelyard.metering.prices import usd
from modelyard.policy.stories import next_step, words
from modelyard.web.routes import AnyRoute, Call, Empty, Route

_REQUEST_ID = re.compile(rf"req_[A-Za-z0-9_-]{{1,{REQUEST_ID_LENGTH_MAX - 4}}}")


class RequestWhy(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request went the way it went. ``why`` are sentences; the rest are the numbers behind them."""

    id: str
    object: str = "request.why"
    why: list[str]
    next_step: str
    """What to do; empty: nothing is wrong."""
    arrived_at: str
    source: str
    model: str
    route: str
    endpoint_id: str
    key_id: str
    status: int
    code: str
    message: str
    retry_after_s: float | None
    facts: dict[str, Fact]
    limits: tuple[Bound, ...]
    reserved_tokens: int
    waited_s: float
    line: Line | None
    version_id: str
    replica_id: str
    considered: tuple[Considered, ...]
    moves: tuple[Move, ...]
    attempts: int
    ttft_s: float | None
    latency_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_usd: str


class Why:
    """The route."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared route."""
        path, summary = "/v1/requests/{request_id}/why", "Why a request went the way it went"
        return [Route("GET", path, Scope.INFERENCE, summary, self.why, Empty, Empty, RequestWhy)]

    async def why(self, call: Call[Empty, Empty]) -> RequestWhy:
        """Return the answer, from a gateway's memory or the ledger."""
        request_id = call.path("request_id")
        story = None
        if _REQUEST_ID.fullmatch(request_id):
            story = await self._context.recall(request_id)
            if story is None:
                story = await self._from_ledger(request_id)
        if story is None or not _may_see(call.identity, story):
            raise missing("request", request_id)
        story = msgspec.structs.replace(story, currency=self._context.config.billing.currency)
        return why_view(await self._without_others(call.identity, story))

    async def _from_ledger(self, request_id: str) -> RequestStory | None:
        rows = await self._context.usage.rows(tenant_id=None, since=0.0, limit=1, request_id=request_id)
        return story_of(rows[0]) if rows else None

    async def _without_others(self, identity: Identity, story: RequestStory) -> RequestStory:
        """Leave out what the caller would learn of another tenant's endpoint."""
        tenant_id = identity.visible_tenant
        if tenant_id is None or not story.endpoint_id:
            return story
        own = await self._context.store.endpoints(tenant_id=tenant_id)
        if any(endpoint.id == story.endpoint_id for endpoint in own):
            return story
        moves = tuple(msgspec.structs.replace(move, replica_id="a replica") for move in story.moves)
        facts = {} if "slots" in story.facts else story.facts
        return msgspec.structs.replace(
            story, replica_id="", version_id="", fallback="", beside=None, considered=(), moves=moves, facts=facts
        )


def _may_see(identity: Identity, story: RequestStory) -> bool:
    return identity.visible_tenant is None or identity.visible_tenant == story.tenant_id


def story_of(row: UsageRow) -> RequestStory:
    """Return what the ledger knows of a request."""
    return RequestStory(
        request_id=row.request_id,
        tenant_id=row.tenant_id,
        key_id=row.key_id,
        source="ledger",
        arrived_at=row.created_at,
        route=row.route,
        model=row.model,
        endpoint_id=row.endpoint_id,
        status=row.http_status,
        code=row.error_code,
        was_sent=True,
        version_id=row.version_id,
        replica_id=row.replica_id,
        attempts=row.attempts,
        ttft_s=row.ttft_ms / 1000 if row.ttft_ms is not None else None,
        latency_s=row.latency_ms / 1000,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        units=row.units,
        cost_nanousd=row.cost_nanousd,
    )


def why_view(story: RequestStory) -> RequestWhy:
    """Return the answer of the API."""
    return RequestWhy(
        id=story.request_id,
        why=words(story),
        next_step=next_step(story),
        arrived_at=datetime.fromtimestamp(story.arrived_at, UTC).isoformat(timespec="milliseconds"),
        source=story.source,
        model=story.model,
        route=story.route,
        endpoint_id=story.endpoint_id,
        key_id=story.key_id,
        status=story.status,
        code=story.code,
        message=story.message,
        retry_after_s=story.retry_after_s,
        facts=story.facts,
        limits=story.bounds,
        reserved_tokens=story.reserved_tokens,
        waited_s=story.waited_s,
        line=story.line,
        version_id=story.version_id,
        replica_id=story.replica_id,
        considered=story.considered,
        moves=story.moves,
        attempts=story.attempts,
        ttft_s=story.ttft_s,
        latency_s=story.latency_s,
        prompt_tokens=story.prompt_tokens,
        cached_tokens=story.cached_tokens,
        completion_tokens=story.completion_tokens,
        cost_usd=usd(story.cost_nanousd),
    )
