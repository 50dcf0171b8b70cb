"""The tables, once, for SQLite and Postgres.

They follow section 5 of the source: ``model_registry``, ``endpoints`` and ``inference_requests`` keep its names and
columns. What the source puts into ``endpoints`` and is a fact of something else stands there, once: the model, its
version and the canary weight are rows of ``releases``, the accelerator is the version's ``gpu_requirement``, the
replicas that run are rows of ``replicas``. Structured leftovers are JSON text.

The ledger (``inference_requests`` and the tables ``usage_…``) has no foreign
keys: it outlives everything that it bills. Times are unix seconds.
"""

import sqlalchemy as sa

from modelyard.stores.sql import columns, schema_billing, schema_books, schema_events
from modelyard.stores.sql.columns import Sequence as _Sequence
from modelyard.stores.sql.columns import added as _added
from modelyard.stores.sql.columns import count as _count
from modelyard.stores.sql.columns import endpoint as _endpoint
from modelyard.stores.sql.columns import flag as _flag
from modelyard.stores.sql.columns import instant as _instant
from modelyard.stores.sql.columns import model as _model
from modelyard.stores.sql.columns import owner as _owner
from modelyard.stores.sql.columns import text as _text

HEAD = "0018"
"""The newest migration; a fresh database is created at it directly. A test holds it equal to Alembic's head."""

metadata = columns.metadata
BILLING, BOOKS, EVENTS = schema_billing, schema_books, schema_events
"""The tables of money, of the books, of events and of webhooks, which are of the same schema."""


def _tokens_added(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger, nullable=False, server_default="0") for name in names]


tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("tenant_id", sa.Text, primary_key=True),
    _text("name"),
    _count("created_at"),
    _text("limits"),
    _flag("is_suspended"),
    # Written by a release before this one too, which does not know them.
    sa.Column("plan", sa.Text, nullable=False, server_default="standard"),
    sa.Column("weight", sa.Double, nullable=False, server_default="1"),
    sa.UniqueConstraint("name"),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("api_key_id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.tenant_id"), nullable=False, index=True),
    _text("name"),
    sa.Column("secret_hash", sa.LargeBinary, nullable=False),
    _text("scopes"),
    _count("created_at"),
    _text("last4"),
    _text("limits"),
    sa.Column("models", sa.Text),
    sa.Column("expires_at", sa.BigInteger),
    sa.Column("revoked_at", sa.BigInteger),
    sa.Column("previous_hash", sa.LargeBinary),
    sa.Column("previous_expires_at", sa.BigInteger),
)

model_registry = sa.Table(
    "model_registry",
    metadata,
    sa.Column("model_id", sa.Text, primary_key=True),
    _owner(),
    _text("name"),
    _text("version"),
    _text("framework"),
    _text("artifact_path"),
    _text("artifact_digest"),
    _count("artifact_size"),
    _text("config"),
    _text("gpu_requirement"),
    _count("memory_required"),
    _text("status"),
    _count("created_at"),
    _added("facts", "{}"),
    _added("files", "[]"),
    _added("base_id"),
    _added("parent_id"),
    sa.UniqueConstraint("owner_id", "name", "version"),
)

endpoints = sa.Table(
    "endpoints",
    metadata,
    sa.Column("endpoint_id", sa.Text, primary_key=True),
    _owner(),
    _text("name"),
    _text("status"),
    _count("min_replicas"),
    _count("max_replicas"),
    _flag("scale_to_zero"),
    sa.Column("idle_s", sa.Double, nullable=False),
    _text("scaling_metric"),
    sa.Column("scaling_target", sa.Double, nullable=False),
    _flag("is_shared"),
    _flag("is_deleted"),
    _text("progress"),
    _text("failure"),
    _count("created_at"),
    _added("serving", "{}"),
    _added("autoscale", "{}"),
    _added("rollout", "null"),
    _added("pool"),
    _added("host_id"),
    # A deleted endpoint drains for a while; its name is free at once.
    sa.Index(
        "uq_endpoints_owner_id_name",
        "owner_id",
        "name",
        unique=True,
        sqlite_where=sa.text("NOT is_deleted"),
        postgresql_where=sa.text("NOT is_deleted"),
    ),
)

