"""Usage and costs in the shape of OpenAI's administration API: ``/v1/organization/…``.

A project is a tenant. Keys belong to tenants and to nobody else, so no usage is
a user's: ``user_id`` is null. Buckets lie on UTC's minutes, hours or days, cut
off at the asked time, so that each sums up just the span that it names. Everybody
sees what is theirs, as in ``/v1/usage``.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from modelyard.control.api.usage_choice import exact, sums_within, too_old, visible
from modelyard.control.context import Context
from modelyard.domain.tenants import Scope
from modelyard.domain.usage import MICRO_PER_UNIT, NANO_PER_USD, Unit, UsageBucket, UsageFilter
from modelyard.errors import invalid_value, unsupported_parameter
from modelyard.web.routes import AnyRoute, Call, Empty, Route

PAGE = "page_"
UNIX_MAX = 253_370_764_800
WIDTHS = {"1m": (60, "minute", 60, 1440), "1h": (3600, "hour", 24, 168), "1d": (86_400, "day", 7, 31)}
"""Seconds, the ledger's dimension, and how many buckets a page has if not asked, and at most."""
COST_DAYS_MAX = 180

ROUTES = {
    "completions": ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    "embeddings": ("/v1/embeddings",),
    "moderations": ("/v1/moderations",),
    "images": ("/v1/images/generations", "/v1/images/edits"),
    "audio_speeches": ("/v1/audio/speech",),
    "audio_transcriptions": ("/v1/audio/transcriptions", "/v1/audio/translations"),
}
"""What each kind of usage is the use of. What OpenAI does not have (ranking, classes, tensors) is in the costs."""

_GROUPS = {
    "project_id": "tenant",
    "api_key_id": "key",
    "model": "model",
    "line_item": "model",
    "batch": "batch",
    "user_id": None,
}
_QUANTITIES = {
    Unit.SECONDS.value: "duration_seconds",
    Unit.IMAGES.value: "images",
    Unit.CHARACTERS.value: "characters",
}

_Start = Annotated[int, msgspec.Meta(ge=0, le=UNIX_MAX, description="Unix seconds, inclusive.")]
_End = Annotated[
    Annotated[int, msgspec.Meta(ge=0, le=UNIX_MAX)] | None,
    msgspec.Meta(description="Unix seconds, exclusive; now if not given."),
]
_Width = Annotated[Literal["1m", "1h", "1d"], msgspec.Meta(description="How long a bucket is.")]
_Limit = Annotated[Annotated[int, msgspec.Meta(ge=1, le=1440)] | None, msgspec.Meta(description="Buckets of a page.")]
_Page = Annotated[str, msgspec.Meta(description="The `next_page` of the answer before.")]
_Users = Annotated[tuple[str, ...], msgspec.Meta(description="Not here: keys belong to projects, not to users.")]
Names = tuple[str, ...]
_Result = Callable[[UsageBucket, Names], dict[str, Any]]


class CostsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's parameters; lists are repeated, as ``group_by`` or ``group_by[]``."""

    start_time: _Start
    end_time: _End = None
    bucket_width: _Width = "1d"
    limit: _Limit = None
    page: _Page = ""
    group_by: Annotated[Names, msgspec.Meta(description="Any of project_id, api_key_id, line_item, user_id.")] = ()
    project_ids: Names = ()
    api_key_ids: Names = ()
    line_items: Annotated[Names, msgspec.Meta(description="Only these line items: models.")] = ()
    user_ids: _Users = ()


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's parameters; lists are repeated, as ``group_by`` or ``group_by[]``."""

    start_time: _Start
    end_time: _End = None
    bucket_width: _Width = "1d"
    limit: _Limit = None
    page: _Page = ""
    group_by: Annotated[Names, msgspec.Meta(description="Any of project_id, api_key_id, model, batch, user_id.")] = ()
    project_ids: Names = ()
    api_key_ids: Names = ()
    models: Names = ()
    batch: bool | None = None
    user_ids: _Users = ()


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """A span of time and its sums by the asked groups; none where nothing was used."""

    object: str = "bucket"
    start_time: int
    end_time: int
    results: list[dict[str, Any]]


class BucketPage(msgspec.Struct, frozen=True, kw_only=True):
    """Buckets, oldest first."""

    object: str = "page"
    data: list[Bucket]
    has_more: bool = False
    next_page: str | None = None


class _Span(NamedTuple):
    """The buckets of one page: those that begin in it on the grid of ``width_s``."""

    since: int
    until: int
    end: int
    """Where the last page ends."""
    width_s: int
    dimension: str

    def buckets(self) -> list[tuple[int, int]]:
        """Return start and end of each."""
        first = self.since // self.width_s * self.width_s
        starts = range(first, self.until, self.width_s)
        return [(max(start, self.since), min(start + self.width_s, self.until)) for start in starts]


