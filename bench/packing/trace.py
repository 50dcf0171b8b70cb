"""Nodes and tasks: a trace of the shape of Alibaba's (FGD, ATC'23), or that trace itself.

The shape is its nodes by model and number of GPUs, and its GPU tasks by share of a GPU and by number of GPUs; what is
drawn from it has no tenants, no times and no CPU. With ``openb_node_list_gpu_node.csv`` and ``openb_pod_list_*.csv`` of
alibaba/clusterdata (cluster-trace-gpu-v2023) in a folder, tasks are drawn from those.
"""

import csv
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelyard.domain.nodes import Accelerator, Node, NodeSeen
from modelyard.policy.asks import Ask
from modelyard.policy.cluster import CPU
from modelyard.policy.fragmentation import Mix, Typical, mix_of

WHOLE = 1000
"""An accelerator has a thousand parts, as the trace counts; real sizes do not matter to a packer."""

NODES = {
    ("G2", 8): 549, ("T4", 2): 387, ("P100", 2): 131, ("G3", 8): 39, ("V100M16", 4): 28, ("V100M32", 8): 21,
    ("V100M16", 1): 19, ("T4", 4): 17, ("V100M32", 4): 9, ("V100M16", 8): 8, ("P100", 1): 3, ("A10", 1): 2,
}  # fmt: skip
SHARES = {
    1000: 3911, 810: 1078, 470: 750, 320: 328, 650: 253, 230: 140, 460: 128, 590: 75, 160: 74, 550: 72, 220: 62,
    370: 47, 110: 24, 480: 19, 50: 7, 330: 7, 350: 6, 270: 4, 440: 2, 140: 1, 290: 1,
}  # fmt: skip
KINDS = {
    "": 4676, "T4": 1291, "G2": 331, "P100": 279, "V100M16|V100M32": 166, "P100|V100M16|V100M32": 107, "G3": 86,
    "G2|P100|T4|V100M16|V100M32": 66, "P100|T4|V100M16|V100M32": 36, "V100M32": 20, "A10|T4": 6,
}  # fmt: skip
"""Kinds that tasks ask for in the trace's variant where a third of them does (``gpuspec33``)."""
SEVERAL = {8: 44, 2: 16, 4: 15}


@dataclass(frozen=True, slots=True)
class Trace:
    """Nodes, and kinds of tasks with how many there are of each."""

    name: str
    nodes: list[NodeSeen]
    tasks: dict[Typical, int]

    @property
    def capacity(self) -> int:
        """GPUs of all nodes."""
        return sum(one.kind != CPU for seen in self.nodes for one in seen.node.accelerators)

    @property
    def has_cores(self) -> bool:
        """Whether nodes' cores are counted."""
        return any(seen.node.cores_milli for seen in self.nodes)

    @property
    def mix(self) -> Mix:
        """What is typical: the tasks themselves, as the paper has it; of those without a GPU nothing of one is lost."""
        return mix_of({task: number for task, number in self.tasks.items() if gpus(task.kinds, 1, 1)})

    def asks(self, chance: random.Random, *, demand: float) -> Iterator[Ask]:
        """Yield tasks, drawn with repetition, until they ask for ``demand`` times the capacity."""
        kinds, numbers = list(self.tasks), list(self.tasks.values())
        asked = 0.0
        while asked < demand * self.capacity:
            task = chance.choices(kinds, numbers)[0]
            asked += gpus(task.kinds, task.count, task.memory_bytes)
            yield Ask(memory_bytes=task.memory_bytes, count=task.count, kinds=task.kinds, cores_milli=task.cores_milli)


def gpus(kinds: frozenset[str], count: int, share: int) -> float:
    """Return the GPUs that a task asks for: none where it runs on a processor."""
    return 0.0 if kinds == {CPU} else count * share / WHOLE


def node(number: int, kind: str, count: int) -> NodeSeen:
    """Return one node of the trace."""
    accelerators = tuple(Accelerator(index, kind.lower(), WHOLE) for index in range(count))
    return NodeSeen(node=Node(f"n-{number:04}", accelerators))


def shaped(*, has_kinds: bool, seed: int = 1) -> Trace:
    """Return a trace of the shape of Alibaba's; with ``has_kinds`` a third of the tasks runs on some kinds only."""
    rows = [key for key, number in NODES.items() for _ in range(number)]
    random.Random(seed).shuffle(rows)
    kinds = KINDS if has_kinds else {"": 1}
    tasks = {
        Typical(share, 1, _kinds(names)): number * times
        for share, number in SHARES.items()
        for names, times in kinds.items()
    }
    tasks |= {Typical(WHOLE, count): number * sum(kinds.values()) for count, number in SEVERAL.items()}
    name = "a third asks for kinds" if has_kinds else "any kind will do"
    return Trace(name, [node(number, *row) for number, row in enumerate(rows)], tasks)


def _kinds(names: str) -> frozenset[str]:
    return frozenset(kind.lower() for kind in names.split("|") if kind)


def alibaba(folder: Path) -> Trace:
    """Return Alibaba's own trace from its CSV files."""
    with (folder / "openb_node_list_gpu_node.csv").open() as file:
        nodes = [node(at, row["model"], int(row["gpu"])) for at, row in enumerate(csv.DictReader(file))]
    tasks: Counter[Typical] = Counter()
    with (folder / "openb_pod_list_default.csv").open() as file:
        for row in csv.DictReader(file):
            if (count := int(row["num_gpu"])) > 0:
                kinds = _kinds(row.get("gpu_spec") or "")
                tasks[Typical(int(row["gpu_milli"]) if count == 1 else WHOLE, count, kinds)] += 1
    return Trace("alibaba", nodes, dict(tasks))
