"""What gateways tell the controller: demand, and replicas that do not answer."""

import msgspec

from modelyard.domain.leases import LeaseReport
from modelyard.domain.signals import ReleaseCounts


class EndpointDemand(msgspec.Struct, frozen=True, array_like=True):
    """One gateway's view of one endpoint, now. ``idle_s``: seconds since its last request, 0 while one is in flight."""

    endpoint_id: str
    queued: int
    in_flight: int
    idle_s: float
    arrivals: int
    """Requests since the gateway started; only differences mean something."""
    wait_s: float = 0.0
    """How long a request that came now would wait, as the gateway predicts it."""
    batch_queued: int = 0
    """Lines of batches among ``queued``, and in ``batch_running`` those on replicas among ``in_flight``."""
    batch_running: int = 0
    batch_arrivals: int = 0
    """Lines of batches among ``arrivals``."""


class ReplicaReport(msgspec.Struct, frozen=True, array_like=True):
    """A replica that a gateway ejected, and why; ``in_flight`` lets control see that a drained one is empty.

    That of a replica with guests counts everybody there. A guest's seat has a report of its own, under the seat's id:
    its ``in_flight`` are that guest's requests, and its ``failures`` are more than 0 as long as the engine answers that
    it does not have the guest, which is to be loaded again; all other failures are told of the replica.
    """

    replica_id: str
    in_flight: int
    failures: int
    """Failures in a row, 0 when the last answer was good."""
    reason: str
    reading: int | None = None
    """Tokens of prompts sent there whose answers have not begun; None: not said."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of a gateway on the feed."""

    token: str
    gateway_id: str


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Everything a gateway has to say; the whole state each time, so that a lost one does not matter.

    ``epoch`` and ``revision`` are those of the routing table that it serves from; ``refused`` are fingerprints of
    requests that take engines down, with the end of their refusal (monotonic seconds).
    """

    endpoints: list[EndpointDemand]
    replicas: list[ReplicaReport]
    epoch: str = ""
    revision: int = 0
    refused: list[tuple[int, float]] = []
    leases: LeaseReport = LeaseReport()
    releases: list[ReleaseCounts] | None = None
    """All that had requests in the last quarter of an hour; None: not said this time."""
    day: int = 0
    """The newest UTC day that it has seen, as a number: it counts no quota for an earlier one."""