releases = sa.Table(
    "releases",
    metadata,
    _endpoint(),
    sa.Column("position", sa.Integer, nullable=False),
    _model(),
    sa.Column("weight", sa.Integer, nullable=False),
    sa.Column("shadow", sa.Integer, nullable=False, server_default="0"),
    sa.Column("fallback", sa.Integer, nullable=False, server_default="0"),
    sa.PrimaryKeyConstraint("endpoint_id", "position"),
)

replicas = sa.Table(
    "replicas",
    metadata,
    sa.Column("replica_id", sa.Text, primary_key=True),
    _endpoint(),
    _model(),
    sa.Column("ordinal", sa.Integer, nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    _text("state"),
    _instant("state_since"),
    _text("host"),
    sa.Column("port", sa.Integer, nullable=False),
    _text("secret"),
    sa.Column("slots", sa.Integer, nullable=False),
    _instant("started_at"),
    sa.Column("ready_at", sa.Double),
    _text("reason"),
    _added("placement", "{}"),
    _added("model_name"),
    _added("guests", "[]"),
    _added("takes_over"),
    sa.Index(None, "endpoint_id"),
)

endpoint_events = sa.Table(
    "endpoint_events",
    metadata,
    sa.Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    _endpoint(),
    _instant("at"),
    _text("kind"),
    _text("reason"),
    _text("replica_id"),
    _added("data", "{}"),
    sa.Index(None, "endpoint_id", "sequence"),
)

observed_loads = sa.Table(
    "observed_loads",
    metadata,
    sa.Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    _text("model_id"),
    sa.Column("seconds", sa.Double, nullable=False),
    sa.Index(None, "model_id", "sequence"),
)

inference_requests = sa.Table(
    "inference_requests",
    metadata,
    sa.Column("request_id", sa.Text, primary_key=True),
    _text("endpoint_id"),
    _text("customer_id"),
    _text("api_key_id"),
    _text("model_name"),
    _text("model_id"),
    _text("replica_id"),
    _text("route"),
    _flag("is_stream"),
    _count("prompt_tokens"),
    _count("cached_tokens"),
    _count("completion_tokens"),
    _count("total_tokens"),
    _count("cost_nanousd"),
    _text("status"),
    sa.Column("http_status", sa.Integer, nullable=False),
    _text("error_code"),
    sa.Column("ttft_ms", sa.Double),
    sa.Column("latency_ms", sa.Double, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    _flag("is_estimated"),
    _instant("created_at"),
    # The hour of created_at, stored because the two dialects round a cast to integer differently.
    _count("hour"),
    _instant("settled_at"),
    # What is not counted in tokens; written by a release before this one too, which does not know it.
    sa.Column("units_micro", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("unit", sa.Text, nullable=False, server_default=""),
    *_tokens_added("reasoning_tokens", "audio_input_tokens", "audio_output_tokens"),
    _added("batch_id"),
    sa.Index(None, "created_at"),
    sa.Index(None, "customer_id", "created_at"),
)


def _rolled(name: str, *dimensions: str) -> sa.Table:
    """A roll-up: sums by the start of a UTC hour, day or month, and by dimensions. Its rows lie in order of time."""
    keys = ("period", *dimensions)
    return sa.Table(
        name,
        metadata,
        _count("period"),
        *(_flag(key) if key == "is_batch" else _text(key) for key in dimensions),
        _count("requests"),
        _count("prompt_tokens"),
        _count("cached_tokens"),
        _count("completion_tokens"),
        _count("reasoning_tokens"),
        _count("audio_input_tokens"),
        _count("audio_output_tokens"),
        _count("units_micro"),
        _count("cost_nanousd"),
        sa.PrimaryKeyConstraint(*keys),
        *([sa.Index(None, "customer_id", "period")] if "customer_id" in keys else []),
        # SQLite would keep all of the long key twice, in the table and in an index.
        sqlite_with_rowid=False,
    )


_OWNERS = ("customer_id", "api_key_id", "model_name", "endpoint_id", "model_id")
_KINDS = ("route", "status", "is_batch", "unit")
usage_rollup_hourly = _rolled("usage_rollup_hourly", *_OWNERS, *_KINDS)
usage_rollup_daily = _rolled("usage_rollup_daily", *_OWNERS, *_KINDS)
usage_rollup_monthly = _rolled("usage_rollup_monthly", *_OWNERS, *_KINDS)
# Small, because they know no tenants. By hour too, so that days of every time zone can be made of it.
usage_rollup_platform_hourly = _rolled("usage_rollup_platform_hourly", "model_name", *_KINDS)
usage_rollup_platform_daily = _rolled("usage_rollup_platform_daily", "model_name", *_KINDS)

usage_rows_kept = sa.Table(
    "usage_rows_kept",
    metadata,
    # One row, once rows of the ledger were removed: those of requests that arrived before are gone.
    sa.Column("name", sa.Text, primary_key=True),
    _count("since"),
)

usage_daily = sa.Table(
    "usage_daily",
    metadata,
    # Days since 1970; by source, so that what each worker spent of a quota is known.
    _text("customer_id"),
    _text("api_key_id"),
    _count("day"),
    _text("source"),
    _count("tokens"),
    _count("cost_nanousd"),
    sa.PrimaryKeyConstraint("customer_id", "api_key_id", "day", "source"),
)

usage_model_months = sa.Table(
    "usage_model_months",
    metadata,
    # What budgets of single models are checked against: as usage_daily, by the first day of the month.
    _text("customer_id"),
    _text("api_key_id"),
    _count("month"),
    _text("model_name"),
    _text("source"),
    _count("cost_nanousd"),
    sa.PrimaryKeyConstraint("customer_id", "api_key_id", "month", "model_name", "source"),
    sqlite_with_rowid=False,
)

usage_open = sa.Table(
    "usage_open",
    metadata,
    sa.Column("request_id", sa.Text, primary_key=True),
    _instant("created_at"),
    _text("intent"),
    _count("prompt_tokens"),
    _count("completion_tokens"),
)

journal_positions = sa.Table(
    "journal_positions",
    metadata,
    sa.Column("source", sa.Text, primary_key=True),
    _text("segment"),
    sa.Column("offset", sa.BigInteger, nullable=False),
)

kept_requests = sa.Table(
    "kept_requests",
    metadata,
    sa.Column("request_id", sa.Text, primary_key=True),
    _owner(),
    _text("api_key_id"),
    _text("instance"),
    _text("route"),
    _text("model_name"),
    _text("fingerprint"),
    sa.Column("idempotency_key", sa.Text),
    _flag("is_detached"),
    _text("status"),
    _instant("created_at"),
    _instant("expires_at"),
    sa.Column("finished_at", sa.Double),
    sa.Column("http_status", sa.Integer, nullable=False),
    _text("content_type"),
    _count("answer_bytes"),
    _text("error_code"),
    sa.Column("webhook_url", sa.Text),
    _text("webhook_event_id"),
    _text("webhook_status"),
    sa.Column("webhook_due", sa.Double),
    sa.Column("webhook_since", sa.Double),
    sa.Column("webhook_tries", sa.Integer, nullable=False),
    _text("webhook_attempts"),
    # Last: SQLite reads what stands behind a large value only by way of all of it.
    sa.Column("answer", sa.LargeBinary, nullable=False),
    # Nulls are distinct in both dialects: requests without such a key do not meet.
    sa.UniqueConstraint("owner_id", "api_key_id", "idempotency_key"),
    sa.Index(None, "owner_id", "created_at"),
    # What a tenant has is counted at every claim.
    sa.Index(None, "owner_id", "answer_bytes"),
    sa.Index(None, "status"),
    sa.Index(None, "expires_at"),
    sa.Index(None, "webhook_due"),
)

webhook_secrets = sa.Table(
    "webhook_secrets",
    metadata,
    sa.Column("owner_id", sa.Text, sa.ForeignKey("tenants.tenant_id"), primary_key=True),
    _text("salt"),
    sa.Column("previous_salt", sa.Text),
    sa.Column("previous_expires_at", sa.Double),
)

uploads = sa.Table(
    "uploads",
    metadata,
    sa.Column("upload_id", sa.Text, primary_key=True),
    _owner(),
    _text("name"),
    _text("digest"),
    _count("size_bytes"),
    _count("part_bytes"),
    _text("parts"),
    _text("status"),
    _instant("created_at"),
    _instant("expires_at"),
    _added("files", "[]"),
    sa.Index(None, "owner_id", "created_at"),
    sa.Index(None, "expires_at"),
)

files = sa.Table(
    "files",
    metadata,
    sa.Column("file_id", sa.Text, primary_key=True),
    _owner(),
    _text("api_key_id"),
    _text("filename"),
    _text("purpose"),
    _count("size_bytes"),
    _instant("created_at"),
    sa.Column("expires_at", sa.Double),
    _text("status"),
    _text("digest"),
    sa.Column("idempotency_key", sa.Text),
    _text("fingerprint"),
    # Nulls are distinct in both dialects: files without such a key do not meet.
    sa.UniqueConstraint("owner_id", "api_key_id", "idempotency_key"),
    sa.Index(None, "owner_id", "created_at"),
    # What a tenant has is counted at every upload.
    sa.Index(None, "owner_id", "size_bytes"),
    sa.Index(None, "expires_at"),
)

forecasts = sa.Table(
    "forecasts",
    metadata,
    sa.Column("endpoint_id", sa.Text, sa.ForeignKey("endpoints.endpoint_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("profile", sa.LargeBinary, nullable=False),
    _instant("updated_at"),
)

engine_fits = sa.Table(
    "engine_fits",
    metadata,
    sa.Column("model_id", sa.Text, sa.ForeignKey("model_registry.model_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("fit", sa.LargeBinary, nullable=False),
    _instant("updated_at"),
)

controller_leases = sa.Table(
    "controller_leases",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    _text("holder"),
    _count("epoch"),
    _count("beat"),
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("batch_id", sa.Text, primary_key=True),
    _owner(),
    _text("api_key_id"),
    _text("route"),
    _text("input_file_id"),
    _text("completion_window"),
    _instant("created_at"),
    _instant("expires_at"),
    _text("output_file_id"),
    _text("error_file_id"),
    _flag("has_output"),
    _flag("has_errors"),
    _text("status"),
    _text("model_name"),
    _text("metadata"),
    sa.Column("output_expires_s", sa.BigInteger),
    _text("errors"),
    _count("total"),
    _count("completed"),
    _count("failed"),
    _text("tokens"),
    _text("forecast"),
    sa.Column("idempotency_key", sa.Text),
    _text("fingerprint"),
    sa.Column("in_progress_at", sa.Double),
    sa.Column("finalizing_at", sa.Double),
    sa.Column("completed_at", sa.Double),
    sa.Column("failed_at", sa.Double),
    sa.Column("expired_at", sa.Double),
    sa.Column("cancelling_at", sa.Double),
    sa.Column("cancelled_at", sa.Double),
    _text("holder"),
    _count("token"),
    _instant("lease_until"),
    # Nulls are distinct in both dialects: batches without such a key do not meet.
    sa.UniqueConstraint("owner_id", "api_key_id", "idempotency_key"),
    sa.Index(None, "owner_id", "created_at"),
    sa.Index(None, "status", "created_at"),
)

batch_shards = sa.Table(
    "batch_shards",
    metadata,
    sa.Column("batch_id", sa.Text, sa.ForeignKey("batches.batch_id", ondelete="CASCADE"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    _count("first"),
    _count("lines"),
    sa.Column("offset", sa.BigInteger, nullable=False),
    _count("size"),
    _flag("is_done"),
    _text("holder"),
    _count("token"),
    _instant("lease_until"),
    _count("completed"),
    _count("failed"),
    _text("tokens"),
    sa.PrimaryKeyConstraint("batch_id", "number"),
)

batch_charges = sa.Table(
    "batch_charges",
    metadata,
    # Of the ledger: which run of a line was charged, so that a line that had to be run again is charged once.
    sa.Column("line", sa.Text, primary_key=True),
    _text("batch_id"),
    _text("request_id"),
    sa.Index(None, "batch_id"),
)

alembic_version = sa.Table(
    "alembic_version",
    sa.MetaData(),  # Alembic's own table, as Alembic makes it; not part of our schema.
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
