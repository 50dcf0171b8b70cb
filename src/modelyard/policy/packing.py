"""Where a replica runs: which accelerators of which nodes.

Small models share an accelerator by memory; one that needs several gets them
whole: in one island first, then in one node, then over several nodes where
its engine can do that. Among the places that fit, the one that leaves the
least that typical asks could not use wins (``fragmentation.py``), and less so
nodes that have the weights, cost less, or are spot where the ask may use it.
The same cluster and ask always give the same place.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import msgspec

from modelyard.domain.nodes import Part, Placement
from modelyard.policy.asks import STANDARD, Ask, NoRoom, Weights, gib, refused
from modelyard.policy.cluster import Block, BlockClass, Cluster, Slot, quantum
from modelyard.policy.fragmentation import STANDARD_MIX, Fragmentation, Mix

__all__ = ["Ask", "NoRoom", "Weights", "find", "no_room", "place"]


STEP = 0.06
"""Fragmentation is compared in steps of so much of an accelerator. Of two places that differ by less the first node is
better than the last decimal: what is placed comes together on the first nodes, and the others keep cores and
accelerators for what needs many of both (``bench.packing``: 5 % left unused instead of 7.5 %)."""


class _Found(NamedTuple):
    """A place in a block: what it costs, how much is free there, and which accelerators by position."""

    score: float
    free: int
    positions: tuple[int, ...]


_Rank = tuple[float, int]
"""Score, and the block: of equals the first."""


def place(ask: Ask, cluster: Cluster, mix: Mix = STANDARD_MIX, weights: Weights = STANDARD) -> Placement | NoRoom:
    """Return the best place for ``ask``, without taking it."""
    return find(ask, cluster, mix, weights) or no_room(ask, cluster)


def find(ask: Ask, cluster: Cluster, mix: Mix = STANDARD_MIX, weights: Weights = STANDARD) -> Placement | None:
    """Return the best place for ``ask``, None where nothing fits; ``place`` says why."""
    book = _Book(ask, cluster, mix, weights)
    for nodes in range(1, min(ask.nodes_max, ask.count) + 1):
        if ask.count % nodes == 0 and (blocks := book.best(ask.count // nodes, nodes)):
            return Placement(tuple(book.part(block, ask.count // nodes) for block in blocks))
    return None


class _Book:
    """Scores of the cluster's classes for one ask; what holds for the next one of its kind stays in the cluster."""

    __slots__ = ("_ask", "_cluster", "_fragmentation", "_nodes", "_weights")

    def __init__(self, ask: Ask, cluster: Cluster, mix: Mix, weights: Weights) -> None:
        self._ask = ask
        self._cluster = cluster
        self._weights = weights
        self._fragmentation = _fragmentation(cluster, mix)
        self._nodes = self._scores_of_nodes()

    def best(self, count: int, nodes: int) -> list[Block]:
        """Return the best blocks for ``count`` accelerators on each of ``nodes`` nodes, or none."""
        ranks = [self._first(count)] if nodes == 1 else self._several(count, nodes)
        return [self._cluster.blocks[rank[1]] for rank in ranks if rank is not None]

    def part(self, block: Block, count: int) -> Part:
        """Return the part of ``block`` that is best for ``count`` accelerators."""
        klass = block.klass
        assert klass is not None, "open blocks have a class"
        found = self._pick(klass, block.slots(), count)
        assert found is not None, "a block has what its class has"
        indices = tuple(sorted(block.indices[position] for position in found.positions))
        return Part(block.node.id, indices, self._ask.memory_bytes, self._ask.cores_milli)

    def _first(self, count: int) -> _Rank | None:
        """Return the best block: one of each class stands for all, but for those that their node tells apart."""
        scores = self._scores(count)
        best: _Rank | None = None
        for klass, members in self._cluster.classes.items():
            found = scores[klass] if klass in scores else self._look(klass, count, scores)
            if found is None or (best is not None and found.score > best[0]):
                continue
            if plain := members - self._nodes.keys() if self._nodes else members:
                rank = (found.score, min(plain))
                best = rank if best is None else min(best, rank)
        for order, extra in self._nodes.items():
            klass_of_it = self._cluster.blocks[order].klass
            assert klass_of_it is not None, "open blocks have a class"
            if (found := self._look(klass_of_it, count, scores)) is not None:
                rank = (found.score + extra, order)
                best = rank if best is None else min(best, rank)
        return best

    def _several(self, count: int, nodes: int) -> list[_Rank]:
        """Return the best blocks of one kind on different nodes, in the order of the nodes."""
        scores = self._scores(count)
        alike: dict[tuple[str, int], list[_Rank]] = {}
        for klass, members in self._cluster.classes.items():
            if (found := self._look(klass, count, scores)) is not None:
                ranks = alike.setdefault((klass.shape.kind, klass.shape.memory_bytes), [])
                ranks += [(found.score + self._nodes.get(order, 0.0), order) for order in members]
        sets = [sorted(ranks)[:nodes] for _, ranks in sorted(alike.items()) if len(ranks) >= nodes]
        best = min(sets, key=lambda ranks: sum(rank[0] for rank in ranks), default=[])
        return sorted(best, key=lambda rank: rank[1])

    def _scores_of_nodes(self) -> dict[int, float]:
        """Return what counts for single blocks because of their node, not of their state."""
        cluster, ask = self._cluster, self._ask
        extra: dict[int, float] = {}
        for nodes, score in (
            (cluster.cached.get(ask.digest, ()) if ask.digest else (), -self._weights.cached),
            (ask.avoid, self._weights.avoid),
        ):
            for block in (block for node_id in nodes for block in cluster.blocks_of(node_id) if block.is_open):
                extra[block.order] = extra.get(block.order, 0.0) + score
        return extra

    def _scores(self, count: int) -> dict[BlockClass, _Found | None]:
        ask = self._ask
        key = (ask.memory_bytes, count, ask.count > 1, ask.kinds, ask.pool, ask.may_use_spot, ask.may_be_simulated)
        found = self._cluster.scores.setdefault((*key, ask.cores_milli, ask.is_beside, self._weights), {})
        return cast("dict[BlockClass, _Found | None]", found)

    def _look(self, klass: BlockClass, count: int, scores: dict[BlockClass, _Found | None]) -> _Found | None:
        """Return the best place in a block of ``klass``, None where it has none."""
        if klass not in scores:
            is_allowed = not refused(self._ask, klass.shape) and self._ask.cores_milli <= klass.cores
            scores[klass] = self._pick(klass, klass.slots, count) if is_allowed else None
        return scores[klass]

    def _pick(self, klass: BlockClass, slots: tuple[Slot, ...], count: int) -> _Found | None:
        fits = [position for position, slot in enumerate(slots) if slot.free >= self._ask.memory_bytes]
        if self._ask.count == 1:
            return self._pick_share(klass, slots, fits)
        return self._pick_whole(klass, slots, [position for position in fits if slots[position].is_empty], count)

    def _pick_share(self, klass: BlockClass, slots: tuple[Slot, ...], fits: list[int]) -> _Found | None:
        """Choose the accelerator whose rest is of most use."""
        best: _Found | None = None
        tried = set()
        before = [quantum(slot, klass.shape.memory_bytes) for slot in slots]
        for position in fits:
            slot = slots[position]
            if (slot.free, slot.is_empty) in tried or (slot.is_empty and self._ask.is_beside):
                continue
            tried.add((slot.free, slot.is_empty))
            score = self._cost(klass, slots, before, {position: slot.free - self._ask.memory_bytes})
            score += self._weights.opened * slot.is_empty
            found = _Found(score, slot.free, (position,))
            best = found if best is None else min(best, found)
        return best

    def _pick_whole(self, klass: BlockClass, slots: tuple[Slot, ...], empty: list[int], count: int) -> _Found | None:
        """Choose whole accelerators of as few islands as there can be; of those that have enough, the smallest."""
        if len(empty) < count:
            return None
        islands: dict[int, list[int]] = {}
        for position in empty:
            islands.setdefault(slots[position].island, []).append(position)
        enough = [island for island, positions in islands.items() if len(positions) >= count]
        if enough:
            chosen = [min(enough, key=lambda island: (len(islands[island]), island))]
        else:
            chosen = sorted(islands, key=lambda island: (-len(islands[island]), island))
        positions = [position for island in chosen for position in islands[island]][:count]
        used = len({slots[position].island for position in positions})
        before = [quantum(slot, klass.shape.memory_bytes) for slot in slots]
        score = self._cost(klass, slots, before, dict.fromkeys(positions, 0)) + self._weights.islands * (used - 1)
        return _Found(score, sum(slot.free for slot in slots), tuple(positions))

    def _cost(self, klass: BlockClass, slots: tuple[Slot, ...], before: list[int], left: dict[int, int]) -> float:
        """Return what it costs to leave ``left`` bytes free of some accelerators."""
        shape, cores = klass.shape, klass.cores
        memory = shape.memory_bytes
        after = list(before)
        share = 0.0
        for position, free in left.items():
            after[position] = quantum(Slot(0, free, is_empty=False), memory)
            share += (slots[position].free - free) / memory
        of = self._fragmentation.of
        rest = cores - self._ask.cores_milli
        lost = of(shape.kind, memory, tuple(sorted(after)), rest) - of(shape.kind, memory, tuple(sorted(before)), cores)
        if self._ask.cores_milli:
            lost += sum(of(*other, rest) - of(*other, cores) for other in klass.beside)
        lost = round(lost / STEP) * STEP
        price = self._weights.price * share * shape.price_nanousd / max(self._cluster.price_max, 1)
        spot = self._weights.spot if shape.is_spot else 0.0
        return round(self._weights.fragmentation * lost + price - spot, 9)


