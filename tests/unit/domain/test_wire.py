"""Frames between a gateway and a controller of releases that differ, as in a rolling restart."""

from typing import Any

import msgspec
import pytest

from modelyard.domain.demand import EndpointDemand, ReplicaReport, Report
from modelyard.domain.routing_table import EngineSpeed, ReplicaSnapshot, Tidings

FIRST = {EndpointDemand: 5, ReplicaReport: 4}
"""How many fields the first release had of what came longer since."""


@pytest.mark.parametrize("kind", FIRST)
def test_what_came_later_may_be_missing(kind: type[Any]) -> None:
    assert len(kind.__struct_fields__) - FIRST[kind] == len(kind.__struct_defaults__)


def test_a_controller_reads_gateways_of_other_releases() -> None:
    old = msgspec.msgpack.encode({"type": "report", "endpoints": [["ep", 1, 2, 0.0, 9, 0.5]], "replicas": []})
    found = msgspec.msgpack.decode(old, type=Report)
    assert found.endpoints == [EndpointDemand("ep", 1, 2, 0.0, 9, 0.5)]
    new = [["ep", 1, 2, 0.0, 9, 0.5, 1, 1, 7, "what a later release adds"]]
    later = msgspec.msgpack.encode({"type": "report", "endpoints": new, "replicas": [], "mood": "fine"})
    assert msgspec.msgpack.decode(later, type=Report).endpoints == [EndpointDemand("ep", 1, 2, 0.0, 9, 0.5, 1, 1, 7)]


def test_a_gateway_reads_controllers_of_other_releases() -> None:
    old = msgspec.msgpack.encode({"type": "tidings", "snapshots": [["r", 1, 2]]})
    assert msgspec.msgpack.decode(old, type=Tidings) == Tidings((ReplicaSnapshot("r", 1, 2),))
    later = {"type": "tidings", "snapshots": [], "speeds": [["v", 0.1, 0.0, 0.0, 0.0, "more"]], "mood": "fine"}
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(later), type=Tidings)
    assert found.speeds == (EngineSpeed("v", 0.1, 0.0, 0.0, 0.0),)
