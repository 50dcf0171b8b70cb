"""Which replicas may sleep, and how much of a node's memory those that do may take.

An engine that sleeps moves its weights into the memory of its machine, so a
replica on a CPU gains nothing by it. It must be possible to tell the engine;
the endpoint must have one version and no guests, so that all its replicas are
alike; what its owner keeps ready whatever the traffic never sleeps.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from modelyard.control.supplies import Supplies
from modelyard.control.world import World
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Tier
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import NodeSeen
from modelyard.engines import EngineCall, Engines
from modelyard.policy.cluster import CPU
from modelyard.policy.rollouts import beside, carriers
from modelyard.policy.sleepers import Sleeper, outgrown
from modelyard.policy.takeovers import takeovers

MEMORY_SHARE = 0.25
MEMORY_BYTES = 64 * 1024**3
"""Of a node whose memory is not known."""
FALL_S = 30.0
"""Longest time that others wait for one that falls asleep."""


class Able(NamedTuple):
    """What tells the engines of a version to sleep and to wake, and what they keep in the memory of their machine."""

    sleep: EngineCall
    wake: EngineCall
    weights_bytes: int


@dataclass(slots=True)
class Dormitory:
    """Knows who may sleep. ``memory_bytes`` is what a node has for them; 0: a part of its memory."""

    engines: Engines
    supplies: Supplies
    nodes: Callable[[], Mapping[str, NodeSeen]]
    memory_bytes: int = 0
    restless: dict[str, float] = field(default_factory=dict)
    """Replicas that could not be put to sleep, and until when (monotonic) nobody tries again."""
    _able: dict[str, tuple[ModelVersion, Able | None]] = field(default_factory=dict)
    """By version, with what it was then: its facts may be read later."""

    def keep(self, world: World, living: Collection[str]) -> None:
        """Forget what is gone."""
        self.restless = {id: at for id, at in self.restless.items() if id in living}
        for gone in self._able.keys() - world.versions.keys():
            del self._able[gone]

    def able_of(self, version: ModelVersion | None) -> Able | None:
        """Return what tells engines of a version to sleep, None where nothing does."""
        if version is None:
            return None
        known = self._able.get(version.id)
        if known is None or known[0] is not version:
            known = self._able[version.id] = version, self._find_able(version)
        return known[1]

    def _find_able(self, version: ModelVersion) -> Able | None:
        engine, settings = self.engines.get(version.framework), self.supplies.settings(version)
        if engine is None or settings is None:
            return None
        sleep, wake = engine.sleep(version.options), engine.wake(version.options)
        if sleep is None or wake is None:
            return None
        return Able(sleep, wake, settings.weights_bytes or settings.memory_bytes)

    def may(self, one: Replica, able: Able | None, now_s: float) -> bool:
        """Say whether a replica may be put to sleep where it is."""
        if able is None or self.restless.get(one.id, now_s) > now_s or not one.placement.parts:
            return False
        known = self.nodes()
        kinds = set()
        for part in one.placement.parts:
            if (seen := known.get(part.node_id)) is None:
                return False
            kinds |= {each.kind for each in seen.node.accelerators if each.index in part.accelerators}
        return bool(kinds) and CPU not in kinds and able.weights_bytes <= self.room_bytes(one.placement.node_id)

    def idle_others(self, endpoint: Endpoint, world: World, on: Collection[str]) -> list[tuple[Replica, float]]:
        """Return the replicas of other endpoints on these nodes that nobody needs, and for how many seconds.

        Those that fall asleep by themselves are among them: it takes seconds to wait for them, if it takes no longer.
        """
        found: list[tuple[Replica, float]] = []
        for endpoint_id, replicas in world.replicas.items():
            ready = [one for one in replicas if one.state is ReplicaState.READY]
            falling = [one for one in replicas if is_falling(one, world.unix_s)]
            if endpoint_id == endpoint.id or not any(_is_on(one, on) for one in (*ready, *falling)):
                continue  # nearly all of them
            other = world.endpoints.get(endpoint_id)
            if other is None or not may_nap(other, world):
                continue
            versions = in_turn(other)
            ready = [one for one in ready if one.version_id in versions]
            demand, spare = world.demand(endpoint_id), len(ready) - floor_of(other, world)
            if demand.queued or demand.in_flight:
                continue
            found += [(one, math.inf) for one in falling if one.version_id in versions]
            if spare <= 0:
                continue
            idle_s = min(math.inf if demand.idle_s is None else demand.idle_s, ready_s(ready, world.unix_s))
            able = [one for one in ready if _is_on(one, on) and self._may_now(one, world)]
            able.sort(key=lambda one: (one.ready_at or 0.0, one.id), reverse=True)
            found += [(one, idle_s) for one in able[:spare]]
        return found

    def _may_now(self, one: Replica, world: World) -> bool:
        able = self.able_of(world.versions.get(one.version_id))
        return one.id not in world.busy and self.may(one, able, world.monotonic_s)

    # --- the memory of nodes --------------------------------------------------------------

    def room_bytes(self, node_id: str) -> int:
        """Return the memory that a node has for engines that sleep."""
        if self.memory_bytes:
            return self.memory_bytes
        seen = self.nodes().get(node_id)
        own = sum(one.memory_bytes for one in (seen.node.accelerators if seen else ()) if one.kind == CPU)
        return int(own * MEMORY_SHARE) or MEMORY_BYTES

    def without_room(self, asleep: Sequence[Replica], world: World, *, but: Collection[str]) -> dict[str, str]:
        """Return the sleepers for whom their node has no room any more, and why; ``but`` those about to wake."""
        by_node: dict[str, list[Sleeper]] = {}
        for one in sorted(asleep, key=lambda one: (one.state_since, one.id)):
            able = self.able_of(world.versions.get(one.version_id))
            if able is not None and one.placement.parts:
                part = one.placement.parts[0]
                sleeper = Sleeper(one.id, able.weights_bytes, frozenset(part.accelerators))
                by_node.setdefault(part.node_id, []).append(sleeper)
        found: dict[str, str] = {}
        for node_id, sleeping in by_node.items():
            here: list[Sleeper] = []
            for newest in sleeping:
                here.append(newest)
                gone = outgrown(here, self.room_bytes(node_id), but=but)
                here = [each for each in here if each.replica_id not in gone]
                found |= dict.fromkeys(gone, f"{node_id} has no more room for engines that sleep")
        return found


def _is_on(one: Replica, nodes: Collection[str]) -> bool:
    return any(part.node_id in nodes for part in one.placement.parts)


def may_nap(endpoint: Endpoint, world: World) -> bool:
    """Say whether replicas of an endpoint may sleep at all."""
    return (
        endpoint.autoscale.nap_s > 0
        and not endpoint.pool
        and not endpoint.is_deleted
        and endpoint.status is not EndpointStatus.PROVISIONING
        and len(carriers(endpoint)) == 1
        and not (endpoint.rollout is not None and endpoint.rollout.is_live)
        and endpoint.id not in world.guests
        and not any(one.guests for one in world.replicas.get(endpoint.id, ()))
        # What moves is there twice for a while, and one of them goes: not a moment to count who is awake.
        and not takeovers(world.replicas.get(endpoint.id, ()))
    )


def is_falling(one: Replica, now_s: float) -> bool:
    """Say whether a replica falls asleep, and has not for so long that nobody waits for it any more."""
    return one.state is ReplicaState.FALLING_ASLEEP and abs(now_s - one.state_since) < FALL_S


def in_turn(endpoint: Endpoint) -> frozenset[str]:
    """Return the versions of which replicas take turns: not one that was replaced, nor one beside the others."""
    return frozenset(release.version_id for release in endpoint.releases) - beside(endpoint)


def floor_of(endpoint: Endpoint, world: World) -> int:
    """Return how many replicas of an endpoint never sleep; lines of batches that scale nothing need one, too."""
    is_kept = endpoint.autoscale.tier is Tier.HOT or world.demand(endpoint.id).has_lines
    return max(endpoint.scaling.floor, int(is_kept))


def ready_s(ready: Iterable[Replica], now_s: float) -> float:
    """Return how long the last of them has been ready; for ever where the clock was set back."""
    ages = [now_s - one.state_since for one in ready]
    return min((age for age in ages if age > -1.0), default=math.inf)
