"""Management requests on their way to the controller: framed anew, bounded in time, nothing of the client's trusted."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import eventually_async

from modelyard.clock import ManualClock
from modelyard.config import GatewayConfig
from modelyard.gateway.control_proxy import ControlExchange, ControlProxy
from modelyard.gateway.head import Request


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
        self.done.append("end and close" if is_last else "end")

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
        self.request = Request()
        self.exchange = ControlExchange(self.proxy, self.client, self.request, "req_1")
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


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/plain\r\n\r\n"


def test_a_chunked_answer_is_over_with_its_last_chunk() -> None:
    desk = Desk()
    desk.exchange.data_received(CHUNKED + b"2\r\nhi\r\n0\r\n\r\n")
    assert desk.client.done == ["end"]
    assert desk.client.sent.endswith(b"\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
    assert desk.wire.is_closed


def test_a_controller_that_dies_inside_of_a_chunk_does_not_end_the_answer() -> None:
    desk = Desk()
    desk.exchange.data_received(CHUNKED + b"ff\r\nthis looks like an end: 0\r\n\r\n")
    desk.exchange.connection_lost(None)
    assert desk.client.done == ["abort"]


def test_an_answer_without_any_framing_ends_with_the_connection() -> None:
    desk = Desk()
    desk.exchange.data_received(b"HTTP/1.1 200 OK\r\n\r\nhello")
    desk.exchange.connection_lost(None)
    assert desk.client.done == ["end and close"]


def test_an_http10_client_gets_no_chunks() -> None:
    desk = Desk()
    desk.request.is_http10 = True
    for piece in (CHUNKED, b"2", b"\r\nhi\r", b"\n3;a=b\r\n yo\r\n", b"0\r\nx: y\r\n", b"\r\n"):
        desk.exchange.data_received(piece)
    head, _, body = desk.client.sent.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"hi yo"
    assert desk.client.done == ["end and close"]


def test_broken_framing_of_the_controller_is_not_passed_on() -> None:
    desk = Desk()
    desk.exchange.data_received(CHUNKED + b"zz\r\n")
    assert desk.client.done == ["abort"]


def test_a_page_may_read_a_proxied_answer_too() -> None:
    desk = Desk()
    desk.request.cors = b"access-control-allow-origin: *\r\nvary: origin\r\n"
    desk.exchange.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
    head = desk.client.sent.partition(b"\r\n\r\n")[0]
    assert b"\r\naccess-control-allow-origin: *\r\nvary: origin" in head


async def test_a_request_waits_for_a_controller_that_restarts(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    desk = Desk()
    desk.proxy._socket = tmp_path / "control.sock"
    exchange = ControlExchange(desk.proxy, desk.client, Request(), "req_2")
    waiting = asyncio.create_task(desk.proxy._open(exchange, b"GET / HTTP/1.1\r\n\r\n"))
    await asyncio.sleep(0)
    assert not waiting.done()
    async with await asyncio.start_unix_server(answer, desk.proxy._socket):
        await asyncio.wait_for(waiting, 5)
        await eventually_async(lambda: desk.client.done == ["end"], 5, "answered")
    assert seen == [b"GET / HTTP/1.1\r\n\r\n"]
