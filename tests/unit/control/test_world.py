"""What all gateways want of an endpoint is one demand."""

from modelyard.control.world import Demand, demands_of
from modelyard.domain.demand import EndpointDemand, Report


def test_requests_add_up_the_shortest_idle_time_and_the_longest_wait_count() -> None:
    reports = [
        Report([EndpointDemand("ep-1", 3, 5, 9.0, 1, wait_s=2.0), EndpointDemand("ep-2", 0, 0, 4.0, 1)], []),
        Report([EndpointDemand("ep-1", 1, 1, 7.0, 1, wait_s=6.5)], []),
        Report([EndpointDemand("ep-1", 0, 0, 8.0, 1)], []),
    ]
    assert demands_of(reports) == {"ep-1": Demand(4, 6, 7.0, 6.5), "ep-2": Demand(0, 0, 4.0, 0.0)}


def test_lines_of_batches_add_up_beside_them() -> None:
    reports = [
        Report([EndpointDemand("ep-1", 4, 6, 0.0, 1, batch_queued=2, batch_running=batch)], []) for batch in (1, 3)
    ]
    demand = demands_of(reports)["ep-1"]
    assert (demand.queued, demand.in_flight, demand.batch_queued, demand.batch_running) == (8, 12, 4, 4)
