"""Which replicas to move so that one that needs accelerators whole, or much of one, has room; or so that one is empty.

What is free may be enough and lie in pieces. ``moves`` finds the fewest
replicas whose move to other accelerators opens what is pending; ``cleared``
empties an accelerator that little is on, for whoever gives it back. Each move
is a load there and a drain here, so there is a bound on them.

``tidy`` is what is done of the last now and then; the controller and the
simulator call the same.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from heapq import nsmallest

import msgspec

from modelyard.domain.nodes import Part, Placement
from modelyard.policy.asks import Ask, Weights, gib, refused
from modelyard.policy.cluster import Block, Cluster
from modelyard.policy.fragmentation import STANDARD_MIX, Mix
from modelyard.policy.packing import find


class Placed(msgspec.Struct, frozen=True):
    """A replica that may be moved: where it is, and what it asked for."""

    placement: Placement
    ask: Ask
    load: float = 0.0
    """Of one accelerator's time, 0 to 1."""
    group: str = ""
    """Of those that have the same one no two move at once; "" is no group."""


class Move(msgspec.Struct, frozen=True):
    """One replica's move: start it at ``to``, and drain it where it is once it is ready there."""

    replica_id: str
    old: Placement
    to: Placement
    reason: str


class Plan(msgspec.Struct, frozen=True):
    """Moves in their order, and what then has room."""

    moves: tuple[Move, ...]
    placement: Placement


def moves(
    cluster: Cluster, pending: Ask, movable: Mapping[str, Placed], *, most: int, mix: Mix = STANDARD_MIX
) -> Plan | None:
    """Return the fewest moves that make room for ``pending``, None where ``most`` of them do not.

    ``cluster`` has all of ``movable`` on it, and is as it was when this returns.
    """
    if (placement := find(pending, cluster, mix)) is not None:
        return Plan((), placement)
    here: dict[tuple[str, int], list[str]] = {}
    for replica_id, placed in sorted(movable.items()):
        for part in placed.placement.parts:
            for index in part.accelerators:
                here.setdefault((part.node_id, index), []).append(replica_id)
    for block, ids, positions in _tries(cluster, pending, here, movable, most):
        places = [(block.node.id, block.indices[position]) for position in positions]
        if (plan := _plan(cluster, pending, places, {one: movable[one] for one in ids}, mix)) is not None:
            return plan
    return None


Place = tuple[str, int]
"""An accelerator: node and index."""
EVERY_S = 60.0
"""Pause between two times that ``tidy`` is called."""
ROUNDS = 8
"""Accelerators that are relieved at most, and emptied, every time."""
MOVES_MOST = 4
"""For one accelerator, or for one replica that has no room."""
LOAD_MOST = 0.8
"""Of an accelerator's time: what moves there must not make it more."""
PLACES = Weights(opened=0.2)
"""How places are chosen where accelerators are emptied: so that few are held to begin with."""
_NO_LOADS: Mapping[Place, float] = {}
TRIES = 12
"""Accelerators that ``cleared`` looks at, the emptiest first: of those with more on them few can be emptied."""


def tidy(
    cluster: Cluster,
    movable: MutableMapping[str, Placed],
    begin: Callable[[Move], None],
    *,
    most: int = 2 * ROUNDS * MOVES_MOST,
    others: Mapping[Place, float] = _NO_LOADS,
    mix: Mix = STANDARD_MIX,
) -> None:
    """Move from accelerators that have too much to do, and empty some that have little: at most ``most`` moves.

    ``begin`` is told of each, and takes the new place on ``cluster``; who moves is taken out of ``movable``. ``others``
    is what is asked of accelerators by those that do not move.
    """

    sharing = _Sharing(movable, others)

    def start(move: Move) -> None:
        nonlocal most
        most -= 1
        begin(move)
        sharing.arrive(_place(move.to), movable[move.replica_id].load)
        group = movable[move.replica_id].group
        for one in [one for one, placed in movable.items() if group and placed.group == group] or [move.replica_id]:
            sharing.drop(one)
            del movable[one]

    for _ in range(min(ROUNDS, most)):
        if (move := _relieved(cluster, sharing, LOAD_MOST, mix)) is None:
            break
        start(move)
    for _ in range(ROUNDS):
        found = _cleared(cluster, sharing, min(MOVES_MOST, most), LOAD_MOST, mix) if most else ()
        if not found:
            break
        for move in found:
            start(move)


def cleared(
    cluster: Cluster,
    movable: Mapping[str, Placed],
    *,
    most: int,
    load_most: float = LOAD_MOST,
    others: Mapping[Place, float] = _NO_LOADS,
    mix: Mix = STANDARD_MIX,
) -> tuple[Move, ...]:
    """Return the moves after which one more accelerator is empty, none where at most ``most`` of them do not do it.

    They go where others are, as long as what all of these ask of an accelerator stays below ``load_most`` of its time.
    ``cluster`` has all of ``movable`` on it, and is as it was when this returns.
    """
    return _cleared(cluster, _Sharing(movable, others), most, load_most, mix)


