"""Files and parts pass through while they come: held back by a slow controller, refused when the client dawdles."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.gateway.test_control_proxy import Client, Wire

from modelyard.clock import ManualClock
from modelyard.config import GatewayConfig
from modelyard.domain.files import FORM_BYTES_MAX
from modelyard.domain.uploads import PART_BYTES_MAX
from modelyard.errors import ApiError
from modelyard.gateway.control_proxy import ANSWER_TIMEOUT_S, ControlProxy
from modelyard.gateway.head import Request, check_headers
from modelyard.gateway.streamed_body import StreamedExchange

FILE_BYTES_MAX = GatewayConfig().file_bytes_max + FORM_BYTES_MAX
TARGET = b"/v1/uploads/artifacts/upl-1/parts/1"


class Line(Wire):
    """The connection to the controller, which remembers what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def set_write_buffer_limits(self, *, high: int) -> None:
        self.high = high


class Sender(Client):
    """The client, whose body still comes."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = False
        self.refused: list[str] = []

    def hold_body(self, *, is_held: bool) -> None:
        self.is_held = is_held

    def end_early(self) -> None:
        self.done.append("end early")

    def refuse_body(self, refusal: ApiError) -> None:
        self.refused.append(str(refusal.code))


class Desk:
    """A part of 10 bytes under way."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.refused: list[str] = []
        gateway: Any = SimpleNamespace(
            clock=self.clock, settings=GatewayConfig(), refuse=lambda _, error, __: self.refused.append(error.code)
        )
        self.proxy = ControlProxy(gateway, Path("none"), "token")
        self.client: Any = Sender()
        self.request = Request()
        self.request.length = 10
        self.line: Any = Line()
        self.exchange = StreamedExchange(self.proxy, self.client, self.request, "req_1")
        self.exchange.payload = b"head "
        self.proxy.active.add(self.exchange)

    def connect(self) -> None:
        self.exchange.connection_made(self.line)
        self.exchange.send()

    def later(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.proxy.check_time(self.clock.monotonic_s())


def test_the_client_is_held_until_the_controller_is_there_and_nothing_is_lost() -> None:
    desk = Desk()
    assert desk.client.is_held
    desk.exchange.feed(b"1234")
    desk.connect()
    assert not desk.client.is_held
    desk.exchange.feed(b"567890")
    assert desk.line.written == b"head 1234567890"


def test_a_controller_that_is_behind_holds_the_client() -> None:
    desk = Desk()
    desk.connect()
    desk.exchange.pause_writing()
    assert desk.client.is_held
    desk.exchange.resume_writing()
    assert not desk.client.is_held


def test_a_client_that_sends_too_slowly_is_refused_and_held_time_is_not_its_own() -> None:
    desk = Desk()
    desk.connect()
    desk.exchange.pause_writing()
    desk.later(ANSWER_TIMEOUT_S - 1)
    assert not desk.client.refused
    desk.exchange.resume_writing()
    desk.later(0)
    assert not desk.client.refused
    desk.exchange.feed(b"1")
    desk.later(GatewayConfig().header_read_timeout_s + 1)
    assert desk.client.refused == ["request_timeout"]
    assert desk.line.is_closed
    assert not desk.proxy.active


def test_a_controller_that_takes_nothing_for_long_is_given_up() -> None:
    desk = Desk()
    desk.connect()
    desk.exchange.feed(b"1")
    desk.exchange.pause_writing()
    desk.later(ANSWER_TIMEOUT_S)
    assert desk.client.refused == ["control_unavailable"]
    assert not desk.client.is_held


def test_a_controller_that_dies_in_the_middle_ends_the_connection_with_an_answer() -> None:
    desk = Desk()
    desk.connect()
    desk.exchange.feed(b"1")
    desk.exchange.connection_lost(None)
    assert desk.client.refused == ["control_unavailable"]
    desk.exchange.feed(b"2")
    assert desk.line.written == b"head 1"


def test_a_controller_that_dies_behind_the_body_is_told_as_usual() -> None:
    desk = Desk()
    desk.connect()
    desk.exchange.feed(b"1234567890")
    desk.exchange.connection_lost(None)
    assert desk.refused == ["control_unavailable"]


@pytest.mark.parametrize(("body", "end"), [(b"1234567890", "end"), (b"1", "end early")])
def test_what_follows_an_answer_that_came_early_is_no_request(body: bytes, end: str) -> None:
    desk = Desk()
    desk.connect()
    desk.exchange.feed(body)
    desk.exchange.data_received(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nno")
    assert desk.client.done == [end]
    assert (b"connection: close" in desk.client.sent) is (end == "end early")


@pytest.mark.parametrize(
    ("method", "target", "most"),
    [
        (b"PUT", TARGET, PART_BYTES_MAX),
        (b"POST", TARGET, None),
        (b"PUT", b"/v1/uploads/artifacts/upl-1/complete", None),
        (b"PUT", b"/v1/uploads/artifacts/../../x/parts/1", None),
        (b"PUT", TARGET + b"/more", None),
        (b"PUT", TARGET + b"?a=/parts/", None),
        (b"PUT", b"/v1/chat/completions?/v1/uploads/artifacts/u/parts/1", None),
        (b"POST", b"/v1/files", FILE_BYTES_MAX),
        (b"PUT", b"/v1/files", None),
        (b"POST", b"/v1/files/", None),
        (b"POST", b"/v1/files?/v1/files", None),
        (b"POST", b"/v1/files/file-1/content", None),
    ],
)
def test_only_files_and_parts_may_be_large(method: bytes, target: bytes, most: int | None) -> None:
    request = Request()
    request.method, request.query = method, target
    request.headers = [(b"host", b"x"), (b"content-length", b"%d" % (most or GatewayConfig().body_bytes_max + 1))]
    if most is not None:
        check_headers(request, GatewayConfig(), 0)
        request.headers[1] = (b"content-length", b"%d" % (most + 1))
    with pytest.raises(ApiError) as refused:
        check_headers(request, GatewayConfig(), 0)
    assert refused.value.status == 413
