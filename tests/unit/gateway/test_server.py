"""The client's connection: one answer a request, in order, whatever is sent; nobody holds it for ever."""

from types import SimpleNamespace
from typing import Any

import pytest

from modelyard import errors
from modelyard.clock import ManualClock
from modelyard.config import GatewayConfig
from modelyard.gateway.server import ClientConnection, Request
from modelyard.ids import RequestIds

HEAD = b"POST /x HTTP/1.1\r\nHost: h\r\n"
KEY = b"Authorization: Bearer good\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class Wire:
    """A client's transport that only notes what is done to it; ``unsent`` bytes are never read."""

    def __init__(self, *, is_tls: bool = False) -> None:
        self.sent = b""
        self.unsent = 0
        self.done: list[str] = []
        self.is_tls = is_tls

    def write(self, data: bytes) -> None:
        self.sent += data

    def can_write_eof(self) -> bool:
        return not self.is_tls

    def write_eof(self) -> None:
        if self.is_tls:
            raise NotImplementedError
        self.done.append("write_eof")

    def close(self) -> None:
        self.done.append("close")

    def abort(self) -> None:
        self.done.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.done or "abort" in self.done

    def pause_reading(self) -> None:
        self.done.append("pause")

    def resume_reading(self) -> None:
        self.done.append("resume")

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def set_write_buffer_limits(self, high: int) -> None:
        pass


class Waiting:
    """What answers later."""

    def __init__(self) -> None:
        self.has_left = False

    def client_left(self) -> None:
        self.has_left = True

    def client_paused(self) -> None:
        pass

    def client_resumed(self) -> None:
        pass


