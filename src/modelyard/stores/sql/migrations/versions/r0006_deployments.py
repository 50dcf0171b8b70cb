"""Deployments: facts of models, placements, rollouts, autoscaling, uploads, forecasts, the controllers' lease."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_ADDED = {
    "model_registry": (("facts", "{}"), ("files", "[]"), ("base_id", ""), ("parent_id", "")),
    "endpoints": (("autoscale", "{}"), ("rollout", "null"), ("pool", "")),
    "replicas": (("placement", "{}"), ("model_name", "")),
    "endpoint_events": (("data", "{}"),),
}


def upgrade() -> None:
    """Add columns, each with what a row without it means, and three tables."""
    for name, columns in _ADDED.items():
        with op.batch_alter_table(name) as table:
            for column, default in columns:
                table.add_column(sa.Column(column, sa.Text(), nullable=False, server_default=default))
    op.create_table(
        "uploads",
        sa.Column("upload_id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("part_bytes", sa.BigInteger(), nullable=False),
        sa.Column("parts", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("upload_id", name="pk_uploads"),
        sa.ForeignKeyConstraint(["owner_id"], ["tenants.tenant_id"], name="fk_uploads_owner_id_tenants"),
    )
    op.create_index("ix_uploads_owner_id_created_at", "uploads", ["owner_id", "created_at"])
    op.create_index("ix_uploads_expires_at", "uploads", ["expires_at"])
    op.create_table(
        "forecasts",
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("profile", sa.LargeBinary(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("endpoint_id", name="pk_forecasts"),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["endpoints.endpoint_id"],
            name="fk_forecasts_endpoint_id_endpoints",
            ondelete="CASCADE",
        ),
    )
    op.create_table(
        "controller_leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_controller_leases"),
    )
