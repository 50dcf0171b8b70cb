"""Engines that sleep and wake in a simulated fleet, as ``policy/sleepers.py`` says.

Which deployments have to be asked in a tick is found by the same comparisons over columns. A replica that falls asleep
holds its accelerators until its requests have ended and its weights are in host memory; one that wakes holds them from
the beginning.
"""

from typing import TYPE_CHECKING

import numpy as np

from modelyard.policy import sleepers
from modelyard.policy.sleepers import Bed, Seen
from modelyard.sim.fleet.population import Floats
from modelyard.sim.fleet.stock import Replica, State, overlap

if TYPE_CHECKING:
    from modelyard.sim.fleet.world import World

RULE = sleepers.STANDARD


class Turns:
    """Since when deployments have more awake than they need."""

    def __init__(self, deployments: int) -> None:
        self._spare_since_s = np.full(deployments, np.nan)

    def look(self, world: "World", now_s: float) -> None:
        """Wake and put to sleep what is due."""
        columns = world.columns
        demand = columns.flying + np.ceil(columns.waiting)
        load: Floats = np.maximum(columns.flying / columns.slots, columns.rate / columns.capacity)
        idle_s = now_s - columns.asked_s
        awake = columns.ready + columns.waking
        wakes = (
            (columns.asleep > 0)
            & (demand > 0)
            & ((demand > awake * columns.slots) | (load * 100 > awake * RULE.share_up))
        )
        fewer = np.maximum(columns.ready - 1, 0)
        carries = (load * 100 <= fewer * RULE.share_down) & (demand <= fewer * columns.slots)
        is_idle = (demand == 0) & (idle_s >= RULE.idle_s)
        sleeps = (columns.ready > 0) & columns.is_llm & (is_idle | ((columns.ready > 1) & carries))
        self._spare_since_s[~sleeps] = np.nan
        for at in np.flatnonzero(wakes | sleeps).tolist():
            since_s = float(self._spare_since_s[at])
            seen = Seen(
                now_s=now_s,
                awake=int(awake[at]),
                asleep=int(columns.asleep[at]),
                demand=int(demand[at]),
                slots=int(columns.slots[at]),
                load=float(load[at]),
                idle_s=float(idle_s[at]),
                floor=world.spec.floor,
            )
            decision = sleepers.decide(None if np.isnan(since_s) else since_s, seen, RULE)
            self._spare_since_s[at] = np.nan if decision.spare_since_s is None else decision.spare_since_s
            for _ in range(decision.change):
                self._wake(world, at, now_s)
            if decision.change < 0:
                self._sleep_some(world, at, min(-decision.change, int(columns.ready[at])), now_s)

    def _wake(self, world: "World", at: int, now_s: float) -> None:
        asleep = [one for one in world.stock.of_deployment[at] if one.state is State.ASLEEP]
        if not asleep:
            return  # one of them made room for others meanwhile
        turn = sleepers.turn([_bed(world, one, now_s) for one in asleep], RULE)
        if turn.replica_id is None:
            # It cannot go elsewhere, so another one is started there; this one is of no use.
            world.stock.stop(asleep[0])
            world.changed(at)
            world.fill(at, now_s)
            return
        replica = world.stock.replicas[int(turn.replica_id)]
        for victim in turn.instead_of:
            self._sleep(world, world.stock.replicas[int(victim)], now_s, but=replica)
        world.stock.wake(replica, now_s)
        world.events.wake(replica, now_s)
        world.changed(at)

    def _sleep_some(self, world: "World", at: int, number: int, now_s: float) -> None:
        ready = [one for one in world.stock.of_deployment[at] if one.state is State.READY]
        offered = [(str(one.number), _is_alone(world, one)) for one in ready]
        for id in sleepers.spared(offered, number):
            self._sleep(world, world.stock.replicas[int(id)], now_s)

    def _sleep(self, world: "World", replica: Replica, now_s: float, *, but: Replica | None = None) -> None:
        at, stock = replica.deployment, world.stock
        held_s = stock.weights[at] / stock.loading.memory + world.left_s(at)
        if _is_alone(world, replica):
            world.recorder.turned(held_s * replica.placement.accelerators)
        for gone in stock.sleep(replica, now_s, but=but):
            world.evict(gone)
        world.changed(at)


def _is_alone(world: "World", replica: Replica) -> bool:
    return all(
        world.stock.held[part.node_id, index] == 1 for part in replica.placement.parts for index in part.accelerators
    )


def _bed(world: "World", replica: Replica, now_s: float) -> Bed:
    """Return how a sleeping replica stands: those that nobody asked for longest would have to go first."""
    stock, columns = world.stock, world.columns
    placement = replica.placement
    (part,) = placement.parts
    is_held = any((part.node_id, index) in stock.held for index in part.accelerators)
    if stock.cluster.has_room(placement):
        return Bed(replica_id=str(replica.number), is_held=is_held)
    idle: list[tuple[float, Replica]] = []
    for other in stock.on_node[part.node_id].values():
        at = other.deployment
        is_able = other.state is State.READY and at >= 0 and columns.is_llm[at] and overlap(other, replica)
        if is_able and columns.flying[at] == 0 and columns.waiting[at] == 0:
            idle.append((now_s - float(columns.asked_s[at]), other))
    idle.sort(key=lambda pair: (-pair[0], pair[1].number))
    gone: list[tuple[float, Replica]] = []
    for pair in idle:
        stock.cluster.give_back(pair[1].placement)
        gone.append(pair)
        if stock.cluster.has_room(placement):
            break
    has_room = stock.cluster.has_room(placement)
    for _, other in gone:
        stock.cluster.take(other.placement)
    ids = tuple((str(other.number), idle_s) for idle_s, other in gone)
    return Bed(replica_id=str(replica.number), is_held=is_held, in_the_way=ids if has_room else None)