class Edge:
    """A gateway that takes every request; ``/x`` is answered at once, ``/later`` is not."""

    def __init__(self, *, is_tls: bool = False, connections_max: int = 2, **settings: Any) -> None:
        self.taken: list[Request] = []
        self.clock = ManualClock()
        self.refused: list[str] = []
        self.gateway: Any = SimpleNamespace(
            settings=GatewayConfig(**settings), clock=self.clock, connections=set(), ids=RequestIds(), begin=self.begin,
            note_refusal=lambda refusal, _: self.refused.append(refusal.code), authenticate=self.authenticate,
        )  # fmt: skip
        self.client = ClientConnection(self.gateway, connections_max=connections_max)
        self.wire: Any = Wire(is_tls=is_tls)
        self.client.connection_made(self.wire)

    def authenticate(self, request: Request, _: object) -> None:
        if (b"authorization", b"Bearer good") not in request.credentials:
            raise errors.invalid_api_key()

    def pass_time(self, seconds: float) -> None:
        """Let time pass as a running worker does: it looks at every connection once a second."""
        for _ in range(int(seconds)):
            self.clock.advance(1)
            if self.client.transport is not None and not self.wire.is_closing():
                self.client.check_time(self.clock.monotonic_s())

    def begin(self, client: ClientConnection, request: Request) -> None:
        self.taken.append(request)
        if request.path == "/later":
            client.current = Waiting()
        else:
            client.respond(200, b"", b"ok")

    def answers(self) -> list[int]:
        return [int(part[:3]) for part in self.wire.sent.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("body", [b"\r\n", b"Content-Length: 2\r\n\r\nhi"])
def test_a_request_to_upgrade_is_answered_once_and_in_the_old_protocol(body: bytes) -> None:
    edge = Edge()
    edge.client.data_received(HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n" + body)
    assert edge.answers() == [200]
    assert edge.taken[0].body == (b"hi" if b"hi" in body else b"")
    assert edge.taken[0].header(b"upgrade") is None
    assert b"connection: close" in edge.wire.sent
    assert edge.wire.done == ["close"]


def test_a_request_to_upgrade_may_come_in_any_pieces() -> None:
    head = HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    whole = head + b"2\r\nhi\r\n0\r\n\r\n"
    for cut in range(1, len(whole)):
        edge = Edge()
        edge.client.data_received(whole[:cut])
        edge.client.data_received(whole[cut:])
        assert [(request.path, request.body) for request in edge.taken] == [("/x", b"hi")], cut
        assert edge.taken[0].header(b"x-a") == b"1"
        assert edge.answers() == [200]


def test_bytes_behind_the_last_request_do_not_disturb_its_answer() -> None:
    edge = Edge()
    edge.client.data_received(HEAD.replace(b"/x", b"/later") + b"Connection: close\r\n\r\n" + HEAD + b"\r\n")
    edge.client.data_received(b"garbage")
    edge.client.respond(200, b"", b"ok")
    assert edge.answers() == [200]


def test_bytes_behind_a_request_to_upgrade_neither_count_nor_hurt() -> None:
    edge = Edge()
    upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    edge.client.data_received(HEAD.replace(b"/x", b"/later") + upgrade + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    edge.client.data_received(HEAD + b"\r\n")
    assert [request.path for request in edge.taken] == ["/later"]
    edge.client.respond(200, b"", b"ok")
    assert edge.answers() == [200]
    assert edge.wire.done == ["close"]


def test_connect_is_refused_once() -> None:
    edge = Edge()
    edge.client.data_received(b"CONNECT /x HTTP/1.1\r\nHost: h\r\n\r\n")
    assert edge.answers() == [400]
    assert not edge.taken


def test_a_body_is_asked_for_once_its_head_is_good() -> None:
    edge = Edge()
    edge.client.data_received(HEAD + KEY + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert edge.answers() == [100]
    edge.client.data_received(b"hi")
    assert edge.answers() == [100, 200]


@pytest.mark.parametrize(
    "head",
    [
        b"POST /x HTTP/1.0\r\nHost: h\r\n" + KEY + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Host: i\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n",
        HEAD + KEY + b"Expect: 100-continue\r\nContent-Length: 999999999\r\n\r\n",
        HEAD + KEY + b"Expect: 100-continue\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_a_body_is_not_asked_for_in_vain(head: bytes) -> None:
    edge = Edge()
    edge.client.data_received(head)
    assert 100 not in edge.answers()


def test_a_pipelined_expectation_does_not_break_into_the_answer_before() -> None:
    edge = Edge()
    edge.client.data_received(HEAD.replace(b"/x", b"/later") + b"\r\n")
    edge.client.start_stream(b"")
    before = edge.wire.sent
    edge.client.data_received(HEAD + KEY + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert edge.wire.sent == before
    edge.client.end_stream(b"")
    assert edge.answers() == [200, 100], "its turn has come"
    edge.client.data_received(b"hi")
    assert edge.answers() == [200, 100, 200]


def test_the_time_to_send_a_request_begins_with_the_request() -> None:
    edge = Edge()
    edge.clock.advance(60)
    edge.client.data_received(HEAD + b"Content-Length: 4\r\n\r\nhi")
    edge.pass_time(9)
    assert not edge.wire.done
    edge.pass_time(2)
    assert edge.answers() == [408]


def test_trailers_are_no_headers() -> None:
    edge = Edge()
    edge.client.data_received(CHUNKED + b"1\r\na\r\n0\r\nCookie: evil\r\n\r\n")
    assert edge.answers() == [200]
    assert edge.taken[0].header(b"cookie") is None


@pytest.mark.parametrize("endless", [b"0\r\nX: ", b"1;"])
def test_endless_framing_is_refused(endless: bytes) -> None:
    edge = Edge()
    edge.client.data_received(CHUNKED + b"1\r\na\r\n" + endless)
    for _ in range(100):
        edge.client.data_received(b"a" * 1000)
    assert edge.answers() == [431]


def test_a_body_in_many_pieces_is_whole() -> None:
    edge = Edge()
    for part in (CHUNKED, *(b"2\r\n%02d\r\n" % number for number in range(100)), b"0\r\n\r\n"):
        edge.client.data_received(part)
    assert edge.taken[0].body == b"".join(b"%02d" % number for number in range(100))


def test_a_client_that_never_reads_its_answer_is_dropped() -> None:
    edge = Edge()
    edge.client.data_received(HEAD + b"\r\n")
    edge.wire.unsent = 1_000_000
    for _ in range(10):  # it reads a little now and then
        edge.clock.advance(50)
        edge.wire.unsent -= 1
        edge.client.check_time(edge.clock.monotonic_s())
    assert not edge.wire.done
    edge.clock.advance(61)
    edge.client.check_time(edge.clock.monotonic_s())
    assert edge.wire.done == ["abort"]


def test_a_refused_upload_is_read_off_so_that_its_refusal_arrives() -> None:
    edge = Edge()
    edge.client.data_received(HEAD + b"Content-Length: 999999999\r\n\r\nabc")
    assert edge.answers() == [413]
    assert edge.wire.done == ["write_eof"]
    for _ in range(10):
        edge.client.data_received(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    assert edge.answers() == [413]
    edge.clock.advance(11)
    edge.client.check_time(edge.clock.monotonic_s())
    assert edge.wire.done == ["write_eof", "close"]


def test_a_body_of_a_byte_now_and_then_is_408() -> None:
    edge = Edge()
    edge.client.data_received(HEAD + b"Content-Length: 1000\r\n\r\n")
    for _ in range(4):
        edge.client.data_received(b"x")
        edge.pass_time(5)
    assert edge.answers() == [408]
    assert edge.refused == ["request_timeout"]
    edge.pass_time(11)
    assert edge.wire.done == ["write_eof", "close"]


def test_a_head_of_a_byte_now_and_then_is_408() -> None:
    edge = Edge()
    for byte in HEAD:
        edge.client.data_received(bytes([byte]))
        edge.pass_time(1)
    assert edge.answers() == [408]
    assert not edge.taken


def test_a_big_upload_over_a_slow_line_is_taken_whole() -> None:
    edge = Edge()
    pieces = 3000
    edge.client.data_received(HEAD + KEY + b"Content-Length: %d\r\n\r\n" % (pieces * 10_000))
    for _ in range(pieces):
        edge.pass_time(5)
        edge.client.data_received(b"x" * 10_000)
    assert edge.answers() == [200]
    assert len(edge.taken[0].body) == pieces * 10_000


def test_a_connection_that_says_nothing_is_closed_without_a_word() -> None:
    edge = Edge()
    edge.pass_time(80)
    assert edge.wire.done == ["close"]
    assert edge.wire.sent == b""


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_big_body_is_kept_only_for_a_good_key(framing: str) -> None:
    piece = b"x" * 100_000
    for key, status in ((b"", 401), (b"Authorization: Bearer bad\r\n", 401), (KEY, 200)):
        edge = Edge()
        if framing == "length":
            edge.client.data_received(HEAD + key + b"Content-Length: 300000\r\n\r\n")
            pieces = [piece, piece, piece]
        else:
            edge.client.data_received(HEAD + key + b"Transfer-Encoding: chunked\r\n\r\n")
            pieces = [b"186a0\r\n" + piece + b"\r\n"] * 3 + [b"0\r\n\r\n"]
        for part in pieces:
            edge.client.data_received(part)
        assert edge.answers() == [status]
        assert bool(edge.taken) is (status == 200)


def test_a_big_body_may_go_to_a_public_page_without_a_key() -> None:
    edge = Edge()
    edge.client.data_received(b"POST /console/x HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000)
    assert edge.answers() == [200]


def test_under_tls_a_refusal_is_closed_by_the_sweep() -> None:
    edge = Edge(is_tls=True)
    edge.client.data_received(b"nonsense\r\n\r\n")
    assert edge.answers() == [400]
    assert not edge.wire.done
    edge.pass_time(11)
    assert edge.wire.done == ["close"]


def test_one_connection_too_many_is_told_so_and_closed() -> None:
    edge = Edge(connections_max=1)
    second = ClientConnection(edge.gateway, connections_max=1)
    wire: Any = Wire()
    second.connection_made(wire)
    assert wire.sent.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in wire.sent
    assert wire.done == ["close"]
    second.data_received(HEAD + b"\r\n")
    second.connection_lost(None)
    assert not edge.taken
    edge.client.data_received(HEAD + b"\r\n")
    assert edge.answers() == [200], "the one before is served"
    edge.client.connection_lost(None)
    third = ClientConnection(edge.gateway, connections_max=1)
    third.connection_made(Wire())  # type: ignore[arg-type]
    assert third in edge.gateway.connections


def test_a_retiring_connection_serves_one_more_request_and_says_that_it_was_the_last() -> None:
    edge = Edge()
    edge.client.retire()
    assert not edge.wire.done, "its client may be about to send"
    edge.client.data_received(HEAD + b"\r\n")
    assert edge.answers() == [200]
    assert b"connection: close\r\n" in edge.wire.sent
    assert edge.wire.done == ["close"]


def test_a_retiring_connection_on_which_nothing_comes_is_closed_soon() -> None:
    edge = Edge()
    edge.client.retire()
    edge.pass_time(3)
    assert edge.wire.done == ["close"]


def test_a_stream_that_begins_on_a_retiring_connection_announces_the_close() -> None:
    edge = Edge()
    edge.client.data_received(HEAD.replace(b"/x", b"/later") + b"\r\n")
    edge.client.retire()
    edge.pass_time(30)
    assert not edge.wire.done, "what is being answered goes on"
    edge.client.start_stream(b"")
    assert b"connection: close\r\n" in edge.wire.sent
    edge.client.end_stream(b"")
    assert edge.wire.done == ["close"]


def test_an_answer_that_began_before_its_connection_retired_is_not_the_last() -> None:
    """Its head did not say so, and its client may be about to ask again."""
    edge = Edge()
    edge.client.data_received(HEAD.replace(b"/x", b"/later") + b"\r\n")
    edge.client.start_stream(b"")
    edge.client.retire()
    edge.client.end_stream(b"")
    assert not edge.wire.done
    edge.client.data_received(HEAD + b"\r\n")
    assert edge.wire.sent.count(b"connection: close\r\n") == 1
    assert edge.wire.done == ["close"]


def test_where_there_is_no_time_an_answer_that_began_before_is_the_last() -> None:
    edge = Edge()
    edge.client.data_received(HEAD.replace(b"/x", b"/later") + b"\r\n")
    edge.client.start_stream(b"")
    edge.client.close_when_idle()
    edge.client.end_stream(b"")
    assert edge.wire.done == ["close"]


@pytest.mark.parametrize("path", [b"/healthz", b"/v1/models", b"/v1/chat/completions"])
def test_options_is_answered_without_a_key(path: bytes) -> None:
    edge = Edge()
    edge.client.data_received(b"OPTIONS " + path + b" HTTP/1.1\r\nHost: h\r\n\r\n")
    assert edge.answers() == [204]
    head = edge.wire.sent.partition(b"\r\n\r\n")[0].lower()
    assert b"\r\nallow: " in head
    assert b"x-request-id: " in head
    assert b"content-length" not in head
    assert b"access-control" not in head
    assert not edge.taken
    edge.client.data_received(HEAD + b"\r\n")
    assert edge.answers() == [204, 200], "the connection goes on"


def test_options_of_a_management_path_is_not_ours() -> None:
    edge = Edge()
    edge.client.data_received(b"OPTIONS /v1/keys HTTP/1.1\r\nHost: h\r\n\r\n")
    assert [request.method for request in edge.taken] == [b"OPTIONS"]
