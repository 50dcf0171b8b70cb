"""The life of a deployment: one pass over one endpoint, in one sitting.

observe → decide how many → plan → act → remember. A pass may fail at any line
and be run again: it starts from what is, not from what an earlier one meant to
do. Policies decide (``policy/scaling.py``, ``policy/reconcile.py``), this file
only carries answers from one to the next.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from modelyard.control.executor import Executor
from modelyard.control.loadtimes import LoadTimes
from modelyard.control.observer import Observer
from modelyard.control.remember import remember
from modelyard.control.supplies import Supplies, SupplyError
from modelyard.control.views import is_proven, situation_of, size_of
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import ReplicaState
from modelyard.engines import Settings
from modelyard.policy import scaling
from modelyard.policy.actions import StartReplica, Wait
from modelyard.policy.progress import Fetch, View
from modelyard.policy.reconcile import Pace, plan
from modelyard.policy.releases import main_release
from modelyard.policy.rollouts import sizes
from modelyard.stores import ControlStore


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass came to: the endpoint's size, and why versions of it cannot start."""

    replicas: int
    troubles: Mapping[str, SupplyError]
    has_rollout: bool


@dataclass(slots=True)
class Tools:
    """What passes share. ``memories`` are the scaling policy's, by endpoint id; ``passed`` the last passes' results."""

    store: ControlStore
    observer: Observer
    executor: Executor
    supplies: Supplies
    loads: LoadTimes
    pace: Pace
    publish: Callable[[], Awaitable[None]]
    memories: dict[str, scaling.Memory] = field(default_factory=dict)
    passed: dict[str, Passed] = field(default_factory=dict)


async def run_pass(endpoint: Endpoint, world: World, tools: Tools) -> bool:
    """Bring what runs of ``endpoint`` one step closer to what should; say whether anything changed."""
    memory = tools.memories.get(endpoint.id)
    settings = settings_of(endpoint, world, tools)
    size = size_of(endpoint, world, slots=settings.slots if settings else 1)

    decision = scaling.decide(endpoint.scaling, memory, size)

    wanted = sizes(decision.replicas, endpoint, world.unix_s)
    situation = situation_of(endpoint, wanted, decision.reason, world, tools.observer, is_first=memory is None)
    actions = plan(situation, tools.pace)

    records = {seen.record.id: seen.record for seen in situation.replicas}
    has_changed, fetch = False, None
    troubles: dict[str, SupplyError] = {}
    for action in actions:
        if isinstance(action, StartReplica):
            try:
                supply = tools.supplies.supply(world.versions[action.replica.version_id])
            except SupplyError as error:
                troubles[action.replica.version_id] = error
                continue
            if isinstance(supply, Fetch):
                fetch = supply
                continue
            await tools.executor.start(action, endpoint, supply, records)
            has_changed = True
        else:
            has_changed |= await tools.executor.carry_out(action, endpoint.id, records)

    for version_id in {record.version_id for record in records.values() if record.state is ReplicaState.READY}:
        await tools.executor.activate(tools.supplies.known(world.versions[version_id]))

    if has_changed:
        # Gateways know of a replica before anybody is told that it is ready.
        await tools.publish()
    load_s = await tools.loads.expected_s(main_release(endpoint).version_id, settings.load_s) if settings else 0.0
    view = View(
        now_s=world.unix_s,
        wanted=sum(wanted[release.version_id] for release in endpoint.releases if not release.shadow),
        replicas=list(records.values()),
        load_s=load_s,
        is_proven=is_proven(endpoint) or decision.memory.is_proven,
        size_reason=decision.reason,
        waiting=next((action.reason for action in actions if isinstance(action, Wait)), ""),
        troubles={version_id: str(error) for version_id, error in troubles.items()},
        fetch=fetch,
    )
    has_rollout = endpoint.rollout is not None and endpoint.rollout.is_live and not endpoint.is_deleted
    tools.passed[endpoint.id] = Passed(decision.replicas, troubles, has_rollout)
    has_changed |= await remember(endpoint, view, memory, decision, tools.store)
    tools.memories[endpoint.id] = decision.memory
    return has_changed


def settings_of(endpoint: Endpoint, world: World, tools: Tools) -> Settings | None:
    """Return what the engine of the release with the most traffic makes of it, None when it cannot say."""
    version = world.versions.get(main_release(endpoint).version_id) if endpoint.releases else None
    return tools.supplies.settings(version) if version else None
