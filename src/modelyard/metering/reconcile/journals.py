"""Journal and ledger, request by request and in both directions; rows and roll-ups.

The ledger says how far it has read each journal; up to there every settlement
must have its row, with the same tokens and the same money. The other way
round: rows that arrived since the oldest journal of each worker began must be as many as
the journals' own. If they are not, the rows that no journal knows are named.
Work goes on meanwhile: rows come, old ones and delivered journals go. So what seems
to be missing is looked for once more before it is called a difference.
Journals are read a piece at a time, so their size does not matter to memory.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from modelyard.domain.books import LedgerEntry, LedgerSum
from modelyard.domain.usage import LINE_REPEATED, MICRO_PER_UNIT, UsageRow
from modelyard.metering.booking import booked, uncharged
from modelyard.metering.journal import Position, segments
from modelyard.metering.reconcile import Check, Difference, Findings
from modelyard.metering.settlements import Follower, Piece, Settlement, sources
from modelyard.stores import BookStore

IDS = 20_000
HOUR_S, DAY_S = 3600, 86_400
MONTH_S = 31 * DAY_S


async def journals_and_ledger(root: Path, books: BookStore, *, kept_since: int = 0) -> Check:
    """Compare every settlement of the journals that are there with its row, from when on rows are kept."""
    findings = Findings("journal and ledger", "requests")
    folders = await asyncio.to_thread(sources, root)
    since = await asyncio.to_thread(_begin, folders)
    if since is None:
        findings.notes.append("there are no journals")
        return findings.check()
    since = max(since, kept_since)
    # One view: rows and positions belong together.
    rows, positions = await books.sum_since(since)
    journal, matched = LedgerSum(), 0
    for folder in folders:
        until = positions.get(folder.name)
        if until is None:
            findings.notes.append(f"nothing of the journal of {folder.name} is in the ledger yet")
            continue
        pieces = Follower(folder).pieces(until)
        while (piece := await asyncio.to_thread(_next, pieces)) is not None:
            kept = [one for one in piece.settled if one.intent.at >= kept_since]
            more, found = await _compared(kept, since, books, findings)
            journal, matched = _plus(journal, more), matched + found
            if piece.orphans:
                findings.notes.append(f"{folder.name}: {piece.orphans} settlements of requests that nobody knows")
    if matched != rows.requests:
        await _name_strangers(folders, positions, since, books, findings)
    findings.notes.append(
        f"as far back as all journals go, they have {journal.requests} requests, and the ledger {rows.requests}"
    )
    return findings.check()


async def rows_and_roll_ups(books: BookStore, *, since: int, until: int, kept_since: int = 0) -> Check:
    """Compare the roll-up of each whole hour, from which on rows are kept, with the sum of its rows.

    And those of the same days and months with one another, kept or not: invoices and reports come from all of them.
    """
    findings = Findings("rows and roll-ups of the ledger", "hours")
    begin, until = since // DAY_S * DAY_S, until // HOUR_S * HOUR_S
    since = max(since // HOUR_S * HOUR_S, kept_since)
    findings.compared = max(0, (until - since) // HOUR_S)
    for start in range(since, until, DAY_S):  # a day at a time: many rows must not be one long transaction
        for hour, rows, rolled in await books.roll_up_differences(since=start, until=min(start + DAY_S, until)):
            what = f"{rows.requests} rows, and {rolled.requests} requests in the roll-up"
            findings.add(_apart(f"hour {hour}", what, rows, rolled))
    apart: dict[str, tuple[LedgerSum, LedgerSum]] = {}  # a month is touched by two of these spans
    for start in range(begin, until, MONTH_S):
        for subject, parts, rolled in await books.roll_ups_apart(since=start, until=min(start + MONTH_S, until)):
            apart[subject] = parts, rolled
    for subject, (parts, rolled) in apart.items():
        what = f"{rolled.requests} requests, and {parts.requests} in the roll-up that it is the sum of"
        findings.add(_apart(subject, what, parts, rolled))
    return findings.check()


def _apart(subject: str, what: str, one: LedgerSum, other: LedgerSum) -> Difference:
    tokens = one.prompt_tokens + one.completion_tokens - other.prompt_tokens - other.completion_tokens
    return Difference(subject=subject, what=what, tokens=tokens, nanousd=one.cost_nanousd - other.cost_nanousd)


def _begin(folders: Sequence[Path]) -> int | None:
    """Return since when all journals are there: a segment is named by the second in which it began, or a later one."""
    oldest = [there[0] for folder in folders if (there := segments(folder))]
    return max(int(path.stem) for path in oldest) + 1 if oldest else None


def _next(pieces: Iterator[Piece]) -> Piece | None:
    return next(pieces, None)


async def _compared(
    settled: Sequence[Settlement], since: int, books: BookStore, findings: Findings
) -> tuple[LedgerSum, int]:
    """Compare some settlements; return the sum of those that arrived since then, and how many of them have rows."""
    found = await books.entries([one.settle.request_id for one in settled])
    # Rows may have been let go since the comparison began.
    kept_since = await books.kept_since() if len(found) < len(settled) else 0
    # In a thread: the controller has requests to answer meanwhile.
    return await asyncio.to_thread(_judged, settled, found, since, kept_since, findings)


def _judged(
    settled: Sequence[Settlement],
    found: Mapping[str, LedgerEntry],
    since: int,
    kept_since: int,
    findings: Findings,
) -> tuple[LedgerSum, int]:
    requests = prompt = cached = completion = cost = matched = 0
    for one in settled:
        row, entry = booked(*one), found.get(one.settle.request_id)
        if entry is None and one.intent.at < kept_since:
            continue
        if entry is not None and entry.error_code == LINE_REPEATED and one.intent.batch_line:
            row = uncharged(row)  # which of the runs of a line bears its charge is the ledger's to say
        findings.compared += 1
        if (difference := _difference(row, entry)) is not None:
            findings.add(difference)
        if row.created_at >= since:
            requests += 1
            matched += entry is not None
            prompt += row.prompt_tokens
            cached += row.cached_tokens
            completion += row.completion_tokens
            cost += row.cost_nanousd
    return LedgerSum(requests, prompt, cached, completion, cost), matched


def _difference(row: UsageRow, entry: LedgerEntry | None) -> Difference | None:
    if entry is None:
        return Difference(
            subject=row.request_id,
            what="it is in the journal, and not in the ledger",
            tokens=row.prompt_tokens + row.completion_tokens,
            nanousd=row.cost_nanousd,
            request_ids=[row.request_id],
        )
    ours = LedgerEntry(
        row.request_id,
        row.prompt_tokens,
        row.cached_tokens,
        row.completion_tokens,
        round(row.units * MICRO_PER_UNIT),
        row.cost_nanousd,
        row.status.value,
        row.error_code,
    )
    if ours == entry:
        return None
    names = [name for name in LedgerEntry.__struct_fields__ if getattr(ours, name) != getattr(entry, name)]
    told = ", ".join(f"{name} {getattr(ours, name)} and {getattr(entry, name)}" for name in names)
    return Difference(
        subject=row.request_id,
        what=f"journal and ledger have {told}",
        tokens=row.prompt_tokens + row.completion_tokens - entry.prompt_tokens - entry.completion_tokens,
        nanousd=row.cost_nanousd - entry.cost_nanousd,
        request_ids=[row.request_id],
    )


def _plus(one: LedgerSum, other: LedgerSum) -> LedgerSum:
    return LedgerSum(*(getattr(one, name) + getattr(other, name) for name in LedgerSum.__struct_fields__))


async def _name_strangers(
    folders: Sequence[Path], positions: dict[str, Position], since: int, books: BookStore, findings: Findings
) -> None:
    """Name the rows that arrived since then and stand in no journal."""
    strangers = await _strangers(folders, positions, since, books, None)
    if strangers:
        # Some may have been written while the journals were read, or their journals delivered and deleted.
        strangers = await _strangers(folders, positions, since, books, strangers)
    for id, entry in (await books.entries(sorted(strangers))).items():
        findings.add(
            Difference(
                subject=id,
                what="it is in the ledger, and in no journal",
                tokens=-(entry.prompt_tokens + entry.completion_tokens),
                nanousd=-entry.cost_nanousd,
                request_ids=[id],
            )
        )


async def _strangers(
    folders: Sequence[Path],
    positions: dict[str, Position],
    since: int,
    books: BookStore,
    candidates: set[str] | None,
) -> set[str]:
    """Return the rows (of the candidates) that no journal knows, as far back as all journals are there now."""
    known = await asyncio.to_thread(_ids, folders, positions, since)
    begins: int | None = await asyncio.to_thread(_begin, folders)
    since = max(since, begins or since)
    found: set[str] = set()
    after = ""
    while ids := await books.ids_since(since, after=after, limit=IDS):
        after = ids[-1]
        found.update(id for id in ids if id not in known and (candidates is None or id in candidates))
    return found


def _ids(folders: Sequence[Path], positions: dict[str, Position], since: int) -> set[str]:
    """Return the requests of the journals, those that settled since the ledger was looked at as well."""
    return {
        one.settle.request_id
        for folder in folders
        if folder.name in positions
        for piece in Follower(folder).pieces()
        for one in piece.settled
        if one.intent.at >= since
    }
