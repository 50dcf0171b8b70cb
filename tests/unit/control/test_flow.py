"""What a pass tells of an endpoint that has no room."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from tests.support.towns import endpoint, replica, version

from modelyard.control.flow import Starts, no_room_of
from modelyard.control.supplies import SupplyError
from modelyard.control.world import Demand, World
from modelyard.domain.endpoints import Autoscale, Release
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import Part, Placement
from modelyard.policy import scaling
from modelyard.policy.actions import StartReplica


def test_a_shadow_without_room_is_no_reason_that_others_wait() -> None:
    one = endpoint("one", releases=(Release("ver-shadow", 0, shadow=10), Release("ver-main", 100)))
    loading, ready = replica(one, version_id="ver-main", ready_at=None), replica(one, version_id="ver-main")
    assert no_room_of(one, {"ver-shadow": "full"}, [loading]) == ""
    assert no_room_of(one, {"ver-shadow": "full"}, [ready]) == "full"
    assert no_room_of(one, {"ver-shadow": "full", "ver-main": "too large"}, [loading]) == "too large"
    assert no_room_of(one, {}, [ready]) == ""


def test_lines_of_batches_that_run_on_what_is_idle_push_nobody_out_and_rent_nothing() -> None:
    offer = cast("Any", SimpleNamespace(settings=SimpleNamespace(load_s=20.0)))

    def needed(queued: int, *, scales: bool) -> tuple[int, float]:
        one = endpoint("one", autoscale=Autoscale(batch_scales=scales))
        demands = {one.id: Demand(queued, queued, 0.0, wait_s=90.0, batch_queued=5)}
        world = World(
            0.0, 0.0, {one.id: one}, {}, {}, {}, frozenset(), {}, frozenset(), are_gateways_known=True, demands=demands
        )
        need = Starts(one, world, cast("Any", None), {}, cast("Any", None))._need(offer)
        return need.queued, need.wait_s

    assert needed(5, scales=True) == (5, 90.0)
    assert needed(5, scales=False) == (0, 0.0)
    assert needed(7, scales=False) == (2, 90.0)


def test_one_that_was_to_take_over_from_one_that_is_gone_tells_what_it_lacks_as_any_does() -> None:
    one, given_up = endpoint("one"), list[str]()

    def refuse(_: object) -> None:
        raise SupplyError("its files are gone")

    placer = SimpleNamespace(move=lambda new: new.placement, give_up=lambda _: None, kinds=frozenset())
    tools = SimpleNamespace(
        placer=placer,
        supplies=SimpleNamespace(offer=refuse, supply=refuse),
        moving=SimpleNamespace(give_up=given_up.append),
    )
    world: Any = SimpleNamespace(versions={"ver-one": version("one")})
    old, seen = replica(one), scaling.Seen(now_s=0.0, replicas=1, ready=1, slots=1, gateways=0, queued=0, in_flight=0)
    new = msgspec.structs.replace(
        replica(one, 1, ready_at=None), takes_over=old.id, placement=Placement((Part("n1", (0,), 1),))
    )

    def troubles_beside(old: Replica) -> dict[str, SupplyError]:
        starts = Starts(one, world, cast("Any", tools), {each.id: each for each in (old, new)}, seen)
        assert not asyncio.run(starts.try_start(StartReplica(new, "it was recorded but not started")))
        return starts.troubles

    assert troubles_beside(msgspec.structs.replace(old, state=ReplicaState.FAILED)).keys() == {"ver-one"}
    for _ in range(3):
        assert not troubles_beside(old), "the old one serves"
    assert not given_up, "once, when its record is dropped, and not in each pass until then"
