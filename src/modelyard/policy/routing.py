"""Which replica gets a request: the least loaded one that has room.

Load is the gateway's own count of what it has running there, never a polled
gauge, which is always late. Ties go to the replica that waited longest since
its last dispatch, so that equal replicas take turns.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What routing may know of a replica; read only."""

    @property
    def running(self) -> int:
        """Requests it has now."""
        ...

    @property
    def slots(self) -> int:
        """Requests it takes at once."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether it is on its way out."""
        ...

    @property
    def ejected_until_s(self) -> float:
        """Until when it pauses after a failure."""
        ...

    @property
    def last_dispatch(self) -> int:
        """Number of its last dispatch; grows."""
        ...


C = TypeVar("C", bound=Candidate)


def choose(replicas: Iterable[C], *, now_s: float, avoid: Collection[C] = ()) -> C | None:
    """Return the replica to use, or None when none has room. ``avoid``: those this request failed on."""
    best: C | None = None
    best_cost = (2.0, 0)
    for replica in replicas:
        running = replica.running
        if running >= replica.slots or replica.is_draining or replica.ejected_until_s > now_s or replica in avoid:
            continue
        cost = (running / replica.slots, replica.last_dispatch)
        if cost < best_cost:
            best, best_cost = replica, cost
    return best


def pick_release(weights: Sequence[int], point: float) -> int:
    """Return the index of the release that ``point`` (0 ≤ point < 1) falls on; all weights 0 means the first."""
    total = sum(weights)
    mark = point * total
    for index, weight in enumerate(weights):
        mark -= weight
        if mark < 0:
            return index
    return 0
