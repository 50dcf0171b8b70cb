"""A line of a batch is charged once, however often it had to be run.

A worker that is killed between an answer and its spool runs the line again.
The first run that succeeded is charged; later ones are in the ledger, too,
since an engine worked for them, with nothing to pay and nothing of a quota.
"""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from modelyard.domain.usage import LINE_REPEATED, Intent, UsageStatus
from modelyard.stores.sql import schema
from modelyard.stores.sql.database import CHUNK, insert
from modelyard.stores.sql.mapping import Values

_TABLE = schema.batch_charges
_NOTHING: Values = {
    "prompt_tokens": 0,
    "cached_tokens": 0,
    "completion_tokens": 0,
    "total_tokens": 0,
    "reasoning_tokens": 0,
    "audio_input_tokens": 0,
    "audio_output_tokens": 0,
    "cost_nanousd": 0,
    "units_micro": 0,
    "unit": "",
    "status": UsageStatus.INTERRUPTED.value,
    "error_code": LINE_REPEATED,
}


def charge_once(connection: sa.Connection, rows: Sequence[Values], intents: Mapping[str, Intent]) -> None:
    """Take the charge off those ledger ``rows`` whose line has been charged by another run."""
    lines = {
        row["request_id"]: intents[row["request_id"]].batch_line
        for row in rows
        if intents[row["request_id"]].batch_line and row["status"] == UsageStatus.SUCCESS.value
    }
    if not lines:
        return
    statement = insert(connection, _TABLE).on_conflict_do_nothing()
    wanted = [{"line": line, "batch_id": line.partition("/")[0], "request_id": rid} for rid, line in lines.items()]
    connection.execute(statement, wanted)
    charged = _charged(connection, sorted(set(lines.values())))
    for row in rows:
        line = lines.get(row["request_id"])
        if line is not None and charged[line] != row["request_id"]:
            row.update(_NOTHING)


def _charged(connection: sa.Connection, lines: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for start in range(0, len(lines), CHUNK):
        query = sa.select(_TABLE.c.line, _TABLE.c.request_id).where(_TABLE.c.line.in_(lines[start : start + CHUNK]))
        found.update((row.line, row.request_id) for row in connection.execute(query))
    return found
