"""Which replica gets a request: the one where it adds the least predicted seconds.

What a replica costs is what the request waits for there (prompts not yet
read), what it takes to read its own prompt (less what the replica has cached),
and what that reading takes from those who run there and from those who will
come after. All of it is in seconds, so nothing has to be weighted against
anything else.

Load is the gateway's own count of what it has running there; what the engine
itself reported is only added for the part that is not ours. A polled gauge
alone is always late: everybody runs to the replica that was idle a second ago.
Ties go to the replica that waited longest since its last dispatch, so that
equal replicas take turns.

The formula was fitted on two public traces; ``python -m bench.routing`` replays
them through the functions below.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from math import exp, inf, log
from typing import Protocol, TypeVar

import msgspec

from modelyard.policy.engine_model import Speed
from modelyard.policy.job import Job, Looks
from modelyard.policy.prefixes import PrefixHolders, PrefixIndex

DECODE_DRAG = 0.5
"""A full batch makes reading a prompt half as long again."""
STALL_SHARE = 0.35
"""Reading a prompt holds up those who run there; from a half full batch on this part of the reading counts as cost."""
BEHIND_SHARE = 0.75
"""Whoever comes next waits while a prompt is read: this part of the reading counts as theirs."""
BEHIND_PER_S = 4.0
"""More of it for each second that even the least busy replica has yet to read. Without it a full fleet gets slower
still: it runs from the replica with the prefix to one with a shorter line, and reads everything twice."""
AHEAD_SHARE_MIN = 0.25
"""What is taken as still unread, however long reading goes on: an engine that hangs must not look idle."""
STICKY_S = 1.0
"""What keeping a session on its replica may cost its caller; a second is what people wait without losing the thread."""
CROWD = 16
"""With more replicas than this only some are looked at."""
LEARN_TOKENS_MIN = 256
"""Below this the first token tells more of the network than of the engine."""
RATE_MIN, RATE_MAX = 20.0, 1_000_000.0
"""Tokens a second that ``learn`` believes: a large model on a laptop, and ten times the fastest GPU."""

EXPECTED_TOKENS = 1024
"""A prompt of usual length: what is read of it in a second is taken for the speed of an engine without answers yet."""

_PRIME = (1 << 61) - 1
_RELEASES = 0x0C4CEB9FE1A85EC5


class Candidate(Protocol):
    """What routing may know of a replica; read only."""

    @property
    def running(self) -> int:
        """Requests of ours it has now."""
        ...

    @property
    def running_elsewhere(self) -> int:
        """Requests it has from others: what the engine last reported, less what was ours then; never below 0."""
        ...

    @property
    def version_id(self) -> str:
        """Which release it belongs to; ``choose`` is asked about one release at a time."""
        ...

    @property
    def slots(self) -> int:
        """Requests it takes at once."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether it is on its way out."""
        ...

    @property
    def ejected_until_s(self) -> float:
        """Until when it pauses after a failure."""
        ...

    @property
    def last_dispatch(self) -> int:
        """Number of its last dispatch; grows."""
        ...

    @property
    def pending_tokens(self) -> int:
        """Sum of ``need_tokens`` of what was dispatched to it and has not begun to answer."""
        ...

    @property
    def reading_since_s(self) -> float:
        """When it began with the oldest of those: the last first token there, or the dispatch to an idle one."""
        ...

    @property
    def prefixes(self) -> PrefixIndex:
        """What it probably has cached."""
        ...

    @property
    def identity(self) -> int:
        """``stable_hash`` of its id: the same in every gateway."""
        ...


C = TypeVar("C", bound=Candidate)


class EngineModel(msgspec.Struct, frozen=True):
    """How fast the engine of a release is; the defaults suit a mid-sized model on one GPU until ``learn`` knows better.

    ``block_tokens``: tokens in a block of a prefix. ``running_s``: what one more running request counts. ``samples``:
    answers that it was learned from.
    """

    prefill_tokens_per_s: float = 8000.0
    block_tokens: float = 256.0
    running_s: float = 0.02
    samples: int = 0


UNKNOWN_ENGINE = EngineModel()


def need_tokens(job: Job, matched: int, model: EngineModel) -> int:
    """Return the tokens that a replica which has ``matched`` blocks of the prompt must still read; at least 1."""
    return max(1, job.prompt_tokens - int(matched * model.block_tokens)) if matched else job.prompt_tokens


def added_seconds(candidate: Candidate, job: Job, model: EngineModel, *, now_s: float, behind: float = 0.0) -> float:
    """Return what ``job`` costs on ``candidate``: its own wait until the first token, and what it takes from others.

    ``behind`` is ``behind_share`` of all replicas.
    """
    batch = candidate.running + candidate.running_elsewhere
    load = batch / max(1, candidate.slots)
    ahead_s = candidate.pending_tokens / model.prefill_tokens_per_s
    wait_s = min(ahead_s, max(AHEAD_SHARE_MIN * ahead_s, ahead_s - now_s + candidate.reading_since_s))
    need_s = need_tokens(job, candidate.prefixes.matched(job.prefix), model) / model.prefill_tokens_per_s
    share = DECODE_DRAG * load + STALL_SHARE * min(1.0, 2.0 * load) + behind
    return wait_s + need_s * (1.0 + share) + model.running_s * batch


