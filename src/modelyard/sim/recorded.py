"""Requests of the ledger, as what comes to a simulated world.

The ledger has no prompts, so that two things are put together from what it
has. *Beginnings that prompts share*: a request whose engine had ``n`` tokens
in its cache began as an earlier one did, the latest of the same key that is
long enough (else of the tenant, else of the endpoint). What was not cached is
taken for new. *More or less traffic*: every caller sends everything once more,
some minutes apart from itself, or a part is left out.
"""

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor
from statistics import median
from sys import intern

import msgspec

from modelyard.domain.usage import LINE_REPEATED, UsageRow, UsageStatus
from modelyard.policy.queueing import BATCH_BAND
from modelyard.sim.requests import Arrival
from modelyard.sim.tasks import BLOCK_TOKENS

PART_S = 3600.0
"""A sample takes some of each part of this length."""
_TURN = (5**0.5 - 1) / 2
"""The golden section: multiples of it without their whole ones are spread evenly, however many there are."""
_MOVED_MOST = 0.5
APART_S = 600.0
"""How far a caller's second self is from the first, at most."""
BLOCKS_MAX = 20_000_000
"""Of all beginnings together: some hundreds of MiB. Where prompts are so long, blocks are larger than an engine's."""
_RECENT = 8
"""So many earlier requests of a key are looked at for a beginning."""
_COPY = 1 << 40


