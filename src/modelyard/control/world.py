"""Everything a reconcile round looks at, taken at one time.

The order of the reads matters. A replica's record is written before its
process starts and removed after its process is forgotten; reading processes
first and records second, and leaving out what was busy when the reads began,
a process is never seen without its record nor a record without its process
just because they were read at different times.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from modelyard.clock import Clock
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.demand import Report
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, seats_of
from modelyard.fleet import Fleet, Observed
from modelyard.stores import ControlStore

T = TypeVar("T", Replica, Observed)


class Demand(NamedTuple):
    """What all gateways together want of one endpoint; ``idle_s`` None: no gateway ever had a request for it."""

    queued: int = 0
    in_flight: int = 0
    idle_s: float | None = None
    wait_s: float = 0.0
    """The longest wait that a gateway predicts."""
    batch_queued: int = 0
    batch_running: int = 0

    @property
    def has_lines(self) -> bool:
        """Whether lines of batches wait or run."""
        return self.batch_queued > 0 or self.batch_running > 0


_NO_DEMAND = Demand()


@dataclass(frozen=True, slots=True)
class World:
    """One consistent look. ``busy`` are ids of replicas with a long action under way."""

    unix_s: float
    monotonic_s: float
    endpoints: Mapping[str, Endpoint]
    versions: Mapping[str, ModelVersion]
    replicas: Mapping[str, list[Replica]]
    """By endpoint id."""
    processes: Mapping[str, list[Observed]]
    """By endpoint id, those of unknown endpoints too."""
    busy: frozenset[str]
    reports: Mapping[str, Report]
    known_to_drain: frozenset[str]
    """Draining replicas that every connected gateway knows to drain."""
    are_gateways_known: bool
    """Whether an absent gateway is really absent, and not just about to connect to a controller that started anew."""

    demands: Mapping[str, Demand]
    """By endpoint id, of those that a gateway reports; a host's has that of its guests in it."""
    guests: Mapping[str, list[Endpoint]] = field(default_factory=dict)
    """By the endpoint that is their host."""
    seats: Mapping[str, list[Replica]] = field(default_factory=dict)
    """Where guests sit, by their endpoint id, as if the seats were replicas of theirs."""

    def demand(self, endpoint_id: str) -> Demand:
        """Return the sum over all gateways."""
        return self.demands.get(endpoint_id, _NO_DEMAND)

    def in_flight(self, replica_id: str) -> int | None:
        """Return the requests on a replica or seat that gets nothing new, None until all gateways know that."""
        if not self.are_gateways_known or replica_id not in self.known_to_drain:
            return None
        return sum(
            row.in_flight for report in self.reports.values() for row in report.replicas if row.replica_id == replica_id
        )


async def look(
    store: ControlStore,
    fleet: Fleet,
    clock: Clock,
    *,
    busy: frozenset[str],
    reports: Mapping[str, Report],
    known_to_drain: frozenset[str],
    are_gateways_known: bool,
) -> World:
    """Take a look; ``busy`` must have been read before."""
    processes = await fleet.observe()
    endpoints = await store.endpoints()
    versions = await store.versions()
    replicas = await store.replicas()
    guests: dict[str, list[Endpoint]] = defaultdict(list)
    for endpoint in endpoints:
        if endpoint.host_id:
            guests[endpoint.host_id].append(endpoint)
    seats = seats_of(replicas)
    return World(
        unix_s=clock.unix_s(),
        monotonic_s=clock.monotonic_s(),
        endpoints={endpoint.id: endpoint for endpoint in endpoints},
        versions={version.id: version for version in versions},
        replicas=_by_endpoint(replicas),
        processes=_by_endpoint(_owned(processes, replicas)),
        busy=busy,
        reports=reports,
        known_to_drain=known_to_drain,
        are_gateways_known=are_gateways_known,
        demands=with_guests(demands_of(reports.values()), guests, seats),
        guests=guests,
        seats=seats,
    )


def demands_of(reports: Iterable[Report]) -> Mapping[str, Demand]:
    """Return what all gateways want of each endpoint that one of them reports."""
    found: dict[str, Demand] = {}
    for report in reports:
        for row in report.endpoints:
            one = Demand(row.queued, row.in_flight, row.idle_s, row.wait_s, row.batch_queued, row.batch_running)
            so_far = found.get(row.endpoint_id)
            found[row.endpoint_id] = one if so_far is None else _added(so_far, one)
    return found


def with_guests(
    demands: Mapping[str, Demand], guests: Mapping[str, Iterable[Endpoint]], seats: Collection[str]
) -> Mapping[str, Demand]:
    """Return ``demands`` with what is wanted of guests added to their hosts'; ``seats``: those that have some.

    Whoever waits for a guest without a seat waits for that, and not for want of replicas.
    """
    found = dict(demands)
    for host_id, of_host in guests.items():
        for guest in of_host:
            if (more := demands.get(guest.id)) is not None:
                wait_s = more.wait_s if guest.id in seats else 0.0
                found[host_id] = _added(found.get(host_id, _NO_DEMAND), more._replace(wait_s=wait_s))
    return found


def _added(one: Demand, other: Demand) -> Demand:
    idle = [idle_s for idle_s in (one.idle_s, other.idle_s) if idle_s is not None]
    return Demand(
        queued=one.queued + other.queued,
        in_flight=one.in_flight + other.in_flight,
        idle_s=min(idle, default=None),
        wait_s=max(one.wait_s, other.wait_s),
        batch_queued=one.batch_queued + other.batch_queued,
        batch_running=one.batch_running + other.batch_running,
    )


def _owned(processes: Iterable[Observed], replicas: Iterable[Replica]) -> list[Observed]:
    """Return ``processes`` with the endpoint that each belongs to now: one of a warm pool was started for the pool."""
    owners = {replica.id: replica.endpoint_id for replica in replicas}
    return [
        process
        if owners.get(process.replica_id, process.endpoint_id) == process.endpoint_id
        else msgspec.structs.replace(process, endpoint_id=owners[process.replica_id])
        for process in processes
    ]


def _by_endpoint(rows: Iterable[T]) -> Mapping[str, list[T]]:
    found: dict[str, list[T]] = defaultdict(list)
    for row in rows:
        found[row.endpoint_id].append(row)
    return found
