"""Which few settings make the difference: a rule, so that nobody picks what looks well on the days held out.

1. *Winners* are the better half of the last round.
2. A setting is *common* where winners moved it the same way (numbers up or down, words away from what is shipped), and
   at most half as many did not as chance alone would leave.
3. From what winners moved common settings to, the one that lowers the mean loss of the validation's runs most is taken,
   then the next beside it, as long as each takes off at least a hundredth: what does less is not worth explaining.

Neither step sees a day or a client that the verdict is of.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from modelyard.sim.fleet.scenario import Scenario
from modelyard.sim.fleet.search import Days, Run, Space, Trial, Value, apply, loss, valued

GAIN_LEAST = 0.01
"""Share of the loss that one more setting must take off."""


class Common(msgspec.Struct, frozen=True):
    """A setting that winners moved, the share of them that did, and the values that they moved it to."""

    name: str
    share: float
    values: tuple[Value, ...]


class Step(msgspec.Struct, frozen=True):
    """One more setting, and the mean loss on the validation's runs with all so far, in GPU-hours."""

    name: str
    value: Value
    loss: float


class Choice(msgspec.Struct, frozen=True):
    """What was chosen, in order, and the loss of what is shipped."""

    shipped: float
    steps: tuple[Step, ...]

    @property
    def settings(self) -> dict[str, Value]:
        """All of them together."""
        return {one.name: one.value for one in self.steps}


def winners(trials: Sequence[Trial]) -> list[Trial]:
    """Return the better half of the last round, of ``trials`` with the best first; what is shipped is none of them."""
    last = max((len(one.losses) for one in trials), default=0)
    reached = [one for one in trials if len(one.losses) == last]
    return [one for one in reached[: math.ceil(len(reached) / 2)] if one.settings]


def common(won: Sequence[Trial], space: Space, scenario: Scenario) -> list[Common]:
    """Return what ``won`` have in common that ``scenario`` has not, in the order of the space."""
    found = []
    for name, values in space.items():
        shipped = valued(scenario, name)
        for side in (-1, 1):
            moved = [
                one.settings[name] for one in won if name in one.settings and _side(one.settings[name], shipped) == side
            ]
            by_chance = sum(_side(value, shipped) == side for value in values) / len(values)
            share = len(moved) / max(len(won), 1)
            if moved and 1 - share <= (1 - by_chance) / 2:
                found.append(Common(name, share, tuple(value for value in values if value in moved)))
    return found


def _side(value: Value, shipped: Value) -> int:
    """Return on which side of the shipped one a value is: 0 on neither; words are all on one."""
    if value == shipped:
        return 0
    if isinstance(value, str) or isinstance(shipped, str):
        return 1
    return 1 if value > shipped else -1


def chosen(
    scenario: Scenario, shared: Sequence[Common], days: Days, run: Run, seeds: Sequence[int], least: float = GAIN_LEAST
) -> Choice:
    """Return the few of the common settings that make the difference on the validation's days."""

    def tried(settings: Mapping[str, Value]) -> float:
        losses = [
            loss(run(apply(msgspec.structs.replace(scenario, start_day=day), settings), seed))
            for day in days.validation
            for seed in seeds
        ]
        return sum(losses) / len(losses)

    shipped = tried({})
    steps: list[Step] = []
    while left := [one for one in shared if one.name not in {step.name for step in steps}]:
        before = {step.name: step.value for step in steps}
        offers = [Step(one.name, value, tried({**before, one.name: value})) for one in left for value in one.values]
        best = min(offers, key=lambda step: step.loss)
        if best.loss > (1 - least) * (steps[-1].loss if steps else shipped):
            break
        steps.append(best)
    return Choice(shipped, tuple(steps))