class Organization:
    """The routes of OpenAI's usage and costs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        scope = Scope.INFERENCE
        found: list[AnyRoute] = [
            Route(
                "GET",
                f"/v1/organization/usage/{kind}",
                scope,
                f"Usage of {kind.replace('_', ' ')} (OpenAI)",
                self._usage_of(kind),
                Empty,
                UsageQuery,
                BucketPage,
            )
            for kind in ROUTES
        ]
        costs = "/v1/organization/costs"
        return [*found, Route("GET", costs, scope, "Costs (OpenAI)", self.costs, Empty, CostsQuery, BucketPage)]

    async def costs(self, call: Call[Empty, CostsQuery]) -> BucketPage:
        """Return what was to be paid."""
        query = call.query
        groups = _groups(query.group_by, ("project_id", "api_key_id", "line_item", "user_id"))
        days_max = COST_DAYS_MAX if query.bucket_width == "1d" else None
        where = await self._where(call, models=query.line_items)
        cost = partial(_cost, currency=self._context.config.billing.currency.lower())
        counts = _COUNTED["costs"] if "line_item" in groups else {"cost_nanousd"}
        return await self._page(query, where, groups, cost, counts, most=days_max)

    def _usage_of(self, kind: str) -> Callable[[Call[Empty, UsageQuery]], Any]:
        async def usage(call: Call[Empty, UsageQuery]) -> BucketPage:
            query = call.query
            groups = _groups(query.group_by, ("project_id", "api_key_id", "model", "batch", "user_id"))
            where = await self._where(call, models=query.models, routes=ROUTES[kind], is_batch=query.batch)
            return await self._page(query, where, groups, _RESULTS[kind], _COUNTED[kind])

        return usage

    async def _where(
        self, call: Call[Empty, Any], *, models: Names, routes: Names = (), is_batch: bool | None = None
    ) -> UsageFilter:
        query = call.query
        if query.user_ids:
            raise unsupported_parameter("user_ids", "keys belong to projects, not to users; use 'api_key_ids'")
        where = await visible(
            self._context, call.identity, tenants=query.project_ids, keys=query.api_key_ids, models=models
        )
        return msgspec.structs.replace(where, routes=routes, is_batch=is_batch)

    async def _page(
        self,
        query: UsageQuery | CostsQuery,
        where: UsageFilter,
        groups: tuple[str, ...],
        result: _Result,
        counts: Collection[str],
        *,
        most: int | None = None,
    ) -> BucketPage:
        kept = await self._context.usage.kept_since()
        span = _span(query, now=math.ceil(self._context.clock.unix_s()), kept=kept, most=most)
        by = dict.fromkeys([span.dimension, *(name for group in groups if (name := _GROUPS[group]))])
        sums = await sums_within(self._context.usage, where, span.since, span.until, tuple(by), counts=counts)
        found = await asyncio.to_thread(_results, sums, span, groups, result)  # in a thread: there may be very many
        data = [Bucket(start_time=start, end_time=end, results=found.get(start, [])) for start, end in span.buckets()]
        more = span.until < span.end
        return BucketPage(data=data, has_more=more, next_page=f"{PAGE}{span.until}" if more else None)


def _results(
    sums: Sequence[UsageBucket], span: _Span, groups: Names, result: _Result
) -> dict[int, list[dict[str, Any]]]:
    """Return the results by the start of their bucket."""
    found: dict[int, list[dict[str, Any]]] = {}
    lists: dict[str, list[dict[str, Any]]] = {}
    for one in sums:
        name = one.group[span.dimension]
        if (results := lists.get(name)) is None:
            start = int(datetime.fromisoformat(f"{name}{_REST[span.dimension]}").timestamp())
            results = lists[name] = found.setdefault(max(start, span.since), [])
        results.append(result(one, groups))
    return found


_REST = {"minute": "", "hour": "", "day": "T00:00:00Z"}
"""What the name of a bucket lacks to be a moment."""


def _span(query: UsageQuery | CostsQuery, *, now: int, kept: int, most: int | None) -> _Span:
    width_s, dimension, usual, page_max = WIDTHS[query.bucket_width]
    limit = query.limit or usual
    if limit > (most or page_max):
        raise invalid_value("limit", f"with bucket_width {query.bucket_width} it is {most or page_max} at most")
    start = int(exact(query.start_time, kept))
    end = int(exact(now if query.end_time is None else query.end_time, kept))
    if start > end:
        raise invalid_value("start_time", "it is after 'end_time'")
    since = _after(query.page, start, end, width_s) if query.page else start
    if dimension == "minute" and since < kept:
        raise too_old("start_time", kept, "minutes are counted from them: use bucket_width 1h")
    until = min((since // width_s + limit) * width_s, end)
    return _Span(since, until, end, width_s, dimension)


def _after(page: str, start: int, end: int, width_s: int) -> int:
    text = page.removeprefix(PAGE)
    since = int(text) if text.isascii() and text.isdigit() and len(text) < 13 else -1
    if not page.startswith(PAGE) or not start < since < end or since % width_s:
        raise invalid_value("page", "it is no 'next_page' of this question: give the same times and bucket_width")
    return since


def _groups(given: Names, known: Names) -> Names:
    """Return OpenAI's names of the groups; plurals are understood."""
    found = []
    for name in given:
        one = name.removesuffix("s")
        if one not in known:
            raise invalid_value("group_by", f"'{name[:40]}' is none of {', '.join(known)}")
        found.append(one)
    return tuple(dict.fromkeys(found))


