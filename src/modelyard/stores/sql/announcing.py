"""Events of endpoints, and those of them that are events of their tenants: added together."""

from collections.abc import Sequence

import sqlalchemy as sa

from modelyard.domain.endpoints import EndpointStatus
from modelyard.domain.events import EventType
from modelyard.policy.announcements import announced
from modelyard.stores import Event
from modelyard.stores.sql import mapping, schema
from modelyard.stores.sql.events import append_for

EVENTS_KEPT = 200
"""Newest events of an endpoint that stay."""

_TABLE = schema.endpoint_events
_ENDPOINTS = schema.endpoints
_RELEASES = schema.releases
_MODELS = schema.model_registry
_OF_STATUS = (EventType.DEPLOYMENT_READY, EventType.DEPLOYMENT_FAILED)


def add_events(connection: sa.Connection, events: Sequence[Event]) -> None:
    """Append; only the last 200 of an endpoint are kept, and none of one that was removed meanwhile."""
    for event in events:
        values = mapping.event_values(event)
        connection.execute(_INSERT, values)
        connection.execute(_TRIM, {"of_endpoint": event.endpoint_id})
        if (kind := announced(event.kind, event.data)) is not None:
            _announce(connection, kind, event)


def _announce(connection: sa.Connection, kind: EventType, event: Event) -> None:
    about = sa.select(_ENDPOINTS).where(
        _ENDPOINTS.c.endpoint_id == event.endpoint_id, ~_ENDPOINTS.c.is_deleted, _ENDPOINTS.c.pool == ""
    )
    endpoint = connection.execute(about).mappings().first()
    if endpoint is None:
        return
    told: dict[str, object] = {"id": event.endpoint_id, "object": "endpoint", "name": endpoint["name"]}
    rollout = mapping.rollout_of(endpoint["rollout"])
    if kind in _OF_STATUS or rollout is None:
        version_id = _main_version(connection, event.endpoint_id)
        told["version"] = _name(connection, version_id)
    else:
        version_id = rollout.candidate_id
        told["version"] = _name(connection, version_id)
        told["stable_version"] = _name(connection, rollout.stable_id)
    told["reason"] = event.reason
    key = _key(connection, kind, event, version_id)
    append_for(connection, endpoint["owner_id"], kind, told, now=event.at, key=key)


def _main_version(connection: sa.Connection, endpoint_id: str) -> str:
    """Return the id of the version with the most traffic."""
    mine = sa.select(_RELEASES.c.model_id).where(_RELEASES.c.endpoint_id == endpoint_id)
    return str(connection.execute(mine.order_by(_RELEASES.c.weight.desc(), _RELEASES.c.position)).scalar() or "")


def _name(connection: sa.Connection, version_id: str) -> str:
    return str(connection.execute(sa.select(_MODELS.c.version).where(_MODELS.c.model_id == version_id)).scalar() or "")


def _key(connection: sa.Connection, kind: EventType, event: Event, version_id: str) -> str:
    """Return what makes an announcement the same as an earlier one, "" for one that never is.

    A controller that was killed tells again what it did not get to store.
    """
    if kind is EventType.DEPLOYMENT_READY:
        before = _TABLE.c.kind == EndpointStatus.FAILED.value
    elif kind is EventType.DEPLOYMENT_FAILED:
        before = _TABLE.c.kind.in_([one.value for one in EndpointStatus if one is not EndpointStatus.FAILED])
    else:
        return ""
    last = sa.select(sa.func.max(_TABLE.c.sequence)).where(_TABLE.c.endpoint_id == event.endpoint_id, before)
    return f"{event.endpoint_id} {version_id} {connection.execute(last).scalar() or 0}"


def _insert() -> sa.Insert:
    names = [column.name for column in _TABLE.columns if column.name != "sequence"]
    row = sa.select(*(sa.bindparam(name, type_=_TABLE.c[name].type) for name in names)).where(
        sa.exists().where(_ENDPOINTS.c.endpoint_id == sa.bindparam("endpoint_id", type_=_TABLE.c.endpoint_id.type))
    )
    return sa.insert(_TABLE).from_select(names, row)


def trimmed(table: sa.Table, mine: sa.ColumnElement[bool], kept: int) -> sa.Delete:
    """Return what deletes all but the newest ``kept`` rows of ``mine``."""
    newest_gone = sa.select(table.c.sequence).where(mine).order_by(table.c.sequence.desc()).offset(kept).limit(1)
    return sa.delete(table).where(mine, table.c.sequence <= newest_gone.scalar_subquery())


# Statements that run often are made once: making one costs SQLAlchemy more than SQLite needs to do it.
_INSERT = _insert()
_TRIM = trimmed(_TABLE, _TABLE.c.endpoint_id == sa.bindparam("of_endpoint"), EVENTS_KEPT)
