"""The first schema: tenants, registry, endpoints and the ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create every table."""
    _create_tenants()
    _create_catalog()
    _create_replicas()
    _create_ledger()
    _create_reports()


def _create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("limits", sa.Text(), nullable=False),
        sa.Column("is_suspended", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("last4", sa.Text(), nullable=False),
        sa.Column("limits", sa.Text(), nullable=False),
        sa.Column("models", sa.Text(), nullable=True),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.Column("previous_hash", sa.LargeBinary(), nullable=True),
        sa.Column("previous_expires_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.tenant_id"], name=op.f("fk_api_keys_tenant_id")),
        sa.PrimaryKeyConstraint("api_key_id", name=op.f("pk_api_keys")),
    )
    op.create_index(op.f("ix_api_keys_tenant_id"), "api_keys", ["tenant_id"], unique=False)


def _create_catalog() -> None:
    op.create_table(
        "model_registry",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("framework", sa.Text(), nullable=False),
        sa.Column("artifact_path", sa.Text(), nullable=False),
        sa.Column("artifact_digest", sa.Text(), nullable=False),
        sa.Column("artifact_size", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("gpu_requirement", sa.Text(), nullable=False),
        sa.Column("memory_required", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["owner_id"], ["tenants.tenant_id"], name=op.f("fk_model_registry_owner_id")),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_model_registry")),
        sa.UniqueConstraint("owner_id", "name", "version", name=op.f("uq_model_registry_owner_id_name_version")),
    )
    op.create_table(
        "endpoints",
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("min_replicas", sa.BigInteger(), nullable=False),
        sa.Column("max_replicas", sa.BigInteger(), nullable=False),
        sa.Column("scale_to_zero", sa.Boolean(), nullable=False),
        sa.Column("idle_s", sa.Double(), nullable=False),
        sa.Column("scaling_metric", sa.Text(), nullable=False),
        sa.Column("scaling_target", sa.Double(), nullable=False),
        sa.Column("is_shared", sa.Boolean(), nullable=False),
        sa.Column("is_deleted", sa.Boolean(), nullable=False),
        sa.Column("progress", sa.Text(), nullable=False),
        sa.Column("failure", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["owner_id"], ["tenants.tenant_id"], name=op.f("fk_endpoints_owner_id")),
        sa.PrimaryKeyConstraint("endpoint_id", name=op.f("pk_endpoints")),
    )
    op.create_index(
        "uq_endpoints_owner_id_name",
        "endpoints",
        ["owner_id", "name"],
        unique=True,
        sqlite_where=sa.text("NOT is_deleted"),
        postgresql_where=sa.text("NOT is_deleted"),
    )
    op.create_table(
        "releases",
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["endpoint_id"], ["endpoints.endpoint_id"], name=op.f("fk_releases_endpoint_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["model_id"], ["model_registry.model_id"], name=op.f("fk_releases_model_id")),
        sa.PrimaryKeyConstraint("endpoint_id", "position", name=op.f("pk_releases")),
    )


def _create_replicas() -> None:
    op.create_table(
        "replicas",
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("state_since", sa.Double(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("port", sa.Integer(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ready_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["endpoint_id"], ["endpoints.endpoint_id"], name=op.f("fk_replicas_endpoint_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["model_id"], ["model_registry.model_id"], name=op.f("fk_replicas_model_id")),
        sa.PrimaryKeyConstraint("replica_id", name=op.f("pk_replicas")),
    )
    op.create_index(op.f("ix_replicas_endpoint_id"), "replicas", ["endpoint_id"], unique=False)
    op.create_table(
        "endpoint_events",
        sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["endpoint_id"], ["endpoints.endpoint_id"], name=op.f("fk_endpoint_events_endpoint_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_endpoint_events")),
    )
    op.create_index(
        op.f("ix_endpoint_events_endpoint_id_sequence"), "endpoint_events", ["endpoint_id", "sequence"], unique=False
    )
    op.create_table(
        "observed_loads",
        sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_observed_loads")),
    )
    op.create_index(
        op.f("ix_observed_loads_model_id_sequence"), "observed_loads", ["model_id", "sequence"], unique=False
    )


def _create_ledger() -> None:
    op.create_table(
        "inference_requests",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("customer_id", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("route", sa.Text(), nullable=False),
        sa.Column("is_stream", sa.Boolean(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("total_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("http_status", sa.Integer(), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=False),
        sa.Column("ttft_ms", sa.Double(), nullable=True),
        sa.Column("latency_ms", sa.Double(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("is_estimated", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("settled_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_inference_requests")),
    )
    op.create_index(op.f("ix_inference_requests_created_at"), "inference_requests", ["created_at"], unique=False)
    op.create_index(
        op.f("ix_inference_requests_customer_id_created_at"),
        "inference_requests",
        ["customer_id", "created_at"],
        unique=False,
    )


def _create_reports() -> None:
    op.create_table(
        "usage_hourly",
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("customer_id", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "hour", "customer_id", "api_key_id", "model_name", "status", name=op.f("pk_usage_hourly")
        ),
    )
    op.create_table(
        "usage_open",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("intent", sa.Text(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_usage_open")),
    )
    op.create_table(
        "journal_positions",
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("source", name=op.f("pk_journal_positions")),
    )
