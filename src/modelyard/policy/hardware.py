"""Kinds of accelerators: memory, bandwidth, arithmetic, and what an hour of one is taken to cost.

Figures are of the makers' data sheets, arithmetic without sparsity: NVIDIA's of the L4, A10, L40S, A100 80 GB SXM,
H100 SXM, H200 SXM, HGX B200 and T4, the Ada whitepaper for the RTX 4090, AWS's page of G5 for the A10G. Prices are
round on-demand prices of clouds, to compare kinds with; the prices of declared nodes and ``fleet.accelerator_prices``
come before them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from modelyard.domain.nodes import Node

GIB = 1024**3
CPU = "cpu"


class Kind(msgspec.Struct, frozen=True):
    """What one accelerator of a kind has. Bandwidth in GB/s; arithmetic in 10^12 operations a second, 0: it cannot."""

    name: str
    memory_gib: int
    """As it is sold; 0: a machine's own."""
    bandwidth_gb_s: float
    tops_16: float
    """With numbers of 16 bits (BF16, or FP16 where there is none)."""
    tops_fp8: float = 0.0
    tops_int8: float = 0.0
    link_gb_s: float = 0.0
    """NVLink, both directions; 0: they reach each other over PCIe."""
    price_usd: float = 0.0
    """Of an hour, where nobody says another."""
    has_bf16: bool = True
    """It multiplies numbers in BF16; without, 16 bits are FP16."""

    @property
    def memory_bytes(self) -> int:
        """Memory of one."""
        return self.memory_gib * GIB


_ALL = (
    Kind(CPU, 0, 40, 0.5, tops_int8=1),
    Kind("t4", 16, 320, 65, tops_int8=130, price_usd=0.5, has_bf16=False),
    Kind("rtx4090", 24, 1008, 165, 330, 660, price_usd=0.5),
    Kind("l4", 24, 300, 121, 242, 242, price_usd=0.8),
    Kind("a10", 24, 600, 125, tops_int8=250, price_usd=1.0),
    Kind("a10g", 24, 600, 70, tops_int8=140, price_usd=1.0),
    Kind("l40s", 48, 864, 362, 733, 733, price_usd=1.8),
    Kind("a100", 80, 2039, 312, tops_int8=624, link_gb_s=600, price_usd=2.5),
    Kind("h100", 80, 3350, 989, 1979, 1979, link_gb_s=900, price_usd=3.5),
    Kind("h200", 141, 4800, 989, 1979, 1979, link_gb_s=900, price_usd=4.5),
    # Engines have no kernels for 8-bit integers on the data-centre Blackwell (vLLM's table of quantisations).
    Kind("b200", 180, 7700, 2250, 4500, link_gb_s=1800, price_usd=6.0),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _ALL}
"""Kinds by name. The CPU is a guess at two channels of memory and eight cores; its memory is the machine's."""
COUNTS = (1, 2, 4, 8)
"""So many accelerators of a node hold one replica."""


class Offer(msgspec.Struct, frozen=True):
    """Accelerators that may be had: up to ``count_max`` of a kind on one machine; prices are of one for an hour."""

    kind: Kind
    memory_bytes: int
    count_max: int
    price_nanousd: int
    is_in_fleet: bool = False


def offers_of_table(prices: Mapping[str, int] | None = None) -> list[Offer]:
    """Return every kind of the table but the CPU; ``prices`` in nano-dollars by kind come before those of the table."""
    given = prices or {}
    return [
        Offer(kind, kind.memory_bytes, COUNTS[-1], given.get(kind.name, round(kind.price_usd * 1e9)))
        for kind in _ALL
        if kind.name != CPU
    ]


def offers_of_fleet(nodes: Iterable[Node], prices: Mapping[str, int] | None = None) -> list[Offer]:
    """Return what ``nodes`` have of the kinds in the table, each kind once: the least memory, the lowest price.

    The price of a node counts where it has one and cannot be taken away, else that of ``prices`` or of the table.
    """
    given, every = prices or {}, list(nodes)
    found: list[Offer] = []
    for name in sorted({one.kind for node in every for one in node.accelerators} & KINDS.keys()):
        having = [node for node in every if any(one.kind == name for one in node.accelerators)]
        counts = [Counter(one.kind for one in node.accelerators)[name] for node in having]
        memory = min(one.memory_bytes for node in having for one in node.accelerators if one.kind == name)
        of_nodes = [node.price_nanousd for node in having if node.price_nanousd and not node.is_spot]
        default = given.get(name, round(KINDS[name].price_usd * 1e9))
        found.append(Offer(KINDS[name], memory, max(counts), min(of_nodes, default=default), is_in_fleet=True))
    return found
