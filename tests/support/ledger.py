"""The oracle: what the client saw, what the engines made and what is billed must agree.

``violations`` compares the three histories and is pure, so that its own tests
can feed it doctored ones; ``check_ledger`` gathers them from a running yard
until they agree or time is up. Invariants I1 to I5, I8 and I9 of the fault
model. One exception is part of the contract: a request whose gateway was
killed is billed at its last progress mark (status ``interrupted``), which may
be less than what was delivered, never more than what was generated.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.load import Exchange, Outcome

if TYPE_CHECKING:
    from tests.support.yard import Yard

REFUSED_BEFORE_DISPATCH = frozenset(
    {
        "auth_unavailable",
        "headers_too_large",
        "invalid_api_key",
        "invalid_json",
        "method_not_allowed",
        "missing_required_parameter",
        "model_failed",
        "model_loading",
        "model_not_found",
        "no_capacity",
        "permission_denied",
        "queue_full",
        "queue_timeout",
        "rate_limit_exceeded",
        "request_too_large",
        "server_is_overloaded",
        "shutting_down",
        "storage_full",
        "unknown_url",
        "unsupported_content_encoding",
        "unsupported_parameter",
    }
)
"""Codes that say no engine ever saw the request. (``invalid_value`` may also be an engine's own verdict.)"""

ILLEGAL_ENDS = frozenset({Outcome.CUT_SHORT, Outcome.HUNG})


@dataclass(frozen=True, slots=True)
class Row:
    """What a ledger row says, as far as the invariants ask."""

    request_id: str
    replica_id: str
    prompt_tokens: int
    completion_tokens: int
    cost_nanousd: int
    status: str
    http_status: int = 200


@dataclass(slots=True)
class Evidence:
    """The three histories and the state after them.

    ``generated`` is what each engine (by pid) journaled for each request id;
    ``rolled_up`` the totals of the roll-ups (None: not asked).
    """

    exchanges: Sequence[Exchange]
    rows: Sequence[Row]
    generated: dict[str, dict[str, int]]
    open_requests: int = 0
    gauges: dict[str, float] = field(default_factory=dict)
    rolled_up: dict[str, int] | None = None


def violations(evidence: Evidence) -> list[str]:
    """Return everything that is wrong, one sentence each; empty when the histories agree."""
    rows: dict[str, list[Row]] = {}
    for row in evidence.rows:
        rows.setdefault(row.request_id, []).append(row)
    found = [f"I2: {len(same)} rows for {rid}" for rid, same in rows.items() if len(same) > 1]
    for exchange in evidence.exchanges:
        found += _check_end(exchange)
        found += _check_exchange(exchange, rows.get(exchange.request_id or "", []), evidence.generated)
    found += _check_bounds(evidence, rows)
    found += _check_strangers(evidence, rows)
    found += _check_state(evidence)
    return found


def _check_end(exchange: Exchange) -> list[str]:
    if exchange.outcome is None or exchange.outcome in ILLEGAL_ENDS:
        return [f"I8: illegal end of {exchange!r}: …{bytes(exchange.received)[-160:]!r}"]
    if exchange.reader.broken:
        return [f"I8: broken framing ({exchange.reader.broken}) of {exchange!r}"]
    if exchange.outcome is Outcome.COMPLETE and exchange.reader.answer.is_stream:
        reasons = [c.get("finish_reason") for chunk in exchange.chunks for c in chunk.get("choices") or []]
        if not any(reasons):
            return [f"I8: [DONE] without finish_reason in {exchange!r}"]
    return []


def _check_exchange(exchange: Exchange, rows: Sequence[Row], generated: dict[str, dict[str, int]]) -> list[str]:
    rid = exchange.request_id
    if rid is None:
        answered = exchange.outcome in (Outcome.COMPLETE, Outcome.REFUSED, Outcome.ERROR_EVENT)
        return [f"I12: no x-request-id on {exchange!r}"] if answered else []
    if exchange.outcome is Outcome.REFUSED:
        return _check_refused(exchange, rows, generated.get(rid, {}))
    if exchange.outcome is Outcome.COMPLETE:
        return _check_complete(exchange, rows, generated.get(rid, {}))
    if exchange.delivered > 0 and not rows:
        return [f"I1: {exchange.delivered} tokens delivered, but no row for {exchange!r}"]
    found = [
        f"I3: delivered {exchange.delivered} > billed {row.completion_tokens} for {exchange!r}"
        for row in rows
        if row.status != "interrupted" and exchange.delivered > row.completion_tokens
    ]
    if exchange.outcome is Outcome.ERROR_EVENT:
        found += [f"I1: {exchange!r} is billed as success" for row in rows if row.status == "success"]
    return found


def _check_complete(exchange: Exchange, rows: Sequence[Row], generated: dict[str, int]) -> list[str]:
    if not rows:
        return [f"I1: complete answer, but no row for {exchange!r}"]
    row, found = rows[0], []
    if row.status != "success":
        found.append(f"I1: complete answer, but the row says {row.status} for {exchange!r}")
    made = sorted(generated.values()) or [0]
    # A failed attempt on another engine may have made tokens, too; or this one went on with what another had begun.
    if row.completion_tokens not in made and not made[-1] < row.completion_tokens <= sum(made):
        found.append(f"I1: billed {row.completion_tokens}, engines made {made} for {exchange!r}")
    if exchange.delivered > row.completion_tokens:
        found.append(f"I3: delivered {exchange.delivered} > billed {row.completion_tokens} for {exchange!r}")
    if told := exchange.usage:
        billed = {"prompt_tokens": row.prompt_tokens, "completion_tokens": row.completion_tokens}
        said = {name: told.get(name, 0) for name in billed}
        if said != billed:
            found.append(f"I1: told {said}, billed {billed} for {exchange!r}")
    return found


def _check_refused(exchange: Exchange, rows: Sequence[Row], generated: dict[str, int]) -> list[str]:
    found = [
        f"I4: refused, but billed {row.completion_tokens} tokens, {row.cost_nanousd} n$: {exchange!r}"
        for row in rows
        if row.completion_tokens or row.cost_nanousd or row.status == "success"
    ]
    if exchange.error.get("code") in REFUSED_BEFORE_DISPATCH:
        found += [f"I4: refused before dispatch, but has a row ({row.status}): {exchange!r}" for row in rows]
        if generated:
            found.append(f"I4: refused before dispatch, but engines worked on it: {generated} {exchange!r}")
    return found


def _check_bounds(evidence: Evidence, rows: dict[str, list[Row]]) -> list[str]:
    found = []
    for rid, (row, *_) in rows.items():
        made = sum(evidence.generated.get(rid, {}).values())
        if row.completion_tokens > made:
            found.append(f"I3: billed {row.completion_tokens} > generated {made} for {rid} ({row.status})")
        if min(row.prompt_tokens, row.completion_tokens, row.cost_nanousd) < 0:
            found.append(f"I3: negative amount in the row of {rid}")
    return found


def _check_strangers(evidence: Evidence, rows: dict[str, list[Row]]) -> list[str]:
    """Work without a row, and rows that no client can have caused."""
    unbilled = {
        rid: made
        for rid, made in evidence.generated.items()
        if rid not in rows and not rid.startswith("side-")  # probes and shadow copies are nobody's to pay
    }
    found = [f"I1: engines made {made} for {rid}, but there is no row" for rid, made in unbilled.items()]
    known = {exchange.request_id for exchange in evidence.exchanges}
    strangers = [rid for rid in rows if rid not in known]
    silent = [e for e in evidence.exchanges if e.request_id is None and e.outcome is not Outcome.NOT_CONNECTED]
    if len(strangers) > len(silent):
        found.append(
            f"I2: {len(strangers)} rows of unknown requests, {len(silent)} clients without an id: {strangers[:5]}"
        )
    return found


def _check_state(evidence: Evidence) -> list[str]:
    found = []
    if evidence.open_requests:
        found.append(f"I5: {evidence.open_requests} requests are still open")
    found += [f"I9: {name} is {value:g}, not 0" for name, value in evidence.gauges.items() if value != 0]
    if (told := evidence.rolled_up) is not None:
        sums = Counter[str]()
        for row in evidence.rows:
            sums["requests"] += 1
            sums["prompt_tokens"] += row.prompt_tokens
            sums["completion_tokens"] += row.completion_tokens
            sums["cost_nanousd"] += row.cost_nanousd
        wrong = [name for name in sums if told.get(name) != sums[name]]
        found += [f"I2: roll-up says {name}={told.get(name)}, the rows {sums[name]}" for name in wrong]
    return found


def gather(yard: "Yard", exchanges: Iterable[Exchange]) -> Evidence:
    """Collect the evidence of a running yard, as it is now."""
    return Evidence(
        exchanges=list(exchanges),
        rows=yard.rows(),
        generated=yard.generated(),
        open_requests=yard.open_requests(),
        gauges=yard.gauges(),
        rolled_up=yard.rolled_up(),
    )


def check_ledger(yard: "Yard", exchanges: Iterable[Exchange], *, within_s: float = 20.0) -> dict[str, Row]:
    """Wait until the histories agree, twice in a row; return the rows by request id.

    Twice, since something billed a second time may arrive after the first look.
    """
    kept, deadline, good = list(exchanges), time.monotonic() + within_s, 0
    while True:
        evidence = gather(yard, kept)
        found = violations(evidence)
        good = 0 if found else good + 1
        if good == 2:
            return {row.request_id: row for row in evidence.rows}
        if found and time.monotonic() > deadline:
            raise AssertionError("the ledger check failed:\n  " + "\n  ".join(_shortened(found)))
        time.sleep(0.3 if good else 0.05)


def _shortened(found: list[str]) -> list[str]:
    return found if len(found) <= 20 else [*found[:20], f"… and {len(found) - 20} more"]


def as_row(record: dict[str, Any]) -> Row:
    """Make a ``Row`` of a database record or an item of ``GET /v1/usage/requests``."""
    return Row(**{name: record[name] for name in Row.__slots__})
