"""What a pass tells of an endpoint that has no room."""

from types import SimpleNamespace
from typing import Any, cast

from tests.support.towns import endpoint, replica

from modelyard.control.flow import Starts, no_room_of
from modelyard.control.world import Demand, World
from modelyard.domain.endpoints import Autoscale, Release


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
