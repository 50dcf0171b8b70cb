"""Nouns of the books beside the ledger: lives and hours of replicas, sums, meter events.

Money is whole nano-dollars, times are unix seconds.
"""

from enum import StrEnum

import msgspec


class Gap(msgspec.Struct, frozen=True):
    """Requests whose journal is gone before a sink had them: they arrived in this span, and the ledger has them.

    ``since`` and ``until`` are unix seconds, both included. ``source`` and ``segment`` say where they stood.
    """

    source: str
    segment: str
    since: float
    until: float
    requests: int


class ReplicaLife(msgspec.Struct, frozen=True):
    """One replica from its start to its end, and what its engine counted. Times are unix seconds.

    ``prompt_tokens`` and ``generation_tokens`` are the engine's own counters at ``counted_at``, None where it has none.
    """

    replica_id: str
    endpoint_id: str
    owner_id: str
    model: str
    version_id: str
    accelerator: str
    accelerators: float
    """Whole ones: 0.25 is a quarter of one."""
    hourly_nanousd: int
    started_at: float
    ready_at: float | None
    ended_at: float | None
    seen_at: float
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    counted_at: float = 0.0


class ReplicaHour(msgspec.Struct, frozen=True):
    """What a replica took in one UTC hour (its start, unix seconds): of accelerators, of time, of money.

    ``accelerator_s`` are seconds of whole accelerators; ``ready_s`` and ``busy_s`` are parts of ``present_s``.
    """

    hour: int
    replica_id: str
    endpoint_id: str
    owner_id: str
    model: str
    accelerator: str
    present_s: float
    ready_s: float
    busy_s: float
    accelerator_s: float
    cost_nanousd: int


class EndpointUse(msgspec.Struct, frozen=True):
    """What one customer used of one endpoint, from the ledger."""

    endpoint_id: str
    tenant_id: str
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    revenue_nanousd: int


class ReplicaUse(msgspec.Struct, frozen=True):
    """What the ledger has of one replica, of requests that arrived before its engine's counters were last read.

    Tokens are those of requests that had settled by then, and are in the counters for sure.
    """

    replica_id: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    unsure: int
    """Requests that were retried, cut off or estimated."""
    later_tokens: int = 0
    """Generated tokens of requests that were under way then: none, some or all of them are in the counters."""
    wandered: int = 0
    """Requests of the same endpoint that were tried more than once and ended elsewhere, or nobody knows where."""


class LedgerSum(msgspec.Struct, frozen=True):
    """Sums over rows of the ledger."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_nanousd: int = 0


class LedgerEntry(msgspec.Struct, frozen=True):
    """What is billed of one request."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    units_micro: int
    cost_nanousd: int
    status: str
    error_code: str = ""


class DayUse(msgspec.Struct, frozen=True):
    """What the ledger has of one version on one UTC day, for comparison with a provider's invoice."""

    day: str
    model: str
    version_id: str
    sums: LedgerSum


class MeterStatus(StrEnum):
    """What is known of a meter event."""

    PENDING = "pending"
    """It is to be sent; it may have arrived if ``tried_at`` is set."""
    EXPORTED = "exported"
    """Stripe has it."""
    ALARM = "alarm"
    """It cannot be sent by itself any more: somebody must look."""
    BY_HAND = "by_hand"
    """Somebody looked, and said that it was billed otherwise."""
    SPARED = "spared"
    """It is not to be sent: its tenant paid in advance, or pays nothing."""


class MeterEvent(msgspec.Struct, frozen=True):
    """One event for Stripe: a part of what a tenant used in an hour. Its identifier and value never change.

    Part 0 is what was known when the hour was first reported; later ones add what settled after that.
    """

    tenant_id: str
    meter: str
    hour: int
    part: int
    value: int
    created_at: float
    status: MeterStatus = MeterStatus.PENDING
    tried_at: float | None = None
    """The first try that may have arrived."""
    exported_at: float | None = None
    reason: str = ""

    @property
    def identifier(self) -> str:
        """What Stripe knows it by."""
        return f"modelyard-{self.tenant_id}-{self.meter}-{self.hour}-{self.part}"
