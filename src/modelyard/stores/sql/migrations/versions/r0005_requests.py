"""Requests whose answer is kept, their webhooks, and what webhook secrets are derived from."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add two tables."""
    op.create_table(
        "kept_requests",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("route", sa.Text(), nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text()),
        sa.Column("is_detached", sa.Boolean(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double()),
        sa.Column("http_status", sa.Integer(), nullable=False),
        sa.Column("content_type", sa.Text(), nullable=False),
        sa.Column("answer_bytes", sa.BigInteger(), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=False),
        sa.Column("webhook_url", sa.Text()),
        sa.Column("webhook_event_id", sa.Text(), nullable=False),
        sa.Column("webhook_status", sa.Text(), nullable=False),
        sa.Column("webhook_due", sa.Double()),
        sa.Column("webhook_since", sa.Double()),
        sa.Column("webhook_tries", sa.Integer(), nullable=False),
        sa.Column("webhook_attempts", sa.Text(), nullable=False),
        sa.Column("answer", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["owner_id"], ["tenants.tenant_id"], name=op.f("fk_kept_requests_owner_id")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_kept_requests")),
        sa.UniqueConstraint(
            "owner_id",
            "api_key_id",
            "idempotency_key",
            name=op.f("uq_kept_requests_owner_id_api_key_id_idempotency_key"),
        ),
    )
    op.create_index(op.f("ix_kept_requests_owner_id_created_at"), "kept_requests", ["owner_id", "created_at"])
    op.create_index(op.f("ix_kept_requests_owner_id_answer_bytes"), "kept_requests", ["owner_id", "answer_bytes"])
    op.create_index(op.f("ix_kept_requests_status"), "kept_requests", ["status"])
    op.create_index(op.f("ix_kept_requests_expires_at"), "kept_requests", ["expires_at"])
    op.create_index(op.f("ix_kept_requests_webhook_due"), "kept_requests", ["webhook_due"])
    op.create_table(
        "webhook_secrets",
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("salt", sa.Text(), nullable=False),
        sa.Column("previous_salt", sa.Text()),
        sa.Column("previous_expires_at", sa.Double()),
        sa.ForeignKeyConstraint(["owner_id"], ["tenants.tenant_id"], name=op.f("fk_webhook_secrets_owner_id")),
        sa.PrimaryKeyConstraint("owner_id", name=op.f("pk_webhook_secrets")),
    )
