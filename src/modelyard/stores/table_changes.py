"""From one routing table to the next: what changed, and the table that it makes again; pure."""

from collections.abc import Collection, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from modelyard.domain.routing_table import RoutingTable, TableChange


class _Row(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_Row)


class _Difference(NamedTuple, Generic[T]):
    put: tuple[T, ...]
    gone: tuple[str, ...]


SHARE_MAX = 0.5
"""A change of more than this share of the endpoints is not worth the trouble."""


def change_between(old: RoutingTable, new: RoutingTable) -> TableChange | None:
    """Return what makes ``new`` of ``old``, None when only the whole table does.

    Rows are compared by identity: what is equal but another object is sent once more, which costs and harms nothing.
    """
    if old.epoch != new.epoch:
        return None
    tenants, keys = _between(old.tenants, new.tenants), _between(old.keys, new.keys)
    endpoints = _between(old.endpoints, new.endpoints)
    if tenants is None or keys is None or endpoints is None:
        return None
    if len(endpoints.put) > SHARE_MAX * len(new.endpoints) + 1:
        return None
    return TableChange(
        epoch=new.epoch,
        base=old.revision,
        revision=new.revision,
        tenants=tenants.put,
        keys=keys.put,
        endpoints=endpoints.put,
        gone_tenants=tenants.gone,
        gone_keys=keys.gone,
        gone_endpoints=endpoints.gone,
    )


def changed(table: RoutingTable, change: TableChange) -> RoutingTable:
    """Return ``table`` after ``change``; what did not change is the same object as before.

    Raises:
        ValueError: it is not a change of this table.
    """
    if (table.epoch, table.revision) != (change.epoch, change.base):
        raise ValueError(f"a change of revision {change.base} came for revision {table.revision}")
    return msgspec.structs.replace(
        table,
        revision=change.revision,
        tenants=_changed(table.tenants, change.tenants, change.gone_tenants),
        keys=_changed(table.keys, change.keys, change.gone_keys),
        endpoints=_changed(table.endpoints, change.endpoints, change.gone_endpoints),
    )


def _between(old: Sequence[T], new: Sequence[T]) -> _Difference[T] | None:
    """Return the rows to put and the ids to remove, None when that would not give the order of ``new``."""
    if old is new:
        return _Difference((), ())
    before = {row.id: row for row in old}
    put = tuple(row for row in new if before.get(row.id) is not row)
    kept = {row.id for row in new}
    gone = tuple(row.id for row in old if row.id not in kept)
    made = _changed(old, put, gone)
    return (
        _Difference(put, gone)
        if len(made) == len(new) and all(a is b for a, b in zip(made, new, strict=True))
        else None
    )


def _changed(rows: Sequence[T], put: Sequence[T], gone: Collection[str]) -> tuple[T, ...]:
    """Return ``rows`` without those ``gone``, with each of ``put`` in its old place or at the end."""
    if not put and not gone:
        return tuple(rows)
    made = {row.id: row for row in rows}
    for row_id in gone:
        made.pop(row_id, None)
    made |= {row.id: row for row in put}
    return tuple(made.values())
