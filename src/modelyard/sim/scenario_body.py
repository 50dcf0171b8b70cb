"""What a scenario's file may say: tables and keys with their bounds.

What a deployment or the configuration has as well is called as it is there, with the same defaults, so that what was
tried can be copied: ``[hardware]``, ``[scaling]`` and ``[autoscale]`` are those of a deployment's file, ``[gateway]``
and ``[fleet]`` those of the configuration, ``[engine]`` has vLLM's own names.
"""

from typing import Annotated, Literal

import msgspec

from modelyard.config import Count, FleetConfig, GatewayConfig, Positive, PositiveInt, Share
from modelyard.domain.endpoints import Autoscale
from modelyard.domain.lengths import TOKENS_MAX
from modelyard.domain.tenants import Plan
from modelyard.sim.fleet.scenario import Faults, Loading, Measures
from modelyard.sim.fleet.scenario import Scenario as Fleet
from modelyard.sim.fleet.scenario import Traffic as FleetTraffic
from modelyard.sim.traffic import REQUESTS_MAX, Pattern

SEEDS_MAX = 100
REPLICAS_MAX = 1024
"""Of one endpoint whose every request is simulated; it is meant for some dozens."""
TABLES_MAX = 64
"""Tenants, releases or kinds of nodes of a file."""
VERSION = "v1"
_GATEWAY, _FLEET, _FLEET_TRAFFIC = GatewayConfig(), Fleet(), FleetTraffic()
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=31_536_000)]
Seconds = Annotated[float, msgspec.Meta(ge=1e-6, le=10)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Up to what every reader of JSON takes exactly."""
Seeds = Annotated[int, msgspec.Meta(ge=1, le=SEEDS_MAX)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class HardwareBody(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica runs on, and how many there may be, as in a deployment's file."""

    gpu_type: str = "l4"
    gpu_count: Literal[1, 2, 4, 8] = 1
    memory_gib: NotNegative = 0.0
    """Of one; 0: as its data sheet says, which a CPU has none of."""
    min_replicas: Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)] = 1
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)] | None = None


class ScalingBody(msgspec.Struct, frozen=True, kw_only=True):
    """As in a deployment's file."""

    scale_to_zero: bool = False
    scale_to_zero_after_idle_seconds: Positive = 300.0


class GatewayBody(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``gateway.*`` that a simulation knows."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = _GATEWAY.workers
    queue_max: PositiveInt = _GATEWAY.queue_max
    queue_wait_s: Positive = _GATEWAY.queue_wait_s
    load_wait_s: Positive = _GATEWAY.load_wait_s
    kv_share_max: Annotated[float, msgspec.Meta(gt=0, le=0.99)] = _GATEWAY.kv_share_max


class FleetBody(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``fleet.*`` that a simulation knows."""

    accelerator_prices: dict[str, Annotated[float, msgspec.Meta(ge=0, le=100_000)]] = FleetConfig().accelerator_prices
    """Dollars for an hour of one, by kind; those of ``policy/hardware.py`` for the others."""


class SpeedBody(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's own four numbers: an iteration takes ``step_s`` and so much more for each of the others."""

    step_s: Seconds
    request_s: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    prefill_token_s: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    kv_token_s: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0


class EngineBody(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is set; names and defaults are vLLM's where it has them."""

    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 256
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=16, le=1_000_000)] = 2048
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    kv_tokens: Annotated[int, msgspec.Meta(ge=2048, le=1_000_000_000)] | None = None
    """Tokens of the KV cache; left out: what the memory leaves beside the weights."""
    speed: SpeedBody | None = None
    """Left out: by the roofline of model, precision and hardware."""
    slowdown: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0
    """Everything takes so many times as long."""
    load_s: Positive = 60.0
    """From the start of a replica until it serves."""


class ReleaseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A version with its share of the traffic; what it does not say is as the scenario's own."""

    version: str = VERSION
    weight: Annotated[int, msgspec.Meta(ge=0, le=100)] = 100
    replicas: Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)] | None = None
    """At first; left out: its share of ``hardware.min_replicas``."""
    model: str = "llama-3.1-8b"
    precision: str = ""
    hardware: HardwareBody = HardwareBody()
    engine: EngineBody = EngineBody()


class RoutingBody(msgspec.Struct, frozen=True, kw_only=True):
    """What gateways go by."""

    slots: Count = 0
    """Requests that a replica gets at once; 0: ``engine.max_num_seqs``."""
    knows_kv: bool = True
    """Whether requests are admitted by the KV cache."""
    prefixes: bool = True
    """Whether prompts that begin alike go where that is cached."""


