"""How fast the engines of a version were seen to be."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Add the table; what is learned from now on goes there."""
    op.create_table(
        "engine_fits",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("fit", sa.LargeBinary(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"],
            ["model_registry.model_id"],
            name=op.f("fk_engine_fits_model_id_model_registry"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_engine_fits")),
    )
