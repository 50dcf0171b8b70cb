"""The cluster that is kept from round to round says what one built anew would."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.control.placing import REBUILD_S, Placer
from modelyard.control.promises import Need
from modelyard.control.world import World
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import Accelerator, Node, NodeSeen, Placement
from modelyard.policy.asks import Ask
from modelyard.policy.cluster import Cluster
from modelyard.policy.packing import NoRoom

GIB = 1024**3
NODES = [
    NodeSeen(node=Node(f"n{number}", tuple(Accelerator(index, "h100", 80 * GIB, 0) for index in range(2))))
    for number in range(2)
]


def world(replicas: dict[str, Replica], now_s: float) -> World:
    by_endpoint = {replica.endpoint_id: [replica] for replica in replicas.values()}
    return World(now_s, now_s, {}, {}, by_endpoint, {}, frozenset(), {}, frozenset(), True, {})


def free(cluster: Cluster) -> list[int | None]:
    return [cluster.free_bytes(seen.node.id, index) for seen in NODES for index in range(2)]


def replica_of(name: str) -> Replica:
    return Replica(f"rep-{name}", f"ep-{name}", "ver", 0, 1, ReplicaState.STARTING, 0.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from([20, 60, 80]), st.booleans()), max_size=25))
def test_what_is_free_is_the_nodes_minus_what_is_held_and_promised(steps: list[tuple[str, int, bool]]) -> None:
    placer, recorded, promised = Placer(), {}, {}
    for number, (name, size, is_recorded) in enumerate(steps):
        placer.see(world(recorded, float(number)), NODES, {})
        replica = replica_of(name)
        if name in recorded:
            del recorded[name]  # it ended
            continue
        placer.begin(replica.endpoint_id)
        ask = Ask(memory_bytes=size * GIB, may_be_simulated=True)
        found = placer.place(replica, ask, Need(name, 0, 1.0), list)
        promised.pop(name, None)
        if isinstance(found, Placement):
            promised[name] = found
            if is_recorded:
                recorded[name] = msgspec.structs.replace(replica, placement=promised.pop(name))
        placer.end(replica.endpoint_id, [replica.id] if is_recorded else [])
        if is_recorded and isinstance(found, NoRoom):
            promised.pop(name, None)
        placer.see(world(recorded, number + 0.5), NODES, {})
        placements = [*(one.placement for one in recorded.values()), *promised.values()]
        assert free(placer._cluster) == free(Cluster.of(NODES, placements))


def test_the_cluster_is_kept_until_a_node_differs_or_it_is_old() -> None:
    placer = Placer()
    placer.see(world({}, 1.0), NODES, {})
    first = placer._cluster
    placer.see(world({}, 2.0), list(NODES), {})
    assert placer._cluster is first
    placer.see(world({}, 3.0), [NODES[0], msgspec.structs.replace(NODES[1], is_ready=False)], {})
    second = placer._cluster
    assert second is not first
    assert second.free_bytes("n1", 0) is not None
    placer.see(world({}, 3.0 + REBUILD_S), placer.nodes.values(), {})
    assert placer._cluster is not second


def test_where_strangers_use_a_gpu_what_is_free_is_measured_anew_each_time() -> None:
    placer, busy = Placer(), [msgspec.structs.replace(NODES[0], used_bytes={0: 30 * GIB}), NODES[1]]
    placer.see(world({}, 1.0), busy, {})
    assert placer._cluster.free_bytes("n0", 0) == 50 * GIB
    placer.see(world({}, 2.0), [msgspec.structs.replace(NODES[0], used_bytes={0: 10 * GIB}), NODES[1]], {})
    assert placer._cluster.free_bytes("n0", 0) == 70 * GIB
