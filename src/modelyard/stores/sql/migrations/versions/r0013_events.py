"""Webhooks that tenants register, the events that they are told of, and their deliveries."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add three tables. Webhooks of requests move into them when this release leads, not before (``adopt``)."""
    op.create_table(
        "webhooks",
        sa.Column("webhook_id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("types", sa.Text(), nullable=False),
        sa.Column("is_enabled", sa.Boolean(), nullable=False),
        sa.Column("disabled_reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("salt", sa.Text(), nullable=False),
        sa.Column("previous_salt", sa.Text()),
        sa.Column("previous_expires_at", sa.Double()),
        sa.Column("failing_since", sa.Double()),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        sa.Column("quiet_until", sa.Double()),
        sa.ForeignKeyConstraint(["owner_id"], ["tenants.tenant_id"], name=op.f("fk_webhooks_owner_id")),
        sa.PrimaryKeyConstraint("webhook_id", name=op.f("pk_webhooks")),
    )
    op.create_index(op.f("ix_webhooks_owner_id"), "webhooks", ["owner_id"])
    op.create_table(
        "tenant_events",
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["owner_id"], ["tenants.tenant_id"], name=op.f("fk_tenant_events_owner_id")),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_tenant_events")),
    )
    op.create_index(op.f("ix_tenant_events_owner_id_created_at"), "tenant_events", ["owner_id", "created_at"])
    op.create_index(op.f("ix_tenant_events_created_at"), "tenant_events", ["created_at"])
    _create_deliveries()


def _create_deliveries() -> None:
    op.create_table(
        "webhook_deliveries",
        sa.Column("delivery_id", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("webhook_id", sa.Text()),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("lane", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double()),
        sa.Column("since", sa.Double()),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["event_id"],
            ["tenant_events.event_id"],
            name=op.f("fk_webhook_deliveries_event_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.webhook_id"], name=op.f("fk_webhook_deliveries_webhook_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("delivery_id", name=op.f("pk_webhook_deliveries")),
        sa.UniqueConstraint("event_id", "webhook_id", name=op.f("uq_webhook_deliveries_event_id_webhook_id")),
    )
    op.create_index(op.f("ix_webhook_deliveries_lane_due_at"), "webhook_deliveries", ["lane", "due_at"])
    op.create_index(
        op.f("ix_webhook_deliveries_webhook_id_created_at"), "webhook_deliveries", ["webhook_id", "created_at"]
    )
