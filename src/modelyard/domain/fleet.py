"""Replicas and what is known of them."""

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
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


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

    @property
    def is_tombstone(self) -> bool:
        """Whether the record is only kept so that its id is never given again; a failed one still tells its reason."""
        return self.state is ReplicaState.STOPPED


def replica_id(endpoint_id: str, version_id: str, ordinal: int, generation: int) -> str:
    """Return the deterministic id of a replica: a second start of the same one has the same id."""
    return f"rep-{endpoint_id.removeprefix('ep-')[:12]}-{version_id.removeprefix('ver-')[:8]}-{ordinal}-{generation}"
