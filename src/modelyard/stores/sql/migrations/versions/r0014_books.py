"""Cursors of sinks, lives and hours of replicas, what Stripe was told."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def _number(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=False)


def upgrade() -> None:
    """Add six tables."""
    _add_sinks()
    _add_replicas()
    _add_stripe()


def _add_sinks() -> None:
    op.create_table(
        "sink_cursors",
        _text("sink"),
        _text("source"),
        _text("segment"),
        _count("offset"),
        sa.PrimaryKeyConstraint("sink", "source", name=op.f("pk_sink_cursors")),
    )
    op.create_table(
        "sink_gaps",
        _text("sink"),
        _text("source"),
        _text("segment"),
        _number("since"),
        _number("until"),
        _count("requests"),
        sa.PrimaryKeyConstraint("sink", "source", "segment", name=op.f("pk_sink_gaps")),
    )


def _add_replicas() -> None:
    op.create_table(
        "replica_lives",
        _text("replica_id"),
        _text("endpoint_id"),
        _text("owner_id"),
        _text("model_name"),
        _text("model_id"),
        _text("accelerator"),
        _number("accelerators"),
        _count("hourly_nanousd"),
        _number("started_at"),
        sa.Column("ready_at", sa.Double()),
        sa.Column("ended_at", sa.Double()),
        _number("seen_at"),
        sa.Column("prompt_tokens", sa.BigInteger()),
        sa.Column("generation_tokens", sa.BigInteger()),
        _number("counted_at"),
        sa.PrimaryKeyConstraint("replica_id", name=op.f("pk_replica_lives")),
    )
    op.create_index(op.f("ix_replica_lives_ended_at"), "replica_lives", ["ended_at"])
    op.create_table(
        "replica_hours",
        _count("hour"),
        _text("replica_id"),
        _text("endpoint_id"),
        _text("owner_id"),
        _text("model_name"),
        _text("accelerator"),
        _number("present_s"),
        _number("ready_s"),
        _number("busy_s"),
        _number("accelerator_s"),
        _count("cost_nanousd"),
        sa.PrimaryKeyConstraint("hour", "replica_id", name=op.f("pk_replica_hours")),
    )


def _add_stripe() -> None:
    op.create_table(
        "stripe_customers",
        _text("tenant_id"),
        _text("customer_id"),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_stripe_customers")),
    )
    op.create_table(
        "stripe_meter_events",
        _count("hour"),
        _text("tenant_id"),
        _text("meter"),
        sa.Column("part", sa.Integer(), nullable=False),
        _count("value"),
        _number("created_at"),
        _text("status"),
        sa.Column("tried_at", sa.Double()),
        sa.Column("exported_at", sa.Double()),
        _text("reason"),
        sa.PrimaryKeyConstraint("hour", "tenant_id", "meter", "part", name=op.f("pk_stripe_meter_events")),
    )
    op.create_index(op.f("ix_stripe_meter_events_status_hour"), "stripe_meter_events", ["status", "hour"])
