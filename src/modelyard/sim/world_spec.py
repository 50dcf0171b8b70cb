"""What a world of requests has: its versions, how gateways treat them, and what goes wrong."""

import msgspec

from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.policy.dispatch import DispatchRules
from modelyard.sim.faults import Fault
from modelyard.sim.tasks import EngineSpec


class ReleaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A version with its share of traffic, its engine and how many replicas it has at first."""

    engine: EngineSpec
    version_id: str = "ver_sim"
    weight: int = 100
    replicas: int = 1
    shadow: int = 0
    """Percent of requests of which it gets a copy."""


class WorldSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What there is. ``slots``: what gateways send a replica at once (0: what its engine runs at once).

    ``knows_kv``: whether gateways know the size of KV caches, and so admit by it. ``snapshot_s``: how often engines'
    own pages are told to gateways, each ``snapshot_age_s`` later (0: never). ``scaling``: None leaves sizes alone.
    """

    releases: tuple[ReleaseSpec, ...]
    slots: int = 0
    knows_kv: bool = True
    uses_prefixes: bool = True
    gateways: int = 1
    rules: DispatchRules = DispatchRules()
    queue_wait_s: float = 30.0
    load_wait_s: float = 600.0
    snapshot_s: float = 0.0
    snapshot_age_s: float = 0.0
    scaling: Scaling | None = None
    autoscale: Autoscale = Autoscale()
    load_s: float = 60.0
    """From the start of a replica until it is ready."""
    pass_s: float = 2.0
    """As often as the controller decides."""
    idle_pass_s: float = 0.0
    """The same while nobody came for minutes, to get over nights; whoever comes wakes it at once. 0: as ever."""
    faults: tuple[Fault, ...] = ()
    keeps: bool = False
    """Whether the controller replaces replicas that fail: of a world without faults it is the same world without."""
