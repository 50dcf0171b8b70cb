"""The shape of Alibaba's trace with its cores: nodes and pods by what they have and ask for.

Counts of ``openb_node_list_gpu_node.csv`` and ``openb_pod_list_default.csv`` of alibaba/clusterdata,
cluster-trace-gpu-v2023 (Weng et al., "Beware of Fragmentation", USENIX ATC'23); no row of it is kept. A trace drawn
from them has no tenants, no times and no memory, of which the nodes have more than is asked for.
"""

import random

from bench.packing.trace import WHOLE, Trace
from modelyard.domain.nodes import Accelerator, Node, NodeSeen
from modelyard.policy.asks import Ask
from modelyard.policy.cluster import CPU, Block
from modelyard.policy.fragmentation import Typical

PUBLISHED = {"random": 13.56, "GPU packing": 8.20, "best fit": 7.12, "modelyard (FGD)": 4.75}
"""Percent of the GPUs that nobody has once 102 % of them were asked for: means of ten seeds, as the paper's authors
publish them (hkust-adsl/kubernetes-scheduler-simulator, ``analysis_allo_discrete.csv``, workload ``default``)."""
NODES = {
    ("G2", 8, 96000): 549, ("T4", 2, 104000): 387, ("P100", 2, 16000): 107, ("G3", 8, 128000): 39,
    ("V100M16", 4, 32000): 28, ("P100", 2, 64000): 22, ("V100M32", 8, 96000): 21, ("V100M16", 1, 8000): 19,
    ("T4", 4, 96000): 17, ("V100M32", 4, 48000): 9, ("V100M16", 8, 64000): 7, ("P100", 1, 8000): 3,
    ("P100", 2, 8000): 2, ("A10", 1, 128000): 2, ("V100M16", 8, 82000): 1,
}  # fmt: skip
"""By model, GPUs and thousandths of cores."""
PODS = {
    (3152, 1, 810): 1047, (11300, 1, 1000): 874, (11400, 1, 1000): 599, (3152, 1, 1000): 470,
    (11908, 1, 470): 388, (12500, 0, 0): 366, (8000, 1, 470): 360, (12000, 1, 1000): 326, (32000, 0, 0): 290,
    (18708, 1, 1000): 255, (11908, 1, 650): 237, (4000, 1, 320): 232, (9810, 1, 1000): 195, (8000, 0, 0): 185,
    (8000, 1, 1000): 164, (4000, 1, 1000): 159, (15700, 1, 1000): 158, (11908, 1, 1000): 153,
    (16000, 1, 1000): 150, (4000, 1, 230): 122, (6000, 1, 460): 120, (15400, 0, 0): 120, (16500, 0, 0): 95,
    (14200, 1, 1000): 93, (24200, 1, 1000): 84, (3152, 1, 590): 75, (4152, 1, 550): 72, (8000, 1, 320): 72,
    (11900, 1, 1000): 55, (4000, 1, 160): 54, (4152, 1, 370): 45, (4000, 1, 220): 43, (8200, 1, 1000): 41,
    (15200, 1, 1000): 36, (4152, 1, 810): 31, (16400, 1, 1000): 29, (1000, 1, 320): 22, (6000, 1, 160): 20,
    (8000, 1, 220): 19, (4000, 1, 110): 18, (4000, 1, 480): 18, (8000, 1, 230): 18, (64200, 8, 1000): 18,
    (88000, 8, 1000): 18, (1000, 1, 1000): 15, (16000, 0, 0): 14, (8000, 1, 650): 12, (7000, 1, 1000): 11,
    (11400, 0, 0): 11, (15400, 1, 1000): 9, (32200, 4, 1000): 9, (2000, 1, 1000): 8, (6000, 1, 1000): 8,
    (14900, 1, 1000): 8, (4000, 1, 330): 7, (16200, 2, 1000): 7, (4000, 1, 350): 6, (9400, 1, 1000): 6,
    (12000, 1, 460): 6, (4152, 1, 270): 4, (6000, 1, 50): 4, (6000, 1, 110): 4, (12000, 0, 0): 4,
    (4000, 1, 50): 3, (6000, 2, 1000): 3, (30200, 2, 1000): 3, (32000, 4, 1000): 3, (60200, 4, 1000): 3,
    (64000, 8, 1000): 3, (120000, 8, 1000): 3, (1000, 1, 650): 2, (2000, 1, 370): 2, (4000, 1, 470): 2,
    (4000, 1, 650): 2, (6000, 1, 320): 2, (8000, 1, 110): 2, (8000, 1, 440): 2, (8000, 1, 460): 2,
    (17400, 2, 1000): 2, (20000, 0, 0): 2, (120200, 8, 1000): 2, (1000, 1, 140): 1, (1000, 1, 290): 1,
    (5000, 1, 1000): 1, (8000, 1, 480): 1, (8710, 1, 1000): 1, (10000, 0, 0): 1, (11800, 1, 1000): 1,
    (14000, 1, 1000): 1, (14000, 2, 1000): 1, (15900, 1, 1000): 1,
}  # fmt: skip
"""By thousandths of cores, GPUs, and thousandths of a GPU."""


def node(number: int, kind: str, count: int, cores_milli: int) -> NodeSeen:
    """Return one node; whoever asks for no GPU is on its processor."""
    gpus = [Accelerator(index, kind.lower(), WHOLE) for index in range(count)]
    processor = Accelerator(count, CPU, cores_milli, island=1)
    return NodeSeen(node=Node(f"n-{number:04}", (*gpus, processor), cores_milli=cores_milli))


def with_cores(*, seed: int = 1) -> Trace:
    """Return a trace of this shape."""
    rows = [key for key, number in NODES.items() for _ in range(number)]
    random.Random(seed).shuffle(rows)
    gpus = frozenset(kind.lower() for kind, _, _ in NODES)
    tasks: dict[Typical, int] = {}
    for (cores_milli, count, milli), number in PODS.items():
        if count:
            task = Typical(milli, count, gpus, cores_milli=cores_milli)
        else:
            task = Typical(1, 1, frozenset({CPU}), cores_milli=cores_milli)
        tasks[task] = tasks.get(task, 0) + number
    return Trace("with cores", [node(at, *row) for at, row in enumerate(rows)], tasks)


def best_fit(ask: Ask, block: Block, positions: tuple[int, ...]) -> tuple[float, ...]:
    """The node with the least left of GPUs and cores, each as a share of what the largest node has."""
    gpus = sum(slot.free for slot in block.slots()) / WHOLE / 8 if block.shape.kind != CPU else 0.0
    return (gpus + block.cores.free / 128_000, block.slot(positions[0]).free)
