"""Guests: endpoints on the replicas of others, their seats there, and uploaded folders."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_ADDED = {"endpoints": ("host_id", ""), "replicas": ("guests", "[]"), "uploads": ("files", "[]")}


def upgrade() -> None:
    """Add columns, each with what a row without it means."""
    for name, (column, default) in _ADDED.items():
        with op.batch_alter_table(name) as table:
            table.add_column(sa.Column(column, sa.Text(), nullable=False, server_default=default))
