"""Ledger and engines: what was billed of each replica, and what its engine counted itself.

An engine never does less than is billed: a generated token that it does not
know of was billed for nothing. It may do more, for reasons that are known, and
that much is allowed for; beyond it, work was done that nobody pays for, and
the requests that were cut off or retried there are named.

An engine's page is some seconds old when its replica ends or is killed. What
had settled by then is in it for sure, and is set against it in the one
direction. Requests that were under way at that moment settle later, with
tokens of before and after it, so that they count in the other direction only:
nobody can be told by them to have been billed too much, and all that the
engine did for them is explained. What arrived later is in no page, and is not
compared. Lives of which rows are gone cannot be compared; of the others rows
are added up a day at a time, in the database.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from modelyard.domain.books import ReplicaLife, ReplicaUse
from modelyard.metering.reconcile import LISTED_MAX, NAMED_MAX, Check, Difference, Findings
from modelyard.stores import BookStore

MARGIN_S = 2.0
"""A page is written before it is read: what settled in the last moments may be missing in it."""
EACH_UNSURE = 8_192
"""Tokens that an engine may have done more for each request that was retried, cut off or estimated."""
UNDER_WAY = 65_536
"""Tokens of requests that a replica that lives may be working on."""
SETTLES_S = 60.0
"""So long after the end of a replica its last requests may still be on their way into the ledger."""
DAY_S = 86_400
"""Requests arrive before they settle, and hardly more than this."""
NO_SLACK: Mapping[str, int] = MappingProxyType({})


async def ledger_and_engines(
    books: BookStore,
    *,
    since: float,
    until: float,
    tolerance: float,
    now_s: float | None = None,
    shadows: Collection[str] = (),
) -> Check:
    """Compare replicas that lived at some time between, over their whole lives.

    ``shadows`` are versions that get copies of requests, which nobody is billed for.
    """
    findings = Findings("ledger and engines", "replicas")
    lives = await books.lives(since=since, until=until)
    counted = [life for life in lives if life.generation_tokens is not None and life.counted_at]
    if len(counted) < len(lives):
        findings.notes.append(f"{len(lives) - len(counted)} replicas have engines that count no tokens")
    uses = await _uses(books, await _whole(books, counted))
    # Work goes on meanwhile: what was counted since is allowed for, and rows go, too.
    latest = {life.replica_id: life for life in await books.lives(since=since, until=until)}
    whole = [latest.get(life.replica_id, life) for life in await _whole(books, counted)]
    if len(whole) < len(counted):
        findings.notes.append(f"{len(counted) - len(whole)} replicas began before the rows that are still kept")
    copied = [life for life in whole if life.version_id in shadows]
    if copied:
        findings.notes.append(f"{len(copied)} replicas get copies that nobody is billed for: they may do more")
    findings.compared = len(whole)
    slack = _slack(counted, latest, now_s) | {life.replica_id: life.generation_tokens or 0 for life in copied}
    by_id = {life.replica_id: life for life in whole}
    for difference in differences(whole, uses, tolerance, slack):
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
        f"retried, cut off or estimated, there or elsewhere after a try there, and {UNDER_WAY} under way or on their "
        f"way into the ledger, until {SETTLES_S:.0f} s after its end"
    )
    if unsure := sum(use.unsure + use.wandered for use in uses.values()):
        findings.notes.append(f"{unsure} times a request was retried, cut off or estimated, and may explain a part")
    return findings.check()


def _slack(before: Sequence[ReplicaLife], latest: Mapping[str, ReplicaLife], now_s: float | None) -> dict[str, int]:
    """Return what engines may have done more: counted since the rows were read, or not in the ledger yet."""
    found: dict[str, int] = {}
    for life in before:
        now = latest.get(life.replica_id, life)
        fresh = now_s is not None and now.ended_at is not None and now_s - now.ended_at < SETTLES_S
        counted = (now.generation_tokens or 0) - (life.generation_tokens or 0)
        found[life.replica_id] = counted + (UNDER_WAY if fresh else 0)
    return found


async def _whole(books: BookStore, lives: Sequence[ReplicaLife]) -> list[ReplicaLife]:
    """Return those of whose requests no row is gone."""
    kept_since = await books.kept_since()
    return [life for life in lives if not kept_since or life.started_at - DAY_S >= kept_since]


async def _uses(books: BookStore, lives: Sequence[ReplicaLife]) -> dict[str, ReplicaUse]:
    """Add up what the ledger has of these, a day at a time: many rows must not be one long transaction."""
    found: dict[str, ReplicaUse] = {}
    since = min((life.started_at for life in lives), default=0.0) - DAY_S
    end = max((life.counted_at for life in lives), default=since) + MARGIN_S
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


def differences(
    lives: Sequence[ReplicaLife], uses: Mapping[str, ReplicaUse], tolerance: float, slack: Mapping[str, int] = NO_SLACK
) -> list[Difference]:
    """Return what cannot be explained; tokens are the ledger's less the engine's. ``slack`` may have been done more."""
    found: list[Difference] = []
    for life in lives:
        id = life.replica_id
        use = uses.get(id, ReplicaUse(id, 0, 0, 0, 0, 0))
        made = life.generation_tokens or 0
        billed = use.completion_tokens + use.later_tokens
        allowed = round(made * tolerance) + EACH_UNSURE * (use.unsure + use.wandered) + slack.get(id, 0)
        allowed += UNDER_WAY if life.ended_at is None else 0
        if use.completion_tokens > made:
            what = f"{use.completion_tokens} generated tokens are billed, and the engine made {made}"
            found.append(Difference(subject=id, what=what, tokens=use.completion_tokens - made))
        elif made - billed > allowed:
            what = f"the engine made {made} tokens, and {billed} are billed; {allowed} may be missing"
            found.append(Difference(subject=id, what=what, tokens=billed - made))
        unread = use.prompt_tokens - use.cached_tokens
        if life.prompt_tokens is not None and unread > life.prompt_tokens:
            what = f"{unread} prompt tokens are billed as computed, and the engine read {life.prompt_tokens}"
            found.append(Difference(subject=id, what=what, tokens=unread - life.prompt_tokens))
    return found
