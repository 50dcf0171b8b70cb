"""The speed of an engine, from what the ledger says of its requests.

``fitting.py`` learns it from a replay; the ledger has thousands of requests,
of which some hundreds are enough: the densest stretches of one replica, which
say what a batch does, and one of middling density, which says how long a
request takes that is almost alone. Half of them are learned from, the other
half is judged.
"""

from collections.abc import Sequence
from math import ceil, nan

import msgspec

from modelyard.policy.engine_model import Speed
from modelyard.sim.comparison import KV_BLOCKS_UNKNOWN, Comparison, compare, replay, spec_of
from modelyard.sim.fitting import fit
from modelyard.sim.recorded import Asked
from modelyard.sim.tasks import BLOCK_TOKENS
from modelyard.sim.traces import Recorded, Served

REQUESTS_MIN = 20
"""Fewer say too little."""
_RUN = 100
"""Requests of one stretch."""
_RUNS = 3
_PAUSE_S = 1.0
"""Between two stretches that are put one behind the other."""


class Learned(msgspec.Struct, frozen=True):
    """A speed, and how far a replay with it is off on requests that it was not learned from."""

    speed: Speed
    requests: int
    judged: Comparison


class Size(msgspec.Struct, frozen=True):
    """What an engine takes at once."""

    slots: int = 8
    chunk_tokens: int = 2048
    kv_tokens: int = 0
    """0: not known, and taken for enough."""


def learn(asked: Sequence[Asked], size: Size) -> Learned | None:
    """Return the speed of the engines that answered ``asked`` (of one version, in order); None where they are few."""
    run = _run_of(asked, size)
    return None if run is None else _judged(run, fit(run, learn_from=lambda place: place % 2 == 0))


def judge(speed: Speed, asked: Sequence[Asked], size: Size) -> Learned | None:
    """Return how far a speed that is known otherwise is off on the same requests; None where they are few."""
    run = _run_of(asked, size)
    return None if run is None else _judged(run, speed)


def _judged(run: Recorded, speed: Speed) -> Learned:
    return Learned(speed, len(run.served), compare(replay(spec_of(run, speed), run.served), run.served, judged=_is_odd))


def _run_of(asked: Sequence[Asked], size: Size) -> Recorded | None:
    served = _behind_one_another(_runs(asked))
    if len(served) < REQUESTS_MIN:
        return None
    blocks = size.kv_tokens // BLOCK_TOKENS
    longest = max(ceil((one.prompt_tokens + one.output_tokens) / BLOCK_TOKENS) for one in served)
    return Recorded(
        name="ledger",
        model="",
        max_num_seqs=size.slots,
        chunk_tokens=max(size.chunk_tokens, size.slots),
        kv_blocks=blocks if blocks >= longest else KV_BLOCKS_UNKNOWN,
        data_parallel=1,
        served=tuple(served),
    )


def _is_odd(place: int) -> bool:
    return place % 2 == 1


def _runs(asked: Sequence[Asked]) -> list[list[Asked]]:
    """Return stretches of one replica's requests to learn from."""
    by_replica: dict[str, list[Asked]] = {}
    for one in asked:
        if one.replica_id and one.is_ok and one.is_replayable and one.completion_tokens > 0 and one.latency_s > 0:
            by_replica.setdefault(one.replica_id, []).append(one)
    if not by_replica:
        return []
    _, mine = max(by_replica.items(), key=lambda item: (len(item[1]), item[0]))
    # Who came before it had answered anybody may have waited for it to load, which is no matter of speed.
    answered_s = min(one.at_s + (one.latency_s if one.ttft_s is None else one.ttft_s) for one in mine)
    mine = [one for one in mine if one.at_s >= answered_s]
    runs = [mine[begin : begin + _RUN] for begin in range(0, len(mine), _RUN)]
    runs.sort(key=lambda run: (run[-1].at_s - run[0].at_s) / len(run))
    chosen = [*runs[: _RUNS - 1], *runs[len(runs) // 2 :][:1]] if len(runs) > _RUNS else runs
    return sorted(chosen, key=lambda run: run[0].at_s)


def _behind_one_another(runs: Sequence[Sequence[Asked]]) -> list[Served]:
    """Return the requests on one clock, each stretch behind the end of the one before it."""
    served: list[Served] = []
    begin_s = 0.0
    for run in runs:
        apart_s = begin_s - run[0].at_s
        for one in run:
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
    return served
