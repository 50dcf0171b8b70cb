"""``GET /v1/usage/export``: rows or sums of the ledger as a file, sent while they are read.

The rows are read page by page, each in its own transaction, oldest first; a
page is encoded in a thread. What fails on the way cuts the answer off, so that
half a file is never taken for a whole one; so does the sweep of old rows, where it
overtakes the reading.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from starlette.responses import StreamingResponse

from modelyard.control.api.usage_choice import GROUPS, Chosen, Selection, choose, groups_of, sums_of, too_old
from modelyard.control.context import Context
from modelyard.domain.tenants import Scope
from modelyard.domain.usage import Moment, UsageBucket, UsageRow
from modelyard.errors import invalid_value, permission_denied
from modelyard.metering import export
from modelyard.metering.export import Encoder, ExtraMissingError, Format, Row, Sheet
from modelyard.stores import UsageStore
from modelyard.web.routes import AnyRoute, Call, Empty, Route

PAGE_ROWS = 5_000
"""Rows that are read and encoded at a time; of a Parquet file, of one group."""


class ExportQuery(Selection, frozen=True, forbid_unknown_fields=True):
    """What the file has."""

    format: Annotated[
        Literal["csv", "json", "jsonl", "parquet"],
        msgspec.Meta(description="parquet needs the extra `export` in the controller."),
    ] = "csv"
    of: Annotated[Literal["requests", "sums"], msgspec.Meta(description="A row each, or sums by 'group_by'.")] = (
        "requests"
    )
    group_by: Annotated[str, msgspec.Meta(description=f"Of sums: any of {', '.join(GROUPS)}, with commas.")] = ""


class UsageExport:
    """The route of exports."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared route."""
        path, title = "/v1/usage/export", "Usage as CSV, JSON or Parquet"
        return [
            Route("GET", path, Scope.INFERENCE, title, self.file, Empty, ExportQuery, str, media_type="text/csv"),
        ]

    async def file(self, call: Call[Empty, ExportQuery]) -> StreamingResponse:
        """Return the file."""
        query = call.query
        chosen = await choose(self._context, call.identity, query)
        if query.of == "requests":
            if not call.identity.may(Scope.MANAGE):
                raise permission_denied(Scope.MANAGE)
            if query.group_by:
                raise invalid_value("group_by", "single requests have no groups: ask for of=sums")
            if chosen.since < chosen.rows_since:
                raise too_old("since", chosen.rows_since, "older ones are in the sums alone: ask for of=sums")
            sheet, pages = export.ROWS, _rows(self._context.usage, chosen)
        else:
            groups = groups_of(query.group_by)
            buckets = await sums_of(self._context.usage, chosen, groups)
            values = await asyncio.to_thread(_sums, buckets, groups)
            sheet, pages = export.sheet_of_buckets(groups), _parts(values)
        format = Format(query.format)
        name = f"usage-{query.of}-{int(chosen.since)}-{int(chosen.until)}.{format.value}"
        headers = {
            "cache-control": "no-store",
            "content-disposition": f'attachment; filename="{name}"',
            "x-content-type-options": "nosniff",
        }
        media_type = export.MEDIA_TYPES[format]
        encoder = await _encoder(format, sheet)
        return StreamingResponse(_encoded(encoder, pages), headers=headers, media_type=media_type)


class RowsGoneError(Exception):
    """The time for which rows are kept ran out while they were exported."""


def _sums(buckets: Sequence[UsageBucket], groups: Sequence[str]) -> list[Row]:
    return [export.values_of_bucket(bucket, groups) for bucket in buckets if bucket.requests]


async def _encoder(format: Format, sheet: Sheet) -> Encoder:
    try:
        return await asyncio.to_thread(export.encoder_of, format, sheet)  # a first import takes its time
    except ExtraMissingError as error:
        raise invalid_value("format", f"{error} where the controller runs, or take csv, json or jsonl") from None


async def _encoded(encoder: Encoder, pages: AsyncIterator[Sequence[Row]]) -> AsyncIterator[bytes]:
    yield encoder.begin()
    async for page in pages:
        yield await asyncio.to_thread(encoder.rows, page)
    yield await asyncio.to_thread(encoder.end)


async def _rows(store: UsageStore, chosen: Chosen) -> AsyncIterator[Sequence[Row]]:
    after: Moment | None = None
    while True:
        rows: list[UsageRow] = await store.rows_between(
            chosen.where, since=chosen.since, until=chosen.until, after=after, limit=PAGE_ROWS
        )
        if await store.kept_since() > max(chosen.since, 0.0 if after is None else after.at):
            raise RowsGoneError("rows were removed before they were read")
        yield await asyncio.to_thread(_values, rows)
        if len(rows) < PAGE_ROWS:
            return
        after = Moment(rows[-1].created_at, rows[-1].request_id)


def _values(rows: Sequence[UsageRow]) -> list[Row]:
    return [export.values_of_row(row) for row in rows]


async def _parts(values: Sequence[Row]) -> AsyncIterator[Sequence[Row]]:
    for part in _cut(values):
        yield part


def _cut(values: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(values), PAGE_ROWS):
        yield values[start : start + PAGE_ROWS]
