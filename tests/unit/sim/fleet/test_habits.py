"""What a controller knows of gaps when a run begins is what came before it."""

import random

import msgspec
import numpy as np
import pytest
from tests.unit.sim.fleet.test_world import SLOTS, SMALL, client

from modelyard.policy.idleness import Gaps
from modelyard.sim.fleet.habits import gaps_before
from modelyard.sim.fleet.population import Population, populate

DAY_S = 86_400.0


def population(*clients) -> Population:
    scenario = msgspec.structs.replace(
        SMALL, traffic=msgspec.structs.replace(SMALL.traffic, endpoints=6, share_pooled=0.0)
    )
    return populate(scenario, clients, random.Random(3))


def test_gaps_are_as_long_as_requests_are_rare() -> None:
    one = population(client("rare", 0.01))
    # The scenario's rate is shared out among endpoints; here each has a request every two minutes.
    one.factor[:] = 1 / 120 / 0.01
    found = gaps_before(one, begin_s=3 * DAY_S, days=2.0, seed=5)
    assert len(found) == 6
    for gaps in found:
        # Poisson's gaps of two minutes: of 1,440 requests 61 % end one of a minute and more, 3 minutes long on average.
        assert gaps.total == pytest.approx(2 * 720 * 0.61, rel=0.15)
        mean_min = sum((at + 0.5) * count for at, count in enumerate(gaps.counts)) / gaps.total
        assert mean_min == pytest.approx(3.0, rel=0.1)


def test_who_asks_all_the_time_has_none_and_nights_are_long() -> None:
    busy, office = population(client("busy", 1.0)), population(client("office", 0.5, busy=range(54, 102)))
    busy.factor[:] = office.factor[:] = 1.0
    assert gaps_before(busy, begin_s=2 * DAY_S, days=1.0, seed=5) == [Gaps()] * 6
    for gaps in gaps_before(office, begin_s=7 * DAY_S, days=4.0, seed=5):
        assert gaps.beyond in {3, 4}, "a night of sixteen hours is none that an idle time could outlast"


def test_the_same_seed_gives_the_same_and_nothing_of_the_run_itself_is_known() -> None:
    rates = tuple(0.01 if at >= SLOTS // 2 else 0.0 for at in range(SLOTS))
    one = population(msgspec.structs.replace(client("late", 0.01), rates=rates))
    one.factor[:] = 1.0
    one.shift[:] = np.zeros(6)
    assert gaps_before(one, begin_s=4 * DAY_S, days=3.0, seed=5) == [Gaps()] * 6
    later = gaps_before(one, begin_s=6 * DAY_S, days=3.0, seed=5)
    assert later == gaps_before(one, begin_s=6 * DAY_S, days=3.0, seed=5)
    assert all(gaps.total > 100 for gaps in later)
