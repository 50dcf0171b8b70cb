"""Usage: what was used and what it costs, from the ledger.

Everybody sees what is theirs: a key with the scope ``inference`` its own
requests, ``manage`` its tenant's, ``admin`` all. Costs are sums of whole
nano-dollars; ``cost_usd`` is the same as an exact decimal.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import UTC
from typing import Annotated

import msgspec

from modelyard.control.api.usage_choice import GROUPS, Moment, Selection, choose, groups_of, moment_of, sums_of
from modelyard.control.context import Context
from modelyard.domain.tenants import Identity, Scope
from modelyard.domain.usage import MICRO_PER_UNIT, Unit, UsageBucket, UsageRow, UsageStatus
from modelyard.errors import permission_denied
from modelyard.metering.delivery import backlog
from modelyard.metering.prices import usd
from modelyard.web.paging import LIMIT_DEFAULT, Limit
from modelyard.web.routes import AnyRoute, Call, Empty, Route

_Labels = dict[str, Mapping[str, str]]
"""Names by group and id."""


class UsageQuery(Selection, frozen=True, forbid_unknown_fields=True):
    """What to sum, and how."""

    group_by: Annotated[str, msgspec.Meta(description=f"Comma-separated, any of {', '.join(GROUPS)}.")] = ""


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Of the completion tokens."""
    audio_input_tokens: int = 0
    """Of the prompt tokens."""
    audio_output_tokens: int = 0
    """Of the completion tokens."""
    cost_usd: str = "0"
    cost_nanousd: int = 0
    units: dict[str, float] = {}
    """What is not counted in tokens, by its kind: ``seconds``, ``images``, ``characters``, ``searches``, ``pairs``,
    ``requests``."""


class UsageEntry(Sums, frozen=True, kw_only=True):
    """The sums of one group; only the asked dimensions are there."""

    tenant: str | msgspec.UnsetType = msgspec.UNSET
    tenant_name: str | msgspec.UnsetType = msgspec.UNSET
    """The tenant's name, where it is there and one that the caller may see."""
    key: str | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    endpoint: str | msgspec.UnsetType = msgspec.UNSET
    version: str | msgspec.UnsetType = msgspec.UNSET
    version_name: str | msgspec.UnsetType = msgspec.UNSET
    """The version's ``NAME@VERSION``, where it is one that the caller may see."""
    route: str | msgspec.UnsetType = msgspec.UNSET
    status: str | msgspec.UnsetType = msgspec.UNSET
    batch: str | msgspec.UnsetType = msgspec.UNSET
    minute: str | msgspec.UnsetType = msgspec.UNSET
    hour: str | msgspec.UnsetType = msgspec.UNSET
    day: str | msgspec.UnsetType = msgspec.UNSET
    month: str | msgspec.UnsetType = msgspec.UNSET


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Groups, their total, and how fresh they are."""

    object: str = "list"
    data: list[UsageEntry]
    has_more: bool = False
    total: Sums
    since: int
    until: int
    tz: str
    currency: str
    """What amounts are in, those that are called ``…_usd`` too."""
    rows_since: int
    """Unix seconds; before it ``since``, ``until`` and the starts of days are whole hours. 0: nowhere."""
    data_up_to: int
    """Unix seconds; requests that ended before are all counted."""


class RequestsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which requests."""

    request_id: Annotated[str, msgspec.Meta(description="Only this one.")] = ""
    since: Moment = ""
    limit: Limit = LIMIT_DEFAULT


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the ledger: the source's ``inference_requests``."""

    request_id: str
    object: str = "usage.request"
    endpoint_id: str
    tenant_id: str
    key_id: str
    model: str
    version_id: str
    replica_id: str
    route: str
    is_stream: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    audio_input_tokens: int
    audio_output_tokens: int
    cost_usd: str
    cost_nanousd: int
    units: float
    """What is not counted in tokens, in ``unit``."""
    unit: Unit
    status: UsageStatus
    http_status: int
    error_code: str
    ttft_ms: float | None
    latency_ms: float
    attempts: int
    is_estimated: bool
    batch_id: str
    created_at: int
    settled_at: int


