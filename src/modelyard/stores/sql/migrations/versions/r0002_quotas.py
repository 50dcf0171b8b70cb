"""Plans and weights of tenants, and what each key spent by day, for quotas."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add two columns with defaults and one table, which begins with what the hourly roll-up knows."""
    with op.batch_alter_table("tenants") as tenants:
        tenants.add_column(sa.Column("plan", sa.Text(), nullable=False, server_default="standard"))
        tenants.add_column(sa.Column("weight", sa.Double(), nullable=False, server_default="1"))
    op.create_table(
        "usage_daily",
        sa.Column("customer_id", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("day", sa.BigInteger(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("customer_id", "api_key_id", "day", "source", name=op.f("pk_usage_daily")),
    )
    # Which worker it came from is not known any more: source ''.
    op.execute(
        "INSERT INTO usage_daily (customer_id, api_key_id, day, source, tokens, cost_nanousd) "
        "SELECT customer_id, api_key_id, (hour - hour % 86400) / 86400, '', sum(prompt_tokens + completion_tokens), "
        "sum(cost_nanousd) FROM usage_hourly GROUP BY customer_id, api_key_id, (hour - hour % 86400) / 86400"
    )
