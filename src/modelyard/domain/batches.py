"""Batches: many requests in one file, answered when there is room, within a window.

A batch is cut into *shards*, ranges of its lines. Whoever works on a shard, or
checks a batch, or assembles its files, holds a *lease* with a fencing token:
each new holder has a greater one, and what comes with a lower one is refused.
Times are unix seconds.
"""

from collections.abc import Sequence
from enum import Enum, StrEnum

import msgspec

from modelyard.domain.files import File
from modelyard.domain.usage import MICRO_PER_UNIT

LINES_MAX = 50_000
"""Most requests of a batch."""
EMBEDDINGS_MAX = 50_000
"""Most inputs of all requests of a batch of embeddings together."""
WINDOW = "24h"
"""The completion window that OpenAI has."""
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/classify",
    "/v1/images/generations",
)
"""What a batch may ask for."""
METHOD = "POST"
LATE_S = 30.0
"""So long after the moment of its forecast a batch without any answer may still be thought to be done soon."""

CALLER_HEADER = "x-modelyard-caller"
"""JSON of ``Caller``, to the gateway on a socket that only planes can open; a client's own is never read."""


class Caller(msgspec.Struct, frozen=True):
    """Whose request a line is: the key that made the batch. ``line`` names it for good, like ``batch_x/17``."""

    key_id: str
    line: str = ""


class BatchStatus(StrEnum):
    """Where a batch is, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Say whether nothing will change any more."""
        return self in _OVER


_OVER = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


class BatchError(msgspec.Struct, frozen=True):
    """What is wrong with the input file; ``line`` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Counts(msgspec.Struct, frozen=True):
    """Lines in all, lines with an answer, lines with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Tokens(msgspec.Struct, frozen=True):
    """What the answers of a batch used, as they tell it."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: "Tokens") -> "Tokens":
        """Return both together."""
        return Tokens(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )


class Forecast(msgspec.Struct, frozen=True):
    """What a batch will probably take, made when its file was checked. ``seconds`` None: nobody knows its model yet."""

    input_tokens: int
    output_tokens: int
    cost_nanousd: int
    seconds: float | None
    basis: str
    """What it was made from, in words."""
    factor_micro: int | None = None
    """What lines pay of the price in real time, in millionths, by the prices of then."""


class Batch(msgspec.Struct, frozen=True):
    """One batch of a tenant. ``input_file_id`` is as its maker wrote it; the file may not exist.

    ``output_file_id`` and ``error_file_id`` are empty until it is over, and of a file that would have no line.
    """

    id: str
    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: float
    expires_at: float
    output_file_id: str = ""
    error_file_id: str = ""
    status: BatchStatus = BatchStatus.VALIDATING
    model: str = ""
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None
    errors: tuple[BatchError, ...] = ()
    counts: Counts = Counts()
    tokens: Tokens = Tokens()
    forecast: Forecast | None = None
    idempotency_key: str | None = None
    fingerprint: str = ""
    """Of what was asked, to tell a repetition from another request with the same idempotency key."""
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None


class Shard(msgspec.Struct, frozen=True):
    """A range of lines: ``lines`` requests from number ``first`` (from 0) on, ``size`` bytes at ``offset``."""

    batch_id: str
    number: int
    first: int
    lines: int
    offset: int
    size: int


class Lease(msgspec.Struct, frozen=True):
    """The right to work on a batch as a whole, or on one of its shards, as long as ``token`` is the newest."""

    batch: Batch
    token: int
    shard: Shard | None = None


class Hold(Enum):
    """What a lease of a shard is still good for."""

    HELD = "held"
    ENDING = "ending"
    """It is ours, but its batch is to end: what is under way may finish, nothing more is begun."""
    LOST = "lost"
    """Somebody else has it: whatever comes of it now is for nobody."""


class Progress(msgspec.Struct, frozen=True):
    """How far a shard is."""

    completed: int = 0
    failed: int = 0
    tokens: Tokens = Tokens()


class Ending(msgspec.Struct, frozen=True):
    """What became of a batch; its files, whose contents are there, exist from its end on."""

    status: BatchStatus
    counts: Counts
    tokens: Tokens
    output: File | None = None
    errors: File | None = None


# --- as OpenAI shows it ---


class ErrorsView(msgspec.Struct, frozen=True):
    """A list of what is wrong with the file."""

    data: list[BatchError]
    object: str = "list"


class _CachedDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class _ReasoningDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class UsageView(msgspec.Struct, frozen=True):
    """Tokens of all answers."""

    input_tokens: int
    input_tokens_details: _CachedDetails
    output_tokens: int
    output_tokens_details: _ReasoningDetails
    total_tokens: int


class ForecastView(msgspec.Struct, frozen=True):
    """What it will probably take; ``finish_at`` is null while nobody knows."""

    finish_at: int | None
    cost_usd: float
    input_tokens: int
    output_tokens: int
    basis: str


class ExtraView(msgspec.Struct, frozen=True):
    """What is beyond OpenAI's object."""

    key_id: str
    tenant_id: str
    forecast: ForecastView | None
    price_factor: float
    """What lines pay of the price in real time, by the prices that held when its file was checked; until then the
    platform's own. A line has the price of its arrival."""


