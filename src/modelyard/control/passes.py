"""What passes over endpoints share, and what each came to."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from modelyard.control.bursts import Bursts
from modelyard.control.executor import Executor
from modelyard.control.guests import Guests
from modelyard.control.loadtimes import LoadTimes
from modelyard.control.moving import Moving
from modelyard.control.observer import Observer
from modelyard.control.placing import Placer
from modelyard.control.pools import Pools
from modelyard.control.sizing import Sizing
from modelyard.control.sleeping import Sleeping
from modelyard.control.supplies import Supplies, SupplyError
from modelyard.policy import scaling
from modelyard.policy.reconcile import Pace
from modelyard.stores import ControlStore


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass came to: the endpoint's size, and why versions of it cannot start, or have no room.

    ``is_waiting``: something of it is to start, and waits for that, for room, or for its artifact. ``awake_at``: since
    when it is to have replicas at all, as far as this controller saw; unix seconds.
    """

    replicas: int
    troubles: Mapping[str, SupplyError]
    has_rollout: bool
    no_room: Mapping[str, str] = field(default_factory=dict)
    is_waiting: bool = False
    awake_at: float = 0.0
    look_in_s: float | None = None
    """When the next look is due though nothing changes: a replica may be due to sleep. None: at the usual pace."""


@dataclass(slots=True)
class Tools:
    """What passes share. ``memories`` are the scaling policy's, by endpoint id; ``passed`` the last passes' results."""

    store: ControlStore
    observer: Observer
    executor: Executor
    supplies: Supplies
    guests: Guests
    loads: LoadTimes
    placer: Placer
    moving: Moving
    bursts: Bursts
    pools: Pools
    sizing: Sizing
    sleeping: Sleeping
    pace: Pace
    publish: Callable[[], Awaitable[None]]
    memories: dict[str, scaling.Memory] = field(default_factory=dict)
    passed: dict[str, Passed] = field(default_factory=dict)
