"""Endpoints, their releases and scaling settings (``DESIGN.md`` section 2)."""

from enum import StrEnum

import msgspec

from modelyard.domain.rollouts import Rollout


class EndpointStatus(StrEnum):
    """The source's ``endpoints.status``."""

    PROVISIONING = "provisioning"
    RUNNING = "running"
    SCALING = "scaling"
    FAILED = "failed"
    STOPPED = "stopped"


class Stage(StrEnum):
    """How far a deployment or a cold start is; always in this order."""

    QUEUED = "queued"
    PLACING = "placing"
    DOWNLOADING = "downloading"
    VERIFYING = "verifying"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"


class Progress(msgspec.Struct, frozen=True):
    """The stage with its numbers, and why it is not further.

    ``percent`` is of the whole way to ready, None when unknown; ``eta_s`` is
    seconds until ready, from measured load times.
    """

    stage: Stage
    percent: int | None = None
    eta_s: float | None = None
    reason: str = ""
    bytes_per_s: float | None = None
    """Pace of an artifact on its way."""


class Scaling(msgspec.Struct, frozen=True):
    """Bounds and pace of an endpoint's replica count."""

    min_replicas: int = 1
    max_replicas: int = 1
    scale_to_zero: bool = False
    idle_s: float = 300.0
    """Seconds without a request before the endpoint goes to zero."""
    metric: str = "queue_depth"
    target_value: float = 70.0

    @property
    def floor(self) -> int:
        """The fewest replicas to keep: none where scale to zero is on."""
        return 0 if self.scale_to_zero else self.min_replicas


