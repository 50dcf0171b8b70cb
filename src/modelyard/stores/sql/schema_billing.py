"""The tables of money beside the ledger; a part of ``schema.py``, which see."""

import sqlalchemy as sa

from modelyard.stores.sql.columns import Sequence, count, instant, metadata, text

SUMMED = ("requests", "input_tokens", "cached_tokens", "output_tokens", "units_micro", "cost_nanousd")
"""What ``billing_sums`` sums."""

price_entries = sa.Table(
    "price_entries",
    metadata,
    sa.Column("price_id", sa.Text, primary_key=True),
    # "": every tenant, every version.
    text("tenant_id"),
    text("model"),
    text("version"),
    count("effective_from"),
    sa.Column("effective_until", sa.BigInteger),
    text("price"),
    count("created_at"),
    text("created_by"),
    sa.UniqueConstraint("tenant_id", "model", "version", "effective_from"),
)

billing_accounts = sa.Table(
    "billing_accounts",
    metadata,
    sa.Column("tenant_id", sa.Text, primary_key=True),
    text("plan"),
    text("details"),
    count("accounted_nanousd"),
    count("applied_nanousd"),
)

credit_grants = sa.Table(
    "credit_grants",
    metadata,
    sa.Column("grant_id", sa.Text, primary_key=True),
    text("tenant_id"),
    count("amount_nanousd"),
    count("granted_at"),
    sa.Column("expires_at", sa.BigInteger),
    text("reason"),
    text("created_by"),
    count("drawn_nanousd"),
    count("expired_nanousd"),
    sa.Index(None, "tenant_id"),
)

credit_entries = sa.Table(
    "credit_entries",
    metadata,
    text("grant_id"),
    text("kind"),
    count("day"),
    text("tenant_id"),
    count("at"),
    count("amount_nanousd"),
    sa.PrimaryKeyConstraint("grant_id", "kind", "day"),
    sa.Index(None, "tenant_id", "at"),
)

budgets = sa.Table(
    "budgets",
    metadata,
    sa.Column("budget_id", sa.Text, primary_key=True),
    text("tenant_id"),
    count("created_at"),
    text("details"),
    sa.Index(None, "tenant_id"),
)

billing_events = sa.Table(
    "billing_events",
    metadata,
    sa.Column("event_id", sa.Text, primary_key=True),
    text("tenant_id"),
    text("type"),
    count("at"),
    text("once"),
    text("data"),
    sa.UniqueConstraint("once"),
    sa.Index(None, "tenant_id", "at"),
)

billing_notices = sa.Table(
    "billing_notices",
    metadata,
    sa.Column("notice_id", sa.Text, primary_key=True),
    sa.Column("event_id", sa.Text, sa.ForeignKey("billing_events.event_id"), nullable=False, index=True),
    text("channel"),
    text("target"),
    sa.Column("due_at", sa.Double, index=True),
    sa.Column("since", sa.Double),
    sa.Column("tries", sa.Integer, nullable=False),
    text("status"),
    text("error"),
)

billing_sums = sa.Table(
    "billing_sums",
    metadata,
    # What invoices are made of: a roll-up like usage_hourly, and beside each sum how much of it is on invoices.
    text("tenant_id"),
    text("month"),
    text("model_name"),
    text("price"),
    text("unit"),
    *(count(name) for name in SUMMED),
    *(sa.Column(f"billed_{name}", sa.BigInteger, nullable=False, server_default="0") for name in SUMMED),
    sa.PrimaryKeyConstraint("tenant_id", "month", "model_name", "price", "unit"),
)

usage_totals = sa.Table(
    "usage_totals",
    metadata,
    # All that a key ever cost: what prepaid credit is set against. By source, as usage_daily.
    text("tenant_id"),
    text("api_key_id"),
    text("source"),
    count("cost_nanousd"),
    sa.PrimaryKeyConstraint("tenant_id", "api_key_id", "source"),
)

invoices = sa.Table(
    "invoices",
    metadata,
    sa.Column("invoice_id", sa.Text, primary_key=True),
    text("tenant_id"),
    text("month"),
    text("status"),
    sa.Column("number", sa.Text),
    count("drafted_at"),
    sa.Column("issued_at", sa.BigInteger),
    text("document"),
    sa.UniqueConstraint("number"),
    sa.Index(None, "tenant_id", "month"),
)

credit_notes = sa.Table(
    "credit_notes",
    metadata,
    sa.Column("credit_note_id", sa.Text, primary_key=True),
    text("tenant_id"),
    sa.Column("invoice_id", sa.Text, sa.ForeignKey("invoices.invoice_id"), nullable=False, index=True),
    text("number"),
    count("issued_at"),
    text("document"),
    sa.UniqueConstraint("number"),
)

billing_series = sa.Table(
    "billing_series",
    metadata,
    # The last number of each series; raised in the transaction that uses it, so that none is left out.
    sa.Column("name", sa.Text, primary_key=True),
    count("last"),
)

billing_audit = sa.Table(
    "billing_audit",
    metadata,
    sa.Column("sequence", Sequence, primary_key=True, autoincrement=True),
    instant("at"),
    text("api_key_id"),
    text("tenant_id"),
    text("action"),
    text("subject"),
    text("before"),
    text("after"),
)
