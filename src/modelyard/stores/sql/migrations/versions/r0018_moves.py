"""Moves: which replica a new one takes over from."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Add the column; nothing moves yet."""
    with op.batch_alter_table("replicas") as table:
        table.add_column(sa.Column("takes_over", sa.Text(), nullable=False, server_default=""))
