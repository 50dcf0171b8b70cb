"""Simulated beside real: LLMServingSim's recordings of vLLM 0.19, and Splitwise's measurements."""

import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean, median

from modelyard.policy.engine_model import Speed
from modelyard.sim.comparison import Comparison, compare, replay, spec_of
from modelyard.sim.fitting import fit, fit_measured
from modelyard.sim.traces import Measured, recorded, splitwise

Group = tuple[str, str, int]


@dataclass(frozen=True)
class Fitted:
    """A run of which one half of the requests was learned from, and the other is judged."""

    name: str
    learned_from: str
    speed: Speed
    held_out: Comparison
    fit_s: float


@dataclass(frozen=True)
class Errors:
    """Relative errors of a formula on measurements that it was not fitted to: means, and the 90th percentile."""

    runs: int
    prompt: float
    prompt_p90: float
    token: float
    token_p90: float


def vllm(folder: Path) -> list[Fitted]:
    """Return each run twice: learned from every other request, the first among them or not."""
    found = []
    for run in recorded(folder):
        for rest, learned_from in enumerate(("even", "odd")):
            began_s = time.perf_counter()
            speed = fit(run, learn_from=lambda place, rest=rest: place % 2 == rest)
            spent_s = time.perf_counter() - began_s
            held_out = compare(
                replay(spec_of(run, speed), run.served), run.served, judged=lambda place, rest=rest: place % 2 != rest
            )
            found.append(Fitted(run.name, learned_from, speed, held_out, spent_s))
    return found


def measured(path: Path) -> dict[Group, tuple[Speed, Errors]]:
    """Return speed and errors of each model on each kind of accelerator: every other row is held out."""
    found = {}
    for group, rows in groupby(sorted(splitwise(path), key=group_of), group_of):
        held = plausible(list(rows))
        speed = fit_measured(held[::2])
        found[group] = (speed, errors(speed, held[1::2]))
    return found


def group_of(row: Measured) -> Group:
    """Return what was measured."""
    return row.model, row.hardware, row.tensor_parallel


def plausible(rows: list[Measured]) -> list[Measured]:
    """Leave out prompts that were read three times as fast as any others: they cannot all have been in memory."""
    usual = median(row.batch * row.prompt_tokens / row.prompt_s for row in rows if row.prompt_tokens >= 512)
    return [row for row in rows if row.batch * row.prompt_tokens / row.prompt_s < 3 * usual]


def errors(speed: Speed, rows: list[Measured]) -> Errors:
    """Return how far a speed is off these measurements."""
    prompts, tokens = [], []
    for row in rows:
        read = row.batch * row.prompt_tokens
        held = row.batch * (row.prompt_tokens + row.output_tokens / 2)
        prompts.append(abs(speed.iteration_s(row.batch, read, read) / row.prompt_s - 1))
        tokens.append(abs(speed.iteration_s(row.batch, 0, held) / row.token_s - 1))
    prompts.sort()
    tokens.sort()
    high = int(0.9 * len(rows))
    return Errors(len(rows), mean(prompts), prompts[high], mean(tokens), tokens[high])
