"""Ledger and a provider's invoice, given as a CSV file.

Tokens are compared by model, and by day where the file has days. Money is the
provider's price, not ours, so it is not compared; what a difference in tokens
costs is reckoned at the invoice's own average price. A provider bills what it
generated and we bill what was delivered: requests that were retried or cut off
explain small differences, and are named.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import TextIO

import msgspec

from modelyard.domain.books import DayUse
from modelyard.domain.usage import NANO_PER_USD
from modelyard.metering.reconcile import LISTED_MAX, NAMED_MAX, Check, Difference, Findings
from modelyard.policy.utc import DAY_S, day_number
from modelyard.stores import BookStore, TooManyGroupsError

_COLUMNS = {
    "day": ("day", "date", "start_date", "start_time_iso", "usage_date_utc", "usage_date"),
    "model": ("model", "model_name", "model_version", "model_id"),
    "prompt_tokens": ("prompt_tokens", "input_tokens", "n_context_tokens_total"),
    "completion_tokens": ("completion_tokens", "output_tokens", "n_generated_tokens_total"),
    "usd": ("cost_usd", "cost", "amount", "amount_value", "usd"),
}
"""The names that providers give to columns, by ours."""
_NEEDED = ("model", "prompt_tokens", "completion_tokens")


class InvoiceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a provider bills of a model, on a day ("": in the whole time)."""

    day: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    nanousd: int = 0


class InvoiceError(ValueError):
    """The file is no invoice that can be read; the text says why."""


def read_invoice(file: TextIO) -> list[InvoiceLine]:
    """Return an invoice's lines, added up by day and model.

    Raises:
        InvoiceError: a column is missing, or a number is none.
    """
    reader = csv.DictReader(file)
    names = {(name or "").strip().lower().replace(" ", "_"): name for name in reader.fieldnames or ()}
    columns = {ours: next((names[one] for one in theirs if one in names), None) for ours, theirs in _COLUMNS.items()}
    missing = [ours for ours in _NEEDED if columns[ours] is None]
    if missing:
        raise InvoiceError(f"it has no column for {', '.join(missing)}; known names are in docs/how-to")
    sums: dict[tuple[str, str], list[int]] = {}
    for row in reader:
        day = (row.get(columns["day"] or "") or "")[:10]
        total = sums.setdefault((day, (row[columns["model"] or ""] or "").strip()), [0, 0, 0])
        total[0] += _whole(row, columns["prompt_tokens"], reader.line_num)
        total[1] += _whole(row, columns["completion_tokens"], reader.line_num)
        total[2] += _nano(row, columns["usd"], reader.line_num)
    return [InvoiceLine(day, model, *total) for (day, model), total in sorted(sums.items())]


def _whole(row: Mapping[str, str | None], column: str | None, line: int) -> int:
    text = (row.get(column or "") or "0").strip().replace(",", "")
    if not text.isdecimal():
        raise InvoiceError(f"line {line}: '{text[:40]}' is no number of tokens")
    return int(text)


def _nano(row: Mapping[str, str | None], column: str | None, line: int) -> int:
    text = (row.get(column or "") or "0").strip().removeprefix("$").replace(",", "")
    try:
        return round(Decimal(text) * NANO_PER_USD)
    except (InvalidOperation, ValueError, OverflowError):
        raise InvoiceError(f"line {line}: '{text[:40]}' is no amount of money") from None


async def ledger_and_invoice(
    books: BookStore,
    lines: Sequence[InvoiceLine],
    names: Mapping[str, str],
    *,
    since: float,
    until: float,
    tolerance: float,
) -> Check:
    """Compare an invoice with the ledger; ``names`` are the provider's names of models by version id."""
    findings = Findings("ledger and the provider's invoice", "lines")
    by_day = any(line.day for line in lines)
    used: dict[tuple[str, str], list[DayUse]] = {}
    try:
        uses = await books.day_use(since=since, until=until)
    except TooManyGroupsError as error:
        findings.problem = f"{error}; ask for a shorter time"
        return findings.check()
    for use in uses:
        model = names.get(use.version_id)
        if model is not None:
            used.setdefault((use.day if by_day else "", model), []).append(use)
    billed = {(line.day, line.model): line for line in lines}
    findings.compared = len(billed.keys() | used.keys())
    for key in sorted(billed.keys() | used.keys()):
        line = billed.get(key, InvoiceLine(*key, 0, 0))
        difference = compared(line, used.get(key, []), tolerance)
        if difference is not None:
            named = await _unsure(books, used.get(key, []), since, until) if findings.found < LISTED_MAX else []
            findings.add(msgspec.structs.replace(difference, request_ids=named))
    findings.notes.append(f"allowed: {tolerance:.1%}, for requests that were retried or cut off")
    findings.notes.append(
        f"the amounts of the invoice add up to {sum(line.nanousd for line in lines) / NANO_PER_USD:.2f}"
    )
    return findings.check()


def compared(line: InvoiceLine, uses: Iterable[DayUse], tolerance: float) -> Difference | None:
    """Return how a line differs from the ledger; tokens and money are the ledger's less the invoice's."""
    sums = [use.sums for use in uses]
    prompt = sum(one.prompt_tokens for one in sums) - line.prompt_tokens
    completion = sum(one.completion_tokens for one in sums) - line.completion_tokens
    if abs(prompt) <= line.prompt_tokens * tolerance and abs(completion) <= line.completion_tokens * tolerance:
        return None
    total = line.prompt_tokens + line.completion_tokens
    return Difference(
        subject=f"{line.model}{f', {line.day}' if line.day else ''}",
        what=(
            f"the ledger has {prompt + line.prompt_tokens} prompt and {completion + line.completion_tokens} generated "
            f"tokens, the invoice {line.prompt_tokens} and {line.completion_tokens}"
        ),
        tokens=prompt + completion,
        nanousd=line.nanousd * (prompt + completion) // total if total else 0,
    )


async def _unsure(books: BookStore, uses: Iterable[DayUse], since: float, until: float) -> list[str]:
    found: list[str] = []
    days: dict[str, list[int]] = {}
    for use in uses:
        days.setdefault(use.version_id, []).append(day_number(use.day) * DAY_S)
    for version_id, starts in days.items():
        begin, end = max(since, min(starts)), min(until, max(starts) + DAY_S)
        found += await books.unsure_of_version(version_id, since=begin, until=end, limit=NAMED_MAX - len(found))
        if len(found) >= NAMED_MAX:
            break
    return found
