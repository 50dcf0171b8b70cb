"""The contract of what is remembered of batches: their life, their shards, who works on what."""

from collections.abc import Collection, Sequence
from typing import Protocol

from modelyard.domain.batches import Batch, BatchError, Ending, Forecast, Hold, Lease, Progress, Shard


class BatchesFullError(Exception):
    """A tenant has as many batches under way as it may have."""


class BatchStore(Protocol):
    """Batches and their shards. All methods raise ``StoreUnavailableError``.

    Every change by a worker names the token of its lease, changes nothing where a newer one was given out, and says
    whether it did. Counts of a batch never go down.
    """

    async def add_batch(self, batch: Batch, *, open_max: int | None = None) -> Batch | None:
        """Add ``batch``, or return the one that has its tenant, key and idempotency key.

        Raises:
            BatchesFullError: ``open_max`` batches of the tenant are not over, and this would be one more.
            AlreadyExistsError: somebody else adds one with its idempotency key at this moment.
        """
        ...

    async def batch(self, batch_id: str, *, tenant_id: str | None) -> Batch | None:
        """Return the batch of this id (of this tenant)."""
        ...

    async def batches(self, *, tenant_id: str | None, limit: int, after: Batch | None) -> list[Batch]:
        """Return batches (of this tenant) older than ``after``, newest first."""
        ...

    async def open_batches(self, tenant_id: str) -> int:
        """Return how many batches of a tenant are not over."""
        ...

    async def cancel(self, batch_id: str, *, now: float) -> bool:
        """Ask for the end of a batch that is neither over nor being cancelled; say whether it was so."""
        ...

    async def lease_batch(self, holder: str, *, now: float, until: float) -> Lease | None:
        """Give out a batch that has work of its own and no living lease, the oldest first.

        That is one to be checked; or one whose files are to be made: all its shards are done, or its window is over or
        it was cancelled and no shard has a living lease.
        """
        ...

    async def keep_batch(self, batch_id: str, token: int, *, until: float) -> bool:
        """Move the end of a lease."""
        ...

    async def leave_batch(self, batch_id: str, token: int) -> None:
        """Give a lease back."""
        ...

    async def plan(
        self, batch_id: str, token: int, shards: Sequence[Shard], model: str, forecast: Forecast, *, now: float
    ) -> bool:
        """Begin a batch whose file is good."""
        ...

    async def fail(self, batch_id: str, token: int, errors: Sequence[BatchError], *, now: float) -> bool:
        """End a batch whose file is bad."""
        ...

    async def seal(self, batch_id: str, token: int, *, now: float) -> list[Shard] | None:
        """Take all shards from whoever works on them, and return them in order; None if the lease is lost.

        A batch that is in progress, all of it done, becomes ``finalizing``.
        """
        ...

    async def finish(self, batch_id: str, token: int, ending: Ending, *, now: float) -> bool:
        """End a batch, add the files that ``ending`` has, and forget its shards: all of it, or nothing."""
        ...

    async def lease_shard(
        self,
        holder: str,
        *,
        now: float,
        until: float,
        not_of: Collection[str] = (),
        not_for: Collection[tuple[str, str]] = (),
    ) -> Lease | None:
        """Give out a shard that is not done and has no living lease; none of the tenants ``not_of``, and none for a
        model of a tenant in ``not_for``.

        Of the tenant that has the fewest given out, then of the oldest batch; only of batches that are in progress.
        """
        ...

    async def keep_shard(self, shard: Shard, token: int, progress: Progress, *, until: float) -> Hold:
        """Move the end of a lease and note progress."""
        ...

    async def leave_shard(self, shard: Shard, token: int, progress: Progress) -> Hold:
        """Give a lease back before the shard is done."""
        ...

    async def finish_shard(self, shard: Shard, token: int, progress: Progress) -> Hold:
        """Note that all lines of a shard are answered."""
        ...

    async def ahead(self, batch: Batch) -> int:
        """Return how many lines older batches of the same model still have."""
        ...

    async def forget_charges(self, *, before: float) -> int:
        """Forget what lines of batches that ended before then were charged; return how many."""
        ...