def relieved(
    cluster: Cluster,
    movable: Mapping[str, Placed],
    *,
    load_most: float = LOAD_MOST,
    others: Mapping[Place, float] = _NO_LOADS,
    mix: Mix = STANDARD_MIX,
) -> Move | None:
    """Return the move of a replica away from the accelerator of which most is asked, None where none is above 1.

    The one that asks for most goes, as long as there is a place that it does not crowd in turn.
    """
    return _relieved(cluster, _Sharing(movable, others), load_most, mix)


def _are_apart(ids: Sequence[str], movable: Mapping[str, Placed]) -> bool:
    """Say whether these may move at the same time."""
    if len(ids) == 1:
        return True
    groups = [group for one in ids if (group := movable[one].group)]
    return len(groups) == len(set(groups))


class _Sharing:
    """Who shares each accelerator, of those that may move, and what is asked of it."""

    def __init__(self, movable: Mapping[str, Placed], others: Mapping[Place, float]) -> None:
        self.movable = dict(movable)
        self.others = others
        self.here: dict[Place, list[str]] = {}
        self.loads: dict[Place, float] = dict(others)
        for replica_id in sorted(movable):
            placed = movable[replica_id]
            if placed.ask.count == 1:
                place = _place(placed.placement)
                self.here.setdefault(place, []).append(replica_id)
                self.loads[place] = self.loads.get(place, 0.0) + placed.load

    def arrive(self, place: Place, load: float) -> None:
        """Count one that will be there, and moves no more for now."""
        self.others = {**self.others, place: self.others.get(place, 0.0) + load}
        self.loads[place] = self.loads.get(place, 0.0) + load

    def drop(self, replica_id: str) -> None:
        """Take out one that moves, or may not any more."""
        placed = self.movable.pop(replica_id)
        place = _place(placed.placement)
        if replica_id not in (ids := self.here.get(place, [])):
            return
        ids.remove(replica_id)
        del self.loads[place]
        if ids or place in self.others:
            # Summed anew: what is left must not depend on who was there.
            self.loads[place] = sum((self.movable[one].load for one in ids), self.others.get(place, 0.0))
        if not ids:
            del self.here[place]


def _cleared(cluster: Cluster, sharing: _Sharing, most: int, load_most: float, mix: Mix) -> tuple[Move, ...]:
    movable = sharing.movable
    able = nsmallest(
        TRIES,
        (
            (sum(movable[one].ask.memory_bytes for one in ids), place)
            for place, ids in sharing.here.items()
            if len(ids) <= most and cluster.shares(*place) == len(ids) and _are_apart(ids, movable)
        ),
    )
    for _, place in able:
        leaving = {one: movable[one] for one in sharing.here[place]}
        if found := _leave(cluster, place, leaving, sharing.loads, load_most, mix):
            return found
    return ()


def _relieved(cluster: Cluster, sharing: _Sharing, load_most: float, mix: Mix) -> Move | None:
    loads, movable = sharing.loads, sharing.movable
    crowded = sorted(
        (place for place, ids in sharing.here.items() if loads[place] > 1 and len(ids) + (place in sharing.others) > 1),
        key=lambda one: -loads[one],
    )
    for place in crowded[:TRIES]:
        largest = max(sharing.here[place], key=lambda one: (movable[one].load, one))
        placed = movable[largest]
        with _Search(cluster, loads, load_most, mix) as search:
            search.fill(place)
            # A place of its own is fine for what needs more than is left anywhere.
            to = search.place_for(placed, is_beside=False)
        if to is not None:
            text = f"moving it to {to.node_id} relieves accelerator {place[1]} of {place[0]}, which has too much to do"
            return Move(largest, placed.placement, to, text)
    return None


def _place(placement: Placement) -> Place:
    part = placement.parts[0]
    return part.node_id, part.accelerators[0]


class _Search:
    """Looks for places on a cluster that is left as it was."""

    def __init__(self, cluster: Cluster, loads: Mapping[Place, float], load_most: float, mix: Mix) -> None:
        self._cluster = cluster
        self._loads = dict(loads)
        self._load_most = load_most
        self._mix = mix
        self._taken: list[Placement] = []

    def __enter__(self) -> "_Search":
        return self

    def __exit__(self, *_: object) -> None:
        for placement in reversed(self._taken):
            self._cluster.give_back(placement)

    def fill(self, place: Place) -> None:
        """Let nothing more go to an accelerator."""
        self.take(Placement((Part(place[0], (place[1],), self._cluster.free_bytes(*place) or 0),)))

    def place_for(self, placed: Placed, *, is_beside: bool) -> Placement | None:
        """Return a place that ``placed`` does not crowd, and take it."""
        ask = msgspec.structs.replace(placed.ask, is_beside=is_beside)
        for _ in range(TRIES):
            to = find(ask, self._cluster, self._mix)
            if to is None:
                return None
            load = self._loads.get(_place(to), 0.0) + placed.load
            if load <= self._load_most or _place(to) not in self._loads:
                self.take(to)
                self._loads[_place(to)] = load
                return to
            self.fill(_place(to))
        return None

    def take(self, placement: Placement) -> None:
        """Take a place until the search is over."""
        self._cluster.take(placement)
        self._taken.append(placement)


