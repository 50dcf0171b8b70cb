"""How close an endpoint is to answering, from what is recorded of it and where its weights lie."""

import asyncio
import math

from modelyard.control.context import Context
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.fleet import FleetError
from modelyard.policy.releases import main_release
from modelyard.policy.tiers import Seen, Standing, tier_of

NODES_TIMEOUT_S = 5.0


async def standing_of(context: Context, endpoint: Endpoint, replicas: list[Replica]) -> Standing | None:
    """Return the tier that ``endpoint`` is in now, and why; None for one without a release."""
    if not endpoint.releases:
        return None
    states = [replica.state for replica in replicas]
    demand = [
        one for report in context.gateways().values() for one in report.endpoints if one.endpoint_id == endpoint.id
    ]
    idle_s = min((one.idle_s for one in demand), default=math.inf)
    digest = await _digest(context, endpoint)
    return tier_of(
        Seen(
            ready=states.count(ReplicaState.READY),
            loading=states.count(ReplicaState.LOADING) + states.count(ReplicaState.STARTING),
            in_flight=sum(one.in_flight for one in demand),
            idle_s=idle_s if math.isfinite(idle_s) else None,
            floor=endpoint.scaling.floor,
            pin=endpoint.autoscale.tier,
            cached_on=await _cached_on(context, digest) if digest else (),
            is_stored=digest is not None,
            has_weights=digest != "",
        )
    )


async def _digest(context: Context, endpoint: Endpoint) -> str | None:
    """Return the digest of its weights, "" where it has none, None while they were not fetched."""
    version_id = main_release(endpoint).version_id
    for version in await context.store.versions(tenant_id=endpoint.tenant_id):
        if version.id == version_id:
            engine = context.engines.get(version.framework)
            return version.artifact.digest or (None if engine is None or engine.needs_artifact else "")
    return None


async def _cached_on(context: Context, digest: str) -> list[str]:
    """Return the nodes with these weights; none where the fleet does not answer, which must not hide the rest."""
    try:
        async with asyncio.timeout(NODES_TIMEOUT_S):
            return [seen.node.id for seen in await context.fleet.nodes() if digest in seen.cached]
    except (FleetError, TimeoutError):
        return []
