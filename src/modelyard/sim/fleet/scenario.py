"""What a simulated fleet is: its nodes, models, traffic, faults, and which measures are taken to need fewer GPUs.

Every number that is not measured somewhere says so. A scenario and a seed give the same outcome, always.
"""

import msgspec

from modelyard.domain.endpoints import Autoscale
from modelyard.policy import sleepers
from modelyard.policy.hardware import KINDS

GB = 1_000_000_000
GIB = 1024**3
DAY_S = 86_400


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one kind. ``share_spot`` of them may be taken away."""

    kind: str
    count: int
    accelerators: int = 8
    """Of one NVLink island, where the kind has NVLink."""
    share_spot: float = 0.0
    price_usd: float | None = None
    """Of one accelerator for an hour, not spot; None: that of ``policy/hardware.py``."""

    @property
    def usd_per_hour(self) -> float:
        """What an accelerator costs."""
        return KINDS[self.kind].price_usd if self.price_usd is None else self.price_usd


NODES = (
    Nodes(kind="h100", count=350, share_spot=0.2),
    Nodes(kind="a100", count=250, share_spot=0.2),
    Nodes(kind="l40s", count=150, share_spot=0.2),
    Nodes(kind="l4", count=400, accelerators=4, share_spot=0.2),
)
"""7,600 accelerators, within the source's 5 to 10 thousand (its H100, A100, L4; the L40S is ours)."""


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """How often things break. Rates are of one node for a day."""

    node_per_day: float = 0.0038
    """Llama 3 405B's training stopped 419 times in 54 days on 2,048 nodes of 8 GPUs ("The Llama 3 Herd of Models")."""
    repair_s: float = 4 * 3600.0
    """An assumption."""
    engine_per_day: float = 0.03
    """Crashes of one replica: an assumption, once a month."""
    reclaim_per_day: float = 0.1
    """Spot nodes taken back: an assumption, between the clouds' 5 and 20 % a month and their worst days."""
    notice_s: float = 120.0
    """Before a spot node goes: AWS's two minutes."""
    away_s: float = 3600.0
    """Until another spot node comes in its place: an assumption."""


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second by where weights are, and what a start takes besides.

    ``disk`` and ``memory`` are slopes through ServerlessLLM's loader on an H100 (8B and 32B, from NVMe and from host
    memory; ``load_times`` in ``sim/rates.py``).
    """

    remote: float = 1.25 * GB
    """Of one fetch from the store, 10 Gbit/s: an assumption."""
    disk: float = 19.5 * GB
    memory: float = sleepers.MEMORY_BYTES_PER_S
    engine_s: float = 12.0
    """From a process to an engine that could take weights (imports, context, graphs from a cache): an assumption."""
    wake_s: float = sleepers.WAKE_S
    """An engine that sleeps beside its weights in host memory skips ``engine_s`` and takes this: an assumption."""
    sleep_bytes: int = 600 * GB
    """Host memory of a node for weights of engines that sleep, beside ``memory_bytes``: an assumption (a DGX H100 has
    2 TB)."""
    adapter_s: float = 0.2
    """A LoRA adapter onto a running engine: an assumption; Alibaba's measured ones are of this size."""
    disk_bytes: int = 4_000 * GB
    """Weight cache of a node."""
    memory_bytes: int = 600 * GB
    """Of it in host memory."""


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to need fewer GPUs; the first of all has none of it."""

    scale_to_zero: bool = True
    pooling: bool = True
    """Adapters of one base are guests on its replicas, instead of a merged copy of the base each."""
    packing: bool = True
    """Small models share an accelerator by memory."""
    quantised: bool = True
    """The precision and hardware that ``policy/fit.py`` recommends, where the model's purpose allows fewer bits."""
    continuous: bool = True
    """Continuous batching; else batches that start and end together."""
    static_batch: int = 8
    """Requests of such a batch: the source's own example."""
    backfill: bool = True
    """Batches run on what is idle, and on spot; else on accelerators of their own."""
    prewarm: bool = True
    sleeping: bool = False
    """Engines that nobody needs for seconds give their accelerators back, and wake there (``policy/sleepers.py``)."""
    consolidating: bool = False
    """Replicas move together, so that accelerators become empty (``policy/defragment.py``); and where one has no room
    for want of a place that is whole."""
    warm_pools: bool = False
    """Replicas of stock encoders wait for whoever needs one (``policy/warm_pool.py``)."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for what. Shares are of endpoints."""

    endpoints: int = 10_000
    rate: float = 6_000.0
    """Mean requests/s of all together, over the trace's fourteen days."""
    share_pooled: float = 0.7372
    """Adapters of shared bases (``scheduling.md`` B4)."""
    bases: int = 40
    share_small: float = 0.12
    """Encoders and classifiers."""
    share_exact: float = 0.1
    """Models that must not be quantised (mathematics, exact code)."""
    spread: float = 1.0
    """Sigma of the lognormal factor on each endpoint's rate."""
    burst_most: float = 6.0
    """Largest CV of the times between requests: what lies above is of windows with a handful of them."""
    batch_share: float = 0.29
    """Requests of batches for each online one of an LLM: the source's 500 million a day beside 20,000/s."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``start_day`` counts from the trace's first; days before it teach the forecast."""

    name: str = "fleet"
    nodes: tuple[Nodes, ...] = NODES
    traffic: Traffic = Traffic()
    measures: Measures = Measures()
    rules: Autoscale = Autoscale(batch_scales=False)
    """As shipped, but that lines of batches run on what is idle; with ``batch_scales`` they count as demand."""
    faults: Faults = Faults()
    loading: Loading = Loading()
    idle_s: float = 300.0
    asleep_s: float = 3_600.0
    """Idle time of engines that sleep meanwhile (``Measures.sleeping``): what they hold is the memory of a machine."""
    replicas_most: int = 64
    start_day: float = 7.0
    hours: float = 24.0
    tick_s: float = 2.0
    warmup_s: float = 1_800.0
    """Time before counting begins, in which the fleet finds its size."""
    gateways: int = 4
    queue_most: int = 256
    """Places in an endpoint's line at each gateway (``gateway.queue_max``)."""
    queue_wait_s: float = 30.0
    """``gateway.queue_wait_s``."""
    load_wait_s: float = 600.0
    """``gateway.load_wait_s``."""