def behind_share(replicas: Iterable[Candidate], model: EngineModel, *, now_s: float) -> float:
    """Return which part of reading a prompt is waited for by those who come after: more, the fuller all replicas are.

    It only matters where a prompt is longer to read on one replica than on another.
    """
    least = min((replica.pending_tokens for replica in replicas if _has_room(replica, now_s)), default=0)
    return BEHIND_SHARE + BEHIND_PER_S * least / model.prefill_tokens_per_s


def choose(  # noqa: PLR0913 - what a choice depends on, by name
    replicas: Sequence[C],
    job: Job,
    *,
    now_s: float,
    model: EngineModel = UNKNOWN_ENGINE,
    avoid: Collection[C] = (),
    fits: Callable[[C], bool] | None = None,
    chance: Callable[[], float],
    holders: PrefixHolders[C] | None = None,
    looks: Looks | None = None,
) -> C | None:
    """Return the replica to use, or None when none has room.

    ``avoid``: those this request failed on. ``fits``: whether the request fits a replica's memory; asked only of those
    that would be chosen. ``holders``: who has which prefix, for more than ``CROWD`` replicas. ``looks`` gets what was
    seen of those it chose from.
    """
    if len(replicas) <= 1:
        only = replicas[0] if replicas else None
        if only is None or not _has_room(only, now_s) or only in avoid:
            return None
        return only if fits is None or fits(only) else None
    looked_at: Collection[C] = replicas if len(replicas) <= CROWD else _some(replicas, job, chance, holders)
    behind = behind_share(looked_at, model, now_s=now_s) if job.prefix else 0.0
    best = _least(looked_at, job, now_s, model, avoid, fits, behind, looks)
    if best is None and looked_at is not replicas:
        best = _least(replicas, job, now_s, model, avoid, fits, behind, None)
    if best is None or not job.session:
        return best
    home = _home(replicas, job.session, holders)
    if home is None or home is best or not _has_room(home, now_s) or home in avoid:
        return best
    home_s = added_seconds(home, job, model, now_s=now_s, behind=behind)
    if home_s > added_seconds(best, job, model, now_s=now_s, behind=behind) + STICKY_S:
        return best
    return home if fits is None or fits(home) else best


def _least(
    replicas: Iterable[C],
    job: Job,
    now_s: float,
    model: EngineModel,
    avoid: Collection[C],
    fits: Callable[[C], bool] | None,
    behind: float,
    looks: Looks | None,
) -> C | None:
    # ``added_seconds`` written out in the loop: calling it costs as much as all the rest. A test compares them.
    token_s = 1.0 / model.prefill_tokens_per_s
    running_s = model.running_s
    prompt_s = job.prompt_tokens * token_s
    prefix = job.prefix
    best: C | None = None
    best_cost = inf
    for replica in replicas:
        batch = replica.running
        slots = replica.slots
        if batch >= slots or replica.is_draining or replica.ejected_until_s > now_s or (avoid and replica in avoid):
            if looks is not None:
                looks.append((replica.identity, batch, slots, 0, 0.0, 0.0, inf))
            continue
        batch += replica.running_elsewhere
        load = batch / slots
        need_s = prompt_s
        matched = 0
        ahead_s = 0.0
        if prefix and (matched := replica.prefixes.matched(prefix)):
            need_s = max(1, job.prompt_tokens - int(matched * model.block_tokens)) * token_s
        stall = STALL_SHARE if load > 0.5 else 2.0 * STALL_SHARE * load
        cost = need_s * (1.0 + DECODE_DRAG * load + stall + behind) + running_s * batch
        if pending := replica.pending_tokens:
            ahead_s = pending * token_s
            left_s = ahead_s - now_s + replica.reading_since_s
            if left_s < ahead_s:
                least_s = AHEAD_SHARE_MIN * ahead_s
                ahead_s = left_s if left_s > least_s else least_s
            cost += ahead_s
        if looks is not None:
            looks.append((replica.identity, batch, slots, matched, ahead_s, need_s, cost))
        if (
            best is None or cost < best_cost or (cost == best_cost and replica.last_dispatch < best.last_dispatch)
        ) and (fits is None or fits(replica)):
            best, best_cost = replica, cost
    return best


