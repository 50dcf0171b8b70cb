"""Replicas that move to other accelerators, as ``policy/defragment.py`` says.

Another one is started at the new place; once it is ready the old one drains. Until then both hold their memory.
"""

from typing import TYPE_CHECKING

from modelyard.domain.nodes import Placement
from modelyard.policy import defragment
from modelyard.policy.asks import Ask
from modelyard.policy.defragment import MOVES_MOST, Move, Placed
from modelyard.sim.fleet.stock import Replica, State

if TYPE_CHECKING:
    from modelyard.sim.fleet.world import World


class Moves:
    """Who moves: the new replica's number, and the one that goes once it is there."""

    def __init__(self) -> None:
        self._old: dict[int, Replica] = {}
        self.made = 0

    def look(self, world: "World", now_s: float) -> None:
        """Move from accelerators that have too much to do, and empty some that have little."""
        movable, stock = _movable(world, self._busy()), world.stock
        defragment.tidy(stock.cluster, movable, lambda move: self._begin(world, move, now_s), mix=stock.mix)

    def open(self, world: "World", at: int, now_s: float) -> bool:
        """Move replicas so that one more of ``at`` has room once they are gone; say whether that helps."""
        profile = world.population.deployments[at].profile
        pending = Ask(memory_bytes=profile.memory_bytes, count=profile.accelerators, kinds=frozenset({profile.kind}))
        movable = _movable(world, self._busy())
        stock = world.stock
        plan = defragment.moves(stock.cluster, pending, movable, most=MOVES_MOST, mix=stock.mix) if movable else None
        for move in plan.moves if plan is not None else ():
            self._begin(world, move, now_s)
        return plan is not None

    def arrived(self, world: "World", replica: Replica, now_s: float) -> None:
        """A replica is ready at its new place: the old one goes, or the new one where the old one is gone already."""
        old = self._old.pop(replica.number)
        if old.state is State.READY:
            world.drain(old, now_s)
        else:
            world.drain(replica, now_s)

    def _busy(self) -> set[int]:
        self._old = {number: old for number, old in self._old.items() if old.state is State.READY}
        return {old.number for old in self._old.values()}

    def _begin(self, world: "World", move: Move, now_s: float) -> None:
        old = world.stock.replicas[int(move.replica_id)]
        profile = world.population.deployments[old.deployment].profile
        new = world.stock.put(old.deployment, profile, move.to, world.digest(old.deployment), now_s)
        new.state = State.MOVING
        world.events.load(new, now_s)
        self._old[new.number] = old
        self.made += world.recorder.is_counting


def _movable(world: "World", busy: set[int]) -> dict[str, Placed]:
    """Return the replicas that serve on a part of an accelerator, and do not move already."""
    columns, found = world.columns, {}
    load = columns.rate / columns.alone_requests_s
    for replica in world.stock.replicas.values():
        at = replica.deployment
        if replica.state is State.READY and at >= 0 and columns.is_shared[at] and replica.number not in busy:
            profile = world.population.deployments[at].profile
            ask = Ask(
                memory_bytes=profile.memory_bytes,
                kinds=frozenset({profile.kind}),
                digest=world.digest(at),
                may_use_spot=replica.is_spot,
                avoid=_brothers(world, replica),
            )
            share = float(load[at] / max(columns.ready[at], 1.0))
            found[str(replica.number)] = Placed(replica.placement, ask, share)
    return found


def _brothers(world: "World", replica: Replica) -> frozenset[str]:
    """Return the nodes where others of its deployment are: two on one accelerator are no faster than one."""
    places: list[Placement] = [
        one.placement for one in world.stock.of_deployment[replica.deployment] if one is not replica
    ]
    return frozenset(place.node_id for place in places)
