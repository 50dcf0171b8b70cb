"""What clients got, what the journal has and what the ledger says, held against each other."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.metering.played import House
from modelyard.domain.usage import EVERYTHING, Moment, Settle, UsageRow
from modelyard.metering.delivery import Delivery
from modelyard.metering.journal import read_records, segments
from modelyard.stores.sql import SqlUsageStore

PAGE = 10_000


@dataclass(slots=True)
class Books:
    """Sums of the three, and every difference in words (the first hundred)."""

    requests: int = 0
    clients_tokens: int = 0
    """Tokens that reached clients."""
    unbilled_tokens: int = 0
    """Of these, such as a killed gateway had not marked yet: the only ones that are not in the ledger."""
    journal_tokens: int = 0
    ledger_tokens: int = 0
    rolled_up_tokens: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    flaws: list[str] = field(default_factory=list)

    def differ(self, flaw: str) -> None:
        """Note a difference."""
        if len(self.flaws) < 100:
            self.flaws.append(flaw)


async def reconcile(root: Path, store: SqlUsageStore, *, requests: int, chunk: int, seed: int) -> Books:
    """Play ``requests``, deliver them as the controller does, and compare, ``chunk`` by ``chunk``."""
    books = Books()
    folder = root / "gateway-0"
    house, delivery = House(folder, seed), Delivery(root, store, 1.0)
    seen: dict[str, int] = {}
    after: Moment | None = None
    settled: set[str] = set()
    while books.requests < requests:
        house.play(min(chunk, requests - books.requests))
        _read_journal(folder, seen, settled, books)
        await delivery.drain()
        rows: dict[str, UsageRow] = {}
        while page := await store.rows_between(EVERYTHING, since=0, until=1e12, after=after, limit=PAGE):
            rows |= {row.request_id: row for row in page}
            after = Moment(page[-1].created_at, page[-1].request_id)
        _compare(house, rows, settled, books)
        settled.clear()
    house.close()
    await _sums(store, books)
    return books


def _read_journal(folder: Path, seen: dict[str, int], settled: set[str], books: Books) -> None:
    """Add up what is new in the journal."""
    for path in segments(folder):
        records, seen[path.name] = read_records(path, seen.get(path.name, 0))
        for record in records:
            if isinstance(record, Settle):
                if record.request_id in settled:
                    books.differ(f"{record.request_id}: settled twice")
                settled.add(record.request_id)
                books.journal_tokens += record.completion_tokens


def _compare(house: House, rows: dict[str, UsageRow], settled: set[str], books: Books) -> None:
    got, house.got = house.got, {}
    for rid in (rows.keys() ^ got.keys()) | (rows.keys() ^ settled):
        books.differ(f"{rid}: not in all three: row {rid in rows}, client {rid in got}, journal {rid in settled}")
    for rid, one in got.items():
        row = rows.get(rid)
        if flaw := one.flaw(row):
            books.differ(f"{rid}: {flaw}")
        books.clients_tokens += one.delivered
        if row is not None:
            books.by_status[row.status.value] += 1
            books.ledger_tokens += row.completion_tokens
            books.unbilled_tokens += one.delivered - row.completion_tokens
    books.requests += len(got)


async def _sums(store: SqlUsageStore, books: Books) -> None:
    """Hold the sums of the roll-ups against the rows."""
    [total] = await store.usage(tenant_id=None, key_id=None, model=None, since=0, until=1e12, group_by=())
    books.rolled_up_tokens = total.completion_tokens
    if (total.requests, total.completion_tokens) != (books.requests, books.ledger_tokens):
        books.differ(f"the roll-ups have {total.requests} requests and {total.completion_tokens} tokens")
    if books.journal_tokens != books.ledger_tokens:
        books.differ(f"the journal has {books.journal_tokens} tokens, the ledger {books.ledger_tokens}")
    if await store.open_requests():
        books.differ("requests are still open")