def _fragmentation(cluster: Cluster, mix: Mix) -> Fragmentation:
    """Return the cluster's fragmentation under ``mix``, with all that was worked out before."""
    # By identity first: a round has one mix, and comparing a long one costs more than a decision.
    found = cluster.scores.get("fragmentation")
    if not isinstance(found, Fragmentation) or (found.mix is not mix and found.mix != mix):
        cluster.scores.clear()
        found = cluster.scores["fragmentation"] = Fragmentation(mix)
    return found


def no_room(ask: Ask, cluster: Cluster) -> NoRoom:
    """Say why nothing fits ``ask``, and what would help."""
    helps = tuple(_helps(ask, cluster))
    largest = (-1, 0)
    most = (-1, 0)
    for klass, members in cluster.classes.items():
        if not refused(ask, klass.shape):
            order = -min(members)  # of equals, the first node
            largest = max(largest, (max(slot.free for slot in klass.slots), order))
            most = max(most, (_whole(ask, klass.slots), order))
    free, order = largest
    if free < 0:
        return NoRoom(f"needs {_wanted(ask)}; no node that it may be on has that", ask.memory_bytes, helps=helps)
    node_id = cluster.blocks[-order].node.id
    if ask.count == 1:
        reason = f"needs {gib(ask.memory_bytes)} GiB on one node; largest free {gib(free)} on {node_id}"
        return NoRoom(reason, ask.memory_bytes, free, node_id, helps)
    number, order = most
    said = f"the most that are free are {number}, on {cluster.blocks[-order].node.id}" if number else "none is free"
    return NoRoom(f"needs {_wanted(ask)}; {said}", ask.memory_bytes, free, node_id, helps)


