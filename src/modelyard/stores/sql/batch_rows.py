"""Batches and shards to rows and back."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from modelyard.domain.batches import (
    Batch,
    BatchError,
    BatchStatus,
    Counts,
    Forecast,
    Progress,
    Shard,
    Tokens,
    total_of,
)
from modelyard.stores.sql.mapping import Values

_to_json = msgspec.json.Encoder().encode
_errors = msgspec.json.Decoder(tuple[BatchError, ...]).decode
_metadata = msgspec.json.Decoder(dict[str, str] | None).decode
_tokens = msgspec.json.Decoder(Tokens).decode
_forecast = msgspec.json.Decoder(Forecast | None).decode
TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def values_of(batch: Batch) -> Values:
    """Return the row of ``batch``, which nobody has a lease of."""
    return {
        "batch_id": batch.id,
        "owner_id": batch.tenant_id,
        "api_key_id": batch.key_id,
        "route": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "has_output": bool(batch.output_file_id),
        "has_errors": bool(batch.error_file_id),
        "status": batch.status.value,
        "model_name": batch.model,
        "metadata": _text(batch.metadata),
        "output_expires_s": batch.output_expires_s,
        "errors": errors_text(batch.errors),
        "total": batch.counts.total,
        "completed": batch.counts.completed,
        "failed": batch.counts.failed,
        "tokens": tokens_text(batch.tokens),
        "forecast": forecast_text(batch.forecast),
        "idempotency_key": batch.idempotency_key,
        "fingerprint": batch.fingerprint,
        "holder": "",
        "token": 0,
        "lease_until": 0.0,
        **{name: getattr(batch, name) for name in TIMES},
    }


def batch_of(row: sa.RowMapping) -> Batch:
    """Return the batch of a row."""
    return Batch(
        id=row["batch_id"],
        tenant_id=row["owner_id"],
        key_id=row["api_key_id"],
        endpoint=row["route"],
        input_file_id=row["input_file_id"],
        completion_window=row["completion_window"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        # An earlier release wrote the names of files to come there; there are none while the flags say so.
        output_file_id=row["output_file_id"] if row["has_output"] else "",
        error_file_id=row["error_file_id"] if row["has_errors"] else "",
        status=BatchStatus(row["status"]),
        model=row["model_name"],
        metadata=_metadata(row["metadata"]),
        output_expires_s=row["output_expires_s"],
        errors=_errors(row["errors"]),
        counts=Counts(row["total"], row["completed"], row["failed"]),
        tokens=_tokens(row["tokens"]),
        forecast=_forecast(row["forecast"]),
        idempotency_key=row["idempotency_key"],
        fingerprint=row["fingerprint"],
        **{name: row[name] for name in TIMES},
    )


def shard_values(shard: Shard) -> Values:
    """Return the row of a shard that nobody has begun."""
    return {
        "batch_id": shard.batch_id,
        "number": shard.number,
        "first": shard.first,
        "lines": shard.lines,
        "offset": shard.offset,
        "size": shard.size,
        "is_done": False,
        "holder": "",
        "token": 0,
        "lease_until": 0.0,
        **progress_values(Progress()),
    }


def shard_of(row: sa.RowMapping) -> Shard:
    """Return the shard of a row."""
    return Shard(row["batch_id"], row["number"], row["first"], row["lines"], row["offset"], row["size"])


def progress_values(progress: Progress) -> Values:
    """Return the columns that say how far a shard is."""
    return {"completed": progress.completed, "failed": progress.failed, "tokens": tokens_text(progress.tokens)}


def sum_of(rows: Iterable[sa.Row[Any]]) -> Values:
    """Return how far a batch is whose shards are as far as ``rows`` say."""
    return progress_values(
        total_of([Progress(done, failed, _tokens(tokens)) for done, failed, tokens in map(tuple, rows)])
    )


def errors_text(errors: Sequence[BatchError]) -> str:
    """Return them as text."""
    return _text(tuple(errors))


def tokens_text(tokens: Tokens) -> str:
    """Return them as text."""
    return _text(tokens)


def forecast_text(forecast: Forecast | None) -> str:
    """Return it as text."""
    return _text(forecast)


def _text(value: Any) -> str:
    return _to_json(value).decode()