def _leave(
    cluster: Cluster,
    place: Place,
    leaving: Mapping[str, Placed],
    loads: Mapping[Place, float],
    load_most: float,
    mix: Mix,
) -> tuple[Move, ...]:
    """Return moves for all of ``leaving``, or none."""
    done: list[Move] = []
    with _Search(cluster, loads, load_most, mix) as search:
        search.fill(place)
        for replica_id, placed in sorted(leaving.items(), key=lambda item: (-item[1].ask.memory_bytes, item[0])):
            to = search.place_for(placed, is_beside=True)
            if to is None:
                return ()
            text = f"moving it to {to.node_id} helps to empty accelerator {place[1]} of {place[0]}"
            done.append(Move(replica_id, placed.placement, to, text))
    return tuple(done)


def _tries(
    cluster: Cluster, pending: Ask, here: Mapping[tuple[str, int], list[str]], movable: Mapping[str, Placed], most: int
) -> list[tuple[Block, tuple[str, ...], tuple[int, ...]]]:
    """Return blocks with the replicas that would have to leave, the fewest first, and the positions they leave."""
    found = [
        (len(ids), block.order, ids, positions)
        for block in cluster.blocks
        if block.is_open and not refused(pending, block.shape)
        for ids, positions in _sets(pending, block, here, movable)
        if 0 < len(ids) <= most and _are_apart(ids, movable)
    ]
    return [(cluster.blocks[order], ids, positions) for _, order, ids, positions in sorted(set(found))]


def _sets(
    pending: Ask, block: Block, here: Mapping[tuple[str, int], list[str]], movable: Mapping[str, Placed]
) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Return the smallest sets of replicas of a block without which ``pending`` fits there, and where."""
    positions = range(len(block.indices))
    on = [here.get((block.node.id, index), []) for index in block.indices]
    if pending.count == 1:
        return [
            (ids, (position,))
            for position in positions
            if (ids := _shares(pending, block, position, on[position], movable))
        ]
    clear = sorted(
        (len(on[position]), position)
        for position in positions
        if block.shares[position] == len(on[position]) and block.capacity[position] >= pending.memory_bytes
    )
    found = []
    for island in (None, *sorted(set(block.islands))):
        best = [one for one in clear if island is None or block.islands[one[1]] == island][: pending.count]
        if len(best) == pending.count:
            ids = tuple(sorted({replica for _, position in best for replica in on[position]}))
            found.append((ids, tuple(sorted(position for _, position in best))))
    return found


def _shares(
    pending: Ask, block: Block, position: int, on: Sequence[str], movable: Mapping[str, Placed]
) -> tuple[str, ...]:
    """Return the fewest replicas of one accelerator to move: the largest first."""
    if block.exclusive[position]:
        return ()
    lacking = pending.memory_bytes - (block.capacity[position] - block.taken[position])
    sizes = {replica_id: movable[replica_id].placement.parts[0].memory_bytes for replica_id in on}
    # One that alone frees enough: the smallest such, it is the easiest to place elsewhere.
    alone = [replica_id for replica_id in on if sizes[replica_id] >= lacking]
    if alone:
        return (min(alone, key=lambda one: (sizes[one], one)),)
    chosen = []
    for replica_id in sorted(on, key=lambda one: (-sizes[one], one)):
        chosen.append(replica_id)
        lacking -= sizes[replica_id]
        if lacking <= 0:
            return tuple(sorted(chosen))
    return ()


def _plan(
    cluster: Cluster, pending: Ask, places: Sequence[Place], leaving: Mapping[str, Placed], mix: Mix
) -> Plan | None:
    """Return the plan where all that leave ``places`` fit elsewhere while they are still there, too."""
    node_id = places[0][0]
    done: list[Move] = []
    plan = None
    # Old and new run side by side until the new one is ready, so the old one keeps its room while others are placed.
    with _Search(cluster, {}, LOAD_MOST, mix) as search:
        with _Search(cluster, {}, LOAD_MOST, mix) as filling:
            for place in places:
                filling.fill(place)
            for replica_id, placed in sorted(leaving.items(), key=lambda item: (-item[1].ask.memory_bytes, item[0])):
                # Another node is better: the same one may be short of memory or cores for both.
                to = find(msgspec.structs.replace(placed.ask, avoid=placed.ask.avoid | {node_id}), cluster, mix)
                if to is None:
                    return None
                search.take(to)
                whither = to.node_id if to.node_id != node_id else f"accelerator {_place(to)[1]} there"
                text = f"moving it to {whither} helps to open {pending.count} x {gib(pending.memory_bytes)} GiB"
                done.append(Move(replica_id, placed.placement, to, f"{text} on {node_id}"))
        for move in done:
            cluster.give_back(move.old)
        if (placement := find(pending, cluster, mix)) is not None:
            plan = Plan(tuple(done), placement)
        for move in done:
            cluster.take(move.old)
    return plan
