"""``POST /v1/models/plan``: what a deployment would need, where it would run, what it would cost; nothing is done."""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from modelyard.control.api.deploy import autoscale_of, estimate_s, scaling_of
from modelyard.control.api.deploy_spec import EXAMPLE, DeployRequest, Hardware, endpoint_faults, guest_faults
from modelyard.control.api.faults import check_all
from modelyard.control.api.hardware import choose_hardware, known_facts
from modelyard.control.api.hosting import find_host
from modelyard.control.api.serving import changed_serving
from modelyard.control.api.versions import Findings, examine, make_version
from modelyard.control.asking import ask_of
from modelyard.control.context import Context
from modelyard.control.holding import held_in, kinds_of, real_kinds
from modelyard.control.moving import weights_of
from modelyard.control.supplies import Offer
from modelyard.domain.endpoints import Autoscale, Endpoint, Release, Scaling, Serving
from modelyard.domain.fleet import Replica
from modelyard.domain.nodes import Node, NodeSeen, Placement
from modelyard.domain.tenants import Scope
from modelyard.policy import accelerator_quota
from modelyard.policy.cluster import CPU, Cluster
from modelyard.policy.costs import total_hourly_nanousd
from modelyard.policy.packing import Ask, NoRoom, Weights, place
from modelyard.web.routes import AnyRoute, Call, Empty, Route

PLACED_MAX = 32
"""Replicas that are placed one by one; of more, the rest is said to fit or not by the first of them."""


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one replica."""

    replica_bytes: Annotated[int, msgspec.Meta(description="0 of a guest, which has none of its own.")]
    weights_bytes: int
    accelerator_bytes: Annotated[int, msgspec.Meta(description="Of each of its accelerators.")]
    kv_tokens: Annotated[int, msgspec.Meta(description="Tokens that its KV cache holds; 0: not known.")]


class PlacePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where one replica would run."""

    node: str
    accelerators: tuple[int, ...]
    memory_bytes: int
    is_cached: Annotated[bool, msgspec.Meta(description="The node has the weights already.")]


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """What a deployment comes to, as the platform is now."""

    object: str = "deployment.plan"
    model_name: str
    version: str
    framework: str
    host: Annotated[str, msgspec.Meta(description="Of a guest: the endpoint whose replicas it sits on.")]
    gpu_type: str
    gpus_per_replica: int
    hardware_reason: Annotated[str, msgspec.Meta(description="Why these accelerators; empty: as asked for.")]
    min_replicas: int
    max_replicas: int
    scale_to_zero: bool
    memory: MemoryPlan
    fits: Annotated[bool, msgspec.Meta(description="All of max_replicas have room now.")]
    reason: Annotated[str, msgspec.Meta(description="Why they do not, and what would help; or what to doubt.")]
    replicas: Annotated[list[PlacePlan], msgspec.Meta(description="Where they would run, in order.")]
    cost_per_hour_usd: Annotated[float, msgspec.Meta(description="Of min_replicas (0 while asleep).")]
    max_cost_per_hour_usd: Annotated[float, msgspec.Meta(description="Of as many of max_replicas as fit.")]
    estimated_ready_seconds: int