def _named(bucket: UsageBucket, groups: Names, known: Names) -> dict[str, Any]:
    """Return the fields that say which group it is; null where it was not asked."""
    found: dict[str, Any] = dict.fromkeys(known)
    for group in groups:
        if name := _GROUPS[group]:
            value = bucket.group[name]
            found[group] = value if group != "batch" else value == "true"
    return found


def _completions(bucket: UsageBucket, groups: Names) -> dict[str, Any]:
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": bucket.prompt_tokens,
        "input_cached_tokens": bucket.cached_tokens,
        "input_uncached_tokens": bucket.prompt_tokens - bucket.cached_tokens,
        "input_audio_tokens": bucket.audio_input_tokens,
        "output_tokens": bucket.completion_tokens,
        "output_audio_tokens": bucket.audio_output_tokens,
        "output_text_tokens": bucket.completion_tokens - bucket.audio_output_tokens,
        "output_reasoning_tokens": bucket.reasoning_tokens,
        "num_model_requests": bucket.requests,
        **_named(bucket, groups, ("project_id", "user_id", "api_key_id", "model", "batch", "service_tier")),
    }


def _counting(kind: str, **counts: Callable[[UsageBucket], int]) -> Callable[[UsageBucket, Names], dict[str, Any]]:
    def result(bucket: UsageBucket, groups: Names) -> dict[str, Any]:
        return {
            "object": f"organization.usage.{kind}.result",
            **{name: count(bucket) for name, count in counts.items()},
            "num_model_requests": bucket.requests,
            **_named(bucket, groups, ("project_id", "user_id", "api_key_id", "model")),
        }

    return result


def _whole(unit: Unit) -> Callable[[UsageBucket], int]:
    """Return a count of whole units, rounded; ``/v1/usage`` has what is behind the point."""
    return lambda bucket: round(bucket.units_micro.get(unit.value, 0) / MICRO_PER_UNIT)


_COUNTED: Mapping[str, Collection[str]] = {
    "completions": (
        *("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"),
        *("audio_input_tokens", "audio_output_tokens"),
    ),
    "embeddings": ("requests", "prompt_tokens"),
    "moderations": ("requests", "prompt_tokens"),
    "images": ("requests", "units_micro"),
    "audio_speeches": ("requests", "units_micro"),
    "audio_transcriptions": ("requests", "units_micro"),
    "costs": ("cost_nanousd", "prompt_tokens", "completion_tokens", "units_micro"),
}
"""What of a sum each result tells: to add up all takes twice as long."""
_RESULTS: Mapping[str, _Result] = {
    "completions": _completions,
    "embeddings": _counting("embeddings", input_tokens=lambda bucket: bucket.prompt_tokens),
    "moderations": _counting("moderations", input_tokens=lambda bucket: bucket.prompt_tokens),
    "images": _counting("images", images=_whole(Unit.IMAGES)),
    "audio_speeches": _counting("audio_speeches", characters=_whole(Unit.CHARACTERS)),
    "audio_transcriptions": _counting("audio_transcriptions", seconds=_whole(Unit.SECONDS)),
}


def _cost(bucket: UsageBucket, groups: Names, *, currency: str) -> dict[str, Any]:
    found = _named(bucket, groups, _COST_FIELDS)
    found["object"] = "organization.costs.result"
    # A float, as OpenAI has it; cost_nanousd is exact.
    found["amount"] = {"value": bucket.cost_nanousd / NANO_PER_USD, "currency": currency}
    found["cost_nanousd"] = bucket.cost_nanousd
    if "line_item" in groups:
        found["quantity"], found["quantity_unit"] = _quantity(bucket)
    return found


_COST_FIELDS = (
    *("object", "amount", "cost_nanousd", "project_id", "user_id", "api_key_id", "line_item"),
    *("quantity", "quantity_unit"),
)


def _quantity(bucket: UsageBucket) -> tuple[float | None, str | None]:
    """Return how much was used, where one unit says it all."""
    tokens = bucket.prompt_tokens + bucket.completion_tokens
    if tokens and not bucket.units_micro:
        return tokens, "tokens"
    if not tokens and len(bucket.units_micro) == 1:
        [(unit, amount)] = bucket.units.items()
        return (amount, _QUANTITIES[unit]) if unit in _QUANTITIES else (None, None)
    return None, None
