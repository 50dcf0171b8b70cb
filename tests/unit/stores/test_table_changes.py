"""What a gateway makes of changes is the table that the controller has, whatever the changes were."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.config import GatewayConfig
from modelyard.domain.endpoints import Progress, Stage
from modelyard.domain.routing_table import EndpointRoute, ReleaseRoute, ReplicaRoute, RoutingTable, TableChange
from modelyard.domain.tenants import ApiKey, Scope, Tenant
from modelyard.domain.usage import Price
from modelyard.gateway.catalog import Catalog
from modelyard.stores.table_changes import change_between, changed

IDS = st.sampled_from("abcdef")
FLAVOURS = st.integers(0, 2)
ROWS = st.lists(st.tuples(IDS, FLAVOURS), max_size=6, unique_by=lambda row: row[0])
TABLES = st.tuples(ROWS, ROWS, ROWS)

_rows: dict[tuple[str, str, int], object] = {}


def once(kind: str, row: tuple[str, int], made: object) -> object:
    """Return the one object that stands for these values, as the controller keeps what did not change."""
    return _rows.setdefault((kind, *row), made)


def an_endpoint(row_id: str, flavour: int) -> EndpointRoute:
    replica = ReplicaRoute(f"rep-{row_id}", "127.0.0.1", 4000 + flavour, "secret", 8)
    return EndpointRoute(
        id=row_id,
        tenant_id="a" if flavour else "b",
        name=f"name-{row_id}-{flavour // 2}",
        is_shared=flavour == 1,
        created_at=1,
        releases=(ReleaseRoute("ver-1", 100, (replica,)),),
        routes=frozenset({"/v1/chat/completions"}),
        engine_extras=frozenset(),
        context_length=2048,
        price=Price(1, 2, 3),
        progress=Progress(Stage.READY, 100),
    )


def a_table(revision: int, drawn: tuple[list[tuple[str, int]], ...]) -> RoutingTable:
    tenants, keys, endpoints = drawn
    return RoutingTable(
        "epoch",
        revision,
        tuple(once("t", row, Tenant(row[0], f"{row[0]}-{row[1]}", 1)) for row in tenants),  # type: ignore[misc]
        tuple(
            once("k", row, ApiKey(row[0], "a", f"key-{row[1]}", b"h", (Scope.INFERENCE,), 1))  # type: ignore[misc]
            for row in keys
        ),
        tuple(once("e", row, an_endpoint(*row)) for row in endpoints),  # type: ignore[misc]
    )


def sent(change: TableChange) -> TableChange:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(change), type=TableChange)


def a_catalog() -> Catalog:  # type: ignore[type-arg]
    return Catalog(worker=0, settings=GatewayConfig(), deliver=lambda waiter, load: True, chance=lambda: 0.5)


def found(catalog: Catalog) -> dict[str, object]:  # type: ignore[type-arg]
    """Return everything that a gateway can find in its catalog."""
    return {
        "own": {name: state.route for name, state in catalog._own.items()},
        "shared": {name: state.route for name, state in catalog._shared.items()},
        "all": {state.route.id: (state.route, state.is_gone) for state in catalog.endpoints},
        "replicas": {state.route.id: [load.route for load in state.dispatcher.replicas] for state in catalog.endpoints},
        "keys": {key: state.record for key, state in catalog.accounts._keys.items()},
    }


@settings(max_examples=100, deadline=None)
@given(st.lists(TABLES, min_size=2, max_size=6))
def test_a_gateway_that_gets_changes_has_what_one_has_that_gets_whole_tables(
    drawn: list[tuple[list[tuple[str, int]], ...]],
) -> None:
    tables = [a_table(revision, one) for revision, one in enumerate(drawn, 1)]
    theirs, known, following = tables[0], tables[0], a_catalog()
    following.take(theirs, now_s=1.0)
    for table in tables[1:]:
        change = change_between(known, table)
        theirs = table if change is None else changed(theirs, sent(change))
        known = table
        assert theirs == table
        following.take(theirs, now_s=1.0)
        fresh = a_catalog()
        fresh.take(table, now_s=1.0)
        assert found(following) == found(fresh)


def test_what_did_not_change_is_not_sent_and_stays_the_same_object() -> None:
    before = a_table(1, ([("a", 0)], [("a", 0)], [(one, 0) for one in "abcdef"]))
    after = msgspec.structs.replace(
        before, revision=2, endpoints=(*before.endpoints[:3], an_endpoint("d", 1), *before.endpoints[4:])
    )
    change = change_between(before, after)
    assert change is not None
    assert [route.id for route in change.endpoints] == ["d"]
    assert (change.tenants, change.keys, change.gone_endpoints) == ((), (), ())
    made = changed(before, sent(change))
    assert made == after
    assert made.keys is before.keys
    assert made.endpoints[0] is before.endpoints[0]


def test_a_change_of_another_table_is_refused() -> None:
    first, second = (a_table(revision, ([], [], [("a", revision)])) for revision in (1, 2))
    change = change_between(first, second)
    assert change is not None
    with pytest.raises(ValueError, match="a change of revision 1 came for revision 2"):
        changed(second, change)


def test_tables_of_two_controllers_have_no_change_between_them() -> None:
    first = a_table(1, ([], [], []))
    assert change_between(first, msgspec.structs.replace(first, epoch="other", revision=2)) is None