class RequestPage(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of the ledger, newest first."""

    object: str = "list"
    data: list[RequestView]
    has_more: bool = False
    data_up_to: int


class Usage:
    """The routes of usage."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        rows = "/v1/usage/requests"
        return [
            Route("GET", "/v1/usage", Scope.INFERENCE, "Usage and cost", self.sums, Empty, UsageQuery, UsageReport),
            Route("GET", rows, Scope.INFERENCE, "Metered requests", self.requests, Empty, RequestsQuery, RequestPage),
        ]

    async def sums(self, call: Call[Empty, UsageQuery]) -> UsageReport:
        """Return sums by the asked groups."""
        query = call.query
        groups = groups_of(query.group_by)
        chosen = await choose(self._context, call.identity, query)
        up_to = await data_up_to(self._context)
        buckets = await sums_of(self._context.usage, chosen, groups)
        labels = await self._labels(call.identity, groups)
        # In a thread: there may be very many.
        data, total = await asyncio.to_thread(_report, buckets, labels)
        return UsageReport(
            data=data,
            total=total,
            since=int(chosen.since),
            until=int(chosen.until),
            tz=query.tz,
            currency=self._context.config.billing.currency,
            rows_since=chosen.rows_since,
            data_up_to=up_to,
        )

    async def _labels(self, identity: Identity, groups: list[str]) -> _Labels:
        """Return the names of what has ids, by group and id."""
        labels: _Labels = {}
        seen = identity.visible_tenant
        if "version" in groups:
            versions = await self._context.store.versions(tenant_id=seen)
            labels["version"] = {one.id: f"{one.name}@{one.version}" for one in versions}
        if "tenant" in groups:
            tenants = await self._context.store.tenants()
            labels["tenant"] = {one.id: one.name for one in tenants if seen in (None, one.id)}
        return labels

    async def requests(self, call: Call[Empty, RequestsQuery]) -> RequestPage:
        """Return rows of the ledger; a key with the scope ``inference`` must name one of its own."""
        query, identity = call.query, call.identity
        if not query.request_id and not identity.may(Scope.MANAGE):
            raise permission_denied(Scope.MANAGE)
        up_to = await data_up_to(self._context)
        rows = await self._context.usage.rows(
            tenant_id=identity.visible_tenant,
            since=moment_of("since", query.since, 0.0, UTC),
            limit=query.limit + 1,
            request_id=query.request_id or None,
        )
        if not identity.may(Scope.MANAGE):
            rows = [row for row in rows if row.key_id == identity.key_id]
        data = [_row(row) for row in rows[: query.limit]]
        return RequestPage(data=data, has_more=len(rows) > query.limit, data_up_to=up_to)


async def data_up_to(context: Context) -> int:
    """Return until when the ledger is complete: now when nothing waits for delivery, else the first that does.

    Where that cannot be read it is the ledger's newest row.
    """
    now = context.clock.unix_s()
    positions = await context.usage.positions()
    waiting = await asyncio.to_thread(backlog, context.data.journal, positions)
    if not waiting.bytes:
        return int(now)
    if waiting.since is not None:
        return int(min(waiting.since, now))
    newest = await context.usage.rows(tenant_id=None, since=0.0, limit=1)
    return int(newest[0].settled_at) if newest else 0


def _report(buckets: list[UsageBucket], labels: _Labels) -> tuple[list[UsageEntry], Sums]:
    # A sum over no group is one bucket of zeros; an empty list says "nothing" the same way for every grouping.
    return [_entry(bucket, labels) for bucket in buckets if bucket.requests], _total(buckets)


def _entry(bucket: UsageBucket, labels: _Labels) -> UsageEntry:
    named = {f"{group}_name": names[id] for group, names in labels.items() if (id := bucket.group[group]) in names}
    return msgspec.convert({**bucket.group, **named, **_sums(bucket)}, UsageEntry)


def _sums(bucket: UsageBucket) -> dict[str, int | str | dict[str, float]]:
    return {
        "requests": bucket.requests,
        "prompt_tokens": bucket.prompt_tokens,
        "cached_tokens": bucket.cached_tokens,
        "completion_tokens": bucket.completion_tokens,
        "reasoning_tokens": bucket.reasoning_tokens,
        "audio_input_tokens": bucket.audio_input_tokens,
        "audio_output_tokens": bucket.audio_output_tokens,
        "cost_usd": usd(bucket.cost_nanousd),
        "cost_nanousd": bucket.cost_nanousd,
        "units": bucket.units,
    }


def _total(buckets: list[UsageBucket]) -> Sums:
    names = [field.name for field in msgspec.structs.fields(Sums) if field.type is int]
    counts = {name: sum(getattr(bucket, name) for bucket in buckets) for name in names}
    micro: Counter[str] = Counter()
    for bucket in buckets:
        micro.update(bucket.units_micro)
    units = {unit: amount / MICRO_PER_UNIT for unit, amount in sorted(micro.items())}
    return Sums(**counts, cost_usd=usd(counts["cost_nanousd"]), units=units)


def _row(row: UsageRow) -> RequestView:
    fields = msgspec.structs.asdict(row)
    fields |= {
        "cost_usd": usd(row.cost_nanousd),
        "created_at": int(row.created_at),
        "settled_at": int(row.settled_at),
    }
    return msgspec.convert(fields, RequestView)
