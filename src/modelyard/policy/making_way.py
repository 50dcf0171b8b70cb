"""Who on a replica gives up its slot for somebody who comes, and begins anew later.

Lines of batches do for everybody who does not wait for hours: the youngest
goes first, since it loses least, as long as the one who came still waits.
A request of a tenant above its fair share does for one that asks for little
(``headroom.py``), if nobody has seen any of its answer. What it had generated
is lost and costs nobody anything; it is the next of its tenant to start.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from modelyard.policy.dispatch import Dispatcher
from modelyard.policy.replica_load import ReplicaLoad
from modelyard.policy.terms import Waiter

CUTS_OF_LINE_MAX = 8
"""Times that one line gives up its slot. Where slots are asked for without a pause, batches have a reserved share of
them, and what is always cut off would only heat the room."""
CUTS_MAX = 8
"""Most lines that are cut off for one request: more memory than theirs would not come free at once anyway."""


TRADES_MAX = 2
"""Times that a request which is no line of a batch gives up its slot."""


class Line(Protocol):
    """A line of a batch that is on a replica."""

    @property
    def gave_way(self) -> int:
        """How often it gave up its slot."""
        ...


L = TypeVar("L", bound=Line)


class OnReplica(Line, Waiter, Protocol):
    """A request that is on a replica."""

    @property
    def replica(self) -> ReplicaLoad | None:
        """Where it is."""
        ...


R = TypeVar("R", bound=OnReplica)


def make_way(
    youngest_first: Callable[[], Iterable[L]],
    *,
    waits: Callable[[], bool],
    can_stop: Callable[[L], bool],
    cut: Callable[[L], None],
) -> None:
    """``cut`` lines off while somebody ``waits``, until nothing is left to be cut off.

    ``can_stop``: whether an engine can take another instead of a line, and nobody has seen any of its answer.
    """
    for _ in range(CUTS_MAX):
        if not waits():
            return
        victim = next((one for one in youngest_first() if one.gave_way < CUTS_OF_LINE_MAX and can_stop(one)), None)
        if victim is None:
            return
        cut(victim)


def trade(
    waiter: R,
    dispatcher: Dispatcher[R],
    youngest_first: Iterable[R],
    *,
    can_stop: Callable[[R], bool],
    now_s: float,
    deadline_s: float,
) -> tuple[R, ReplicaLoad] | None:
    """Hand ``waiter`` the place of somebody above its share, if it has a right to one; return whose and where it was.

    That one stands in line again until ``deadline_s``, and has to be taken off its engine.
    """
    job, headroom = waiter.job, dispatcher.headroom
    first = dispatcher.line.first()
    if first is None or not headroom.is_light(job) or not headroom.may_pass(job, first.job, dispatcher.line):
        return None
    for victim in youngest_first:
        replica = victim.replica
        if replica is None or replica.occupancy is not None or victim.gave_way >= TRADES_MAX:
            continue
        lost_s = now_s - victim.job.dispatched_s
        if lost_s > headroom.spare_s or victim.job.band < job.band or not headroom.is_above_share(victim.job):
            continue
        if can_stop(victim):
            is_taken = dispatcher.trade(waiter, victim, replica, now_s=now_s, deadline_s=deadline_s)
            headroom.spare_s -= lost_s if is_taken else 0.0
            return (victim, replica) if is_taken else None
    return None
