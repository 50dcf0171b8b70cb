"""Ledger and engines: what was billed of each replica, and what its engine counted itself.

An engine never does less than is billed: a generated token that it does not
know of was billed for nothing. It may do more, for reasons that are known: a
request that was tried on another replica, a client that left, copies for a
shadow, probes, requests that are under way. That much is allowed for; beyond
it, work was done that nobody pays for, and the requests that were cut off or
retried there are named. Lives of which rows are gone cannot be compared; of the
others rows are added up a day at a time, in the database.
"""

from collections.abc import Sequence

from modelyard.domain.books import ReplicaLife, ReplicaUse
from modelyard.metering.reconcile import LISTED_MAX, NAMED_MAX, Check, Difference, Findings
from modelyard.stores import BookStore

MARGIN_S = 2.0
"""A page is written before it is read: what settled in the last moments may be missing in it."""
EACH_UNSURE = 8_192
"""Tokens that an engine may have done more for each request that was retried, cut off or estimated."""
UNDER_WAY = 65_536
"""Tokens of requests that a replica that lives may be working on."""
DAY_S = 86_400
"""Requests arrive before they settle, and hardly more than this."""


async def ledger_and_engines(books: BookStore, *, since: float, until: float, tolerance: float) -> Check:
    """Compare replicas that lived at some time between, over their whole lives."""
    findings = Findings("ledger and engines", "replicas")
    lives = await books.lives(since=since, until=until)
    counted = [life for life in lives if life.generation_tokens is not None and life.counted_at]
    if len(counted) < len(lives):
        findings.notes.append(f"{len(lives) - len(counted)} replicas have engines that count no tokens")
    uses = await _uses(books, await _whole(books, counted))
    whole = await _whole(books, counted)  # rows go meanwhile, too
    if len(whole) < len(counted):
        findings.notes.append(f"{len(counted) - len(whole)} replicas began before the rows that are still kept")
    findings.compared = len(whole)
    by_id = {life.replica_id: life for life in whole}
    for difference in differences(whole, uses, tolerance):
        life = by_id[difference.subject]
        named: list[str] = []
        if findings.found < LISTED_MAX:
            named = await books.unsure_requests(
                life.replica_id, since=life.started_at - DAY_S, until=life.counted_at, limit=NAMED_MAX
            )
        findings.add(
            Difference(subject=difference.subject, what=difference.what, tokens=difference.tokens, request_ids=named)
        )
    findings.notes.append(
        f"allowed: an engine may have done {tolerance:.1%} more, {EACH_UNSURE} tokens for each request that was "
        f"retried, cut off or estimated, and {UNDER_WAY} under way"
    )
    return findings.check()


async def _whole(books: BookStore, lives: Sequence[ReplicaLife]) -> list[ReplicaLife]:
    """Return those of whose requests no row is gone."""
    kept_since = await books.kept_since()
    return [life for life in lives if not kept_since or life.started_at - DAY_S >= kept_since]


async def _uses(books: BookStore, lives: Sequence[ReplicaLife]) -> dict[str, ReplicaUse]:
    """Add up what the ledger has of these, a day at a time: many rows must not be one long transaction."""
    found: dict[str, ReplicaUse] = {}
    since = min((life.started_at for life in lives), default=0.0) - DAY_S
    end = max((life.counted_at for life in lives), default=since)
    while since < end:
        until = min(since + DAY_S, end)
        for id, use in (await books.replica_use(since=since, until=until, margin_s=MARGIN_S)).items():
            before = found.get(id)
            found[id] = use if before is None else _plus(before, use)
        since = until
    return found


def _plus(one: ReplicaUse, other: ReplicaUse) -> ReplicaUse:
    names = ReplicaUse.__struct_fields__[1:]
    return ReplicaUse(one.replica_id, *(getattr(one, name) + getattr(other, name) for name in names))


def differences(lives: Sequence[ReplicaLife], uses: dict[str, ReplicaUse], tolerance: float) -> list[Difference]:
    """Return what cannot be explained; tokens are the ledger's less the engine's."""
    found: list[Difference] = []
    for life in lives:
        use = uses.get(life.replica_id, ReplicaUse(life.replica_id, 0, 0, 0, 0, 0))
        made = life.generation_tokens or 0
        more = use.completion_tokens - made
        allowed = round(made * tolerance) + EACH_UNSURE * use.unsure + (UNDER_WAY if life.ended_at is None else 0)
        if more > 0:
            what = f"{use.completion_tokens} generated tokens are billed, and the engine made {made}"
            found.append(Difference(subject=life.replica_id, what=what, tokens=more))
        elif -more > allowed:
            what = f"the engine made {made} tokens, and {use.completion_tokens} are billed; {allowed} may be missing"
            found.append(Difference(subject=life.replica_id, what=what, tokens=more))
        if life.prompt_tokens is not None and use.prompt_tokens - use.cached_tokens > life.prompt_tokens:
            unread = use.prompt_tokens - use.cached_tokens
            what = f"{unread} prompt tokens are billed as computed, and the engine read {life.prompt_tokens}"
            found.append(Difference(subject=life.replica_id, what=what, tokens=unread - life.prompt_tokens))
    return found
