"""Moves as they are recorded: a replica that takes over from another one of its version, elsewhere.

Two records are all there is of a move, so that whoever looks at them knows how
far it is. While both live, one of them is beyond the number that is wanted:
the new one until it is ready, the old one from then on. Where one of them ends
early, the other is a replica like any. ``reconcile.py`` acts by it,
``defragment.py`` says what is to move.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from modelyard.domain.fleet import Replica, ReplicaState

if TYPE_CHECKING:
    from modelyard.policy.reconcile import ReplicaSeen

START_S = 60.0
"""Longest that a replica which is to take over may be recorded and not started: what was to gain may be over."""
_GOING = frozenset({ReplicaState.DRAINING, ReplicaState.STOPPED, ReplicaState.FAILED})


def takeovers(replicas: Iterable[Replica]) -> dict[str, str]:
    """Return the moves that are under way: the new replica with the old one, where both live.

    The new one is no part of the endpoint's size until the old one is gone.
    """
    live = {replica.id: replica for replica in replicas if replica.state not in _GOING}
    return {replica.id: replica.takes_over for replica in live.values() if replica.takes_over in live}


def is_mere_try(replica: Replica) -> bool:
    """Say whether this one was to take over and never was ready: what became of it is no crash of its endpoint's, of
    which another one served meanwhile."""
    return bool(replica.takes_over) and replica.ready_at is None


def settled(replicas: Sequence[Replica]) -> list[Replica]:
    """Return the replicas as if what moves had moved, or had not begun to: what an endpoint has for its callers.

    One that failed before it could take over is no crash of theirs.
    """
    moving = takeovers(replicas)
    left = {replica.takes_over for replica in replicas if replica.state is ReplicaState.READY and replica.takes_over}

    def counts(replica: Replica) -> bool:
        match replica.state:
            case ReplicaState.DRAINING:
                return replica.id not in left
            case ReplicaState.FAILED:
                return not replica.takes_over or replica.ready_at is not None
            case _:
                return replica.id not in moving

    return [replica for replica in replicas if counts(replica)]


def told(replicas: Sequence[Replica]) -> str:
    """Return what is to be said of a move that is under way, "" where nothing moves."""
    moving = takeovers(replicas)
    for replica in replicas:
        if replica.id in moving:
            return f"a replica moves to {where(replica)}: {replica.reason or 'another one loads'}"
    draining = {replica.id for replica in replicas if replica.state is ReplicaState.DRAINING}
    for replica in replicas:
        if replica.takes_over in draining and replica.state is ReplicaState.READY:
            return f"a replica moved to {where(replica)}; requests still run where it was"
    return ""


def where(replica: Replica) -> str:
    """Return the nodes of a replica as people read them."""
    return " and ".join(part.node_id for part in replica.placement.parts) or "another node"


def standing(
    places: Mapping[int, Sequence["ReplicaSeen"]], can_serve: Callable[["ReplicaSeen"], bool]
) -> tuple[dict[int, int], dict[int, Replica]]:
    """Return the ordinals of one version that are to take over, with those that they take over from; and those that
    were taken over from and leave, with who is there in their stead."""
    here = {
        seen.record.id: ordinal
        for ordinal, group in places.items()
        for seen in group
        if seen.record.state not in _GOING or seen.record.state is ReplicaState.DRAINING
    }
    live = {seen.record.id for group in places.values() for seen in group if seen.record.state not in _GOING}
    arriving: dict[int, int] = {}
    left: dict[int, Replica] = {}
    for ordinal, group in places.items():
        for seen in group:
            new = seen.record
            if new.id not in live or new.takes_over not in here:
                continue
            if can_serve(seen):
                left[here[new.takes_over]] = new
            elif new.takes_over in live:
                arriving[ordinal] = here[new.takes_over]
    return arriving, left


def may_arrive(group: Iterable["ReplicaSeen"], is_late: Callable[[float], bool]) -> bool:
    """Say whether what is to take over may go on: nobody needs its place, and it begins in time.

    ``is_late`` says so of what has been as it is since a moment (unix seconds).
    """
    for seen in group:
        is_unstarted = seen.record.state is ReplicaState.STARTING and not seen.is_known
        if seen.record.state not in _GOING and (seen.is_evicted or (is_unstarted and is_late(seen.record.state_since))):
            return False
    return True


def free_ordinal(
    places: Mapping[int, Sequence["ReplicaSeen"]], kept: Collection[int], is_present: Callable[["ReplicaSeen"], bool]
) -> int:
    """Return the first place that nothing is in, and nothing is to be in."""
    able = range(len(places) + len(kept) + 1)
    return next(one for one in able if one not in kept and not any(map(is_present, places.get(one, ()))))
