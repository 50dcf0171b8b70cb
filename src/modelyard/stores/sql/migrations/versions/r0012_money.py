"""Prices with dates, and everything of money beside the ledger: accounts, credit, budgets, invoices."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add tables. What was used before is on no invoice, since the ledger has not kept at which price."""
    _prices()
    _credit()
    _told()
    _invoices()
    _sums()


def _prices() -> None:
    """Prices with dates, and who changed what."""
    op.create_table(
        "billing_audit",
        sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("before", sa.Text(), nullable=False),
        sa.Column("after", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_billing_audit")),
    )
    op.create_table(
        "price_entries",
        sa.Column("price_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("effective_from", sa.BigInteger(), nullable=False),
        sa.Column("effective_until", sa.BigInteger(), nullable=True),
        sa.Column("price", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("price_id", name=op.f("pk_price_entries")),
        sa.UniqueConstraint(
            "tenant_id",
            "model",
            "version",
            "effective_from",
            name=op.f("uq_price_entries_tenant_id_model_version_effective_from"),
        ),
    )


def _credit() -> None:
    """How tenants pay, and their credit."""
    op.create_table(
        "billing_accounts",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.Column("accounted_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("applied_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_billing_accounts")),
    )
    op.create_table(
        "credit_entries",
        sa.Column("grant_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("day", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("grant_id", "kind", "day", name=op.f("pk_credit_entries")),
    )
    op.create_index(op.f("ix_credit_entries_tenant_id_at"), "credit_entries", ["tenant_id", "at"], unique=False)
    op.create_table(
        "credit_grants",
        sa.Column("grant_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("granted_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("drawn_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("expired_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("grant_id", name=op.f("pk_credit_grants")),
    )
    op.create_index(op.f("ix_credit_grants_tenant_id"), "credit_grants", ["tenant_id"], unique=False)


def _told() -> None:
    """Budgets, and what is told."""
    op.create_table(
        "billing_events",
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("once", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_billing_events")),
        sa.UniqueConstraint("once", name=op.f("uq_billing_events_once")),
    )
    op.create_index(op.f("ix_billing_events_tenant_id_at"), "billing_events", ["tenant_id", "at"], unique=False)
    op.create_table(
        "budgets",
        sa.Column("budget_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("budget_id", name=op.f("pk_budgets")),
    )
    op.create_index(op.f("ix_budgets_tenant_id"), "budgets", ["tenant_id"], unique=False)
    op.create_table(
        "billing_notices",
        sa.Column("notice_id", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=True),
        sa.Column("since", sa.Double(), nullable=True),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["event_id"], ["billing_events.event_id"], name=op.f("fk_billing_notices_event_id")),
        sa.PrimaryKeyConstraint("notice_id", name=op.f("pk_billing_notices")),
    )
    op.create_index(op.f("ix_billing_notices_due_at"), "billing_notices", ["due_at"], unique=False)
    op.create_index(op.f("ix_billing_notices_event_id"), "billing_notices", ["event_id"], unique=False)


def _invoices() -> None:
    """Invoices and credit notes."""
    op.create_table(
        "invoices",
        sa.Column("invoice_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("month", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("number", sa.Text(), nullable=True),
        sa.Column("drafted_at", sa.BigInteger(), nullable=False),
        sa.Column("issued_at", sa.BigInteger(), nullable=True),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("invoice_id", name=op.f("pk_invoices")),
        sa.UniqueConstraint("number", name=op.f("uq_invoices_number")),
    )
    op.create_index(op.f("ix_invoices_tenant_id_month"), "invoices", ["tenant_id", "month"], unique=False)
    op.create_table(
        "billing_series",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_billing_series")),
    )
    op.create_table(
        "credit_notes",
        sa.Column("credit_note_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("invoice_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Text(), nullable=False),
        sa.Column("issued_at", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["invoice_id"], ["invoices.invoice_id"], name=op.f("fk_credit_notes_invoice_id")),
        sa.PrimaryKeyConstraint("credit_note_id", name=op.f("pk_credit_notes")),
        sa.UniqueConstraint("number", name=op.f("uq_credit_notes_number")),
    )
    op.create_index(op.f("ix_credit_notes_invoice_id"), "credit_notes", ["invoice_id"], unique=False)


def _sums() -> None:
    """What invoices and prepaid credit are made of."""
    op.create_table(
        "billing_sums",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("month", sa.Text(), nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("price", sa.Text(), nullable=False),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("units_micro", sa.BigInteger(), nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("billed_requests", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("billed_input_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("billed_cached_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("billed_output_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("billed_units_micro", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("billed_cost_nanousd", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "month", "model_name", "price", "unit", name=op.f("pk_billing_sums")),
    )
    op.create_table(
        "usage_totals",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "api_key_id", "source", name=op.f("pk_usage_totals")),
    )
