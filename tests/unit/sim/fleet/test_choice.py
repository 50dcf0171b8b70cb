"""Few settings are chosen by a rule: what winners have in common, and what makes a difference."""

from tests.unit.sim.fleet.test_search import outcome

from modelyard.domain.endpoints import Autoscale
from modelyard.sim.fleet.choice import Common, chosen, common, winners
from modelyard.sim.fleet.scenario import Scenario
from modelyard.sim.fleet.search import Days, Trial, Value
from modelyard.sim.fleet.tally import Outcome

BASE = Scenario(rules=Autoscale(idle="fixed", down_utilization=30.0))
DAYS = Days(training=(1.0,), validation=(2.0, 3.0), held_out=(4.0,))


def trial(*losses: float, **settings: Value) -> Trial:
    return Trial(settings, losses)


def test_winners_are_the_better_half_of_the_last_round() -> None:
    best, other = trial(3.0, 2.0, idle="learned"), trial(3.0, 4.0, idle="fixed")
    rest = [trial(1.0, 9.0, idle="priced"), trial(1.0, 10.0, idle="priced"), trial(0.5, idle="priced")]
    assert winners([best, trial(1.0, 3.0), other, *rest]) == [best, other], "what is shipped is not one of them"


def test_what_chance_would_leave_as_well_is_not_in_common() -> None:
    space = {
        "idle": ("fixed", "learned", "priced"),
        "down_utilization": (30.0, 45.0, 60.0),
        "prewarm_s": (120.0, 300.0),
    }
    won = [
        trial(1.0, idle="learned", down_utilization=60.0, prewarm_s=120.0),
        trial(1.0, idle="priced", down_utilization=45.0, prewarm_s=300.0),
        trial(1.0, idle="priced", down_utilization=30.0, prewarm_s=120.0),
    ]
    # Two of three words are others, so that two of three winners who moved away would say nothing.
    assert common(won, space, BASE) == [Common("idle", 1.0, ("learned", "priced"))]


def test_numbers_are_in_common_where_they_moved_the_same_way() -> None:
    space = {"down_utilization": (15.0, 30.0, 45.0, 60.0)}
    won = [trial(1.0, down_utilization=value) for value in (60.0, 45.0, 60.0, 60.0)]
    assert common(won, space, BASE) == [Common("down_utilization", 1.0, (45.0, 60.0))]
    apart = [trial(1.0, down_utilization=value) for value in (15.0, 45.0, 15.0, 60.0)]
    assert common(apart, space, BASE) == []


class Runs:
    """Costs 100; each of three settings takes off what it is worth; notes the days that it was asked for."""

    def __init__(self) -> None:
        self.days: set[float] = set()

    def __call__(self, scenario: Scenario, seed: int) -> Outcome:
        self.days.add(scenario.start_day)
        rules = scenario.rules
        cost = 100.0 + seed
        cost -= 20.0 * (rules.idle == "priced") + 5.0 * (rules.idle == "learned")
        cost -= 4.0 * (rules.down_utilization == 60.0)
        cost -= 0.2 * (rules.prewarm_s == 120.0)
        return outcome(cost)


def test_settings_are_added_while_they_make_a_difference_on_the_days_to_choose_by() -> None:
    runs = Runs()
    shared = [
        Common("prewarm_s", 1.0, (120.0,)),
        Common("down_utilization", 1.0, (45.0, 60.0)),
        Common("idle", 1.0, ("learned", "priced")),
    ]
    choice = chosen(BASE, shared, DAYS, runs, seeds=(1, 2))
    assert list(choice.settings.items()) == [("idle", "priced"), ("down_utilization", 60.0)]
    assert [step.loss for step in choice.steps] == [81.5, 77.5]
    assert choice.shipped == 101.5
    assert runs.days == {2.0, 3.0}


def test_nothing_is_chosen_where_nothing_helps() -> None:
    choice = chosen(BASE, [Common("prewarm_s", 1.0, (120.0,))], DAYS, Runs(), seeds=(1,))
    assert choice.settings == {}
    assert choice.steps == ()
