"""``UsageStore`` in SQL: the ledger as a projection of the journals.

``apply`` is at-least-once on its input and exactly-once in its effect: a
request id has one ledger row for good, and the hourly and daily roll-ups are
added to only for rows that were really inserted, in the same transaction. Reading is in
``usage_reports.py``.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from zoneinfo import ZoneInfo

import msgspec
import sqlalchemy as sa

from modelyard.domain.usage import (
    EVERYTHING,
    Intent,
    JournalRecord,
    Mark,
    Moment,
    Settle,
    UsageBucket,
    UsageFilter,
    UsageRow,
)
from modelyard.policy.pricing import cost, micro_units
from modelyard.stores import JournalPosition, SpentRow
from modelyard.stores.sql import batch_charges, retention, rollups, schema, spending, usage_reports, usage_time
from modelyard.stores.sql.billing import sums as billing_sums
from modelyard.stores.sql.database import CHUNK, Database, insert
from modelyard.stores.sql.mapping import Values

TOKENS_MAX = 2**31 - 1
"""Most tokens of one kind in one row. A broken engine's number must neither be billed nor overflow a sum."""

_log = logging.getLogger(__name__)
_to_json = msgspec.json.Encoder().encode
_to_intent = msgspec.json.Decoder(Intent).decode

_LEDGER = schema.inference_requests
_OPEN = schema.usage_open
_POSITIONS = schema.journal_positions
_MARKED = ("prompt_tokens", "completion_tokens")


@dataclass(slots=True)
class _Batch:
    """Journal records, folded by request: first intent, best mark, first settle."""

    intents: dict[str, Intent] = field(default_factory=dict)
    marks: dict[str, tuple[int, int]] = field(default_factory=dict)
    settles: dict[str, Settle] = field(default_factory=dict)

    def add(self, record: JournalRecord) -> None:
        match record:
            case Intent():
                self.intents.setdefault(record.request_id, record)
            case Mark():
                prompt, completion = self.marks.get(record.request_id, (0, 0))
                best = (max(prompt, _tokens(record.prompt_tokens)), max(completion, _tokens(record.completion_tokens)))
                self.marks[record.request_id] = best
            case Settle():
                self.settles.setdefault(record.request_id, record)


class SqlUsageStore:
    """The ledger in ``database``, which its ``SqlControlStore`` closes."""

    __slots__ = ("_database", "unknown_settles")

    def __init__(self, database: Database) -> None:
        self._database = database
        self.unknown_settles = 0
        """Settles dropped since the start because nobody knows their intent: each is a request that was not billed."""

    async def apply(self, records: Sequence[JournalRecord], position: JournalPosition) -> None:
        """Store ``records`` and the new position in one transaction; records seen before change nothing."""
        unknown = await self._database.write(lambda connection: _apply(connection, records, position))
        for settle in unknown:
            self.unknown_settles += 1
            _log.warning(
                "dropped the settle of unknown request %s (%d prompt and %d completion tokens)",
                settle.request_id,
                settle.prompt_tokens,
                settle.completion_tokens,
            )

    async def positions(self) -> list[JournalPosition]:
        """Return how far each journal was read, by source."""
        return await self._database.read(_positions)

    async def open_requests(self) -> int:
        """Return how many intents have no settle yet."""
        query = sa.select(sa.func.count()).select_from(_OPEN)
        return await self._database.read(lambda c: c.execute(query).scalar_one())

    async def usage(  # noqa: PLR0913 - see the contract
        self,
        *,
        tenant_id: str | None,
        key_id: str | None,
        model: str | None,
        since: float,
        until: float,
        group_by: Sequence[str],
        where: UsageFilter = EVERYTHING,
        tz: str = "UTC",
        counts: Collection[str] | None = None,
    ) -> list[UsageBucket]:
        """Return sums over rows with ``since`` <= created_at < ``until``; see the contract."""
        dimensions = usage_reports.dimensions(group_by)
        chosen = _narrowed(where, tenant_id, key_id, model)
        wanted = frozenset(rollups.COUNTS if counts is None else counts)
        asked = usage_reports.Question(chosen, since, until, dimensions, ZoneInfo(tz), wanted)
        return await self._database.read(lambda c: usage_reports.buckets(c, asked))

    async def arrivals(self, endpoint_id: str, *, since: float, until: float) -> dict[int, int]:
        """Return the requests of an endpoint by ten minutes; see the contract."""
        return await self._database.read(lambda c: usage_reports.arrivals(c, endpoint_id, since, until))

    async def spent(
        self, tenant_ids: Collection[str], *, day: int, totals_of: Collection[str] = (), models_of: Collection[str] = ()
    ) -> tuple[list[SpentRow], list[JournalPosition]]:
        """Return what each key of these tenants has in the ledger for ``day`` and for its month; see the contract."""

        def look(connection: sa.Connection) -> tuple[list[SpentRow], list[JournalPosition]]:
            # Positions first: should a database not show one view to both, the sums are the newer ones.
            positions = _positions(connection)
            rows = spending.sums(connection, tenant_ids, day)
            if totals_of:
                rows = spending.with_totals(rows, billing_sums.totals_by_key(connection, sorted(totals_of)))
            return rows + spending.by_model(connection, models_of, day), positions

        return await self._database.read(look)

    async def rows(
        self, *, tenant_id: str | None, since: float, limit: int, request_id: str | None = None, endpoint_id: str = ""
    ) -> list[UsageRow]:
        """Return ledger rows, newest first; see the contract."""
        return await self._database.read(
            lambda c: usage_reports.rows(c, tenant_id, since, limit, request_id, endpoint_id)
        )

    async def rows_between(
        self, where: UsageFilter, *, since: float, until: float, after: Moment | None, limit: int
    ) -> list[UsageRow]:
        """Return ledger rows, oldest first; see the contract."""
        return await self._database.read(lambda c: usage_reports.rows_between(c, where, since, until, after, limit))

    async def kept_since(self) -> int:
        """Return the hour from which on all rows are there; 0 if none was ever removed."""
        return await self._database.read(retention.kept_since)

    async def oldest_row(self) -> float | None:
        """Return when the oldest row arrived that is there."""
        return await self._database.read(retention.oldest)

    async def forget_rows(self, *, before: int, limit: int) -> int:
        """Remove rows that arrived before an hour; see the contract."""
        assert before % rollups.HOUR_S == 0, "what is left of an hour cannot be told from its roll-up"
        return await self._database.write(lambda c: retention.forget(c, before, limit))


