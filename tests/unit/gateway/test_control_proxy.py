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
        self.refused: list[str] = []
        gateway: Any = SimpleNamespace(
            clock=self.clock, settings=GatewayConfig(), refuse=lambda _, error, __: self.refused.append(error.code)
        )
        self.proxy = ControlProxy(gateway, Path("none"), "token")
        self.client: Any = Client()
        self.client.is_paused = is_paused
        self.wire: Any = Wire()
        self.request = Request()
        self.exchange = ControlExchange(self.proxy, self.client, self.request, "req_1")
        self.proxy.active.add(self.exchange)
        self.exchange.connection_made(self.wire)
        self.exchange.send()


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


def test_a_connection_that_retires_inside_of_an_answer_stays_for_the_next() -> None:
    """F29: the head of this answer did not say that it was the last, so the next request may be on its way."""
    desk = Desk()
    desk.exchange.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
    desk.client.is_closing = True
    desk.exchange.data_received(b"hi")
    assert desk.client.done == ["end"]


def test_a_connection_that_is_to_end_says_so_and_ends() -> None:
    desk = Desk()
    desk.client.is_closing = True
    desk.exchange.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
    assert b"\r\nconnection: close\r\n" in desk.client.sent
    assert desk.client.done == ["end and close"]


def test_a_page_may_read_a_proxied_answer_too() -> None:
    desk = Desk()
    desk.request.cors = b"access-control-allow-origin: *\r\nvary: origin\r\n"
    desk.exchange.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
    head = desk.client.sent.partition(b"\r\n\r\n")[0]
    assert b"\r\naccess-control-allow-origin: *\r\nvary: origin" in head


class Controller:
    """A controller that hangs up on its first ``hangs_up`` callers."""

    def __init__(self, hangs_up: int) -> None:
        self.hangs_up = hangs_up
        self.seen: list[bytes] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen.append(await reader.readuntil(b"\r\n\r\n"))
        if len(self.seen) > self.hangs_up:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
            await writer.drain()
        writer.close()


def asking(desk: Desk, method: bytes) -> ControlExchange:
    request = Request()
    request.method = method
    exchange = ControlExchange(desk.proxy, desk.client, request, "req_2")
    exchange.payload = method + b" / HTTP/1.1\r\n\r\n"
    desk.proxy.active.add(exchange)
    desk.proxy.open(exchange)
    return exchange


async def test_a_request_waits_for_a_controller_that_restarts(tmp_path: Path) -> None:
    desk = Desk()
    desk.proxy._socket = tmp_path / "control.sock"
    asking(desk, b"POST")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not desk.client.done
    controller = Controller(hangs_up=0)
    async with await asyncio.start_unix_server(controller.answer, desk.proxy._socket):
        await eventually_async(lambda: desk.client.done == ["end"], 20, "answered")
    assert controller.seen == [b"POST / HTTP/1.1\r\n\r\n"]


@pytest.mark.parametrize(
    ("method", "hangs_up", "tries", "done"), [(b"GET", 2, 3, ["end"]), (b"GET", 9, 3, []), (b"POST", 1, 1, [])]
)
async def test_only_what_may_be_repeated_is_repeated(
    tmp_path: Path, method: bytes, hangs_up: int, tries: int, done: list[str]
) -> None:
    desk = Desk()
    desk.proxy._socket = tmp_path / "control.sock"
    controller = Controller(hangs_up)
    async with await asyncio.start_unix_server(controller.answer, desk.proxy._socket):
        exchange = asking(desk, method)
        await eventually_async(lambda: exchange.is_over, 20, "over")
    assert len(controller.seen) == tries
    assert desk.client.done == done
    assert desk.refused == ([] if done else ["control_unavailable"])
