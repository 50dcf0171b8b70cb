"""Nodes and what runs there: places are given back, weights are found where they were left."""

import random

import pytest

from modelyard.sim.fleet.models import MODELS, Terms, profile
from modelyard.sim.fleet.scenario import GB, Loading, Nodes
from modelyard.sim.fleet.stock import State, Stock, WeightCache

TERMS = Terms(prompt_tokens=1024, completion_tokens=256, kinds=(("h100", 8), ("l4", 4)))
SMALL = profile("llama-3.2-3b", TERMS)


def stock(count: int = 2) -> Stock:
    return Stock.of(
        (Nodes(kind="h100", count=count), Nodes(kind="l4", count=count, accelerators=4)),
        Loading(),
        [SMALL],
        random.Random(1),
    )


def test_what_is_started_is_held_until_it_stops() -> None:
    nodes = stock()
    replicas = [nodes.start(0, SMALL, "m", 0.0) for _ in range(5)]
    assert all(replicas)
    assert nodes.accelerators == len(
        {(one.placement.node_id, one.placement.parts[0].accelerators) for one in replicas if one}
    )
    for replica in replicas:
        assert replica is not None
        nodes.stop(replica)
    assert nodes.accelerators == 0
    assert nodes.usd_per_hour == pytest.approx(0.0)
    assert not nodes.held


def test_loads_that_serve_go_last_and_the_newest_first() -> None:
    nodes = stock()
    replicas = [nodes.start(0, SMALL, "m", 0.0) for _ in range(3)]
    old, loading, new = replicas
    assert old
    assert loading
    assert new
    old.state = new.state = State.READY
    assert list(nodes.surplus(0, 1)) == [loading, new]


def test_weights_that_were_loaded_are_loaded_faster_again() -> None:
    nodes = stock(1)
    first = nodes.start(0, SMALL, "m", 0.0)
    second = nodes.start(1, SMALL, "m", 0.0)
    assert first
    assert second
    assert second.load_s < first.load_s
    assert second.load_s == pytest.approx(SMALL.weights_bytes / Loading().memory)


def test_caches_let_go_of_what_was_used_longest_ago() -> None:
    cache = WeightCache(Loading(disk_bytes=10 * GB, memory_bytes=4 * GB))
    assert cache.put("a", 4 * GB) == []
    assert cache.put("b", 4 * GB) == []
    assert (cache.tier("a"), cache.tier("b")) == ("disk", "memory")
    cache.put("a", 4 * GB)
    assert cache.put("c", 4 * GB) == ["b"]
    assert [cache.tier(one) for one in "abc"] == ["disk", "remote", "memory"]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_runs_somewhere_with_and_without_its_bits(name: str) -> None:
    kinds = (("h100", 8), ("a100", 8), ("l40s", 8), ("l4", 4))
    for quantised in (True, False):
        for is_busy in (True, False):
            terms = Terms(prompt_tokens=1024, completion_tokens=256, kinds=kinds, quantised=quantised, is_busy=is_busy)
            found = profile(name, terms)
            assert found.requests_s > 0
            assert found.slots >= 2


def test_batches_that_end_together_serve_less() -> None:
    together = profile(
        "llama-3.1-8b", Terms(prompt_tokens=1024, completion_tokens=256, kinds=(("h100", 8),), static_batch=8)
    )
    beside = profile(
        "llama-3.1-8b", Terms(prompt_tokens=1024, completion_tokens=256, kinds=(("h100", 8),), is_busy=True)
    )
    assert beside.requests_s > 3 * together.requests_s
