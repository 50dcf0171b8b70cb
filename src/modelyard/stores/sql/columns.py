"""What the tables are made of: the metadata that they belong to, and kinds of columns."""

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only in a column that is declared exactly INTEGER.
Sequence = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def text(name: str) -> sa.Column[str]:
    """Text that is always there."""
    return sa.Column(name, sa.Text, nullable=False)


def added(name: str, default: str = "") -> sa.Column[str]:
    """A column that a release before this one, which writes rows too, does not know."""
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


def count(name: str) -> sa.Column[int]:
    """A whole number."""
    return sa.Column(name, sa.BigInteger, nullable=False)


def instant(name: str) -> sa.Column[float]:
    """Unix seconds with a fraction."""
    return sa.Column(name, sa.Double, nullable=False)


def flag(name: str) -> sa.Column[bool]:
    """True or false."""
    return sa.Column(name, sa.Boolean, nullable=False)


def owner() -> sa.Column[str]:
    """Whose it is."""
    return sa.Column("owner_id", sa.Text, sa.ForeignKey("tenants.tenant_id"), nullable=False)


def endpoint() -> sa.Column[str]:
    """Of which endpoint; it goes with it."""
    return sa.Column("endpoint_id", sa.Text, sa.ForeignKey("endpoints.endpoint_id", ondelete="CASCADE"), nullable=False)


def model() -> sa.Column[str]:
    """Of which version."""
    return sa.Column("model_id", sa.Text, sa.ForeignKey("model_registry.model_id"), nullable=False)
