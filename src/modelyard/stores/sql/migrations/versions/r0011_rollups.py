"""Roll-ups by hour, day and month with all dimensions; tokens of thought and of sound; rows that are kept for a time.

The roll-ups take the place of two tables, which go. A controller of the release
before this one, should it still lead, can then not deliver: what it would have
written stays in the journals, and the next leader delivers it. Nothing is lost,
and no sum goes into a table that is not read any more.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_OWNERS = ("customer_id", "api_key_id", "model_name", "endpoint_id", "model_id")
_KINDS = ("route", "status", "is_batch", "unit")
_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
_SOUND = ("audio_input_tokens", "audio_output_tokens", "units_micro", "cost_nanousd")


def upgrade() -> None:
    """Add columns with defaults, and sum up the rows of the ledger, none of which was ever removed."""
    with op.batch_alter_table("inference_requests") as requests:
        for name in ("reasoning_tokens", "audio_input_tokens", "audio_output_tokens"):
            requests.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
        requests.add_column(sa.Column("batch_id", sa.Text(), nullable=False, server_default=""))
    _roll_up("usage_rollup_hourly", "hour", _OWNERS)
    _roll_up("usage_rollup_daily", "hour - hour % 86400", _OWNERS)
    _roll_up("usage_rollup_monthly", _month(), _OWNERS)
    _roll_up("usage_rollup_platform_hourly", "hour", ("model_name",))
    _roll_up("usage_rollup_platform_daily", "hour - hour % 86400", ("model_name",))
    op.drop_table("usage_hourly")
    op.drop_table("usage_units_hourly")
    op.create_table(
        "usage_rows_kept",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_usage_rows_kept")),
    )


def _month() -> str:
    """Return the start of an hour's month as unix seconds, in SQL."""
    if op.get_bind().dialect.name == "sqlite":
        return "CAST(strftime('%s', hour, 'unixepoch', 'start of month') AS BIGINT)"
    return "CAST(extract(epoch FROM date_trunc('month', to_timestamp(hour) AT TIME ZONE 'UTC')) AS BIGINT)"


def _roll_up(name: str, period: str, owners: tuple[str, ...]) -> None:
    keys = (*owners, *_KINDS)
    op.create_table(
        name,
        sa.Column("period", sa.BigInteger(), nullable=False),
        *(sa.Column(key, sa.Boolean() if key == "is_batch" else sa.Text(), nullable=False) for key in keys),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        *(sa.Column(count, sa.BigInteger(), nullable=False) for count in (*_COUNTS, *_SOUND)),
        sa.PrimaryKeyConstraint("period", *keys, name=op.f(f"pk_{name}")),
        sqlite_with_rowid=False,
    )
    if "customer_id" in keys:
        op.create_index(op.f(f"ix_{name}_customer_id_period"), name, ["customer_id", "period"])
    chosen = ", ".join("false" if key == "is_batch" else key for key in keys)
    groups = ", ".join((period, *(key for key in keys if key != "is_batch")))
    sums = ", ".join(f"sum({count})" for count in (*_COUNTS, *_SOUND))
    op.execute(
        f"INSERT INTO {name} (period, {', '.join(keys)}, requests, {', '.join((*_COUNTS, *_SOUND))}) "  # noqa: S608 - names of ours
        f"SELECT {period}, {chosen}, count(*), {sums} FROM inference_requests GROUP BY {groups}"
    )
