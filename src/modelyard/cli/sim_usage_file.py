"""What ``modelyard sim --replay --usage FILE`` reads: rows that were exported, and nothing of their endpoint."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import close_names
from modelyard.cli.sim_ledger import CHUNK_TOKENS, Case, Part, Wanted, as_said
from modelyard.config.batch import BatchConfig
from modelyard.sim.recorded import Asked, asked_of, most_at_once
from modelyard.sim.recorded_speed import Size
from modelyard.sim.replay import Ledger
from modelyard.sim.replay_money import PriceList

if TYPE_CHECKING:
    from modelyard.domain.usage import UsageRow


def read_file(file: Path, wanted: Wanted) -> list[Case]:
    """Return the worlds of an exported file: nothing is known of them but their rows."""
    groups: dict[str, list[Asked]] = {}
    models: set[str] = set()
    begins = [one.since for one in wanted.replayed]
    number = 0
    for row in _rows(file):
        models.add(row.model)
        if wanted.names and row.endpoint_id not in wanted.names and row.model not in wanted.names:
            continue
        at = bisect_right(begins, row.created_at)
        if not at or row.created_at >= wanted.replayed[at - 1].until:
            continue
        number += 1
        if number > wanted.limit:
            raise wanted.over()
        groups.setdefault(row.endpoint_id, []).append(asked_of(row))
    for name in wanted.names:
        if name not in models and name not in groups:
            raise Failure(f"No row of {file} is of '{name}'. {close_names(name, sorted(models))}", Exit.NOT_FOUND)
    return sorted(
        (_of_rows(sorted(asked, key=lambda one: one.at_s), wanted) for asked in groups.values()),
        key=lambda one: -len(one.ledger.asked),
    )


def span_of(file: Path) -> tuple[float, float]:
    """Return when the first and the last row of a file came."""
    first, last = inf, -inf
    for row in _rows(file):
        first, last = min(first, row.created_at), max(last, row.created_at)
    if first > last:
        raise Failure(f"{file} has no rows.", Exit.USAGE)
    return first, last


def _rows(file: Path) -> Iterable["UsageRow"]:
    from modelyard.metering.reading import FileError, file_rows

    try:
        yield from file_rows(file)
    except FileError as error:
        raise Failure(str(error), Exit.USAGE) from error


def _of_rows(asked: Sequence[Asked], wanted: Wanted) -> Case:
    from modelyard.metering.prices import micro_of

    slots = most_at_once(asked)
    version_id = Counter(one.version_id for one in asked).most_common(1)[0][0]
    part = Part(version_id=version_id or "ver", label=version_id, size=Size(slots, CHUNK_TOKENS, 0))
    left = sum(not one.is_replayable for one in asked)
    notes = [f"From the rows alone: {slots} requests at once on a replica are the most there were (set engine.slots)."]
    if left:
        notes.append(f"{left:,} requests have no prompt tokens: left out.")
    ledger = Ledger(
        asked=tuple(asked),
        replayed=wanted.replayed,
        prices=PriceList(entries=(), factor_micro=micro_of(BatchConfig().price_factor)),
        lives=None,
    )
    case = Case(name=asked[-1].model, ledger=ledger, parts=(part,), notes=tuple(notes))
    return as_said(case, wanted) if wanted.kind else case
