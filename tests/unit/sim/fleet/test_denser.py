"""Engines that sleep, replicas that move together, warm pools: each does what it is for, and breaks nothing."""

import random

import msgspec
import pytest

from modelyard.domain.endpoints import SOURCE
from modelyard.policy.sleepers import MOST as SLEEPERS_MOST
from modelyard.sim.fleet import simulate
from modelyard.sim.fleet.models import Terms, profile
from modelyard.sim.fleet.population import populate
from modelyard.sim.fleet.scenario import Faults, Loading, Measures, Nodes, Scenario, Traffic
from modelyard.sim.fleet.stock import State, Stock
from modelyard.sim.fleet.tally import Outcome
from modelyard.sim.fleet.world import World
from modelyard.sim.rates import Client

SLOTS = 8 * 144
NODES = (
    Nodes(kind="h100", count=12, share_spot=0.3),
    Nodes(kind="a100", count=12),
    Nodes(kind="l4", count=8, accelerators=4),
)
CALM = Faults(node_per_day=0.0, engine_per_day=0.0, reclaim_per_day=0.0)
SHAKY = Faults(node_per_day=5.0, engine_per_day=10.0, reclaim_per_day=20.0)


def client(name: str, rate: float) -> Client:
    return Client(f"language/{name}", (rate,) * SLOTS, (1.5,) * SLOTS, 800.0, 200.0)


CLIENTS = [client("steady", 0.3), client("minutes", 0.02), client("rare", 0.004)]
SMALL = Scenario(
    nodes=NODES,
    traffic=Traffic(endpoints=60, rate=600.0, share_pooled=0.2, share_small=0.3, bases=2),
    hours=0.5,
    warmup_s=600.0,
    faults=CALM,
    start_day=7.0,
    rules=msgspec.structs.replace(SOURCE, batch_scales=False),
)


def outcome(scenario: Scenario = SMALL, seed: int = 1, **measures: bool) -> Outcome:
    changed = msgspec.structs.replace(scenario, measures=Measures(**measures))
    return simulate(changed, CLIENTS, random.Random(seed))


def test_engines_that_sleep_need_fewer_accelerators_and_start_no_more_often() -> None:
    plain, sleeping = outcome(), outcome(sleeping=True)
    assert sleeping.gpu_hours < 0.9 * plain.gpu_hours
    assert sleeping.activations <= plain.activations
    assert sleeping.wakes > 0 == plain.wakes
    assert sleeping.late < 0.01
    assert sleeping.requests == pytest.approx(plain.requests, rel=0.01)


def test_what_moves_together_leaves_accelerators_empty() -> None:
    plain, together = outcome(), outcome(consolidating=True)
    assert together.moves > 0
    assert together.gpu_hours < plain.gpu_hours
    assert together.dropped == plain.dropped == 0


def test_pools_spare_stock_models_their_loads() -> None:
    plain, pooled = outcome(prewarm=False), outcome(prewarm=False, warm_pools=True)
    assert pooled.stolen > 0 == plain.stolen
    assert pooled.late <= plain.late


def test_the_same_seed_gives_the_same_fleet_with_all_of_them_while_things_break() -> None:
    shaky = msgspec.structs.replace(SMALL, faults=SHAKY)
    both = [outcome(shaky, sleeping=True, consolidating=True, warm_pools=True) for _ in range(2)]
    assert both[0] == both[1]
    assert both[0].reclaimed > 0
    assert both[0].availability > 0.99


def test_nothing_is_held_by_nobody_whatever_sleeps_moves_and_breaks() -> None:
    scenario = msgspec.structs.replace(
        SMALL, faults=SHAKY, measures=Measures(sleeping=True, consolidating=True, warm_pools=True)
    )
    world = World(scenario, populate(scenario, CLIENTS, random.Random(3)), random.Random(4))
    for tick in range(600):
        world.tick(tick)
        if tick % 50 == 0:
            check(world)


def check(world: World) -> None:
    stock = world.stock
    held: dict[tuple[str, int], int] = {}
    for replica in stock.replicas.values():
        assert replica.state is not State.GONE
        assert replica in stock.of_deployment[replica.deployment]
        if replica.state is not State.ASLEEP:
            for part in replica.placement.parts:
                for index in part.accelerators:
                    held[part.node_id, index] = held.get((part.node_id, index), 0) + 1
    assert held == stock.held
    asleep = [one for some in stock.asleep.values() for one in some]
    assert all(one.state is State.ASLEEP for one in asleep)
    assert len(asleep) == sum(one.state is State.ASLEEP for one in stock.replicas.values())
    for (node_id, index), number in held.items():
        assert stock.cluster.free_bytes(node_id, index) is not None
        assert stock.cluster.shares(node_id, index) == number


TERMS = Terms(prompt_tokens=1024, completion_tokens=256, kinds=(("h100", 8),))
MODEL = profile("llama-3.1-8b", TERMS)


def asleep_on(loading: Loading, number: int) -> tuple[Stock, list[int]]:
    """Return a machine where ``number`` engines have gone to sleep, and who had to go for them."""
    stock = Stock.of((Nodes(kind="h100", count=1),), loading, [MODEL] * number, random.Random(1))
    gone = []
    for at in range(number):
        replica = stock.start(at, MODEL, f"m{at}", float(at))
        assert replica is not None
        replica.state = State.READY
        for other in stock.sleep(replica, float(at)):
            gone.append(other.deployment)
            stock.stop(other)
    return stock, gone


def test_memory_of_a_machine_bounds_who_sleeps_there_and_the_longest_asleep_goes() -> None:
    stock, gone = asleep_on(Loading(sleep_bytes=3 * MODEL.weights_bytes), 5)
    assert gone == [0, 1]
    assert stock.accelerators == 0
    assert stock.slivers == pytest.approx(3 * 875 * 1024**2 / (80 * 1024**3))


def test_few_sleep_on_one_accelerator() -> None:
    stock, gone = asleep_on(Loading(), SLEEPERS_MOST + 2)
    assert gone == [0, 1], "all of them are on the first, which was empty each time"
    assert len(stock.replicas) == SLEEPERS_MOST


def test_one_that_sleeps_wakes_where_it_was_and_holds_it_again() -> None:
    stock, _ = asleep_on(Loading(), 1)
    (replica,) = stock.replicas.values()
    stock.wake(replica, 9.0)
    assert replica.state is State.WAKING
    assert stock.accelerators == replica.placement.accelerators
    assert stock.slivers == pytest.approx(0.0)
    stock.stop(replica)
    assert stock.accelerators == 0