class Timeouts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds an endpoint's engine gets; None is the gateway's setting of the same name."""

    connect_s: float | None = None
    first_token_s: float | None = None
    token_s: float | None = None
    total_s: float | None = None


class Sticky(StrEnum):
    """What keeps requests together on one release while it has room and, where the load allows it, on one replica."""

    NONE = "none"
    KEY = "key"
    USER = "user"
    """``user``, ``safety_identifier`` or ``prompt_cache_key`` of the request, else its key."""


class Serving(msgspec.Struct, frozen=True, omit_defaults=True):
    """How gateways treat the requests of an endpoint.

    ``coalesce_ms``: tokens of a stream that come within this time go out in one write (0: each as it comes; the first
    token never waits).
    """

    timeouts: Timeouts = Timeouts()
    coalesce_ms: int = 0
    sticky: Sticky = Sticky.NONE
    fallback_after_s: float = 0.0
    """How long a request waits for a release with weight before a fallback may have it."""


class Tier(StrEnum):
    """How close an endpoint is to answering (the source's tiers 1 to 3)."""

    HOT = "hot"
    """A replica serves, or is kept ready for whoever comes."""
    WARM = "warm"
    """Loaded without requests, or asleep beside its weights: there in moments."""
    COLD = "cold"
    """Nothing runs; weights are on a disk or in a store."""


class IdleTime(StrEnum):
    """What says how long an endpoint stays awake without a request."""

    FIXED = "fixed"
    """The seconds that its owner set."""
    LEARNED = "learned"
    """Its own gaps between requests, once there are enough of them (``policy/idleness.py``)."""
    PRICED = "priced"
    """Its own gaps too: as long as another minute awake costs less than the cold starts that it avoids."""


class Autoscale(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an endpoint's size is decided, beyond its bounds.

    Defaults are the source's "Autoscaling Flow" but for four that a search found (ADR 0042; ``SOURCE`` has them as the
    source does). Defaults are not stored: whoever changes one keeps endpoints that are there with a migration (0016).

    Shares are percent. *Gates* (``up_…``, ``down_…``) say when a size changes: up when any is open, down when all are
    calm. ``load_share_…`` say how large it becomes. ``policy/scaling.py`` reads most of it, ``policy/forecast.py`` what
    begins with ``prewarm``, ``policy/warm_pool.py`` what begins with ``burst``.
    """

    tier: Tier | None = None
    """Pinned by its owner; None: as its traffic has it."""
    node_pool: str = "default"
    """Nodes that its replicas run on."""
    check_s: float = 30.0
    """Gates are asked this often; what cannot wait (the fast path) is not held up by it."""

    up_queue: int = 100
    up_queue_s: float = 30.0
    up_utilization: float = 85.0
    up_utilization_s: float = 120.0
    up_latency_factor: float = 2.0
    """The latency gate opens at so many times the target."""
    up_latency_s: float = 60.0
    up_kv: float = 90.0
    up_kv_s: float = 120.0

    down_queue_s: float = 300.0
    down_utilization: float = 60.0
    down_utilization_s: float = 180.0

    target_ttft_s: float = 5.0
    """Seconds to the first token that are promised: a longer predicted wait opens the fast path at once."""
    target_latency_s: float | None = None
    """Seconds to the end of an answer; set, the latency gate watches these instead of the first token."""

    load_share_up: float = 75.0
    """How busy replicas are meant to be after growing."""
    load_share_down: float = 70.0
    """How busy replicas are meant to be after shrinking."""
    backlog_s: float = 30.0
    """Time in which what waits now is to be served."""

    idle: IdleTime = IdleTime.PRICED
    prewarm: bool = True
    """Start before requests are expected, once a week or a day has shown when."""
    prewarm_s: float = 300.0
    """How long before; the time of a load comes on top."""
    prewarm_budget: float = 2.0
    """GPU-hours a day that may be spent on waiting for expected requests."""
    prewarm_cold_cost_s: float = 1800.0
    """What one avoided cold start is worth, in seconds of one accelerator."""

    batch_scales: bool = True
    """Lines of batches are demand as requests are. Off, they run on what is idle, and one replica stays for them."""

    nap_s: float = 10.0
    """Seconds without a need after which an engine that can be told to sleep gives its accelerators back; 0: never."""

    burst_pool: str = ""
    """Node pool that may be used when all others are full and callers would wait too long; "": none."""


SOURCE = Autoscale(
    down_utilization=30.0,
    down_utilization_s=600.0,
    load_share_down=60.0,
    idle=IdleTime.FIXED,
    prewarm_cold_cost_s=900.0,
)
"""The source's "Autoscaling Flow" to the number, as it was shipped before a search found better ones (ADR 0042)."""


class Release(msgspec.Struct, frozen=True):
    """One version inside an endpoint with its share of traffic; weights of an endpoint sum to 100.

    ``shadow`` is the percent of requests that are copied to it without being answered from it; such a release has
    weight 0. So has one with a ``fallback``: its turn (1 first) where those with weight have no room, or none serves.
    """

    version_id: str
    weight: int = 100
    shadow: int = 0
    fallback: int = 0


class Endpoint(msgspec.Struct, frozen=True):
    """A callable name. ``is_shared`` lets every tenant call it, else only its owner.

    ``is_deleted`` endpoints are drained and then forgotten. ``failure`` is why
    it cannot start, in our words.
    """

    id: str
    tenant_id: str
    name: str
    releases: tuple[Release, ...]
    scaling: Scaling
    created_at: int
    is_shared: bool = False
    is_deleted: bool = False
    status: EndpointStatus = EndpointStatus.PROVISIONING
    progress: Progress = Progress(Stage.QUEUED)
    failure: str = ""
    serving: Serving = Serving()
    autoscale: Autoscale = Autoscale()
    rollout: Rollout | None = None
    """A change of releases that is under way or just ended; None: there is nothing to go back to."""
    host_id: str = ""
    """The endpoint on whose replicas its versions are guests (adapters of its base, or small models); "": it has
    replicas of its own."""
    pool: str = ""
    """A warm pool that keeps replicas of a base for others to take; such an endpoint answers nobody."""
