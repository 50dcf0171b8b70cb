"""The speed of an engine, from what the ledger says of its requests.

``fitting.py`` learns it from a replay; the ledger has thousands of requests,
of which some hundreds are enough: the densest stretch of one replica, which
says what a batch does, and one of middling density, which says how long a
request takes that is almost alone. A stretch begins where the replica was
idle; where it never was, those before it are sent too, and not looked at: who
comes to a full engine waits for them. Half of the requests are learned from,
the other half is judged.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import ceil, nan
from typing import Annotated

import msgspec

from modelyard.policy.engine_model import Speed
from modelyard.sim.comparison import KV_BLOCKS_UNKNOWN, Comparison, compare, replay, spec_of
from modelyard.sim.fitting import fit
from modelyard.sim.recorded import Asked
from modelyard.sim.tasks import BLOCK_TOKENS
from modelyard.sim.traces import Recorded, Served

REQUESTS_MIN = 20
"""Fewer say too little."""
ALL = 400
"""So many are taken as they are."""
_RUN = 200
"""Requests of one stretch, where there are more."""
_BEFORE = 100
"""So many before a stretch are looked at for an idle moment, and sent where there is none."""
_PAUSE_S = 1.0
"""Between two stretches that are put one behind the other."""
_COLD = 5.0
"""Those first of a replica whose first token took so many times the usual waited for it to load."""


class Learned(msgspec.Struct, frozen=True):
    """A speed, and how far a replay with it is off on requests that it was not learned from."""

    speed: Speed
    requests: int
    judged: Comparison


class Size(msgspec.Struct, frozen=True):
    """What an engine takes at once."""

    slots: Annotated[int, msgspec.Meta(ge=1)] = 8
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2048
    kv_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0: not known, and taken for enough."""


class _Stretch(msgspec.Struct, frozen=True):
    """Requests of one replica; of the first ``before`` nothing is learned."""

    asked: Sequence[Asked]
    before: int = 0

    @property
    def density(self) -> float:
        """Requests a second."""
        learned = self.asked[self.before :]
        return len(learned) / max(learned[-1].at_s - learned[0].at_s, 1e-3)


class _Run(msgspec.Struct, frozen=True):
    """Stretches on one clock; ``places`` are those of requests that count."""

    recorded: Recorded
    places: tuple[int, ...]

    def learns_from(self, place: int) -> bool:
        return place % 2 == 0 and self._counts(place)

    def judges(self, place: int) -> bool:
        return place % 2 == 1 and self._counts(place)

    def _counts(self, place: int) -> bool:
        at = bisect_right(self.places, place)
        return at > 0 and self.places[at - 1] == place


def learn(asked: Sequence[Asked], size: Size, *, ready: Mapping[str, float] | None = None) -> Learned | None:
    """Return the speed of the engines that answered ``asked`` (of one version, in order); None where they are few.

    ``ready``: since when replicas served (unix seconds), of those of which that is known.
    """
    run = _run_of(asked, size, ready or {})
    return None if run is None else _judged(run, fit(run.recorded, learn_from=run.learns_from))


def judge(
    speed: Speed, asked: Sequence[Asked], size: Size, *, ready: Mapping[str, float] | None = None
) -> Learned | None:
    """Return how far a speed that is known otherwise is off on the same requests; None where they are few."""
    run = _run_of(asked, size, ready or {})
    return None if run is None else _judged(run, speed)


def _judged(run: _Run, speed: Speed) -> Learned:
    served = run.recorded.served
    again = replay(spec_of(run.recorded, speed), served)
    return Learned(speed, len(run.places), compare(again, served, judged=run.judges))


def _run_of(asked: Sequence[Asked], size: Size, ready: Mapping[str, float]) -> _Run | None:
    served, places = _behind_one_another(_stretches(asked, ready))
    if len(places) < REQUESTS_MIN:
        return None
    blocks = size.kv_tokens // BLOCK_TOKENS
    longest = max(ceil((one.prompt_tokens + one.output_tokens) / BLOCK_TOKENS) for one in served)
    recorded = Recorded(
        name="ledger",
        model="",
        max_num_seqs=size.slots,
        chunk_tokens=max(size.chunk_tokens, size.slots),
        kv_blocks=blocks if blocks >= longest else KV_BLOCKS_UNKNOWN,
        data_parallel=1,
        served=tuple(served),
    )
    return _Run(recorded, tuple(places))


