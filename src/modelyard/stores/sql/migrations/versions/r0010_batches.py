"""Batches, their shards, and which run of a line was charged."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add three tables."""
    _add_batches()
    op.create_table(
        "batch_shards",
        sa.Column("batch_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("first", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.BigInteger(), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("is_done", sa.Boolean(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.batch_id"], name=op.f("fk_batch_shards_batch_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "number", name=op.f("pk_batch_shards")),
    )
    op.create_table(
        "batch_charges",
        sa.Column("line", sa.Text(), nullable=False),
        sa.Column("batch_id", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("line", name=op.f("pk_batch_charges")),
    )
    op.create_index(op.f("ix_batch_charges_batch_id"), "batch_charges", ["batch_id"])


def _add_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("route", sa.Text(), nullable=False),
        sa.Column("input_file_id", sa.Text(), nullable=False),
        sa.Column("completion_window", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("output_file_id", sa.Text(), nullable=False),
        sa.Column("error_file_id", sa.Text(), nullable=False),
        sa.Column("has_output", sa.Boolean(), nullable=False),
        sa.Column("has_errors", sa.Boolean(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("output_expires_s", sa.BigInteger()),
        sa.Column("errors", sa.Text(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.Text(), nullable=False),
        sa.Column("forecast", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text()),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("in_progress_at", sa.Double()),
        sa.Column("finalizing_at", sa.Double()),
        sa.Column("completed_at", sa.Double()),
        sa.Column("failed_at", sa.Double()),
        sa.Column("expired_at", sa.Double()),
        sa.Column("cancelling_at", sa.Double()),
        sa.Column("cancelled_at", sa.Double()),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["owner_id"], ["tenants.tenant_id"], name=op.f("fk_batches_owner_id")),
        sa.PrimaryKeyConstraint("batch_id", name=op.f("pk_batches")),
        sa.UniqueConstraint(
            "owner_id",
            "api_key_id",
            "idempotency_key",
            name=op.f("uq_batches_owner_id_api_key_id_idempotency_key"),
        ),
    )
    op.create_index(op.f("ix_batches_owner_id_created_at"), "batches", ["owner_id", "created_at"])
    op.create_index(op.f("ix_batches_status_created_at"), "batches", ["status", "created_at"])
