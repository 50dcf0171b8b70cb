"""What keys spent on each model by month, for budgets of single models."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Add the sums, those of the past too; of which gateway they came is not known of these."""
    op.create_table(
        "usage_model_months",
        sa.Column("customer_id", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("month", sa.BigInteger(), nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "customer_id", "api_key_id", "month", "model_name", "source", name=op.f("pk_usage_model_months")
        ),
        sqlite_with_rowid=False,
    )
    op.execute(
        "INSERT INTO usage_model_months (customer_id, api_key_id, month, model_name, source, cost_nanousd) "
        "SELECT customer_id, api_key_id, period / 86400, model_name, '', sum(cost_nanousd) FROM usage_rollup_monthly "
        "GROUP BY customer_id, api_key_id, period / 86400, model_name HAVING sum(cost_nanousd) > 0"
    )
