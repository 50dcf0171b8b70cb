"""Releases that answer what the others have no room for."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the turn of a fallback; 0, as in every row so far: it is none."""
    with op.batch_alter_table("releases") as table:
        table.add_column(sa.Column("fallback", sa.Integer(), nullable=False, server_default="0"))
