"""The connection to an engine: what it says, however it is cut, becomes one answer; what is doubtful is not reused."""

from collections.abc import Callable

import pytest

from modelyard.clock import ManualClock
from modelyard.gateway import upstream
from modelyard.gateway.responses import MalformedResponseError, ResponseHead, join_chunks
from modelyard.gateway.upstream import IDLE_S_MAX, UpstreamConnection, UpstreamPool

ADDRESS = ("127.0.0.1", 1)
OK = b"HTTP/1.1 200 OK\r\n"


class Wire:
    """A transport that only notes what is done to it."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_aborted = False
        self.is_paused = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Caller:
    """A receiver that notes what it is told."""

    def __init__(self, *, stream: bool = False) -> None:
        self.stream_wanted = stream
        self.told: list[tuple[object, ...]] = []

    def connected(self, connection: UpstreamConnection) -> None:
        self.told.append(("connected",))

    def unreachable(self, address: tuple[str, int], reason: str) -> None:
        self.told.append(("unreachable", reason))

    def wants_stream(self, head: ResponseHead) -> bool:
        return self.stream_wanted

    def answer(self, head: ResponseHead, body: bytes) -> None:
        self.told.append(("answer", head.status, body))

    def stream(self, data: bytes) -> None:
        self.told.append(("stream", data))

    def lost(self, *, is_clean: bool, has_answered: bool) -> None:
        self.told.append(("lost", is_clean, has_answered))

    def malformed(self, reason: str) -> None:
        self.told.append(("malformed",))


def connect(pool: UpstreamPool | None = None) -> tuple[UpstreamConnection, UpstreamPool, Wire]:
    pool = pool or UpstreamPool(clock=ManualClock())
    connection = UpstreamConnection(pool, ADDRESS)
    wire = Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    return connection, pool, wire


def told(*reads: bytes) -> tuple[list[tuple[object, ...]], bool]:
    """Return what the caller is told of an answer in these reads, and whether the connection was kept."""
    connection, pool, wire = connect()
    caller = Caller()
    connection.send(caller, b"GET")
    for read in reads:
        if not wire.is_aborted:
            connection.data_received(read)
    return caller.told, pool.take(ADDRESS) is connection


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"content-length: 2\r\n\r\nhi",
        OK + b"transfer-encoding: chunked\r\n\r\n1\r\nh\r\n1;x=1\r\ni\r\n0\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nx-sum: 1\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
        + OK
        + b"content-length: 2\r\n\r\nhi",
    ],
)
def test_every_cut_gives_one_answer_and_keeps_the_connection(answer: bytes) -> None:
    for cut in range(1, len(answer)):
        assert told(answer[:cut], answer[cut:]) == ([("answer", 200, b"hi")], True), cut
    assert told(*(bytes([byte]) for byte in answer)) == ([("answer", 200, b"hi")], True)


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"content-length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n",
        OK + b"content-length: 2\r\nconnection: close\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi",
    ],
)
def test_a_connection_with_bytes_too_many_or_that_will_close_is_not_kept(answer: bytes) -> None:
    assert told(answer) == ([("answer", 200, b"hi")], False)


@pytest.mark.parametrize("body", [b"-6\r\n", b"zz\r\n", b"1\r\nabcdef\r\n"])
def test_broken_framing_is_told_once_and_the_connection_dropped(body: bytes) -> None:
    assert told(OK + b"transfer-encoding: chunked\r\n\r\n" + body) == ([("malformed",)], False)


def test_a_whole_answer_in_a_thousand_reads_is_not_joined_a_thousand_times(monkeypatch: pytest.MonkeyPatch) -> None:
    joins: list[int] = []

    def counted(body: bytearray) -> tuple[bytes, int] | None:
        joins.append(len(body))
        return join_chunks(body)

    monkeypatch.setattr(upstream, "join_chunks", counted)
    chunk = b"64\r\n" + b"x" * 100 + b"\r\n"
    answers, is_kept = told(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[chunk] * 1000, b"0\r\n\r\n")
    assert [answer[-1] for answer in answers] == [b"x" * 100_000]
    assert is_kept
    assert len(joins) < 100, "work with the square of the length"


def test_the_rest_of_a_served_stream_is_read_before_the_connection_serves_again() -> None:
    rest = [b"0", b"\r\n", b"\r\n"]
    connection, pool, _ = streaming()
    seen = b""

    def follow(data: bytes) -> bool:
        nonlocal seen
        seen += data
        return seen == b"0\r\n\r\n"

    connection.linger(follow)
    for part in rest:
        assert pool.take(ADDRESS) is None
        connection.data_received(part)
    assert pool.take(ADDRESS) is connection


def broken(_: bytes) -> bool:
    raise MalformedResponseError("framing")


@pytest.mark.parametrize("follow", [broken, lambda _: False])
def test_a_rest_that_is_broken_or_long_is_not_waited_for(follow: Callable[[bytes], bool]) -> None:
    connection, _, wire = streaming()
    connection.linger(follow)
    for _ in range(20):
        if not wire.is_aborted:
            connection.data_received(b"x" * 100)
    assert wire.is_aborted


def test_a_rest_that_never_comes_is_given_up() -> None:
    connection, pool, wire = streaming()
    connection.linger(lambda _: False)
    now_s = ManualClock().monotonic_s()
    pool.close_old(now_s + IDLE_S_MAX)
    assert not wire.is_aborted
    pool.close_old(now_s + IDLE_S_MAX + 1)
    assert wire.is_aborted


def streaming() -> tuple[UpstreamConnection, UpstreamPool, Wire]:
    connection, pool, wire = connect()
    connection.send(Caller(stream=True), b"POST")
    connection.data_received(OK + b"transfer-encoding: chunked\r\n\r\n")
    return connection, pool, wire
