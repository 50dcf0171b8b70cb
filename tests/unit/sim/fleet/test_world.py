"""A small fleet over some hours: the same seed gives the same, and measures do what they are for."""

import math
import random
import sys

import msgspec
import pytest

from modelyard.policy.scaling import decide
from modelyard.sim.fleet import simulate
from modelyard.sim.fleet.population import populate
from modelyard.sim.fleet.scenario import Faults, Measures, Nodes, Scenario, Traffic
from modelyard.sim.fleet.world import Production, World
from modelyard.sim.rates import Client

SLOTS = 8 * 144
NODES = (Nodes(kind="h100", count=20, share_spot=0.2), Nodes(kind="l4", count=20, accelerators=4, share_spot=0.2))
CALM = Faults(node_per_day=0.0, engine_per_day=0.0, reclaim_per_day=0.0)


def client(name: str, rate: float, *, busy: range = range(144)) -> Client:
    """Ask at a rate within some slots of every day."""
    rates = tuple(rate if at % 144 in busy else 0.0 for at in range(SLOTS))
    return Client(f"language/{name}", rates, (1.0,) * SLOTS, 800.0, 200.0)


CLIENTS = [
    client("steady", 1.0),
    client("office", 0.5, busy=range(54, 102)),
    client("rare", 0.01, busy=range(60, 66)),
    client("night", 0.2, busy=range(30)),
]
SMALL = Scenario(
    nodes=NODES,
    traffic=Traffic(endpoints=40, rate=6000.0, bases=3),
    hours=1.0,
    warmup_s=600.0,
    faults=CALM,
    start_day=7.0,
)


def outcome(scenario: Scenario = SMALL, seed: int = 1):
    return simulate(scenario, CLIENTS, random.Random(seed))


def measured(**changes: bool) -> Scenario:
    return msgspec.structs.replace(SMALL, measures=msgspec.structs.replace(Measures(), **changes))


def test_the_same_seed_gives_the_same_fleet() -> None:
    shaky = msgspec.structs.replace(SMALL, faults=Faults(node_per_day=5.0, engine_per_day=10.0, reclaim_per_day=20.0))
    assert outcome(shaky) == outcome(shaky)
    assert outcome(shaky) != outcome(shaky, seed=2)


def test_what_is_asked_does_not_depend_on_the_measures() -> None:
    requests = [outcome(measured(pooling=pooling)).requests for pooling in (False, True)]
    assert requests[0] == pytest.approx(requests[1], rel=0.01)


def test_each_measure_needs_fewer_accelerators() -> None:
    dedicated = outcome(
        measured(scale_to_zero=False, pooling=False, packing=False, quantised=False, continuous=False, backfill=False)
    )
    asleep = outcome(measured(pooling=False, packing=False, quantised=False, continuous=False, backfill=False))
    best = outcome()
    assert dedicated.gpu_hours > asleep.gpu_hours > best.gpu_hours
    assert best.dropped == 0


def test_batches_fill_what_is_idle() -> None:
    with_batches, without = outcome(), outcome(measured(backfill=False))
    assert with_batches.batch_gpu_hours < without.batch_gpu_hours
    assert with_batches.total_busy > with_batches.online_busy


def test_faults_cost_requests_and_replicas_come_back() -> None:
    shaky = outcome(msgspec.structs.replace(SMALL, faults=Faults(engine_per_day=100.0, node_per_day=2.0)))
    assert shaky.crashes > 0
    assert 0 < shaky.failed < 0.01
    assert shaky.requests == pytest.approx(outcome().requests, rel=0.02)


def test_on_a_full_fleet_idle_replicas_go_for_those_that_are_waited_for() -> None:
    full = msgspec.structs.replace(
        measured(pooling=False, packing=False, prewarm=False),
        nodes=(Nodes(kind="h100", count=1, accelerators=4), Nodes(kind="l4", count=1, accelerators=4)),
        traffic=Traffic(endpoints=40, rate=60.0, share_pooled=0.0),
    )
    found = outcome(full)
    assert found.no_room > 0
    assert found.evicted > 0


class Counting(Production):
    """The production's policy; every size is noted, and it is asked in every tick where ``skips`` is False."""

    def __init__(self, *, skips: bool) -> None:
        self.skips = skips
        self.sizes: list[tuple[float, int]] = []
        self.asked = 0

    def decide(self, spec, memory, seen, rules):
        self.asked += 1
        return decide(spec, memory, seen, rules)

    def steady(self, spec, memory, seen, rules):
        return Production.steady(spec, memory, seen, rules) if self.skips else None


def test_skipping_leaves_every_tick_as_it_was() -> None:
    worlds = []
    for skips in (True, False):
        sizer = Counting(skips=skips)
        population = populate(SMALL, CLIENTS, random.Random(3))
        worlds.append((World(SMALL, population, random.Random(4), sizer=sizer), sizer))
    for tick in range(1800):
        for world, _ in worlds:
            world.tick(tick)
        assert worlds[0][0].targets == worlds[1][0].targets, f"tick {tick}"
    assert worlds[0][1].asked < worlds[1][1].asked / 10


def test_a_client_of_one_day_says_nothing_of_a_week() -> None:
    brief = Client("reason/brief", (1.0,) * 144 + (0.0,) * 1000, (1.0,) * 1144)
    with pytest.raises(ValueError, match="covers more than"):
        simulate(SMALL, [brief], random.Random(1))
    assert brief.days == 1
    assert math.isclose(client("steady", 1.0).mean_rate, 1.0)


def test_lines_of_batches_that_count_as_demand_start_what_they_were_to_fill() -> None:
    counted = msgspec.structs.replace(SMALL, rules=msgspec.structs.replace(SMALL.rules, batch_scales=True))
    assert outcome(counted).starts > outcome().starts + 5


def test_without_numpy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("modelyard.sim.fleet.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match=r"modelyard\[sim\]"):
        simulate(SMALL, CLIENTS, random.Random(1))


@pytest.mark.parametrize("tick_s", [13.0, 0.7, 0.6, 30.0])
def test_a_tick_may_be_of_any_length(tick_s: float) -> None:
    hours = 1.0 if tick_s > 1 else 0.5
    odd = msgspec.structs.replace(SMALL, tick_s=tick_s, hours=hours, warmup_s=100.0)
    usual = msgspec.structs.replace(SMALL, hours=hours, warmup_s=100.0)
    assert outcome(odd).requests == pytest.approx(outcome(usual).requests, rel=0.1)
