"""Replicas and what is known of them."""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from modelyard.domain.nodes import Placement

OUT_OF_MEMORY = "killed by the kernel: out of memory"
"""The reason of a replica that took more than its machine has."""


class ReplicaState(StrEnum):
    """The life of a replica, in order; only ``READY`` ones are routed to."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    FALLING_ASLEEP = "falling_asleep"
    """It gets nothing new; once its requests have ended its engine is told to sleep. It has its accelerators yet."""
    ASLEEP = "asleep"
    """Its weights are in the memory of its machine, its accelerators are free for others (``policy/sleepers.py``)."""
    WAKING = "waking"
    """Its engine is told to wake; it has its accelerators again."""
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


NAPPING = frozenset({ReplicaState.FALLING_ASLEEP, ReplicaState.ASLEEP, ReplicaState.WAKING})
"""States of a replica that would answer within seconds."""
THERE = NAPPING | {ReplicaState.READY}
"""States of a replica that has loaded: it answers, or would within seconds."""


class SeatState(StrEnum):
    """The life of a guest on a replica; only ``READY`` ones are routed to."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class GuestSeat(msgspec.Struct, frozen=True):
    """The place of one version of a guest endpoint on a replica, written down before the engine is told.

    ``name`` is what the engine calls it: of this endpoint and content alone, and never of anything else. ``since`` is
    when its state began, ``used_at`` when it last had a request, as far as was known then; both unix seconds.
    """

    endpoint_id: str
    version_id: str
    name: str
    state: SeatState = SeatState.LOADING
    since: float = 0.0
    used_at: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """What sits there: endpoint and version."""
        return self.endpoint_id, self.version_id


class Replica(msgspec.Struct, frozen=True):
    """One running engine instance of a release, as control wants and knows it.

    ``ordinal`` is its place within the endpoint and version, and with
    ``generation`` (starts so far) makes its id, so that a repeated start of
    the same replica collides instead of doubling. Times are unix seconds.
    """

    id: str
    endpoint_id: str
    version_id: str
    ordinal: int
    generation: int
    state: ReplicaState
    state_since: float
    host: str = ""
    port: int = 0
    secret: str = ""
    slots: int = 1
    started_at: float = 0.0
    ready_at: float | None = None
    reason: str = ""
    placement: Placement = Placement()
    model_name: str = ""
    """What its engine calls itself, "" for its endpoint's name: one from a warm pool was started under another."""
    guests: tuple[GuestSeat, ...] = ()
    """What else was taken in, for other endpoints. Written by ``put_guests`` alone."""
    takes_over: str = ""
    """The replica whose place it takes once it is ready, as they both live: it was started to move that one."""

    @property
    def is_tombstone(self) -> bool:
        """Whether the record is only kept so that its id is never given again; a failed one still tells its reason."""
        return self.state is ReplicaState.STOPPED


def replica_id(endpoint_id: str, version_id: str, ordinal: int, generation: int) -> str:
    """Return the deterministic id of a replica: a second start of the same one has the same id."""
    return f"rep-{endpoint_id.removeprefix('ep-')[:12]}-{version_id.removeprefix('ver-')[:8]}-{ordinal}-{generation}"


def seat_id(replica_id: str, name: str) -> str:
    """Return the id of a seat: what gateways know it by."""
    return f"{replica_id}/{name}"


SEAT_NAME = re.compile(r"[^\s'\"]+@[0-9a-f]{12}")
"""What engines call guests."""


def without_others(text: str, name: str) -> str:
    """Return what an engine said for the owner of the guest ``name``: who else sits there is not for them to know."""
    return SEAT_NAME.sub(lambda found: found[0] if found[0] == name else "another guest", text)


def replica_of(id: str) -> str:
    """Return the replica that an id is of: its own, or that of a seat on it."""
    return id.partition("/")[0]


SEAT_STATES: Mapping[SeatState, ReplicaState] = {
    SeatState.LOADING: ReplicaState.LOADING,
    SeatState.READY: ReplicaState.READY,
    SeatState.DRAINING: ReplicaState.DRAINING,
}
"""What the state of a seat is to its guest."""


def seats_of(replicas: Iterable[Replica]) -> dict[str, list[Replica]]:
    """Return the seats on ``replicas`` by endpoint, as what they are to a guest: replicas of its own.

    One on a replica that does not serve is none: it is gone, or is not there yet.
    """
    found: dict[str, list[Replica]] = {}
    for replica in replicas:
        if not replica.guests or replica.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            continue
        is_leaving = replica.state is ReplicaState.DRAINING
        for seat in replica.guests:
            if is_leaving and seat.state is SeatState.LOADING:
                continue
            found.setdefault(seat.endpoint_id, []).append(
                msgspec.structs.replace(
                    replica,
                    id=seat_id(replica.id, seat.name),
                    endpoint_id=seat.endpoint_id,
                    version_id=seat.version_id,
                    state=ReplicaState.DRAINING if is_leaving else SEAT_STATES[seat.state],
                    state_since=seat.since,
                    started_at=seat.since,
                    ready_at=seat.since if seat.state is SeatState.READY else None,
                    reason="",
                    model_name=seat.name,
                    guests=(),
                )
            )
    return found
