"""Which endpoints a reconcile round looks at closely.

Most of thousands of endpoints rest: their replicas are ready, or they sleep,
and nobody asks for them. Such an one needs a pass when something that a pass
sees of it is different from the last time, and otherwise only now and then:
at a tenth of its own idle time, so that it is put to sleep in time, and at
most every ``SWEEP_S``, so that reconciling stays level-triggered whatever this
file overlooks. All others get a pass in every round.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from zlib import crc32

from modelyard.control.guests import NOTHING, Standing
from modelyard.control.observer import Observer
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint, EndpointStatus
from modelyard.domain.fleet import Replica, ReplicaState, SeatState
from modelyard.policy.reconcile import Vital

SWEEP_S = 10.0
IDLE_SHARE = 0.1

_STEADY = frozenset({ReplicaState.READY, ReplicaState.ASLEEP})
_RESTING = frozenset({EndpointStatus.RUNNING, EndpointStatus.STOPPED})


@dataclass(frozen=True, slots=True)
class _Rest:
    """What the last pass saw of an endpoint that rests, and when the next one is due."""

    seen: tuple[object, ...]
    due_s: float


class Attention:
    """Remembers what passes saw. ``pass_interval_s`` is the pause between two rounds."""

    def __init__(
        self, observer: Observer, standing: Callable[[str], Standing] = lambda _: NOTHING, *, pass_interval_s: float
    ) -> None:
        self._observer = observer
        self._standing = standing
        self._pass_interval_s = pass_interval_s
        self._rests: dict[str, _Rest] = {}

    def __repr__(self) -> str:
        return f"<Attention: {len(self._rests)} endpoints rest>"

    def wanted(self, world: World, claimed: Collection[str] = ()) -> set[str]:
        """Return the endpoints that need a pass now, and those that only processes tell of.

        ``claimed`` are endpoints of which somebody else needs a replica's place.
        """
        rests = self._rests
        found = set(world.processes.keys() - world.endpoints.keys())
        found.update(claimed)
        for endpoint_id, endpoint in world.endpoints.items():
            rest = rests.get(endpoint_id)
            if rest is None or world.monotonic_s >= rest.due_s or rest.seen != self._seen(endpoint, world):
                found.add(endpoint_id)
        for endpoint_id in rests.keys() - world.endpoints.keys():
            del rests[endpoint_id]
        return found

    def passed(self, endpoint_id: str, world: World, *, has_changed: bool, look_in_s: float | None = None) -> None:
        """Note a pass that saw ``world``: the endpoint rests if there was nothing to do and nothing is under way.

        ``look_in_s``: when the next one is due at the latest.
        """
        endpoint = world.endpoints.get(endpoint_id)
        if endpoint is None or has_changed or not self._is_resting(endpoint, world):
            self._rests.pop(endpoint_id, None)
            return
        # Gates are asked in passes: an owner who wants them asked more often than that gets more passes.
        pace_s = min(IDLE_SHARE * endpoint.scaling.idle_s, endpoint.autoscale.check_s)
        longest_s = min(SWEEP_S, max(self._pass_interval_s, pace_s))
        # Not all at the same time: each has its own part between a half and the whole of it.
        due_s = world.monotonic_s + longest_s * (1 + crc32(endpoint_id.encode()) / 2**32) / 2
        if look_in_s is not None:
            due_s = min(due_s, world.monotonic_s + max(look_in_s, self._pass_interval_s))
        self._rests[endpoint_id] = _Rest(self._seen(endpoint, world), due_s)

    def failed(self, endpoint_id: str) -> None:
        """Note a pass that did not come to its end."""
        self._rests.pop(endpoint_id, None)

    def _is_resting(self, endpoint: Endpoint, world: World) -> bool:
        if endpoint.is_deleted or endpoint.failure or (endpoint.rollout is not None and endpoint.rollout.is_live):
            return False
        demand = world.demand(endpoint.id)
        if endpoint.status not in _RESTING or demand.queued or demand.in_flight:
            return False
        if endpoint.host_id:
            seats = world.seats.get(endpoint.id, ())
            return self._standing(endpoint.id).is_over and all(one.state is ReplicaState.READY for one in seats)
        replicas = world.replicas.get(endpoint.id, ())
        if any(seat.state is not SeatState.READY for replica in replicas for seat in replica.guests):
            return False
        # The files of a guest are on their way, or its load is tried again: it is taken in by a pass of its host.
        if any(not self._standing(guest.id).is_over for guest in world.guests.get(endpoint.id, ())):
            return False
        return all(
            replica.state in _STEADY and self._observer.vital(replica.id)[0] is Vital.READY
            for replica in replicas
            if not replica.is_tombstone
        ) and not _any(world.busy, replicas)

    def _seen(self, endpoint: Endpoint, world: World) -> tuple[object, ...]:
        """Return all that decides what a pass does, besides time."""
        if endpoint.host_id:
            return self._seen_of_guest(endpoint, world)
        replicas = world.replicas.get(endpoint.id, ())
        demand = world.demand(endpoint.id)
        return (
            endpoint,
            [world.versions.get(release.version_id) for release in endpoint.releases],
            replicas,
            world.processes.get(endpoint.id, ()),
            [self._observer.vital(replica.id) for replica in replicas],
            _any(world.busy, replicas),
            demand.queued,
            demand.in_flight,
            demand.idle_s is None,
            len(world.reports),
            world.are_gateways_known,
            [self._seen_of(guest, world) for guest in world.guests.get(endpoint.id, ())],
            [told[1] if (told := self._observer.guests(one.id)) else None for one in replicas],
        )

    @staticmethod
    def _seen_of(guest: Endpoint, world: World) -> tuple[object, ...]:
        """Return what a pass over its host sees of a guest."""
        is_waiting = world.demand(guest.id).queued > 0
        return guest.id, guest.releases, guest.rollout, guest.is_deleted, is_waiting, guest.id in world.seats

    def _seen_of_guest(self, endpoint: Endpoint, world: World) -> tuple[object, ...]:
        host = world.endpoints.get(endpoint.host_id)
        return (
            endpoint,
            world.seats.get(endpoint.id, ()),
            world.demand(endpoint.id).queued,
            self._standing(endpoint.id),
            host is None or (host.is_deleted, host.failure, host.status, host.progress.stage, host.progress.percent),
            any(one.state is ReplicaState.READY for one in world.replicas.get(endpoint.host_id, ())),
        )


def _any(busy: Collection[str], replicas: Collection[Replica]) -> bool:
    return bool(busy) and any(replica.id in busy for replica in replicas)
