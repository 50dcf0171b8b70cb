"""How gateways treat the requests of an endpoint, and which share of them is copied to a release."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add two columns; what stands there already is served as before."""
    with op.batch_alter_table("endpoints") as endpoints:
        endpoints.add_column(sa.Column("serving", sa.Text(), nullable=False, server_default="{}"))
    with op.batch_alter_table("releases") as releases:
        releases.add_column(sa.Column("shadow", sa.Integer(), nullable=False, server_default="0"))