def _narrowed(where: UsageFilter, tenant_id: str | None, key_id: str | None, model: str | None) -> UsageFilter:
    given = {"tenant_ids": tenant_id, "key_ids": key_id, "models": model}
    return msgspec.structs.replace(where, **{name: (value,) for name, value in given.items() if value is not None})


def _positions(connection: sa.Connection) -> list[JournalPosition]:
    query = sa.select(_POSITIONS.c.source, _POSITIONS.c.segment, _POSITIONS.c.offset).order_by(_POSITIONS.c.source)
    return [JournalPosition(*row) for row in connection.execute(query)]


def _apply(connection: sa.Connection, records: Sequence[JournalRecord], position: JournalPosition) -> list[Settle]:
    """Do the one transaction of ``apply``; return the settles of requests that nobody knows."""
    batch = _Batch()
    for record in records:
        batch.add(record)
    intents = batch.intents | _opened(connection, [rid for rid in batch.settles if rid not in batch.intents])
    kept_since = retention.kept_since(connection)
    settled = [(intents[rid], settle) for rid, settle in batch.settles.items() if rid in intents]
    # Of a request from before the rows that are kept nobody could see that it was billed already.
    rows = [_row(intent, settle) for intent, settle in settled if intent.at >= kept_since]
    batch_charges.charge_once(connection, rows, intents)
    billed = _bill(connection, rows)
    rollups.add(connection, billed)
    spending.add(connection, billed, position.source)
    billing_sums.add(connection, billed, intents, batch.settles, position.source)
    _close(connection, [rid for rid in batch.settles if rid in intents])
    _open(connection, batch, kept_since)
    _remember(connection, position)
    orphans = [rid for rid in batch.settles if rid not in intents]
    settled_before = _settled(connection, orphans)
    return [batch.settles[rid] for rid in orphans if rid not in settled_before]


def _opened(connection: sa.Connection, request_ids: Sequence[str]) -> dict[str, Intent]:
    found: dict[str, Intent] = {}
    for chunk in _chunks(request_ids):
        query = sa.select(_OPEN.c.request_id, _OPEN.c.intent).where(_OPEN.c.request_id.in_(chunk))
        found.update((row.request_id, _to_intent(row.intent)) for row in connection.execute(query))
    return found


