"""Replay a trace through a router and engines in virtual time."""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from pathlib import Path

from bench.routing.engine import BATCH_MAX, BLOCK_TOKENS, CACHE_BLOCKS, Engine, Request, reading_s
from bench.routing.policies import Policy
from modelyard.sim.traces import mooncake


@dataclass(frozen=True)
class Outcome:
    """What callers saw."""

    hit_rate: float
    p50_s: float
    p90_s: float
    p99_s: float
    within_5_s: float


def read(lines: Iterable[str], *, load: float = 1.0, limit: int | None = None) -> list[Request]:
    """Return the requests of a Mooncake trace, ``load`` times as fast as they came."""
    return [
        Request(number, one.at_s / load, one.prompt_tokens, one.output_tokens, one.blocks)
        for number, one in enumerate(mooncake(islice(lines, limit)))
    ]


def read_file(path: Path, *, load: float = 1.0) -> list[Request]:
    """Return the requests of a trace file."""
    with path.open() as lines:
        return read(lines, load=load)


def replay(
    requests: Sequence[Request], policy: Policy, *, replicas: int, staleness_s: float, batch_max: int = BATCH_MAX
) -> list[Request]:
    """Send every request when it comes; return them with their times. Gauges are ``staleness_s`` old at most."""
    requests = [Request(r.number, r.at_s, r.prompt_tokens, r.output_tokens, r.blocks) for r in requests]
    engines = [Engine(index, batch_max) for index in range(replicas)]
    versions = [0] * replicas
    events: list[tuple[float, int, int]] = []
    polled_s = -1.0

    def poll(now_s: float) -> None:
        policy.polled([engine.gauges() for engine in engines], now_s)

    def run_until(end_s: float) -> None:
        nonlocal polled_s
        while events and events[0][0] <= end_s:
            now_s, index, version = heapq.heappop(events)
            if version != versions[index]:
                continue
            # Gauges are read at whole multiples of the staleness, before what happens after them.
            if staleness_s and now_s >= polled_s + staleness_s:
                polled_s = now_s // staleness_s * staleness_s
                poll(now_s)
            begun, done = engines[index].happen(now_s)
            for request in begun:
                policy.begun(request, index, now_s)
            for request in done:
                for waited, to in policy.done(request, index, now_s):
                    engines[to].submit(waited, now_s)
                    schedule(to)
            schedule(index)

    def schedule(index: int) -> None:
        versions[index] += 1
        at_s = engines[index].next_event_s()
        if at_s < float("inf"):
            heapq.heappush(events, (at_s, index, versions[index]))

    for request in requests:
        run_until(request.at_s)
        if not staleness_s:
            poll(request.at_s)
        elif request.at_s >= polled_s + staleness_s:
            polled_s = request.at_s // staleness_s * staleness_s
            poll(request.at_s)
        index = policy.pick(request, request.at_s)
        if index is not None:
            engines[index].submit(request, request.at_s)
            schedule(index)
    run_until(float("inf"))
    return requests


def outcome(requests: Sequence[Request]) -> Outcome:
    """Return hit rate by tokens, percentiles of the time to the first token, and the share within 5 s."""
    waits = sorted(request.first_token_s - request.at_s for request in requests)
    return Outcome(
        hit_rate=sum(request.cached_tokens for request in requests) / sum(r.prompt_tokens for r in requests),
        p50_s=quantile(waits, 0.5),
        p90_s=quantile(waits, 0.9),
        p99_s=quantile(waits, 0.99),
        within_5_s=sum(wait <= 5.0 for wait in waits) / len(waits),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of all do not exceed."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def floor(requests: Sequence[Request], *, replicas: int) -> Outcome:
    """Return what nobody can beat by routing: each prompt read at once, alone, with one cache for all replicas."""
    cache: OrderedDict[int, None] = OrderedDict()
    read: list[Request] = []
    for request in requests:
        held = 0
        for block in request.blocks:
            if block not in cache:
                break
            held += 1
        for block in reversed(request.blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > CACHE_BLOCKS * replicas:
            cache.popitem(last=False)
        cached = min(held * BLOCK_TOKENS, request.prompt_tokens - 1)
        alone = replace(request, cached_tokens=cached)
        alone.first_token_s = request.at_s + reading_s(request.prompt_tokens - cached)
        read.append(alone)
    return outcome(read)
