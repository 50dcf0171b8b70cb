"""What a pass tells of an endpoint that has no room."""

from tests.support.towns import endpoint, replica

from modelyard.control.flow import no_room_of
from modelyard.domain.endpoints import Release


def test_a_shadow_without_room_is_no_reason_that_others_wait() -> None:
    one = endpoint("one", releases=(Release("ver-shadow", 0, shadow=10), Release("ver-main", 100)))
    loading, ready = replica(one, version_id="ver-main", ready_at=None), replica(one, version_id="ver-main")
    assert no_room_of(one, {"ver-shadow": "full"}, [loading]) == ""
    assert no_room_of(one, {"ver-shadow": "full"}, [ready]) == "full"
    assert no_room_of(one, {"ver-shadow": "full", "ver-main": "too large"}, [loading]) == "too large"
    assert no_room_of(one, {}, [ready]) == ""
