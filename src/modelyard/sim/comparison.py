"""A recorded run of a real engine, replayed by a simulated one, and how far the two are apart."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, inf

import msgspec

from modelyard.policy.engine_model import Speed
from modelyard.sim.engine import Engine
from modelyard.sim.tasks import EngineSpec, Task, Totals
from modelyard.sim.traces import Recorded, Served

KV_BLOCKS_UNKNOWN = 1 << 20
"""Blocks of an engine whose recording does not say: more than was ever asked for."""
_SHARES = (0.5, 0.9, 0.99)


class Replayed(msgspec.Struct):
    """A request in a replay, and what the engine had done when it came, began and ended."""

    task: Task
    come: Totals
    first: Totals = Totals()
    last: Totals = Totals()


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles of something; zeros of nothing."""

    mean: float
    p50: float
    p90: float
    p99: float


class Comparison(msgspec.Struct, frozen=True):
    """A replay beside the real run, in seconds: to the first token, and for each token after it."""

    requests: int
    ttft_real: Spread
    ttft: Spread
    tpot_real: Spread
    tpot: Spread

    @property
    def errors(self) -> dict[str, float]:
        """Relative errors by what they are of."""
        pairs = (("TTFT", self.ttft, self.ttft_real), ("TPOT", self.tpot, self.tpot_real))
        return {
            f"{name} {field}": getattr(ours, field) / getattr(real, field) - 1
            for name, ours, real in pairs
            for field in Spread.__struct_fields__
            if getattr(real, field) > 0
        }

    @property
    def worst(self) -> float:
        """The largest relative error."""
        return max((abs(error) for error in self.errors.values()), default=0.0)


def spec_of(run: Recorded, speed: Speed) -> EngineSpec:
    """Return the engine that a run was recorded of."""
    # Ranks that share experts take their steps together: to callers they are one engine of twice the size.
    ranks = run.data_parallel
    return EngineSpec(
        speed=speed,
        max_num_seqs=run.max_num_seqs * ranks,
        chunk_tokens=run.chunk_tokens * ranks,
        kv_blocks=run.kv_blocks * ranks or KV_BLOCKS_UNKNOWN,
    )


def replay(spec: EngineSpec, served: Sequence[Served]) -> list[Replayed]:
    """Send every request when it came; return them in the same order."""
    engine = Engine(spec)
    found: dict[Task, Replayed] = {}

    def run_until(at_s: float) -> None:
        while engine.next_s <= at_s and engine.next_s < inf:
            now_s = engine.next_s
            begun, done = engine.advance(now_s)
            if begun or done:
                totals = engine.totals(now_s)
                for task in begun:
                    found[task].first = totals
                for task in done:
                    found[task].last = totals

    for number, one in enumerate(served):
        run_until(one.come_s)
        task = Task(number, number=number, prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens)
        found[task] = Replayed(task, engine.totals(one.come_s))
        engine.submit(task, one.come_s)
    run_until(inf)
    return list(found.values())


def compare(replayed: Sequence[Replayed], served: Sequence[Served], *, judged: Callable[[int], bool]) -> Comparison:
    """Return how those requests fared whose place ``judged`` takes, in the replay and in the real run.

    Those of which nobody saw the first token are not compared.
    """
    pairs = [
        (ours.task, real)
        for place, (ours, real) in enumerate(zip(replayed, served, strict=True))
        if judged(place) and real.has_first
    ]
    more = [(task, real) for task, real in pairs if real.output_tokens > 1]
    return Comparison(
        len(pairs),
        spread([real.ttft_s for _, real in pairs]),
        spread([task.first_s - task.come_s for task, _ in pairs]),
        spread([real.tpot_s for _, real in more]),
        spread([(task.done_s - task.first_s) / (task.output_tokens - 1) for task, _ in more]),
    )


def spread(values: Iterable[float]) -> Spread:
    """Return mean and percentiles: the smallest value that so many do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (ordered[max(0, ceil(share * len(ordered)) - 1)] for share in _SHARES)
    return Spread(sum(ordered) / len(ordered), p50, p90, p99)
