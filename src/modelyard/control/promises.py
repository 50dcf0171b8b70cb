"""Room that is held for replicas, and what is asked of whoever makes some (``placing.py``)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelyard.domain.fleet import Replica
from modelyard.domain.nodes import Placement
from modelyard.policy import eviction
from modelyard.policy.asks import Ask, NoRoom


@dataclass(frozen=True, slots=True)
class Promise:
    """Room that is held for a replica without a record, or that wakes.

    ``victims`` must be gone, or asleep, first; ``leaving`` move away.
    """

    replica_id: str
    endpoint_id: str
    tenant_id: str
    ask: Ask | None
    """None: it wakes where it is."""
    placement: Placement
    victims: frozenset[str] = frozenset()
    reason: str = ""
    leaving: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Need:
    """How urgent a replica is that finds no room, for those who might make some."""

    name: str
    queued: int
    reload_s: float
    ready: int = 0
    """Replicas of its endpoint that answer."""
    wait_s: float = 0.0
    """What a caller would wait now, as gateways predict it."""
    may_evict: bool = True
    """Nobody makes room for one that runs for nobody yet."""


Residents = Callable[[], Sequence[eviction.Resident]]
"""Whoever might be evicted now; asked only when somebody finds no room."""


Opener = Callable[[Replica, Ask, NoRoom], Promise | NoRoom | None]
"""Has others move away for a replica that has no room: what it may claim, why not, or None where no move would help."""
