"""``GET /v1/endpoints/{endpoint}/why``: why it is as it is, with numbers and the next step."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from modelyard.control.api.access import find_endpoint
from modelyard.control.api.endpoint_views import tier_view
from modelyard.control.context import Context
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress
from modelyard.domain.fleet import Replica, ReplicaState, replica_of, seats_of
from modelyard.domain.tenants import Scope
from modelyard.policy.progress import View, outlook
from modelyard.policy.reconcile import LIVE
from modelyard.policy.rollouts import beside
from modelyard.policy.scaling import numbers
from modelyard.policy.why import Answer, Happened, Known, explain
from modelyard.web.routes import AnyRoute, Call, Empty, Route

EVENTS_READ = 200
_STARTING = (ReplicaState.STARTING, ReplicaState.LOADING)


class EndpointWhyView(msgspec.Struct, frozen=True, kw_only=True):
    """Questions and answers, what matters most first."""

    id: str
    object: str = "endpoint.why"
    name: str
    status: EndpointStatus
    progress: Progress
    answers: Annotated[tuple[Answer, ...], msgspec.Meta(description="What matters most first.")]


class EndpointWhy:
    """The route of reasons."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        path, summary = "/v1/endpoints/{endpoint:path}/why", "Why an endpoint is as it is"
        return [Route("GET", path, Scope.MANAGE, summary, self.why, Empty, Empty, EndpointWhyView)]

    async def why(self, call: Call[Empty, Empty]) -> EndpointWhyView:
        """Return what is known of an endpoint, as answers."""
        context, store = self._context, self._context.store
        endpoint = await find_endpoint(store, call.identity, call.path("endpoint"))
        every = await store.replicas()
        replicas = [one for one in every if one.endpoint_id == endpoint.id]
        if endpoint.host_id:
            replicas = seats_of(every).get(endpoint.id, [])
        events = await store.events(endpoint.id, limit=EVENTS_READ)
        size = context.size(endpoint.id)
        versions = {version.id: version for version in await store.versions(tenant_id=endpoint.tenant_id)}
        own = [replica for replica in replicas if not replica.is_tombstone]
        standing = tier_view(context, endpoint, versions, own)
        now_s, load_s = context.clock.unix_s(), size[0].load_s if size else 0.0
        known = Known(
            now_s=now_s,
            wanted=size[1].replicas if size else 0,
            ready=sum(replica.state is ReplicaState.READY for replica in replicas),
            loading=_loading(endpoint, own, now_s, load_s) if load_s else None,
            running=self._running({replica.id for replica in own}),
            drain_timeout_s=context.config.control.drain_timeout_s,
            size_reason=size[1].reason if size else "",
            size_data=numbers(size[0], size[1].replicas) if size else {},
            tier=standing.tier,
            tier_reason=standing.reason,
            failing=self._failing({replica.id for replica in own}),
            placed=[
                _seat(replica, versions.get(replica.version_id)) if endpoint.host_id else _place(replica)
                for replica in replicas
                if replica.placement.parts and (replica.state in LIVE or replica.state is ReplicaState.DRAINING)
            ],
            events=[Happened(one.at, one.kind, one.reason, one.replica_id, one.data) for one in events],
        )
        # The stored outlook of what is deleted is the one from before.
        gone = View(now_s=now_s, wanted=0, replicas=own, load_s=load_s)
        told = outlook(endpoint, gone) if endpoint.is_deleted else endpoint
        return EndpointWhyView(
            id=endpoint.id,
            name=endpoint.name,
            status=told.status,
            progress=told.progress,
            answers=explain(endpoint, known),
        )

    def _running(self, replica_ids: set[str]) -> int:
        reports = self._context.gateways().values()
        return sum(one.in_flight for report in reports for one in report.replicas if one.replica_id in replica_ids)

    def _failing(self, replica_ids: set[str]) -> list[str]:
        """Return how replicas fail that look well to their node; each gateway tells its own."""
        told = {}
        for report in self._context.gateways().values():
            for one in report.replicas:
                if one.replica_id in replica_ids and one.failures and one.reason:
                    told[one.replica_id] = f"{one.replica_id} fails them: {one.reason}"
        return list(told.values())


def _loading(endpoint: Endpoint, replicas: Sequence[Replica], now_s: float, load_s: float) -> Progress | None:
    """Return how far those are that start, as if there were no others; nobody waits for shadows."""
    others = beside(endpoint)
    starting = [one for one in replicas if one.state in _STARTING and one.version_id not in others]
    view = View(now_s=now_s, wanted=len(starting), replicas=starting, load_s=load_s, is_proven=True)
    return outlook(endpoint, view).progress if starting else None


def _place(replica: Replica) -> str:
    parts = [
        f"{part.node_id} ({part.memory_bytes / 2**30:.2f} GiB of accelerator {', '.join(map(str, part.accelerators))})"
        for part in replica.placement.parts
    ]
    return f"{replica.id} is {replica.state} on {' and '.join(parts)}"


def _seat(seat: Replica, version: ModelVersion | None) -> str:
    """Return where a guest sits: the memory of the replica is its host's, of which it has a part."""
    nodes = " and ".join(part.node_id for part in seat.placement.parts)
    size = version.artifact.size_bytes if version is not None else 0
    files = f"; its own files are {size / 2**20:.1f} MiB" if size else ""
    return f"it is {seat.state} on the replica {replica_of(seat.id)} of its host, on {nodes}{files}"