class TrafficBody(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one tenant."""

    arrivals: Pattern = Pattern.POISSON
    rate: Annotated[float, msgspec.Meta(gt=0, le=100_000)] = 1.0
    """Requests a second, a mean."""
    minutes: Annotated[float, msgspec.Meta(gt=0, le=100_000)] | None = None
    """Left out: 10, or all of a file."""
    begin_minutes: Annotated[float, msgspec.Meta(ge=0, le=100_000)] = 0.0
    burstiness: Annotated[float, msgspec.Meta(ge=0.01, le=20)] = 4.0
    peak: Annotated[float, msgspec.Meta(ge=1, le=2)] = 1.8
    period_hours: Annotated[float, msgspec.Meta(ge=0.01, le=1000)] = 24.0
    turns: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 4.0
    think_s: Positive = 20.0
    input_tokens: str = "lognormal:512:0.6"
    output_tokens: str = "lognormal:200:0.6"
    max_tokens: Tokens = 0
    shared_prefix_tokens: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] = 0
    shared_prefixes: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    tenant: str = ""
    """Left out: ``tenant``, or ``tenant-2`` of the second, or as the file has it."""
    plan: Plan = Plan.STANDARD
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    file: str = ""
    """Requests of a CSV or of JSON lines instead, a public trace or an own one."""
    speedup: Annotated[float, msgspec.Meta(ge=0.001, le=1_000_000)] = 1.0
    requests: Annotated[int, msgspec.Meta(ge=0, le=REQUESTS_MAX)] = 0
    """Only so many of a file; 0: all."""


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """A world of requests: one endpoint."""

    title: str = ""
    level: Literal["request"] = "request"
    seed: Seed = 1
    seeds: Seeds = 1
    model: str = "llama-3.1-8b"
    precision: str = ""
    hardware: HardwareBody = HardwareBody()
    engine: EngineBody = EngineBody()
    releases: list[ReleaseBody] = []
    scaling: ScalingBody = ScalingBody()
    autoscale: Autoscale = Autoscale()
    gateway: GatewayBody = GatewayBody()
    routing: RoutingBody = RoutingBody()
    traffic: list[TrafficBody] = []
    fleet: FleetBody = FleetBody()


class NodesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one kind."""

    kind: str
    count: Annotated[int, msgspec.Meta(ge=1, le=20_000)]
    accelerators: Literal[1, 2, 4, 8] = 8
    share_spot: Share = 0.0


class FleetTrafficBody(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for what; shares are of endpoints."""

    endpoints: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 100
    rate: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] | None = None
    """Requests/s of all endpoints together, a mean; left out: 0.6 an endpoint."""
    share_pooled: Share = _FLEET_TRAFFIC.share_pooled
    bases: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """Left out: 40 for ten thousand endpoints, four at least."""
    share_small: Share = _FLEET_TRAFFIC.share_small
    share_exact: Share = _FLEET_TRAFFIC.share_exact
    spread: Annotated[float, msgspec.Meta(ge=0, le=5)] = _FLEET_TRAFFIC.spread
    burst_most: Annotated[float, msgspec.Meta(ge=1, le=100)] = _FLEET_TRAFFIC.burst_most
    batch_share: Annotated[float, msgspec.Meta(ge=0, le=100)] = _FLEET_TRAFFIC.batch_share


class FleetGatewayBody(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``gateway.*`` that a fleet knows."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=1024)] = _FLEET.gateways
    queue_max: PositiveInt = _FLEET.queue_most
    queue_wait_s: Positive = _FLEET.queue_wait_s
    load_wait_s: Positive = _FLEET.load_wait_s


class FleetHardwareBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of each endpoint."""

    max_replicas: PositiveInt = _FLEET.replicas_most


class FleetScalingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of each endpoint; ``measures.scale_to_zero`` says whether it sleeps."""

    scale_to_zero_after_idle_seconds: Positive = _FLEET.idle_s


class FleetScenarioBody(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet of endpoints; ``sim/fleet/scenario.py`` has the reasons of all defaults."""

    level: Literal["fleet"]
    title: str = ""
    seed: Seed = 1
    seeds: Seeds = 1
    traces: str = ""
    """Folder with ServeGen's rates; left out: the part of them that comes with the package."""
    hours: Annotated[float, msgspec.Meta(ge=0.2, le=168)] = _FLEET.hours
    """Rates are of ten minutes, and so is what is shown over time."""
    start_day: Annotated[float, msgspec.Meta(ge=1, le=13)] = _FLEET.start_day
    tick_s: Annotated[float, msgspec.Meta(ge=0.5, le=30)] = _FLEET.tick_s
    warmup_s: NotNegative = _FLEET.warmup_s
    nodes: list[NodesBody] = []
    traffic: FleetTrafficBody = FleetTrafficBody()
    measures: Measures = Measures()
    autoscale: Autoscale = _FLEET.rules
    scaling: FleetScalingBody = FleetScalingBody()
    hardware: FleetHardwareBody = FleetHardwareBody()
    gateway: FleetGatewayBody = FleetGatewayBody()
    faults: Faults = Faults()
    loading: Loading = Loading()
    fleet: FleetBody = FleetBody()
