"""Usage: what was used and what it costs, from the ledger.

Everybody sees what is theirs: a key with the scope ``inference`` its own
requests, ``manage`` its tenant's, ``admin`` all. Costs are sums of whole
nano-dollars; ``cost_usd`` is the same as an exact decimal.
"""

import asyncio
import re
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from modelyard.control.api.access import find_key, find_tenant, missing
from modelyard.control.context import Context
from modelyard.domain.tenants import Identity, Scope
from modelyard.domain.usage import NANO_PER_USD, Unit, UsageBucket, UsageRow, UsageStatus
from modelyard.errors import invalid_value, permission_denied
from modelyard.metering.delivery import backlog_bytes
from modelyard.web.paging import LIMIT_DEFAULT, Limit
from modelyard.web.routes import AnyRoute, Call, Empty, Route

GROUPS = ("tenant", "key", "model", "hour", "day", "status")
SPAN_DEFAULT_S = 86400
UNIX_MAX = 253_402_300_799
"""The last second of the year 9999."""

_Moment = Annotated[str, msgspec.Meta(description="Unix seconds, or an ISO 8601 date or time (UTC unless it says).")]


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to sum, and how."""

    group_by: Annotated[str, msgspec.Meta(description=f"Comma-separated, any of {', '.join(GROUPS)}.")] = ""
    since: _Moment = ""
    until: _Moment = ""
    key: Annotated[str, msgspec.Meta(description="Only this key's.")] = ""
    model: Annotated[str, msgspec.Meta(description="Only this model's.")] = ""
    tenant: Annotated[str, msgspec.Meta(description="Only this tenant's (admin; others see their own).")] = ""


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: str = "0"
    cost_nanousd: int = 0
    units: dict[str, float] = {}
    """What is not counted in tokens, by its kind: ``seconds``, ``images``, ``characters``, ``searches``."""


class UsageEntry(Sums, frozen=True, kw_only=True):
    """The sums of one group; only the asked dimensions are there."""

    tenant: str | msgspec.UnsetType = msgspec.UNSET
    key: str | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    hour: str | msgspec.UnsetType = msgspec.UNSET
    day: str | msgspec.UnsetType = msgspec.UNSET
    status: str | msgspec.UnsetType = msgspec.UNSET


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Groups, their total, and how fresh they are."""

    object: str = "list"
    data: list[UsageEntry]
    has_more: bool = False
    total: Sums
    since: int
    until: int
    data_up_to: int
    """Unix seconds; requests that ended before are all counted."""


class RequestsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which requests."""

    request_id: Annotated[str, msgspec.Meta(description="Only this one.")] = ""
    since: _Moment = ""
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
        query, now = call.query, self._context.clock.unix_s()
        until = _moment("until", query.until, now)
        since = _moment("since", query.since, until - SPAN_DEFAULT_S)
        if since > until:
            raise invalid_value("since", "it is after 'until'")
        groups = _groups(query.group_by)
        tenant_id = await self._tenant(call.identity, query.tenant)
        key_id = await self._key(call.identity, query.key)
        up_to = await data_up_to(self._context)
        buckets = await self._context.usage.usage(
            tenant_id=tenant_id, key_id=key_id, model=query.model or None, since=since, until=until, group_by=groups
        )
        # A sum over no group is one bucket of zeros; an empty list says "nothing" the same way for every grouping.
        data = [_entry(bucket) for bucket in buckets if bucket.requests]
        return UsageReport(data=data, total=_total(buckets), since=int(since), until=int(until), data_up_to=up_to)

    async def requests(self, call: Call[Empty, RequestsQuery]) -> RequestPage:
        """Return rows of the ledger; a key with the scope ``inference`` must name one of its own."""
        query, identity = call.query, call.identity
        if not query.request_id and not identity.may(Scope.MANAGE):
            raise permission_denied(Scope.MANAGE)
        up_to = await data_up_to(self._context)
        rows = await self._context.usage.rows(
            tenant_id=identity.visible_tenant,
            since=_moment("since", query.since, 0.0),
            limit=query.limit + 1,
            request_id=query.request_id or None,
        )
        if not identity.may(Scope.MANAGE):
            rows = [row for row in rows if row.key_id == identity.key_id]
        data = [_row(row) for row in rows[: query.limit]]
        return RequestPage(data=data, has_more=len(rows) > query.limit, data_up_to=up_to)

    async def _tenant(self, identity: Identity, wanted: str) -> str | None:
        if not wanted or wanted == identity.tenant_id:
            return wanted or identity.visible_tenant
        if not identity.may(Scope.ADMIN):
            raise missing("tenant", wanted)
        return (await find_tenant(self._context.store, wanted)).id

    async def _key(self, identity: Identity, wanted: str) -> str | None:
        if not identity.may(Scope.MANAGE):
            if wanted not in ("", identity.key_id):
                raise missing("key", wanted)
            return identity.key_id
        return (await find_key(self._context.store, identity, wanted)).id if wanted else None


async def data_up_to(context: Context) -> int:
    """Return until when the ledger is complete: now when nothing waits for delivery, else its newest row."""
    now = context.clock.unix_s()
    positions = await context.usage.positions()
    if not await asyncio.to_thread(backlog_bytes, context.data.journal, positions):
        return int(now)
    newest = await context.usage.rows(tenant_id=None, since=0.0, limit=1)
    return int(newest[0].settled_at) if newest else 0


def usd(nanousd: int) -> str:
    """Return nano-dollars as an exact decimal number of dollars, without trailing zeros."""
    whole, rest = divmod(abs(nanousd), NANO_PER_USD)
    text = f"{whole}.{rest:09d}".rstrip("0").rstrip(".")
    return f"-{text}" if nanousd < 0 else text


def _groups(text: str) -> list[str]:
    groups = [group.strip() for group in text.split(",") if group.strip()]
    for group in groups:
        if group not in GROUPS:
            raise invalid_value("group_by", f"'{group[:40]}' is none of {', '.join(GROUPS)}")
    if len(set(groups)) != len(groups):
        raise invalid_value("group_by", "a group is named twice")
    return groups


def _moment(param: str, text: str, default: float) -> float:
    if not text:
        return default
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text):
        moment = float(text)
    else:
        try:
            # A "+" of a time zone arrives as a space when the caller did not quote it.
            read = datetime.fromisoformat(re.sub(r" (\d\d:?\d\d)$", r"+\1", text) if "T" in text else text)
        except ValueError:
            raise invalid_value(param, "give unix seconds or an ISO 8601 date, like 2026-11-29") from None
        moment = (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    if not 0 <= moment <= UNIX_MAX:
        raise invalid_value(param, "it is out of range")
    return moment


def _entry(bucket: UsageBucket) -> UsageEntry:
    return msgspec.convert({**bucket.group, **_sums(bucket)}, UsageEntry)


def _sums(bucket: UsageBucket) -> dict[str, int | str | dict[str, float]]:
    return {
        "requests": bucket.requests,
        "prompt_tokens": bucket.prompt_tokens,
        "cached_tokens": bucket.cached_tokens,
        "completion_tokens": bucket.completion_tokens,
        "cost_usd": usd(bucket.cost_nanousd),
        "cost_nanousd": bucket.cost_nanousd,
        "units": bucket.units,
    }


def _total(buckets: list[UsageBucket]) -> Sums:
    cost = sum(bucket.cost_nanousd for bucket in buckets)
    units = {unit for bucket in buckets for unit in bucket.units}
    return Sums(
        requests=sum(bucket.requests for bucket in buckets),
        prompt_tokens=sum(bucket.prompt_tokens for bucket in buckets),
        cached_tokens=sum(bucket.cached_tokens for bucket in buckets),
        completion_tokens=sum(bucket.completion_tokens for bucket in buckets),
        cost_usd=usd(cost),
        cost_nanousd=cost,
        units={unit: sum(bucket.units.get(unit, 0.0) for bucket in buckets) for unit in sorted(units)},
    )


def _row(row: UsageRow) -> RequestView:
    fields = msgspec.structs.asdict(row)
    fields |= {
        "cost_usd": usd(row.cost_nanousd),
        "created_at": int(row.created_at),
        "settled_at": int(row.settled_at),
    }
    return msgspec.convert(fields, RequestView)
