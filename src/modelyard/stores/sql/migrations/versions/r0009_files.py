"""Files of tenants."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add the table; contents are in the data directory."""
    op.create_table(
        "files",
        sa.Column("file_id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("file_id", name="pk_files"),
        sa.ForeignKeyConstraint(["owner_id"], ["tenants.tenant_id"], name="fk_files_owner_id_tenants"),
        sa.UniqueConstraint(
            "owner_id",
            "api_key_id",
            "idempotency_key",
            name=op.f("uq_files_owner_id_api_key_id_idempotency_key"),
        ),
    )
    op.create_index("ix_files_owner_id_created_at", "files", ["owner_id", "created_at"])
    op.create_index("ix_files_owner_id_size_bytes", "files", ["owner_id", "size_bytes"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