def _wanted(ask: Ask) -> str:
    kinds = " or ".join(sorted(ask.kinds)) or ("accelerator" if ask.count == 1 else "accelerators")
    pool = "" if ask.pool == "default" else f" in pool {ask.pool}"
    pool += f" and {ask.cores_milli / 1000:g} cores" if ask.cores_milli else ""
    if ask.count == 1:
        return f"{gib(ask.memory_bytes)} GiB of one {kinds}{pool}"
    nodes = "one node" if ask.nodes_max == 1 else f"at most {ask.nodes_max} nodes"
    return f"{ask.count} whole {kinds} with {gib(ask.memory_bytes)} GiB each on {nodes}{pool}"


def _whole(ask: Ask, slots: tuple[Slot, ...]) -> int:
    return sum(slot.is_empty and slot.free >= ask.memory_bytes for slot in slots)


def _helps(ask: Ask, cluster: Cluster) -> Iterator[str]:
    """Yield what would make room by another setting or at another node."""
    for block in (block for node_id in cluster.closed for block in cluster.blocks_of(node_id)):
        if not refused(ask, block.shape) and _holds(ask, block):
            yield f"{block.node.id} has room but takes nothing: {cluster.closed[block.node.id]}"
            break
    if found := _elsewhere(ask, cluster, may_use_spot=True):
        yield f"spot node {found} has room, for batches and for replicas beyond the first and the least number"
    for pool in sorted({block.shape.pool for block in cluster.blocks} - {ask.pool}):
        if found := _elsewhere(ask, cluster, pool=pool):
            yield f"pool {pool} has room on {found}"
            break
    for kind in sorted({block.shape.kind for block in cluster.blocks} - ask.kinds) if ask.kinds else ():
        if found := _elsewhere(ask, cluster, kinds=frozenset({kind})):
            yield f"{kind} has room on {found}"
            break
    if ask.nodes_max < ask.count and (found := _elsewhere(ask, cluster, nodes_max=ask.count)):
        yield f"{found} together have room, if it may be divided over nodes"


def _holds(ask: Ask, block: Block) -> bool:
    if ask.count > 1:
        return _whole(ask, block.slots()) >= ask.count
    return any(slot.free >= ask.memory_bytes for slot in block.slots())


def _elsewhere(ask: Ask, cluster: Cluster, **changes: object) -> str:
    placement = find(msgspec.structs.replace(ask, **changes), cluster)
    return " and ".join(part.node_id for part in placement.parts) if placement else ""
