"""Contracts of what the books need beside the ledger: cursors of sinks, lives of replicas, what Stripe was told.

A sink (Kafka, Stripe) is a projection with a cursor of its own: it is behind by
as much as it likes, and holds up nobody else.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from modelyard.domain.books import (
    DayUse,
    EndpointUse,
    Gap,
    LedgerEntry,
    LedgerSum,
    MeterEvent,
    MeterStatus,
    ReplicaHour,
    ReplicaLife,
    ReplicaUse,
)
from modelyard.domain.usage import UsageRow


class BookStore(Protocol):
    """The state of sinks, replicas' hours, and questions to the ledger. All raise ``StoreUnavailableError``."""

    async def cursors(self, sink: str) -> dict[str, tuple[str, int]]:
        """Return how far a sink is: segment and offset by source."""
        ...

    async def put_cursor(self, sink: str, source: str, segment: str, offset: int, *, gap: Gap | None = None) -> None:
        """Move a cursor; ``gap`` is noted in the same transaction."""
        ...

    async def gaps(self, sink: str) -> list[Gap]:
        """Return what a sink still has to get from the ledger, oldest first."""
        ...

    async def close_gap(self, sink: str, gap: Gap) -> None:
        """Note that a sink has all of a gap."""
        ...

    async def put_lives(self, lives: Sequence[ReplicaLife], hours: Sequence[ReplicaHour]) -> None:
        """Add or replace lives, and add to hours, in one transaction."""
        ...

    async def lives(self, *, since: float, until: float) -> list[ReplicaLife]:
        """Return replicas that lived at some time between, by id."""
        ...

    async def hours(self, *, since: int, until: int) -> list[ReplicaHour]:
        """Return the hours that began between (``until`` excluded), by hour and replica."""
        ...

    async def replica_sums(self, *, since: int, until: int) -> list[ReplicaHour]:
        """Return the same as one row a replica and owner, whose ``hour`` is the first, the latest replicas last."""
        ...

    async def endpoint_use(self, *, since: int, until: int) -> list[EndpointUse]:
        """Return who used what in the hours from ``since`` on, before ``until``."""
        ...

    async def kept_since(self) -> int:
        """Return the hour from which on all rows are there; 0 if none was ever removed."""
        ...

    async def replica_use(self, *, since: float, until: float, margin_s: float) -> dict[str, ReplicaUse]:
        """Return what the ledger has of replicas whose lives are known, of the requests that arrived between.

        Those count that settled after it began and arrived before its engine's counters were read. A request is in
        them for sure if it settled ``margin_s`` before that, and not at all if it arrived as long after.
        """
        ...

    async def unsure_requests(self, replica_id: str, *, since: float, until: float, limit: int) -> list[str]:
        """Return requests of a replica that were retried, cut off or estimated, newest first; of those that arrived
        between."""
        ...

    async def entries(self, request_ids: Collection[str]) -> dict[str, LedgerEntry]:
        """Return the rows of these requests."""
        ...

    async def rows_between(self, after: tuple[float, str], until: float, *, limit: int) -> list[UsageRow]:
        """Return rows behind (arrival, request id), up to those that arrived at ``until``, oldest first."""
        ...

    async def sum_since(self, since: float) -> tuple[LedgerSum, dict[str, tuple[str, int]]]:
        """Return the sum of the rows that arrived since then, and of one view how far each journal was read."""
        ...

    async def ids_since(self, since: float, *, after: str, limit: int) -> list[str]:
        """Return ids of rows that arrived since then, in their order, behind ``after``."""
        ...

    async def roll_up_differences(self, *, since: int, until: int) -> list[tuple[int, LedgerSum, LedgerSum]]:
        """Return the hours, from which on rows are kept, whose roll-up is not their sum: hour, rows, roll-up."""
        ...

    async def roll_ups_apart(self, *, since: int, until: int) -> list[tuple[str, LedgerSum, LedgerSum]]:
        """Return where roll-ups of the days and months that are touched do not agree with one another.

        Each is a day or month and the roll-up's name, what that is the sum of, and its own sum.
        """
        ...

    async def day_use(self, *, since: float, until: float) -> list[DayUse]:
        """Return the ledger by UTC day and version, from the roll-ups.

        Raises:
            TooManyGroupsError: it is too much for one answer.
        """
        ...

    async def unsure_of_version(self, version_id: str, *, since: float, until: float, limit: int) -> list[str]:
        """Return requests of a version that were retried, cut off or estimated, newest first."""
        ...

    async def hourly(self, *, since: int, until: int) -> dict[tuple[str, int], LedgerSum]:
        """Return the roll-up by tenant and hour."""
        ...

    async def customers(self) -> dict[str, str]:
        """Return Stripe's customer of each tenant that has one."""
        ...

    async def put_customer(self, tenant_id: str, customer_id: str) -> None:
        """Remember Stripe's customer of a tenant; one that is there stays."""
        ...

    async def meter_events(
        self,
        *,
        since: int,
        until: int,
        status: MeterStatus | None = None,
        after: MeterEvent | None = None,
        limit: int | None = None,
    ) -> list[MeterEvent]:
        """Return events of the hours between, oldest hour first: those behind ``after``, at most ``limit``."""
        ...

    async def meter_counts(self, *, since: int) -> dict[MeterStatus, int]:
        """Return how many events there are of the hours since then, by status."""
        ...

    async def add_meter_events(self, events: Sequence[MeterEvent]) -> None:
        """Add; those that are there stay."""
        ...

    async def put_meter_events(self, events: Sequence[MeterEvent]) -> None:
        """Replace status, times and reason of those."""
        ...


class SinkError(Exception):
    """A sink cannot take anything now; nothing is lost, it is tried again.

    ``is_answered``: it said so itself; else nobody knows whether what was sent arrived.
    """

    def __init__(self, reason: str, *, is_answered: bool = False) -> None:
        super().__init__(reason)
        self.is_answered = is_answered


class EventSink(Protocol):
    """Where usage events go. Methods block: for a thread."""

    trouble: str
    """What it said last of why it cannot take anything; "" if nothing."""

    def send(self, events: Sequence[tuple[bytes, bytes]], *, wait_s: float) -> bool:
        """Take events (key, value) in order and wait for their acknowledgement; say whether all have it.

        If not, they are still under way: call ``wait`` again, and send nothing else before.
        """
        ...

    def wait(self, wait_s: float) -> bool:
        """Wait on; say whether all are acknowledged.

        Raises:
            SinkError: some failed for good and must be sent again.
        """
        ...

    def close(self) -> None:
        """Let go of what is under way."""
        ...


class MeterRefusedError(Exception):
    """Stripe does not want this, and will not: the reason is its own, and so is ``code``, which may be ""."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


class Meters(Protocol):
    """Stripe, as far as it is needed. All methods raise ``SinkError`` while it cannot be reached or is busy.

    Nothing that was asked in vain is known not to have arrived.
    """

    async def ensure_customer(self, tenant_id: str, name: str) -> str:
        """Return the id of the customer of a tenant, made if there is none."""
        ...

    async def report(self, event: MeterEvent, customer_id: str, *, timestamp: int, attempt: int) -> None:
        """Report one event; one that was there before is fine.

        Raises:
            MeterRefusedError: it was refused.
        """
        ...

    async def total(self, meter: str, customer_id: str, *, since: int, until: int) -> int:
        """Return what a meter has of a customer between two full hours."""
        ...

    async def hourly(self, meter: str, customer_id: str, *, since: int, until: int) -> dict[int, int]:
        """Return the same by hour, those with something."""
        ...

    async def close(self) -> None:
        """Give back connections."""
        ...
