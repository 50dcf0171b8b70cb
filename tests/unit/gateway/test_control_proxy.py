"""Management requests on their way to the controller: framed anew, bounded in time, nothing of the client's trusted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelyard.clock import ManualClock
from modelyard.config import GatewayConfig
from modelyard.gateway.control_proxy import ControlExchange, ControlProxy
from modelyard.gateway.server import Request


class Wire:
    """The connection to the controller."""

    def __init__(self) -> None:
        self.is_paused = False
        self.is_closed = False

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Client:
    """The client's connection."""

    def __init__(self) -> None:
        self.is_paused = False
        self.is_closing = False
        self.sent = b""
        self.done: list[str] = []

    def send_raw(self, data: bytes) -> None:
        self.sent += data

    def end_raw(self, *, is_last: bool) -> None:
        self.done.append("end")

    def abort(self) -> None:
        self.done.append("abort")


class Desk:
    """One management request that has reached the controller."""

    def __init__(self, *, is_paused: bool = False) -> None:
        self.clock = ManualClock()
        gateway: Any = SimpleNamespace(clock=self.clock, settings=GatewayConfig(), refuse=lambda *_: None)
        self.proxy = ControlProxy(gateway, Path("none"), "token")
        self.client: Any = Client()
        self.client.is_paused = is_paused
        self.wire: Any = Wire()
        self.exchange = ControlExchange(self.proxy, self.client, Request(), "req_1")
        self.proxy.active.add(self.exchange)
        self.exchange.connection_made(self.wire)
        self.exchange.send(b"GET")


def test_a_stream_that_is_followed_does_not_hold_up_the_end() -> None:
    desk = Desk()
    assert desk.proxy.unanswered == 1
    desk.exchange.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    assert desk.proxy.unanswered == 0
    assert desk.proxy.active


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_client_that_does_not_read_a_stream_is_dropped(is_paused: bool) -> None:
    desk = Desk(is_paused=is_paused)
    desk.exchange.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    if not is_paused:
        desk.exchange.client_paused()
    assert desk.wire.is_paused
    desk.clock.advance(GatewayConfig().write_stall_timeout_s + 1)
    desk.proxy.check_time(desk.clock.monotonic_s())
    assert desk.client.done == ["abort"]
    assert desk.wire.is_closed
    assert not desk.proxy.active


def test_a_client_that_reads_on_may_follow_for_ever() -> None:
    desk = Desk()
    desk.exchange.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    for _ in range(10):
        desk.exchange.client_paused()
        desk.exchange.client_resumed()
        desk.clock.advance(1000)
        desk.proxy.check_time(desk.clock.monotonic_s())
    assert not desk.client.done
    assert not desk.wire.is_paused
