"""``BatchStore`` in SQL: a row a batch, a row a shard, and tokens that fence them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from modelyard.domain.batches import Batch, BatchError, BatchStatus, Ending, Forecast, Hold, Lease, Progress, Shard
from modelyard.domain.events import EventType
from modelyard.stores.batches import BatchesFullError
from modelyard.stores.sql import batch_rows, files, schema
from modelyard.stores.sql.database import CHUNK, Database
from modelyard.stores.sql.events import append_for
from modelyard.stores.sql.mapping import Values

T = TypeVar("T")

_BATCHES = schema.batches
_SHARDS = schema.batch_shards
_CHARGES = schema.batch_charges
_OVER = tuple(status.value for status in BatchStatus if status.is_over)
_OPEN = tuple(status.value for status in BatchStatus if not status.is_over)
"""Named one by one: an index finds these few, and not what is none of those that are over."""
_CANCELLABLE = (BatchStatus.VALIDATING.value, BatchStatus.IN_PROGRESS.value, BatchStatus.FINALIZING.value)
_NOBODY: Values = {"holder": "", "lease_until": 0.0}
FORGOTTEN_TOGETHER = 20_000
"""Most charges that one transaction deletes."""


class SqlBatchStore:
    """Batches in ``database``, which somebody else closes."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- batches as their makers see them ---

    async def add_batch(self, batch: Batch, *, open_max: int | None = None) -> Batch | None:
        """Add ``batch``, or return the one that has its idempotency key; see the contract."""
        mine = (
            (_BATCHES.c.owner_id == batch.tenant_id)
            & (_BATCHES.c.api_key_id == batch.key_id)
            & (_BATCHES.c.idempotency_key == batch.idempotency_key)
        )

        def add(connection: sa.Connection) -> Batch | None:
            if batch.idempotency_key is not None:
                row = connection.execute(sa.select(_BATCHES).where(mine)).mappings().first()
                if row is not None:
                    return batch_rows.batch_of(row)
            if open_max is not None and (connection.scalar(_open(batch.tenant_id)) or 0) >= open_max:
                raise BatchesFullError(batch.tenant_id)
            connection.execute(sa.insert(_BATCHES).values(batch_rows.values_of(batch)))
            return None

        return await self._database.write(add)

    async def batch(self, batch_id: str, *, tenant_id: str | None) -> Batch | None:
        """Return the batch of this id (of this tenant)."""
        query = sa.select(_BATCHES).where(_BATCHES.c.batch_id == batch_id)
        if tenant_id is not None:
            query = query.where(_BATCHES.c.owner_id == tenant_id)

        def read(connection: sa.Connection) -> Batch | None:
            row = connection.execute(query).mappings().first()
            return None if row is None else batch_rows.batch_of(row)

        return await self._database.read(read)

    async def batches(self, *, tenant_id: str | None, limit: int, after: Batch | None) -> list[Batch]:
        """Return batches, newest first."""
        query = sa.select(_BATCHES)
        if tenant_id is not None:
            query = query.where(_BATCHES.c.owner_id == tenant_id)
        if after is not None:
            place = sa.tuple_(_BATCHES.c.created_at, _BATCHES.c.batch_id)
            query = query.where(place < sa.tuple_(sa.literal(after.created_at), sa.literal(after.id)))
        query = query.order_by(_BATCHES.c.created_at.desc(), _BATCHES.c.batch_id.desc()).limit(limit)
        return await self._database.read(lambda c: [batch_rows.batch_of(row) for row in c.execute(query).mappings()])

    async def open_batches(self, tenant_id: str) -> int:
        """Return how many batches of a tenant are not over."""
        return int(await self._database.read(lambda c: c.scalar(_open(tenant_id)) or 0))

    async def cancel(self, batch_id: str, *, now: float) -> bool:
        """Ask for the end of a batch that is not over."""
        change = (
            sa.update(_BATCHES)
            .where(_BATCHES.c.batch_id == batch_id, _BATCHES.c.status.in_(_CANCELLABLE))
            # The lease goes too: whoever checks the file or makes files of it is to stop.
            .values(status=BatchStatus.CANCELLING.value, cancelling_at=now, token=_BATCHES.c.token + 1, **_NOBODY)
        )
        return await self._database.write(lambda c: c.execute(change).rowcount == 1)

    # --- a batch as a whole ---

    async def lease_batch(self, holder: str, *, now: float, until: float) -> Lease | None:
        """Give out the oldest batch that has work of its own and no living lease."""
        of_it = _SHARDS.c.batch_id == _BATCHES.c.batch_id
        is_worked_on = sa.exists().where(of_it, ~_SHARDS.c.is_done, _SHARDS.c.lease_until > now)
        is_unfinished = sa.exists().where(of_it, ~_SHARDS.c.is_done)
        status = _BATCHES.c.status
        has_work = sa.or_(
            status.in_((BatchStatus.VALIDATING.value, BatchStatus.FINALIZING.value)),
            sa.and_(status == BatchStatus.CANCELLING.value, ~is_worked_on),
            sa.and_(
                status == BatchStatus.IN_PROGRESS.value,
                sa.or_(~is_unfinished, sa.and_(_BATCHES.c.expires_at <= now, ~is_worked_on)),
            ),
        )
        query = (
            sa.select(_BATCHES)
            .where(status.in_(_OPEN), _BATCHES.c.lease_until <= now, has_work)
            .order_by(_BATCHES.c.created_at, _BATCHES.c.batch_id)
            .limit(1)
        )

        def lease(connection: sa.Connection) -> Lease | None:
            row = connection.execute(query).mappings().first()
            if row is None:
                return None
            token = row["token"] + 1
            taken = _with_token(row["batch_id"], row["token"]).where(
                _BATCHES.c.lease_until <= now, status == row["status"]
            )
            if connection.execute(taken.values(token=token, holder=holder, lease_until=until)).rowcount != 1:
                return None
            return Lease(batch_rows.batch_of(row), token)

        return await self._write_if_any(query, lease)

    async def keep_batch(self, batch_id: str, token: int, *, until: float) -> bool:
        """Move the end of a lease."""
        return await self._change(batch_id, token, {"lease_until": until})

    async def leave_batch(self, batch_id: str, token: int) -> None:
        """Give a lease back."""
        await self._change(batch_id, token, _NOBODY)

    async def plan(
        self, batch_id: str, token: int, shards: Sequence[Shard], model: str, forecast: Forecast, *, now: float
    ) -> bool:
        """Begin a batch whose file is good."""
        changes: Values = {
            "status": BatchStatus.IN_PROGRESS.value,
            "in_progress_at": now,
            "model_name": model,
            "total": sum(shard.lines for shard in shards),
            "forecast": batch_rows.forecast_text(forecast),
            **_NOBODY,
        }
        change = _with_token(batch_id, token).where(_BATCHES.c.status == BatchStatus.VALIDATING.value).values(changes)

        def begin(connection: sa.Connection) -> bool:
            if connection.execute(change).rowcount != 1:
                return False
            connection.execute(sa.insert(_SHARDS), [batch_rows.shard_values(shard) for shard in shards])
            return True

        return await self._database.write(begin)

    async def fail(self, batch_id: str, token: int, errors: Sequence[BatchError], *, now: float) -> bool:
        """End a batch whose file is bad."""
        changes: Values = {
            "status": BatchStatus.FAILED.value,
            "failed_at": now,
            "errors": batch_rows.errors_text(errors),
            **_NOBODY,
        }

        def end(connection: sa.Connection) -> bool:
            if connection.execute(_with_token(batch_id, token).values(changes)).rowcount != 1:
                return False
            _tell_end(connection, batch_id, BatchStatus.FAILED, now=now)
            return True

        return await self._database.write(end)

    async def seal(self, batch_id: str, token: int, *, now: float) -> list[Shard] | None:
        """Take all shards from whoever works on them, and return them in order."""
        in_progress, finalizing = BatchStatus.IN_PROGRESS.value, BatchStatus.FINALIZING.value
        of_it = _SHARDS.c.batch_id == batch_id

        def seal(connection: sa.Connection) -> list[Shard] | None:
            status = connection.scalar(
                sa.select(_BATCHES.c.status).where(_BATCHES.c.batch_id == batch_id, _BATCHES.c.token == token)
            )
            if status is None:
                return None
            connection.execute(sa.update(_SHARDS).where(of_it, ~_SHARDS.c.is_done).values(token=_SHARDS.c.token + 1))
            unfinished = connection.scalar(sa.select(sa.func.count()).where(of_it, ~_SHARDS.c.is_done))
            if status == in_progress and not unfinished:
                connection.execute(_with_token(batch_id, token).values(status=finalizing, finalizing_at=now))
            rows = connection.execute(sa.select(_SHARDS).where(of_it).order_by(_SHARDS.c.number)).mappings()
            return [batch_rows.shard_of(row) for row in rows]

        return await self._database.write(seal)

    async def finish(self, batch_id: str, token: int, ending: Ending, *, now: float) -> bool:
        """End a batch, add its files, and forget its shards."""
        output, errors = ending.output, ending.errors
        changes: Values = {
            "status": ending.status.value,
            f"{ending.status.value}_at": now,
            "completed": ending.counts.completed,
            "failed": ending.counts.failed,
            "tokens": batch_rows.tokens_text(ending.tokens),
            "output_file_id": "" if output is None else output.id,
            "error_file_id": "" if errors is None else errors.id,
            "has_output": output is not None,
            "has_errors": errors is not None,
            **_NOBODY,
        }

        def end(connection: sa.Connection) -> bool:
            if connection.execute(_with_token(batch_id, token).values(changes)).rowcount != 1:
                return False
            connection.execute(sa.delete(_SHARDS).where(_SHARDS.c.batch_id == batch_id))
            if made := [files.values_of(file) for file in (output, errors) if file is not None]:
                connection.execute(sa.insert(schema.files), made)
            _tell_end(connection, batch_id, ending.status, now=now)
            return True

        return await self._database.write(end)

    # --- shards ---

    async def lease_shard(
        self,
        holder: str,
        *,
        now: float,
        until: float,
        not_of: Collection[str] = (),
        not_for: Collection[tuple[str, str]] = (),
    ) -> Lease | None:
        """Give out a shard that is not done and has no living lease."""
        is_free = sa.and_(~_SHARDS.c.is_done, _SHARDS.c.lease_until <= now)
        is_held = sa.and_(~_SHARDS.c.is_done, _SHARDS.c.lease_until > now)
        runs = sa.and_(_BATCHES.c.status == BatchStatus.IN_PROGRESS.value, _BATCHES.c.expires_at > now)
        if not_of:
            runs = sa.and_(runs, _BATCHES.c.owner_id.not_in(not_of))
        if not_for:
            runs = sa.and_(runs, sa.tuple_(_BATCHES.c.owner_id, _BATCHES.c.model_name).not_in(not_for))
        held = (
            sa.select(_SHARDS.c.batch_id, sa.func.count().label("shards"))
            .where(is_held)
            .group_by(_SHARDS.c.batch_id)
            .subquery()
        )
        held_by = (
            sa.select(_BATCHES.c.owner_id, sa.func.sum(held.c.shards).label("held"))
            .select_from(_BATCHES.join(held, held.c.batch_id == _BATCHES.c.batch_id))
            .group_by(_BATCHES.c.owner_id)
            .subquery()
        )
        # First the batch, then its shard: of a thousand batches with a hundred shards each, not all are to be ordered.
        has_free = sa.exists().where(_SHARDS.c.batch_id == _BATCHES.c.batch_id, is_free)
        of_batch = (
            sa.select(_BATCHES.c.batch_id)
            .select_from(_BATCHES.outerjoin(held_by, held_by.c.owner_id == _BATCHES.c.owner_id))
            .where(runs, has_free)
            .order_by(sa.func.coalesce(held_by.c.held, 0), _BATCHES.c.created_at, _BATCHES.c.batch_id)
            .limit(1)
        )
        chosen = _SHARDS.c.batch_id == of_batch.scalar_subquery()
        query = sa.select(_SHARDS).where(chosen, is_free).order_by(_SHARDS.c.number).limit(1)

        def lease(connection: sa.Connection) -> Lease | None:
            row = connection.execute(query).mappings().first()
            if row is None:
                return None
            shard, token = batch_rows.shard_of(row), row["token"] + 1
            taken = _of_shard(shard, row["token"]).where(is_free)
            if connection.execute(taken.values(token=token, holder=holder, lease_until=until)).rowcount != 1:
                return None
            found = connection.execute(sa.select(_BATCHES).where(_BATCHES.c.batch_id == shard.batch_id)).mappings()
            return Lease(batch_rows.batch_of(found.one()), token, shard)

        return await self._write_if_any(query, lease)

    async def keep_shard(self, shard: Shard, token: int, progress: Progress, *, until: float) -> Hold:
        """Move the end of a lease and note progress."""
        return await self._progress(shard, token, progress, {"lease_until": until})

    async def leave_shard(self, shard: Shard, token: int, progress: Progress) -> Hold:
        """Give a lease back before the shard is done."""
        return await self._progress(shard, token, progress, _NOBODY)

    async def finish_shard(self, shard: Shard, token: int, progress: Progress) -> Hold:
        """Note that all lines of a shard are answered."""
        return await self._progress(shard, token, progress, {"is_done": True, **_NOBODY})

    async def ahead(self, batch: Batch) -> int:
        """Return how many lines older batches of the same model still have."""
        left = _BATCHES.c.total - _BATCHES.c.completed - _BATCHES.c.failed
        query = sa.select(sa.func.coalesce(sa.func.sum(left), 0)).where(
            _BATCHES.c.status == BatchStatus.IN_PROGRESS.value,
            _BATCHES.c.model_name == batch.model,
            _BATCHES.c.created_at < batch.created_at,
        )
        return int(await self._database.read(lambda c: c.scalar(query) or 0))

    async def forget_charges(self, *, before: float) -> int:
        """Forget what lines of batches that ended before then were charged."""
        ended = sa.func.coalesce(*(_BATCHES.c[f"{status}_at"] for status in _OVER))
        has_some = sa.exists().where(_CHARGES.c.batch_id == _BATCHES.c.batch_id)
        # Read first: all batches that ever were are looked at for it, and nobody is to wait for that.
        old = sa.select(_BATCHES.c.batch_id).where(_BATCHES.c.status.in_(_OVER), ended < before, has_some).limit(CHUNK)
        found = await self._database.read(lambda c: list(c.execute(old).scalars()))
        if not found:
            return 0
        some = sa.select(_CHARGES.c.line).where(_CHARGES.c.batch_id.in_(found)).limit(FORGOTTEN_TOGETHER)
        change = sa.delete(_CHARGES).where(_CHARGES.c.line.in_(some.scalar_subquery()))
        return await self._database.write(lambda c: c.execute(change).rowcount)

    # --- inside ---

    async def _change(self, batch_id: str, token: int, changes: Values) -> bool:
        change = _with_token(batch_id, token).values(changes)
        return await self._database.write(lambda c: c.execute(change).rowcount == 1)

    async def _write_if_any(self, query: sa.Select[Any], change: Callable[[sa.Connection], T]) -> T | None:
        """Do ``change`` if ``query`` has a row: an idle plane looks often, and need not take the writer's lock."""
        if await self._database.read(lambda c: c.execute(query).first()) is None:
            return None
        return await self._database.write(change)

    async def _progress(self, shard: Shard, token: int, progress: Progress, changes: Values) -> Hold:
        """Note progress of a shard and of its batch."""
        values = {**changes, **batch_rows.progress_values(progress)}
        of_it = _BATCHES.c.batch_id == shard.batch_id
        mine = _SHARDS.c.batch_id == shard.batch_id
        query = sa.select(_SHARDS.c.completed, _SHARDS.c.failed, _SHARDS.c.tokens).where(mine)

        def note(connection: sa.Connection) -> Hold:
            if connection.execute(_of_shard(shard, token).values(values)).rowcount != 1:
                return Hold.LOST
            sums = batch_rows.sum_of(connection.execute(query))
            # A line that was counted and then lost with a disk's cache is counted again later; never less meanwhile.
            is_more = _BATCHES.c.completed + _BATCHES.c.failed <= sums["completed"] + sums["failed"]
            connection.execute(sa.update(_BATCHES).where(of_it, is_more).values(sums))
            status = connection.scalar(sa.select(_BATCHES.c.status).where(of_it))
            return Hold.HELD if status == BatchStatus.IN_PROGRESS.value else Hold.ENDING

        return await self._database.write(note)


def _tell_end(connection: sa.Connection, batch_id: str, status: BatchStatus, *, now: float) -> None:
    """Tell the webhooks of its tenant, in the transaction of the end."""
    owner = connection.execute(sa.select(_BATCHES.c.owner_id).where(_BATCHES.c.batch_id == batch_id)).scalar_one()
    append_for(connection, owner, EventType(f"batch.{status.value}"), {"id": batch_id}, now=now, key=batch_id)


def _open(tenant_id: str) -> sa.Select[int]:
    # An expression, so that SQLite goes by the few that are open, and not by all that the tenant ever made.
    is_mine = sa.func.coalesce(_BATCHES.c.owner_id, "") == tenant_id
    return sa.select(sa.func.count()).where(is_mine, _BATCHES.c.status.in_(_OPEN))


def _with_token(batch_id: str, token: int) -> sa.Update:
    return sa.update(_BATCHES).where(_BATCHES.c.batch_id == batch_id, _BATCHES.c.token == token)


def _of_shard(shard: Shard, token: int) -> sa.Update:
    return sa.update(_SHARDS).where(
        _SHARDS.c.batch_id == shard.batch_id, _SHARDS.c.number == shard.number, _SHARDS.c.token == token
    )
