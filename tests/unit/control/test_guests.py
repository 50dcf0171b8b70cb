"""A replica of a host is kept from callers until the guests of those that it replaces are on it."""

from types import SimpleNamespace
from typing import Any

import msgspec
from tests.support.towns import Town, endpoint, replica

from modelyard.clock import ManualClock
from modelyard.control.guests import Guests
from modelyard.domain.fleet import GuestSeat, ReplicaState, SeatState
from modelyard.engines import GuestKind


def test_one_that_takes_over_has_the_guests_that_came_while_it_loaded() -> None:
    town, host = Town(), endpoint("host")
    town.settle(host)
    seat = GuestSeat("ep-guest", "ver-guest", "g@000000000000", SeatState.READY)
    old = town.run(msgspec.structs.replace(replica(host), guests=(seat,)))
    new = town.run(msgspec.structs.replace(replica(host, 1, ready_at=None), state=ReplicaState.LOADING))
    engine = SimpleNamespace(guests=GuestKind.ADAPTER, guests_max=lambda _: 4)
    nobody: Any = SimpleNamespace()
    engines: Any = {"simulated": engine}
    guests = Guests(nobody, engines, nobody, nobody, nobody, ManualClock(), nobody, nobody)
    assert not guests.holds_back(new, host, town.look()), "one more of the same: its guests are where they were"
    new = msgspec.structs.replace(new, takes_over=old.id)
    assert guests.holds_back(new, host, town.look())
