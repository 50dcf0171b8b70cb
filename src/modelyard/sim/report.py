"""What a run came to: the summary that benches and commands print."""

from collections.abc import Sequence
from math import inf

import msgspec

from modelyard.sim.comparison import Spread, spread
from modelyard.sim.requests import Request
from modelyard.sim.world import World


class Summary(msgspec.Struct, frozen=True):
    """A run in numbers. Seconds and shares from 0 to 1; spreads are of the requests that were done."""

    requests: int
    done: int
    refused: dict[str, int]
    """By reason."""
    span_s: float
    """From the first arrival to the last end."""
    ttft_s: Spread
    tpot_s: Spread
    waited_s: Spread
    """Before an engine had it."""
    within_share: float
    """Share of all requests whose first token came within ``slo_s``."""
    goodput_s: float
    """Such requests a second."""
    requests_s: float
    tokens_s: float
    hit_rate: float
    """Share of prompt tokens that were cached."""
    preemptions: int
    recomputed_tokens: int
    """Prompt tokens read beyond those that had to be."""
    replica_hours: float
    busy_share: float
    """Share of the time of replicas in which they computed."""
    events: int


def summary(world: World, requests: Sequence[Request], *, slo_s: float = 5.0) -> Summary:
    """Return what ``requests`` of a world came to, all of which have ended."""
    done = [request for request in requests if request.done_s < inf]
    refused: dict[str, int] = {}
    for request in requests:
        if request.refusal:
            refused[request.refusal] = refused.get(request.refusal, 0) + 1
    begin_s = min((request.arrival.at_s for request in requests), default=0.0)
    end_s = max((min(request.done_s, request.refused_s) for request in requests), default=begin_s)
    span_s = max(end_s - begin_s, 1e-9)
    within = sum(request.ttft_s <= slo_s for request in done)
    replicas = [*world.replicas.values(), *world.gone]
    engines = [replica.engine for replica in replicas] + (world.breakage.dead if world.breakage else [])
    lived_s = sum(max(0.0, min(replica.gone_s, end_s) - replica.began_s) for replica in replicas)
    prompts = sum(request.arrival.prompt_tokens for request in done)
    cached = sum(request.cached_tokens for request in done)
    read = sum(engine.totals(end_s).prefill_tokens for engine in engines)
    return Summary(
        requests=len(requests),
        done=len(done),
        refused=refused,
        span_s=span_s,
        ttft_s=spread(request.ttft_s for request in done),
        tpot_s=spread(request.tpot_s for request in done if request.arrival.output_tokens > 1),
        waited_s=spread(request.waited_s for request in done),
        within_share=within / max(1, len(requests)),
        goodput_s=within / span_s,
        requests_s=len(done) / span_s,
        tokens_s=sum(request.arrival.output_tokens for request in done) / span_s,
        hit_rate=cached / max(1, prompts),
        preemptions=sum(engine.preemptions for engine in engines),
        recomputed_tokens=max(0, round(read) - (prompts - cached)),
        replica_hours=lived_s / 3600,
        busy_share=sum(engine.busy_s for engine in engines) / max(lived_s, 1e-9),
        events=world.events.happened,
    )