class Asked(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request of the ledger, as much of it as a replay needs. ``at_s`` is unix seconds of its arrival."""

    at_s: float
    endpoint_id: str
    model: str
    version_id: str = ""
    replica_id: str = ""
    tenant_id: str = ""
    key_id: str = ""
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int
    units: float = 0.0
    cost_nanousd: int = 0
    ttft_s: float | None = None
    """From its arrival, as callers see it: with its time in line. None where it was not measured."""
    latency_s: float = 0.0
    is_ok: bool = True
    is_batch: bool = False
    is_charged: bool = True
    """Not so a line of a batch that was run again."""

    @property
    def is_replayable(self) -> bool:
        """Whether an engine has read a prompt of it: one that failed before, or counts no tokens, has none."""
        return self.prompt_tokens > 0


class Stretch(msgspec.Struct, frozen=True):
    """A time of the ledger that is replayed, in unix seconds; ``begin_s`` is when it begins in the world."""

    since: float
    until: float
    begin_s: float


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How a tenant's requests are treated: its share of a full endpoint, and its band."""

    weight: float = 1.0
    band: int = 1


class Traffic(msgspec.Struct, frozen=True):
    """Arrivals of a world, in order, and of which request of the ledger each is (its place in what was given)."""

    arrivals: tuple[Arrival, ...]
    places: tuple[int, ...]


def asked_of(row: UsageRow) -> Asked:
    """Return what a replay needs of a row."""
    return Asked(
        at_s=row.created_at,
        # Of a million rows these are some dozens of texts.
        endpoint_id=intern(row.endpoint_id),
        model=intern(row.model),
        version_id=intern(row.version_id),
        replica_id=intern(row.replica_id),
        tenant_id=intern(row.tenant_id),
        key_id=intern(row.key_id),
        prompt_tokens=row.prompt_tokens,
        cached_tokens=min(row.cached_tokens, row.prompt_tokens),
        completion_tokens=row.completion_tokens,
        units=row.units,
        cost_nanousd=row.cost_nanousd,
        ttft_s=None if row.ttft_ms is None else row.ttft_ms / 1000,
        latency_s=row.latency_ms / 1000,
        is_ok=row.status == UsageStatus.SUCCESS,
        is_batch=bool(row.batch_id),
        is_charged=row.error_code != LINE_REPEATED,
    )


def stretches(since: float, until: float, share: float = 1.0) -> list[Stretch]:
    """Return what to replay of a window: all of it, or a ``share`` of each hour, laid end to end.

    Requests are as dense in it as they were, which a sample of callers would not be; what happens over more than an
    hour (a night's sleep) is shortened. Each hour's part begins elsewhere in it, or what comes at the full hour would
    be in all of them, or in none.
    """
    assert since < until, "a window has a length"
    assert 0 < share <= 1, "a share of the time"
    if share == 1:
        return [Stretch(since, until, 0.0)]
    parts = ceil((until - since) / PART_S)
    whole_s = (until - since) / parts
    part_s = whole_s * share
    # Neighbours are so far apart that parts of up to a half never meet, though they may reach into the next hour.
    turn = _TURN if share <= _MOVED_MOST else 0.0
    begins = (since + (number + number * turn % 1) * whole_s for number in range(parts))
    return [
        Stretch(begin, begin + part_s, number * part_s)
        for number, begin in enumerate(min(begin, until - part_s) for begin in begins)
    ]


def length_s(replayed: Sequence[Stretch]) -> float:
    """Return how long the world lasts that replays them."""
    return sum(one.until - one.since for one in replayed)


def traffic(
    asked: Sequence[Asked],
    replayed: Sequence[Stretch],
    *,
    terms: Mapping[str, Terms] | None = None,
    factor: float = 1.0,
    seed: int = 0,
    is_sticky: bool = False,
    block_tokens: int = BLOCK_TOKENS,
) -> Traffic:
    """Return the arrivals of ``asked``, which lie in the stretches and are in order; all must be replayable.

    ``factor``: how many times as many. ``is_sticky``: a key's requests stay together. ``block_tokens`` are those that
    a block of a beginning stands for.
    """
    times = _times(asked, replayed)
    blocks = _blocks(asked, block_tokens)
    known = terms or {}
    found: list[tuple[float, int, int]] = []
    span_s = length_s(replayed)
    chance = random.Random(f"traffic {seed}")
    for place, at_s in enumerate(times):
        copies = floor(factor) + (chance.random() < factor % 1)
        key_id = asked[place].key_id
        found += [(_moved(at_s, key_id, copy, span_s, seed), place, copy) for copy in range(copies)]
    found.sort()
    arrivals = []
    for at_s, place, copy in found:
        one = asked[place]
        its = known.get(one.tenant_id, Terms())
        arrivals.append(
            Arrival(
                at_s=at_s,
                prompt_tokens=one.prompt_tokens,
                output_tokens=max(1, one.completion_tokens),
                tenant_id=one.tenant_id or "unknown",
                weight=its.weight,
                band=BATCH_BAND if one.is_batch else its.band,
                is_line=one.is_batch,
                is_stream=not one.is_batch,
                # A second self begins as its own earlier requests do, and as nobody else's.
                blocks=tuple(block + copy * _COPY for block in blocks[place]) if copy else blocks[place],
                session=hash_of(f"{one.key_id}/{copy}" if copy else one.key_id) if is_sticky else 0,
            )
        )
    return Traffic(tuple(arrivals), tuple(place for _, place, _ in found))


def block_tokens_of(asked: Sequence[Asked]) -> int:
    """Return how many tokens a block of a beginning should stand for, so that all of them have room in memory."""
    tokens, block_tokens = sum(one.cached_tokens for one in asked), BLOCK_TOKENS
    while tokens > BLOCKS_MAX * block_tokens:
        block_tokens *= 2
    return block_tokens


def hash_of(text: str) -> int:
    """Return a number of a text that is the same in every run, never 0."""
    return random.Random(text).getrandbits(63) | 1


def most_at_once(asked: Sequence[Asked]) -> int:
    """Return how many requests were on one replica at once, of any."""
    changes: dict[str, list[tuple[float, int]]] = {}
    first = [one.ttft_s for one in asked if one.ttft_s is not None]
    usual_s = median(first) if first else 0.0
    for one in asked:
        # What a first token takes longer than usual was spent in line, and not on it.
        begun_s = one.at_s + max(0.0, (one.ttft_s or 0.0) - usual_s)
        changes.setdefault(one.replica_id, []).extend(((begun_s, 1), (one.at_s + one.latency_s, -1)))
    most = 1
    for its in changes.values():
        now = 0
        for _, change in sorted(its):
            now += change
            most = max(most, now)
    return most


def _moved(at_s: float, key_id: str, copy: int, span_s: float, seed: int) -> float:
    """Return when a copy comes: a caller's are all moved alike, so that its bursts and pauses stay."""
    if not copy or span_s <= 0:
        return at_s
    most_s = min(APART_S, span_s / 4)
    return (at_s + random.Random(f"{seed}/{key_id}/{copy}").uniform(-most_s, most_s)) % span_s


def _times(asked: Sequence[Asked], replayed: Sequence[Stretch]) -> list[float]:
    """Return when each comes in the world."""
    times, number = [], 0
    for one in asked:
        while one.at_s >= replayed[number].until and number + 1 < len(replayed):
            number += 1
        stretch = replayed[number]
        assert stretch.since <= one.at_s, "requests are in order, and of the stretches"
        times.append(stretch.begin_s + one.at_s - stretch.since)
    return times


def _blocks(asked: Sequence[Asked], block_tokens: int) -> list[tuple[int, ...]]:
    """Return hashes of the beginning of each prompt, as far as any other shares it."""
    parents = list(_parents(asked, block_tokens))
    needed = [shared for _, shared in parents]
    for parent, shared in parents:
        if parent >= 0:
            needed[parent] = max(needed[parent], shared)
    found: list[tuple[int, ...]] = []
    fresh = 0
    for (parent, shared), need in zip(parents, needed, strict=True):
        begin = found[parent][:shared] if parent >= 0 else ()
        more = need - len(begin)
        found.append((*begin, *range(fresh, fresh + more)))
        fresh += more
    return found


def _parents(asked: Sequence[Asked], block_tokens: int) -> Iterable[tuple[int, int]]:
    """Yield for each request the earlier one that it begins like (-1: none), and by how many blocks."""
    recent: dict[str, deque[tuple[int, int]]] = {}
    for place, one in enumerate(asked):
        whole = one.prompt_tokens // block_tokens
        wanted = min(one.cached_tokens // block_tokens, whole)
        circles = [recent.setdefault(name, deque(maxlen=_RECENT)) for name in (one.key_id, f"of {one.tenant_id}", "")]
        yield _parent(wanted, circles) if wanted else (-1, 0)
        for circle in circles:
            circle.append((place, whole))


def _parent(wanted: int, circles: Sequence[deque[tuple[int, int]]]) -> tuple[int, int]:
    for circle in circles:
        for place, whole in reversed(circle):
            if whole >= wanted:
                return place, wanted
    # What it shares may be the answer before it, too: then it begins like the longest prompt, and the rest is read.
    place, whole = max(circles[0] or circles[-1], key=lambda one: one[1], default=(-1, 0))
    return place, min(wanted, whole)