class Plans:
    """The route of plans."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        path, summary = "/v1/models/plan", "What a deployment would need, and whether it fits"
        types = (DeployRequest, Empty, PlanView)
        return [Route("POST", path, Scope.MANAGE, summary, self.plan, *types, 200, EXAMPLE, gathers=True)]

    async def plan(self, call: Call[DeployRequest, Empty]) -> PlanView:
        """Check as a deployment would, place on paper, and answer."""
        context, wanted = self._context, call.body
        nodes = await context.fleet.nodes()
        findings = await examine(context, call.identity, wanted)
        hosting = await find_host(context, call.identity, findings, wanted.host)
        facts, prices = await known_facts(context, findings), context.config.fleet.accelerator_prices
        chosen = choose_hardware(wanted.hardware, findings, facts, nodes, prices)
        _, unserved = changed_serving(wanted.serving, Serving(), context.config.gateway)
        autoscale, unscaled = autoscale_of(wanted)
        unmade = endpoint_faults(wanted, chosen, findings.engine, real_kinds(nodes))
        faults = [*unmade, *findings.faults, *hosting.faults, *unserved, *unscaled]
        if hosting.host is not None:
            faults += guest_faults(wanted, findings.engine)
        check_all("This deployment cannot be made.", call.flaws, faults)
        endpoint, offer = await self._on_paper(call, findings, autoscale, chosen)
        ask = ask_of(endpoint, offer, kinds_of(nodes))
        replicas = await context.store.replicas()
        # A guest takes a seat on replicas that are there, and no room of its own.
        weights = weights_of(context.config.control)
        placed: list[Placement] = []
        no_room: NoRoom | None = None
        if not hosting.host:
            placed, no_room = _place_all(ask, endpoint.scaling, Cluster.of(nodes, held_in(replicas)), weights)
        placed, over = await self._within_quota(endpoint.tenant_id, placed, replicas, nodes)
        why_not = over or (no_room.text if no_room else "")
        of_id = {seen.node.id: seen.node for seen in nodes}
        return PlanView(
            model_name=endpoint.name,
            version=offer.version.version,
            framework=offer.engine.name,
            host=hosting.host.name if hosting.host else "",
            gpu_type=offer.version.gpu_type,
            gpus_per_replica=offer.version.gpu_count,
            hardware_reason=chosen.reason,
            min_replicas=endpoint.scaling.min_replicas,
            max_replicas=endpoint.scaling.max_replicas,
            scale_to_zero=endpoint.scaling.scale_to_zero,
            memory=MemoryPlan(
                replica_bytes=0 if hosting.host else offer.settings.memory_bytes,
                weights_bytes=offer.version.artifact.size_bytes,
                accelerator_bytes=0 if hosting.host else ask.memory_bytes,
                kv_tokens=offer.settings.kv_tokens,
            ),
            fits=not why_not,
            reason=f"{len(placed)} of {endpoint.scaling.max_replicas} fit; {why_not}"
            if why_not
            else f"as a guest on '{hosting.host.name}'"
            if hosting.host
            else _doubt(ask, offer),
            replicas=[_view(placement, ask, nodes) for placement in placed],
            cost_per_hour_usd=_usd(placed[: endpoint.scaling.floor], of_id),
            max_cost_per_hour_usd=_usd(placed, of_id),
            estimated_ready_seconds=math.ceil(await estimate_s(context, offer.version, offer.settings)),
        )

    async def _on_paper(
        self, call: Call[DeployRequest, Empty], findings: Findings, autoscale: Autoscale, chosen: Hardware
    ) -> tuple[Endpoint, Offer]:
        wanted, tenant_id = call.body, call.identity.tenant_id
        gpus = (chosen.gpu_type, chosen.gpu_count)
        version = await make_version(
            self._context, wanted, findings, tenant_id=tenant_id, name=wanted.model_name, gpus=gpus
        )
        endpoint = Endpoint(
            id="",
            tenant_id=tenant_id,
            name=wanted.model_name,
            releases=(Release(version.id),),
            scaling=scaling_of(wanted),
            created_at=version.created_at,
            autoscale=autoscale,
        )
        assert findings.engine is not None, "an unknown engine is a fault"
        assert findings.settings is not None, "bad options are a fault"
        return endpoint, Offer(version, findings.engine, findings.settings)

    async def _within_quota(
        self, tenant_id: str, placed: list[Placement], replicas: Sequence[Replica], nodes: Sequence[NodeSeen]
    ) -> tuple[list[Placement], str]:
        """Return those of ``placed`` that the tenant may have beside what it has, and why not the others."""
        store = self._context.store
        limits = {tenant.id: tenant.limits.accelerators for tenant in await store.tenants()}
        own = {one.id for one in await store.endpoints(tenant_id=tenant_id)}
        held = held_in(one for one in replicas if one.endpoint_id in own)
        sizes = accelerator_quota.sizes_of(nodes)
        for number, new in enumerate(placed):
            beside = [*held, *placed[:number]]
            if over := accelerator_quota.refusal(limits.get(tenant_id), beside, new, sizes):
                return placed[:number], over
        return placed, ""


def _doubt(ask: Ask, offer: Offer) -> str:
    """Say where an engine without weights takes another accelerator than it is said to have."""
    kind = offer.version.gpu_type
    if ask.kinds or kind in ("", "any", CPU):
        return ""
    return f"no node has {kind}: this engine has no weights and runs on any accelerator; one with weights would wait"


def _place_all(ask: Ask, scaling: Scaling, cluster: Cluster, weights: Weights) -> tuple[list[Placement], NoRoom | None]:
    placed: list[Placement] = []
    for ordinal in range(min(scaling.max_replicas, PLACED_MAX)):
        # As when it is deployed: what goes beyond the least number may run where it can be taken away.
        asked = msgspec.structs.replace(ask, may_use_spot=ordinal >= max(scaling.floor, 1))
        found = place(asked, cluster, weights=weights)
        if isinstance(found, NoRoom):
            return placed, found
        cluster.take(found)
        placed.append(found)
    return placed, None


def _view(placement: Placement, ask: Ask, nodes: Sequence[NodeSeen]) -> PlacePlan:
    first = placement.parts[0]
    cached = {seen.node.id: seen.cached for seen in nodes}
    return PlacePlan(
        node=" + ".join(part.node_id for part in placement.parts),
        accelerators=first.accelerators,
        memory_bytes=first.memory_bytes,
        is_cached=bool(ask.digest) and all(ask.digest in cached[part.node_id] for part in placement.parts),
    )


def _usd(placements: Sequence[Placement], nodes: dict[str, Node]) -> float:
    return round(total_hourly_nanousd(placements, nodes) / 1e9, 6)
