"""What holds of every placement, whatever the nodes and whatever was placed before."""

from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.clusters import GIB, state

from modelyard.domain.nodes import Accelerator, Node, NodeSeen, Placement
from modelyard.policy.asks import Ask, NoRoom, refused
from modelyard.policy.cluster import Cluster
from modelyard.policy.packing import find, place

KINDS = {"l4": 24, "a100": 80, "h100": 80}


@st.composite
def nodes(draw: st.DrawFn) -> list[NodeSeen]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(sorted(KINDS)))
        count, island = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8)]))
        node = Node(
            id=f"n{number}",
            accelerators=tuple(Accelerator(one, kind, KINDS[kind] * GIB, one // island) for one in range(count)),
            pool=draw(st.sampled_from(["default", "default", "burst"])),
            is_spot=draw(st.booleans()),
            is_cordoned=draw(st.integers(0, 5)) == 0,
            is_simulated=draw(st.booleans()),
            price_nanousd=draw(st.integers(0, 4)) * 10**9,
        )
        cached = frozenset(draw(st.sets(st.sampled_from(["x", "y"]))))
        used = draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, 30 * GIB), max_size=2))
        ready = draw(st.integers(0, 5)) > 0
        found.append(NodeSeen(node=node, cached=cached, used_bytes=used, is_ready=ready))
    return found


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    return Ask(
        memory_bytes=draw(st.sampled_from([1, 3, 8, 20, 24, 40, 60, 80])) * GIB,
        count=draw(st.sampled_from([1, 1, 1, 2, 4, 8])),
        kinds=frozenset(draw(st.sets(st.sampled_from(sorted(KINDS))))),
        nodes_max=draw(st.sampled_from([1, 2, 4])),
        digest=draw(st.sampled_from(["", "x", "y"])),
        pool=draw(st.sampled_from(["default", "burst"])),
        may_use_spot=draw(st.booleans()),
        may_be_simulated=draw(st.booleans()),
        avoid=frozenset(draw(st.sets(st.sampled_from(["n0", "n1"]), max_size=1))),
    )


class Packing(RuleBasedStateMachine):
    """Places and gives back in any order, beside a plain account of every accelerator."""

    @initialize(seen=nodes())
    def begin(self, seen: list[NodeSeen]) -> None:
        self.seen = {one.node.id: one for one in seen}
        self.cluster = Cluster.of(seen)
        self.empty = state(self.cluster)
        self.placed: list[tuple[Ask, Placement]] = []

    @rule(ask=asks())
    def place(self, ask: Ask) -> None:
        before = state(self.cluster)
        found = place(ask, self.cluster)
        assert state(self.cluster) == before, "looking changes nothing"
        if isinstance(found, NoRoom):
            assert found.reason
            assert found.largest_free_bytes < ask.memory_bytes or ask.count > 1, found
            return
        self.check(ask, found)
        self.cluster.take(found)
        self.placed.append((ask, found))

    def check(self, ask: Ask, found: Placement) -> None:
        assert found.accelerators == ask.count
        assert len(found.parts) <= ask.nodes_max
        assert len({part.node_id for part in found.parts}) == len(found.parts)
        assert len({len(part.accelerators) for part in found.parts}) == 1
        for part in found.parts:
            seen = self.seen[part.node_id]
            assert seen.is_ready
            assert not seen.node.is_cordoned
            assert len(set(part.accelerators)) == len(part.accelerators)
            for block in self.cluster.blocks_of(part.node_id):
                assert refused(ask, block.shape) == ""
            self.check_island(part.node_id, part.accelerators)

    def check_island(self, node_id: str, taken: tuple[int, ...]) -> None:
        """Accelerators of one island, where one has enough that are free."""
        if len(taken) < 2:
            return
        block = self.cluster.blocks_of(node_id)[0]
        used = {block.islands[block.indices.index(index)] for index in taken}
        free = [block.islands[at] for at, slot in enumerate(block.slots()) if slot.is_empty]
        free_of = [index for at, index in enumerate(block.indices) if block.slots()[at].is_empty]
        assert set(taken) <= set(free_of)
        # Strangers may leave an empty accelerator too little: only those with as much as the taken ones count.
        least = min(block.capacity[block.indices.index(index)] for index in taken)
        enough = [
            block.islands[at]
            for at in range(len(block.indices))
            if block.shares[at] == 0 and block.capacity[at] >= least
        ]
        if any(enough.count(island) >= len(taken) for island in set(free)):
            assert len(used) == 1

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        _, gone = self.placed.pop(data.draw(st.integers(0, len(self.placed) - 1)))
        self.cluster.give_back(gone)

    @precondition(lambda self: self.placed)
    @rule()
    def give_all_back_and_take_it_again(self) -> None:
        before = state(self.cluster)
        for _, placement in self.placed:
            self.cluster.give_back(placement)
        assert state(self.cluster) == self.empty
        for _, placement in self.placed:
            self.cluster.take(placement)
        assert state(self.cluster) == before

    @rule(ask=asks())
    def the_same_question_has_the_same_answer_in_a_cluster_built_anew(self, ask: Ask) -> None:
        anew = Cluster.of(
            [msgspec.structs.replace(one, used_bytes={}) for one in self.seen.values()], [p for _, p in self.placed]
        )
        again = Cluster.of([msgspec.structs.replace(one, used_bytes={}) for one in self.seen.values()])
        for _, placement in self.placed:
            again.take(placement)
        assert find(ask, anew) == find(ask, again)

    @invariant()
    def nothing_is_over_its_memory(self) -> None:
        if not hasattr(self, "placed"):
            return
        sums: dict[tuple[str, int], list[int]] = {}
        for _, placement in self.placed:
            for part in placement.parts:
                for index in part.accelerators:
                    sums.setdefault((part.node_id, index), []).append(part.memory_bytes)
        for (node_id, index), parts in sums.items():
            seen = self.seen[node_id]
            free = seen.node.accelerators[index].memory_bytes - seen.used_bytes.get(index, 0)
            assert sum(parts) <= free
        for _, placement in self.placed:
            if placement.is_exclusive:
                for part in placement.parts:
                    assert all(len(sums[part.node_id, index]) == 1 for index in part.accelerators)


TestPacking = Packing.TestCase
TestPacking.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@settings(max_examples=80, deadline=None)
@given(seen=nodes(), wanted=st.lists(asks(), max_size=12), last=asks())
def test_more_free_room_never_turns_a_placement_into_no_room(
    seen: list[NodeSeen], wanted: list[Ask], last: Ask
) -> None:
    cluster = Cluster.of(seen)
    placed = []
    for ask in wanted:
        if (found := find(ask, cluster)) is not None:
            cluster.take(found)
            placed.append(found)
    answers = [find(last, cluster) is not None]
    for placement in placed:
        cluster.give_back(placement)
        answers.append(find(last, cluster) is not None)
    assert all(later or not earlier for earlier, later in pairwise(answers))


@settings(max_examples=60, deadline=None)
@given(seen=nodes(), wanted=st.lists(asks(), max_size=10))
def test_scores_kept_from_earlier_decisions_answer_like_new_ones(seen: list[NodeSeen], wanted: list[Ask]) -> None:
    cluster = Cluster.of(seen)
    for ask in wanted:
        found = find(ask, cluster)
        cluster.scores.clear()
        assert find(ask, cluster) == found
        if found is not None:
            cluster.take(found)
