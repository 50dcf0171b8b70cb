"""Tables of the books, beside those of ``schema.py`` and under the same rules.

They have no foreign keys, as the ledger has none: what a replica cost outlives
its endpoint.
"""

import sqlalchemy as sa

from modelyard.stores.sql.columns import metadata


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _number(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=False)


sink_cursors = sa.Table(
    "sink_cursors",
    metadata,
    _text("sink"),
    _text("source"),
    _text("segment"),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("sink", "source"),
)

sink_gaps = sa.Table(
    "sink_gaps",
    metadata,
    _text("sink"),
    _text("source"),
    _text("segment"),
    _number("since"),
    _number("until"),
    _count("requests"),
    sa.PrimaryKeyConstraint("sink", "source", "segment"),
)

replica_lives = sa.Table(
    "replica_lives",
    metadata,
    sa.Column("replica_id", sa.Text, primary_key=True),
    _text("endpoint_id"),
    _text("owner_id"),
    _text("model_name"),
    _text("model_id"),
    _text("accelerator"),
    _number("accelerators"),
    _count("hourly_nanousd"),
    _number("started_at"),
    sa.Column("ready_at", sa.Double),
    sa.Column("ended_at", sa.Double),
    _number("seen_at"),
    sa.Column("prompt_tokens", sa.BigInteger),
    sa.Column("generation_tokens", sa.BigInteger),
    _number("counted_at"),
    sa.Index(None, "ended_at"),
)

replica_hours = sa.Table(
    "replica_hours",
    metadata,
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
    sa.PrimaryKeyConstraint("hour", "replica_id"),
)

stripe_customers = sa.Table(
    "stripe_customers",
    metadata,
    sa.Column("tenant_id", sa.Text, primary_key=True),
    _text("customer_id"),
)

stripe_meter_events = sa.Table(
    "stripe_meter_events",
    metadata,
    _count("hour"),
    _text("tenant_id"),
    _text("meter"),
    sa.Column("part", sa.Integer, nullable=False),
    _count("value"),
    _number("created_at"),
    _text("status"),
    sa.Column("tried_at", sa.Double),
    sa.Column("exported_at", sa.Double),
    _text("reason"),
    sa.PrimaryKeyConstraint("hour", "tenant_id", "meter", "part"),
    sa.Index(None, "status", "hour"),
)
