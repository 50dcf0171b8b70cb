"""Better settings of the policies, found on some days and judged on others.

Candidates are drawn from a space of settings (or are its grid), tried on training days and halved: the better half goes
on with twice the time. ``choice.py`` says which few settings of those that are left make the difference, on days and
clients of its own. These are compared with the settings that are shipped on days and clients that nobody was tuned on,
seed by seed. The same random numbers serve every candidate, so that differences are of settings and not of luck.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from modelyard.domain.endpoints import Autoscale
from modelyard.sim.fleet.scenario import Scenario
from modelyard.sim.fleet.tally import Outcome

Value = float | int | str | bool
Space = Mapping[str, Sequence[Value]]
"""Settings of ``Autoscale`` by name, or ``idle_s`` of the scenario, with the values to try."""
Run = Callable[[Scenario, int], Outcome]
"""Runs a scenario with a seed."""

COLD_START_S = 900.0
"""Accelerator-seconds that an avoided cold start is worth: half of the shipped ``prewarm_cold_cost_s`` (ADR 0042)."""
LATE_S = 10.0
"""The same of a request that waited for more than five seconds: an assumption."""
DROPPED_S = 100.0
"""And of one that was turned away: an assumption."""

SPACE: Space = {
    "idle": ("fixed", "learned", "priced"),
    "idle_s": (120.0, 300.0, 600.0),
    "down_utilization": (30.0, 45.0, 60.0),
    "down_utilization_s": (180.0, 300.0, 600.0),
    "load_share_up": (65.0, 75.0, 85.0),
    "load_share_down": (50.0, 60.0, 70.0),
    "prewarm_cold_cost_s": (300.0, 900.0, 1800.0, 2700.0),
    "prewarm_budget": (2.0, 8.0),
    "prewarm_s": (120.0, 300.0),
}


class Days(msgspec.Struct, frozen=True):
    """When runs begin, in days from the trace's first: to learn on, to choose by, and to judge by.

    Twelve hours each, all within the trace's second week. Nothing was ever tuned on those held out: day 10, and the
    afternoons of days 12 and 13.
    """

    training: tuple[float, ...] = (7.0, 8.0, 9.0)
    validation: tuple[float, ...] = (11.0,)
    held_out: tuple[float, ...] = (10.0, 12.5, 13.5)


class Trial(msgspec.Struct, frozen=True):
    """Settings, and the loss on each run that they had."""

    settings: dict[str, Value]
    losses: tuple[float, ...] = ()

    @property
    def loss(self) -> float:
        """The mean, in GPU-hours."""
        return sum(self.losses) / max(len(self.losses), 1)


class Verdict(msgspec.Struct, frozen=True):
    """Settings on days that they were not tuned on, beside those that are shipped: one entry a day and seed."""

    settings: dict[str, Value]
    shipped: tuple[Outcome, ...]
    tuned: tuple[Outcome, ...]

    @property
    def gains(self) -> list[float]:
        """By how much the loss is smaller, as a share, of each day and seed."""
        return [1 - loss(new) / loss(old) for old, new in zip(self.shipped, self.tuned, strict=True)]

    @property
    def is_clear(self) -> bool:
        """Whether they were better every time."""
        return min(self.gains) > 0


def loss(outcome: Outcome) -> float:
    """Return what a run cost in GPU-hours, waits and refusals of callers included."""
    waits_s = COLD_START_S * outcome.activations
    waits_s += outcome.requests * (LATE_S * outcome.late + DROPPED_S * (outcome.dropped + outcome.failed))
    return outcome.online_gpu_hours + waits_s / 3600


def apply(scenario: Scenario, settings: Mapping[str, Value]) -> Scenario:
    """Return ``scenario`` with other settings.

    Raises:
        ValueError: there is no such setting, or no such value.
    """
    of_scenario = {name: value for name, value in settings.items() if name == "idle_s"}
    of_rules = {name: value for name, value in settings.items() if name != "idle_s"}
    unknown = of_rules.keys() - set(Autoscale.__struct_fields__)
    if unknown:
        raise ValueError(f"no settings of the autoscaler: {', '.join(sorted(unknown))}")
    rules = msgspec.convert({**msgspec.to_builtins(scenario.rules), **of_rules}, Autoscale)
    return msgspec.structs.replace(scenario, rules=rules, **of_scenario)


def valued(scenario: Scenario, name: str) -> Value:
    """Return the value of a setting, as ``apply`` takes it."""
    value: Value = scenario.idle_s if name == "idle_s" else getattr(scenario.rules, name)
    return str(value) if isinstance(value, str) else value


def grid(space: Space) -> list[dict[str, Value]]:
    """Return all combinations."""
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def drawn(space: Space, number: int, chance: random.Random) -> list[dict[str, Value]]:
    """Return ``number`` different combinations, or all where there are no more."""
    found: list[dict[str, Value]] = []
    for _ in range(20 * number):
        one = {name: chance.choice(values) for name, values in space.items()}
        if one not in found:
            found.append(one)
        if len(found) == number:
            break
    return found


def halved(
    scenario: Scenario, candidates: Sequence[Mapping[str, Value]], days: Days, run: Run, *, hours: float, seed: int = 0
) -> list[Trial]:
    """Return the trials of all candidates, the best first; the better half of each round has twice the hours."""
    going = [Trial(dict(one)) for one in candidates]
    gone: list[Trial] = []
    for day in days.training:
        one = msgspec.structs.replace(scenario, start_day=day, hours=hours)
        tried = [Trial(trial.settings, (*trial.losses, loss(run(apply(one, trial.settings), seed)))) for trial in going]
        # By the newest, longest run: what a short one said has done its work.
        tried.sort(key=lambda trial: trial.losses[-1])
        kept = max(1, math.ceil(len(tried) / 2))
        going, gone = tried[:kept], [*tried[kept:], *gone]
        hours *= 2
    return [*going, *gone]


def judged(scenario: Scenario, settings: Mapping[str, Value], days: Days, run: Run, seeds: Sequence[int]) -> Verdict:
    """Return how ``settings`` do on held-out days against the scenario's own."""
    shipped, tuned = [], []
    for day in days.held_out:
        one = msgspec.structs.replace(scenario, start_day=day)
        for seed in seeds:
            shipped.append(run(one, seed))
            tuned.append(run(apply(one, settings), seed))
    return Verdict(dict(settings), tuple(shipped), tuple(tuned))
