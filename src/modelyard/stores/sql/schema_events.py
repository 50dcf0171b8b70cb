"""The tables of events, webhooks and deliveries; a part of ``schema.py``, which see."""

import sqlalchemy as sa

from modelyard.stores.sql.columns import count, flag, instant, metadata, owner, text

webhooks = sa.Table(
    "webhooks",
    metadata,
    sa.Column("webhook_id", sa.Text, primary_key=True),
    owner(),
    text("url"),
    text("description"),
    text("types"),
    flag("is_enabled"),
    text("disabled_reason"),
    instant("created_at"),
    text("salt"),
    sa.Column("previous_salt", sa.Text),
    sa.Column("previous_expires_at", sa.Double),
    # Since the last success: the first failure, how many there were, and until when nobody asks again.
    sa.Column("failing_since", sa.Double),
    count("failures"),
    sa.Column("quiet_until", sa.Double),
    sa.Index(None, "owner_id"),
)

tenant_events = sa.Table(
    "tenant_events",
    metadata,
    sa.Column("event_id", sa.Text, primary_key=True),
    owner(),
    text("type"),
    instant("created_at"),
    text("data"),
    sa.Index(None, "owner_id", "created_at"),
    sa.Index(None, "created_at"),
)

webhook_deliveries = sa.Table(
    "webhook_deliveries",
    metadata,
    sa.Column("delivery_id", sa.Text, primary_key=True),
    sa.Column("event_id", sa.Text, sa.ForeignKey("tenant_events.event_id", ondelete="CASCADE"), nullable=False),
    text("owner_id"),
    # Null: to the URL that came with a request; else to that of the webhook, as it is at the attempt.
    sa.Column("webhook_id", sa.Text, sa.ForeignKey("webhooks.webhook_id", ondelete="CASCADE")),
    text("url"),
    # Whose turn it takes: its webhook's, or its tenant's.
    text("lane"),
    text("status"),
    instant("created_at"),
    sa.Column("due_at", sa.Double),
    sa.Column("since", sa.Double),
    sa.Column("tries", sa.Integer, nullable=False),
    text("attempts"),
    sa.UniqueConstraint("event_id", "webhook_id"),
    # What is due is looked for lane by lane: those that fail may have many thousands.
    sa.Index(None, "lane", "due_at"),
    sa.Index(None, "webhook_id", "created_at"),
)