def _some(
    replicas: Sequence[C], job: Job, chance: Callable[[], float], holders: PrefixHolders[C] | None
) -> Collection[C]:
    """Return up to 8 replicas that hold most of the prompt, 4 at random, and the 2 emptiest of 8 more at random.

    Random ones find idle replicas (two choices are enough, Mitzenmacher 2001) without a walk over all.
    """
    count = len(replicas)
    drawn = [replicas[int(chance() * count)] for _ in range(12)]
    emptiest = sorted(drawn[4:], key=_fill)[:2]
    found = dict.fromkeys(drawn[:4])
    found.update(dict.fromkeys(emptiest))
    if holders is not None and job.prefix:
        version_id = replicas[0].version_id
        for holder in holders.find(job.prefix, at_most=8):
            if holder.version_id == version_id:
                found[holder] = None
    return found


def _fill(replica: Candidate) -> float:
    return (replica.running + replica.running_elsewhere) / max(1, replica.slots)


def _has_room(replica: Candidate, now_s: float) -> bool:
    return replica.running < replica.slots and not replica.is_draining and replica.ejected_until_s <= now_s


def preferred(replicas: Sequence[C], session: int) -> C | None:
    """Return the replica that ``session`` belongs to: the one that draws the highest number for it.

    Rendezvous hashing (Thaler and Ravishankar 1998): when a replica goes, only its sessions move; when one comes, it
    takes an equal share of everybody's. Every gateway finds the same one. The product of two hashes modulo a prime
    spreads them as evenly as dearer mixing does.
    """
    # An integer's hash is its rest modulo 2^61 - 1 (documented, without a random key), twice as fast as dividing here.
    draws = [hash(replica.identity * session) for replica in replicas]
    while draws:
        home = replicas[draws.index(max(draws))]
        if not home.is_draining:
            return home
        replicas = [replica for replica in replicas if not replica.is_draining]
        draws = [hash(replica.identity * session) for replica in replicas]
    return None


def _home(replicas: Sequence[C], session: int, holders: PrefixHolders[C] | None) -> C | None:
    if holders is None:
        return preferred(replicas, session)
    home = holders.homes.get(session)
    if home is None or home.is_draining or home.version_id != replicas[0].version_id:
        home = preferred(replicas, session)
        if home is not None:
            holders.settle(session, home)
    return home


def stable_hash(text: str) -> int:
    """Return a 60-bit hash of ``text`` that is the same in every process; never 0."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 4 or 1


def pick_release(weights: Sequence[int], point: float) -> int:
    """Return the index of the release that ``point`` (0 ≤ point < 1) falls on; all weights 0 means the first."""
    total = sum(weights)
    mark = point * total
    for index, weight in enumerate(weights):
        mark -= weight
        if mark < 0:
            return index
    return 0


def release_point(session: int, chance: Callable[[], float]) -> float:
    """Return the point for ``pick_release``: always the same for a session, by chance without one.

    Because releases are laid out in order, raising one's weight moves only as many sessions as it must.
    """
    if not session:
        return chance()
    # Multiplied by a constant, so that it has nothing to do with which replica a session prefers.
    return session * _RELEASES % _PRIME / _PRIME


def is_shadowed(percent: int, chance: Callable[[], float]) -> bool:
    """Return whether this request is also copied to a release with ``shadow`` = ``percent``."""
    return percent > 0 and chance() * 100.0 < percent


def expected(model: EngineModel, speed: Speed) -> EngineModel:
    """Return the model of an engine of which no answer came yet, by what its own page told others.

    The first answer of one's own says it better: it has the way there and back in it.
    """
    if model.samples:
        return model
    read_s = speed.iteration_s(1, EXPECTED_TOKENS, EXPECTED_TOKENS)
    rate = min(max(EXPECTED_TOKENS / read_s, RATE_MIN), RATE_MAX)
    return msgspec.structs.replace(model, prefill_tokens_per_s=rate)


def learn(
    model: EngineModel, *, prompt_tokens: int, cached_tokens: int, ttft_s: float, running: int, slots: int
) -> EngineModel:
    """Return the model after one answer whose first token came after ``ttft_s``.

    Pass only answers that did not queue: dispatched when the replica had no ``pending_tokens``. ``running`` of
    ``slots`` were there at dispatch. What is too short to tell reading from everything else changes nothing.
    """
    need = prompt_tokens - cached_tokens
    if need < LEARN_TOKENS_MIN or ttft_s <= 0.0:
        return model
    load = min(1.0, running / slots)
    seen = need * (1.0 + DECODE_DRAG * load) / ttft_s
    # The first answers count fully, later ones a tenth. One answer may move the rate by a factor of two at most, and
    # downwards by less: what delays a first token (another gateway's prompt, a pause) only ever makes it late.
    surprise = log(min(max(seen, RATE_MIN), RATE_MAX) / model.prefill_tokens_per_s)
    if model.samples >= 8:
        surprise = min(max(surprise, -0.35), 0.7)
    rate = model.prefill_tokens_per_s * exp(surprise * max(0.1, 1.0 / (model.samples + 1)))
    return msgspec.structs.replace(model, prefill_tokens_per_s=rate, samples=model.samples + 1)