def _settled(connection: sa.Connection, request_ids: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for chunk in _chunks(request_ids):
        found.update(connection.scalars(sa.select(_LEDGER.c.request_id).where(_LEDGER.c.request_id.in_(chunk))))
    return found


def _bill(connection: sa.Connection, rows: list[Values]) -> list[Values]:
    """Insert the ledger rows that are not there yet; return just those."""
    if not rows:
        return []
    statement = insert(connection, _LEDGER).on_conflict_do_nothing().returning(_LEDGER.c.request_id)
    # The database says what is new; to look first and then insert would bill twice with two controllers on Postgres.
    new = set(connection.scalars(statement, rows))
    return [row for row in rows if row["request_id"] in new]


def _close(connection: sa.Connection, request_ids: Sequence[str]) -> None:
    for chunk in _chunks(request_ids):
        connection.execute(sa.delete(_OPEN).where(_OPEN.c.request_id.in_(chunk)))


def _open(connection: sa.Connection, batch: _Batch, kept_since: int) -> None:
    """Open the intents that have no ledger row, and raise the marks of those that are open."""
    beginning = [rid for rid, intent in batch.intents.items() if rid not in batch.settles and intent.at >= kept_since]
    # A replayed intent of a settled request must not open it again.
    settled = _settled(connection, beginning)
    opening = [
        {
            "request_id": rid,
            "created_at": batch.intents[rid].at,
            "intent": _to_json(batch.intents[rid]).decode(),
            "prompt_tokens": batch.marks.get(rid, (0, 0))[0],
            "completion_tokens": batch.marks.get(rid, (0, 0))[1],
        }
        for rid in beginning
        if rid not in settled
    ]
    if opening:
        statement = insert(connection, _OPEN)
        raised = {name: _greater(_OPEN.c[name], statement.excluded[name]) for name in _MARKED}
        connection.execute(statement.on_conflict_do_update(index_elements=["request_id"], set_=raised), opening)
    later = [
        {"rid": rid, "prompt": prompt, "completion": completion}
        for rid, (prompt, completion) in batch.marks.items()
        if rid not in batch.intents and rid not in batch.settles
    ]
    if later:
        mark = sa.update(_OPEN).where(_OPEN.c.request_id == sa.bindparam("rid"))
        raised = {
            "prompt_tokens": _greater(_OPEN.c.prompt_tokens, sa.bindparam("prompt", type_=sa.BigInteger)),
            "completion_tokens": _greater(_OPEN.c.completion_tokens, sa.bindparam("completion", type_=sa.BigInteger)),
        }
        connection.execute(mark.values(raised), later)


def _remember(connection: sa.Connection, position: JournalPosition) -> None:
    values = {"source": position.source, "segment": position.segment, "offset": position.offset}
    statement = insert(connection, _POSITIONS).values(values)
    connection.execute(statement.on_conflict_do_update(index_elements=["source"], set_=values))


def _greater(left: sa.ColumnElement[int], right: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    # GREATEST is MAX in SQLite; CASE is the same in both.
    return sa.case((right > left, right), else_=left)


def _row(intent: Intent, settle: Settle) -> Values:
    prompt, completion = _tokens(settle.prompt_tokens), _tokens(settle.completion_tokens)
    cached = min(_tokens(settle.cached_tokens), prompt)
    units = micro_units(settle.units) if settle.unit else 0
    price = intent.price if settle.price is None else settle.price
    return {
        "request_id": settle.request_id,
        "endpoint_id": intent.endpoint_id,
        "customer_id": intent.tenant_id,
        "api_key_id": intent.key_id,
        "model_name": intent.model,
        "model_id": settle.version_id or intent.version_id,
        "replica_id": settle.replica_id,
        "route": intent.route,
        "is_stream": intent.is_stream,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "cost_nanousd": cost(price, prompt, cached, completion, units),
        "status": settle.status.value,
        "http_status": settle.http_status,
        "error_code": settle.error_code,
        "ttft_ms": settle.ttft_ms,
        "latency_ms": settle.latency_ms,
        "attempts": settle.attempts,
        "is_estimated": settle.is_estimated,
        "created_at": intent.at,
        "hour": usage_time.hour_of(intent.at),
        "settled_at": settle.at,
        "units_micro": units,
        "unit": settle.unit.value if units else "",
        "reasoning_tokens": min(_tokens(settle.reasoning_tokens), completion),
        "audio_input_tokens": min(_tokens(settle.audio_input_tokens), prompt),
        "audio_output_tokens": min(_tokens(settle.audio_output_tokens), completion),
        "batch_id": intent.batch_line.partition("/")[0],
    }


def _tokens(count: int) -> int:
    return min(max(count, 0), TOKENS_MAX)


def _chunks(values: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]
