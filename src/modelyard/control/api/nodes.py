"""Nodes (admin only): what there is, what is on it, what is free."""

import asyncio
from collections.abc import Iterable
from typing import Annotated

import msgspec

from modelyard.control.beds import residue
from modelyard.control.context import Context
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import Accelerator, NodeSeen
from modelyard.domain.tenants import Scope
from modelyard.errors import control_unavailable
from modelyard.fleet import FleetError
from modelyard.policy.cluster import Cluster
from modelyard.web.paging import Page, Paging, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

FLEET_TIMEOUT_S = 10.0
_ENDED = frozenset({ReplicaState.STOPPED, ReplicaState.FAILED})


class ReplicaOnNode(msgspec.Struct, frozen=True, kw_only=True):
    """A replica on an accelerator."""

    replica_id: str
    endpoint: str
    state: ReplicaState
    memory_bytes: Annotated[int, msgspec.Meta(description="What it was given of this accelerator.")]


class AcceleratorView(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator and what is on it."""

    index: int
    kind: str
    memory_bytes: int
    island: Annotated[int, msgspec.Meta(description="Those of one number reach each other fastest (NVLink).")]
    free_bytes: int
    used_bytes: Annotated[int | None, msgspec.Meta(description="Measured, whoever uses it; null: not measured.")]
    replicas: list[ReplicaOnNode]


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node."""

    id: str
    object: str = "node"
    pool: str
    state: Annotated[str, msgspec.Meta(description="ready, cordoned, or down.")]
    reason: str
    is_spot: bool
    is_simulated: Annotated[bool, msgspec.Meta(description="Declared: only engines without weights run there.")]
    nanousd_per_hour: Annotated[int, msgspec.Meta(description="Of all its accelerators.")]
    cache_bytes: Annotated[int, msgspec.Meta(description="Bound of its weight cache; 0: none.")]
    cache_used_bytes: int
    cached_artifacts: int
    accelerators: list[AcceleratorView]


class Nodes:
    """The route of nodes."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        summary = "List nodes with their accelerators and what is on them"
        return [Route("GET", "/v1/nodes", Scope.ADMIN, summary, self.page, Empty, Paging, Page[NodeView])]

    async def page(self, call: Call[Empty, Paging]) -> Page[NodeView]:
        """Return the nodes in the order of their fleet."""
        context = self._context
        try:
            async with asyncio.timeout(FLEET_TIMEOUT_S):
                seen = await context.fleet.nodes()
        except (FleetError, TimeoutError) as error:
            raise control_unavailable() from error
        replicas = [one for one in await context.store.replicas() if one.state not in _ENDED]
        endpoints = {one.id: one for one in await context.store.endpoints()}
        rows, has_more = page_of(seen, limit=call.query.limit, after=call.query.after, id_of=lambda one: one.node.id)
        return Page(views(seen, rows, replicas, endpoints), has_more)


def views(
    seen: Iterable[NodeSeen], rows: Iterable[NodeSeen], replicas: Iterable[Replica], endpoints: dict[str, Endpoint]
) -> list[NodeView]:
    """Return ``rows`` of the nodes that were ``seen``, with the replicas that are on them."""
    replicas = list(replicas)
    asleep = {one.id: residue(one.placement) for one in replicas if one.state is ReplicaState.ASLEEP}
    awake = [one.placement for one in replicas if one.id not in asleep]
    cluster = Cluster.of(seen, awake, [(one.placement, asleep[one.id]) for one in replicas if one.id in asleep])
    on: dict[tuple[str, int], list[ReplicaOnNode]] = {}
    for replica in replicas:
        endpoint = endpoints.get(replica.endpoint_id)
        for part in replica.placement.parts:
            here = ReplicaOnNode(
                replica_id=replica.id,
                endpoint=endpoint.name if endpoint else replica.endpoint_id,
                state=replica.state,
                memory_bytes=asleep.get(replica.id, part.memory_bytes),
            )
            for index in part.accelerators:
                on.setdefault((part.node_id, index), []).append(here)

    def accelerator(row: NodeSeen, one: Accelerator) -> AcceleratorView:
        return AcceleratorView(
            index=one.index,
            kind=one.kind,
            memory_bytes=one.memory_bytes,
            island=one.island,
            free_bytes=cluster.free_bytes(row.node.id, one.index) or 0,
            used_bytes=row.used_bytes.get(one.index),
            replicas=on.get((row.node.id, one.index), []),
        )

    return [
        NodeView(
            id=row.node.id,
            pool=row.node.pool,
            state="down" if not row.is_ready else "cordoned" if row.node.is_cordoned else "ready",
            reason=row.reason,
            is_spot=row.node.is_spot,
            is_simulated=row.node.is_simulated,
            nanousd_per_hour=row.node.price_nanousd * len(row.node.accelerators),
            cache_bytes=row.node.cache_bytes,
            cache_used_bytes=row.cache_used_bytes,
            cached_artifacts=len(row.cached),
            accelerators=[accelerator(row, one) for one in row.node.accelerators],
        )
        for row in rows
    ]
