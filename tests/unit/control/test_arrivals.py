"""Requests are counted once, whatever gateways and controllers come and go."""

from modelyard.control.arrivals import Arrivals
from modelyard.domain.demand import EndpointDemand, Report


def said(**counts: int) -> dict[str, Report]:
    return {name: Report([EndpointDemand("ep-1", 0, 0, 0.0, count)], []) for name, count in counts.items()}


def test_only_what_is_new_is_counted() -> None:
    arrivals = Arrivals(0.0)
    assert arrivals.take(said(one=1000), 1.0) == {}, "it was counted before this controller was there"
    assert arrivals.take(said(one=1007, two=5), 3.0) == {"ep-1": 7}
    assert arrivals.take(said(one=1007, two=9), 5.0) == {"ep-1": 4}


def test_lines_of_batches_are_nothing_to_be_awake_for() -> None:
    arrivals = Arrivals(0.0)
    for at_s, (count, lines) in enumerate([(1000, 900), (1500, 1400), (1507, 1405)], 1):
        demand = EndpointDemand("ep-1", 0, 0, 0.0, count, batch_arrivals=lines)
        new = arrivals.take({"one": Report([demand], [])}, float(at_s))
        assert new == ({"ep-1": 2} if at_s == 3 else {})


def test_a_gateway_that_began_anew_counts_whole_and_one_that_was_away_does_not() -> None:
    arrivals = Arrivals(0.0)
    arrivals.take(said(one=1000), 1.0)
    assert arrivals.take(said(one=3), 3.0) == {"ep-1": 3}
    assert arrivals.take({}, 5.0) == {}
    assert arrivals.take(said(one=5), 7.0) == {"ep-1": 2}
    assert arrivals.take(said(one=5, new=6), 60.0) == {"ep-1": 6}


def test_the_rate_is_of_the_last_minute_and_unknown_before_there_was_one() -> None:
    arrivals = Arrivals(0.0)
    arrivals.take(said(one=0), 1.0)
    arrivals.take(said(one=90), 30.0)
    assert arrivals.rate("ep-1", 30.0) is None
    arrivals.take(said(one=120), 80.0)
    assert arrivals.rate("ep-1", 85.0) == 2.0
    assert arrivals.rate("ep-1", 100.0) == 0.5
    arrivals.take(said(one=120), 250.0)
    assert arrivals.rate("ep-1", 250.0) == 0.0
    assert arrivals.rate("ep-other", 250.0) == 0.0
