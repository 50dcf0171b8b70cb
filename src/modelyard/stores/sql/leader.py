"""``LeaderStore`` in SQL: one row that says who leads."""

import sqlalchemy as sa

from modelyard.stores import Leader
from modelyard.stores.sql import schema
from modelyard.stores.sql.database import Database, insert

_NAME = "controller"
_mine = schema.controller_leases.c.name == _NAME


class SqlLeaderStore:
    """Who leads, in ``database``, whose writes it fences."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    async def leader(self) -> Leader | None:
        """Return the leader of now, None if there never was one."""
        return await self._database.read(_read)

    async def lead(self, holder: str, *, after: int) -> bool:
        """Make ``holder`` the leader of epoch ``after + 1``, if ``after`` is still the epoch; say whether it is."""
        table = schema.controller_leases

        def take(connection: sa.Connection) -> bool:
            if after == 0:
                row = insert(connection, table).values(name=_NAME, holder=holder, epoch=1, beat=0)
                return connection.execute(row.on_conflict_do_nothing()).rowcount == 1
            changed = sa.update(table).where(_mine, table.c.epoch == after)
            return connection.execute(changed.values(holder=holder, epoch=after + 1, beat=0)).rowcount == 1

        leads = await self._database.write(take)
        if leads:
            self._database.fence(after + 1)
        return leads

    async def beat(self, epoch: int) -> bool:
        """Show that the leader of ``epoch`` lives; say whether it still leads."""
        table = schema.controller_leases
        change = sa.update(table).where(_mine, table.c.epoch == epoch).values(beat=table.c.beat + 1)
        return await self._database.write(lambda c: c.execute(change).rowcount == 1, is_fenced=False)

    async def resign(self, epoch: int) -> None:
        """Let the next one lead at once."""
        change = sa.update(schema.controller_leases).where(_mine, schema.controller_leases.c.epoch == epoch)
        await self._database.write(lambda c: c.execute(change.values(holder="")), is_fenced=False)


def _read(connection: sa.Connection) -> Leader | None:
    row = connection.execute(sa.select(schema.controller_leases).where(_mine)).mappings().first()
    return None if row is None else Leader(row["holder"], row["epoch"], row["beat"])
