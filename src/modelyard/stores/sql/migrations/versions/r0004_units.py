"""Units beside tokens: seconds of sound, pictures, characters of speech, searches."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add two columns with defaults and one table; what was billed so far had no units."""
    with op.batch_alter_table("inference_requests") as requests:
        requests.add_column(sa.Column("units_micro", sa.BigInteger(), nullable=False, server_default="0"))
        requests.add_column(sa.Column("unit", sa.Text(), nullable=False, server_default=""))
    op.create_table(
        "usage_units_hourly",
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("customer_id", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("units_micro", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "hour", "customer_id", "api_key_id", "model_name", "status", "unit", name=op.f("pk_usage_units_hourly")
        ),
    )