class BatchView(msgspec.Struct, frozen=True):
    """OpenAI's batch object, and one field more."""

    id: str
    endpoint: str
    model: str | None
    errors: ErrorsView | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    usage: UsageView | None
    metadata: dict[str, str] | None
    modelyard: ExtraView
    object: str = "batch"


def view(batch: Batch, *, price_factor: float, now: float) -> BatchView:
    """Return ``batch`` as callers see it; ``price_factor`` is the platform's own."""
    has_begun = batch.in_progress_at is not None
    found = batch.forecast
    if found is not None and found.factor_micro is not None:
        price_factor = found.factor_micro / MICRO_PER_UNIT
    return BatchView(
        id=batch.id,
        endpoint=batch.endpoint,
        model=batch.model or None,
        errors=ErrorsView(list(batch.errors)) if batch.errors else None,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status=batch.status,
        output_file_id=batch.output_file_id or None,
        error_file_id=batch.error_file_id or None,
        created_at=int(batch.created_at),
        in_progress_at=_second(batch.in_progress_at),
        expires_at=int(batch.expires_at),
        finalizing_at=_second(batch.finalizing_at),
        completed_at=_second(batch.completed_at),
        failed_at=_second(batch.failed_at),
        expired_at=_second(batch.expired_at),
        cancelling_at=_second(batch.cancelling_at),
        cancelled_at=_second(batch.cancelled_at),
        request_counts=batch.counts,
        usage=_usage(batch.tokens) if has_begun else None,
        metadata=batch.metadata,
        modelyard=ExtraView(batch.key_id, batch.tenant_id, _forecast(batch, now), price_factor),
    )


def total_of(progresses: Sequence[Progress]) -> Progress:
    """Return several shards' progress as one."""
    total = Progress()
    for one in progresses:
        total = Progress(total.completed + one.completed, total.failed + one.failed, total.tokens + one.tokens)
    return total


def _second(at: float | None) -> int | None:
    return None if at is None else int(at)


def _usage(tokens: Tokens) -> UsageView:
    return UsageView(
        tokens.input,
        _CachedDetails(tokens.cached),
        tokens.output,
        _ReasoningDetails(tokens.reasoning),
        tokens.input + tokens.output,
    )


def _forecast(batch: Batch, now: float) -> ForecastView | None:
    found = batch.forecast
    if found is None:
        return None
    return ForecastView(
        _finish_at(batch, found, now), found.cost_nanousd / 1e9, found.input_tokens, found.output_tokens, found.basis
    )


def _finish_at(batch: Batch, forecast: Forecast, now: float) -> int | None:
    """Return when it will be done, never a moment that is over: by its own pace once a twentieth of it is, by the
    forecast before."""
    counts, begun = batch.counts, batch.in_progress_at
    done = counts.completed + counts.failed
    planned = None if forecast.seconds is None or begun is None else begun + forecast.seconds
    if batch.status is not BatchStatus.IN_PROGRESS or begun is None:
        return None if planned is None else int(planned)
    # What should be over by now goes by its own pace, however little is done: it was wrong about the model.
    if done and (done * 20 >= counts.total or planned is None or planned <= now):
        return int(now + max(0.0, now - begun) * (counts.total - done) / done)
    if planned is None or now - planned > LATE_S:
        return None
    return int(max(planned, now))
