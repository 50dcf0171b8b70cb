"""Windows of what gateways told: exact over restarts of either side, and bounded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.clock import ManualClock
from modelyard.domain.demand import EndpointDemand, Report
from modelyard.domain.signals import ReleaseCounts
from modelyard.policy.signals import KEPT_S, TICK_S, Signals


class Room:
    """Signals, and gateways that report to them by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.signals = Signals(self.clock)

    def told(
        self,
        gateway: str = "g0",
        *,
        requests: int | None = None,
        errors: int = 0,
        arrivals: int = 0,
        queued: int = 0,
        version: str = "v1",
    ) -> None:
        counts = None
        if requests is not None:
            counts = [ReleaseCounts("ep", version, requests, errors, ttft=(requests,))] if requests else []
        demand = EndpointDemand("ep", queued, 0, 0.0, arrivals)
        self.signals.hear(gateway, Report([demand], [], "e", 1, releases=counts))

    def passes(self, seconds: float, **last: int) -> None:
        """Let time pass with a report each second, as gateways do."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.told(**last)  # type: ignore[arg-type]

    def requests(self, seconds: float, version: str | None = None) -> int:
        return self.signals.window("ep", version, seconds).requests


@pytest.fixture
def room() -> Room:
    return Room()


def test_what_a_gateway_counts_after_its_first_report_is_in_the_window(room: Room) -> None:
    room.told(requests=0)
    room.clock.advance(2)
    room.told(requests=7, errors=2)
    window = room.signals.window("ep", None, 60)
    assert (window.requests, window.errors) == (7, 2)
    assert window.ttft_p50_s is not None


def test_what_was_counted_before_the_controller_began_is_in_no_window(room: Room) -> None:
    room.told(requests=1000)
    assert room.requests(60) == 0
    room.clock.advance(2)
    room.told(requests=1005)
    assert room.requests(60) == 5


def test_a_report_that_does_not_speak_of_releases_changes_nothing(room: Room) -> None:
    room.told(requests=0)
    room.clock.advance(2)
    room.told(requests=3)
    room.told()
    room.clock.advance(2)
    room.told(requests=4)
    assert room.requests(60) == 4


def test_a_gateway_that_began_anew_is_counted_on(room: Room) -> None:
    room.told(requests=0)
    room.clock.advance(2)
    room.told(requests=50)
    room.clock.advance(2)
    room.told(requests=4)
    assert room.requests(60) == 54


def test_gateways_are_summed_and_one_that_left_stays_in_the_window(room: Room) -> None:
    for gateway in ("g0", "g1"):
        room.told(gateway, requests=0)
    room.clock.advance(2)
    room.told("g0", requests=5)
    room.told("g1", requests=6)
    room.signals.hear("g1", Report([], []))
    assert room.requests(60) == 11
    room.told("g1", requests=6)  # it was only the connection
    assert room.requests(60) == 11


def test_releases_are_told_apart(room: Room) -> None:
    room.told(requests=0)
    room.told(requests=5, version="v1")
    assert room.requests(60, "v1") == 5
    assert room.requests(60, "v2") == 0
    assert list(room.signals.versions("ep")) == ["v1"]


def test_a_release_that_was_quiet_for_long_and_counts_from_0_is_counted_on(room: Room) -> None:
    room.told(requests=0)
    room.passes(2, requests=9)
    room.passes(2, requests=0)
    assert room.requests(600) == 9
    room.passes(2, requests=12)
    assert room.requests(600) == 21


def test_a_window_forgets_what_was_before_it(room: Room) -> None:
    room.told(requests=0)
    room.passes(2, requests=10)
    room.passes(100, requests=10)
    room.passes(2, requests=11)
    assert room.requests(60) == 1
    assert room.requests(300) == 11


def test_a_window_says_what_it_covers(room: Room) -> None:
    room.told(requests=0)
    room.passes(20, requests=1)
    assert room.signals.window("ep", None, 300).seconds == pytest.approx(20)
    room.passes(100, requests=1)
    assert 60 <= room.signals.window("ep", None, 60).seconds < 60 + TICK_S + 1


def test_nothing_is_kept_of_a_release_longer_than_windows_reach(room: Room) -> None:
    room.told(requests=0)
    room.passes(2, requests=10)
    room.passes(KEPT_S + 60, requests=0)
    assert room.requests(KEPT_S) == 0
    assert list(room.signals.versions("ep")) == []


def test_arrivals_are_rates_and_begin_with_what_is_new(room: Room) -> None:
    room.told(arrivals=1000)
    assert room.signals.arrival_rate("ep", 10) == 0.0
    for second in range(1, 61):
        room.clock.advance(1.0)
        room.told(arrivals=1000 + 5 * second)
    assert room.signals.arrival_rate("ep", 10) == pytest.approx(5.0, rel=0.15)
    assert room.signals.arrival_rate("ep", 60) == pytest.approx(5.0, rel=0.15)
    room.clock.advance(1.0)
    room.told(arrivals=3)  # it began anew
    assert room.signals.arrival_rate("ep", 60) == pytest.approx(303 / 61, rel=0.15)
    assert room.signals.arrival_rate("unknown", 60) == 0.0


def test_the_longest_line_of_a_window_is_remembered_over_all_gateways(room: Room) -> None:
    room.told("g0", queued=3)
    room.told("g1", queued=4)
    room.told("g0")
    room.told("g1")
    room.passes(30)
    assert room.signals.queued_max("ep", 60) == 7
    room.passes(100)
    assert room.signals.queued_max("ep", 60) == 0
    assert room.signals.queued_max("unknown", 60) == 0


def test_nothing_is_kept_of_an_endpoint_that_was_deleted(room: Room) -> None:
    room.told(arrivals=0)
    room.passes(10, arrivals=5, queued=2)
    for _ in range(int(KEPT_S) + 60):
        room.clock.advance(1.0)
        room.signals.hear("g0", Report([EndpointDemand("other", 0, 0, 0.0, 0)], [], "e", 1))
    assert room.signals.arrival_rate("ep", 60) == 0.0
    assert room.signals.queued_max("ep", 60) == 0
    assert "1 endpoints" in repr(room.signals)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["report", "restart", "leave"])), min_size=1, max_size=400),
    st.floats(5.0, 1200.0),
)
def test_a_window_has_exactly_what_was_told_since_the_tick_it_begins_at(
    steps: list[tuple[int, str]], seconds: float
) -> None:
    room = Room()
    room.told(requests=0)
    began_s = room.clock.monotonic_s()
    seen: list[tuple[float, int]] = []
    count = 0
    for added, what in steps:
        room.clock.advance(2.0)
        if what == "restart":
            count = 0
            added = min(added, 1)  # fewer than before, or it would not be noticed  # noqa: PLW2901
            room.signals.hear("g0", Report([], []))
            room.told(requests=0)
        elif what == "leave":
            room.signals.hear("g0", Report([], []))
            room.told(requests=count)
        count += added
        room.told(requests=count)
        seen.append((room.clock.monotonic_s(), added))
    window = room.signals.window("ep", None, seconds)
    start_s = room.clock.monotonic_s() - window.seconds
    # A report and the tick before it happen at the same time: what it told came after the tick.
    exact = sum(added for at_s, added in seen if at_s >= start_s)
    if window.seconds > 1.0:
        assert window.requests == exact
    assert window.seconds <= max(seconds + 30 + 2 * TICK_S, 1.0)
    assert start_s >= began_s or window.seconds == 1.0
