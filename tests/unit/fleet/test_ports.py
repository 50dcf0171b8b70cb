"""Ports for engines: two platforms of one machine do not give the same one while its engine is not there yet."""

import sys

import pytest

from modelyard.fleet import FleetError, ports


@pytest.mark.skipif(sys.platform != "linux", reason="claims are names of Linux")
def test_a_port_that_was_given_is_not_given_again_before_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_port(())
    monkeypatch.setattr(ports, "_PORT_FIRST", first)
    monkeypatch.setattr(ports, "_outgoing_first", lambda: first + 1)
    assert ports.is_free(first), "nobody listens there"
    with pytest.raises(FleetError, match="No free port"):
        ports.free_port(())


@pytest.mark.skipif(sys.platform != "linux", reason="claims are names of Linux")
def test_only_the_last_ports_are_kept_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_port(())
    for _ in range(ports._CLAIMS_MAX):
        ports.free_port((first,))
    assert len(ports._claims) == ports._CLAIMS_MAX
    assert ports._claim(first), "an older one may be given again"