# --- which requests ------------------------------------------------------------------------


def _stretches(asked: Sequence[Asked], ready: Mapping[str, float]) -> list[_Stretch]:
    """Return what to learn from, in order of time."""
    by_replica: dict[str, list[Asked]] = {}
    for one in asked:
        if one.replica_id and one.is_ok and one.is_replayable and one.completion_tokens > 0 and one.latency_s > 0:
            by_replica.setdefault(one.replica_id, []).append(one)
    if not by_replica:
        return []
    replica_id, most = max(by_replica.items(), key=lambda item: (len(item[1]), item[0]))
    mine = _warm(most, ready.get(replica_id))
    if len(mine) <= ALL:
        return [_Stretch(mine)] if mine else []
    idle = _idle_places(mine)
    found = [_from(mine, place, idle) for place in range(0, len(mine) - _RUN + 1, _RUN)]
    found.sort(key=lambda one: -one.density)
    return sorted((found[0], found[(len(found) + 1) // 2]), key=lambda one: one.asked[0].at_s)


def _from(mine: Sequence[Asked], place: int, idle: Sequence[int]) -> _Stretch:
    """Return the stretch that begins at a place, or at the idle moment before it."""
    at = bisect_right(idle, place)
    if at and place - idle[at - 1] < _BEFORE:
        return _Stretch(mine[idle[at - 1] : place + _RUN])
    begin = max(0, place - _BEFORE)
    return _Stretch(mine[begin : place + _RUN], place - begin)


def _idle_places(mine: Sequence[Asked]) -> list[int]:
    """Return the places of requests that came when nobody was on the replica."""
    found, busy_until = [], 0.0
    for place, one in enumerate(mine):
        if one.at_s >= busy_until:
            found.append(place)
        busy_until = max(busy_until, one.at_s + one.latency_s)
    return found


def _warm(mine: Sequence[Asked], ready_s: float | None) -> Sequence[Asked]:
    """Return the requests without the time that they waited for the replica to load."""
    if ready_s is not None:
        # The engine got them when it was there.
        return [_since(one, ready_s) if one.at_s < ready_s else one for one in mine]
    first = sorted(one.ttft_s for one in mine if one.ttft_s is not None)
    usual_s = first[len(first) // 2] if first else 0.0
    waited = next(
        (place for place, one in enumerate(mine) if one.ttft_s is None or one.ttft_s <= _COLD * usual_s), len(mine)
    )
    return mine[waited:] if usual_s else mine


def _since(one: Asked, ready_s: float) -> Asked:
    waited_s = ready_s - one.at_s
    ttft_s = None if one.ttft_s is None else max(one.ttft_s - waited_s, 1e-3)
    return msgspec.structs.replace(
        one, at_s=ready_s, ttft_s=ttft_s, latency_s=max(one.latency_s - waited_s, ttft_s or 1e-3)
    )


def _behind_one_another(stretches: Sequence[_Stretch]) -> tuple[list[Served], list[int]]:
    """Return the requests on one clock, each stretch behind the end of the one before it, and which count."""
    served: list[Served] = []
    places: list[int] = []
    begin_s = 0.0
    for stretch in stretches:
        apart_s = begin_s - stretch.asked[0].at_s
        places += range(len(served) + stretch.before, len(served) + len(stretch.asked))
        for one in stretch.asked:
            come_s = one.at_s + apart_s
            served.append(
                Served(
                    len(served),
                    # What was cached was not read.
                    max(1, one.prompt_tokens - one.cached_tokens),
                    max(1, one.completion_tokens),
                    come_s,
                    nan if one.ttft_s is None else come_s + one.ttft_s,
                    come_s + one.latency_s,
                )
            )
        begin_s = max(one.last_s for one in served) + _PAUSE_S
    return served, places
