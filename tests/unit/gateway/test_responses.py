"""Reading an engine's responses: what is ambiguous is refused."""

import pytest

from modelyard.gateway.responses import RETRY_AFTER_S_MAX, MalformedResponseError, join_chunks, parse_head


def test_a_plain_head_is_read() -> None:
    head = parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\ncontent-type: Application/JSON\r\nConnection: close")
    assert (head.status, head.length, head.content_type, head.is_last) == (200, 12, b"application/json", True)


@pytest.mark.parametrize(
    "head",
    [
        b"SSH-2.0-OpenSSH",
        b"HTTP/2 200",
        b"HTTP/1.1 abc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip",
        b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nContent-Encoding: gzip",
        b"HTTP/1.1 500 Oh\r\ncontent-length: 5\r\ncontent-encoding: identity, br",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: identity\r\ncontent-encoding: gzip\r\ncontent-length: 5",
    ],
)
def test_a_doubtful_head_is_refused(head: bytes) -> None:
    with pytest.raises(MalformedResponseError):
        parse_head(head)


def test_chunks_are_joined_when_whole() -> None:
    assert join_chunks(bytearray(b"3\r\nabc\r\n2\r\nde\r\n")) is None
    body = b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
    assert join_chunks(bytearray(body)) == (b"abcde", len(body))
    assert join_chunks(bytearray(body + b"HTTP/1.1")) == (b"abcde", len(body))
    for size in range(len(body)):
        assert join_chunks(bytearray(body[:size])) is None, size


def test_trailers_belong_to_the_body() -> None:
    body = b"1\r\na\r\n0\r\nx-checksum: 1\r\n\r\n"
    assert join_chunks(bytearray(body)) == (b"a", len(body))
    for size in range(len(body)):
        assert join_chunks(bytearray(body[:size])) is None, size


@pytest.mark.parametrize(
    "body", [b"xyz\r\n", b"-6\r\n", b"-1\r\nab\r\n", b"\r\n", b"0x1\r\na\r\n", b"1_0\r\n", b"1\r\nabc"]
)
def test_broken_chunks_are_refused(body: bytes) -> None:
    with pytest.raises(MalformedResponseError):
        join_chunks(bytearray(body))


def test_an_absurd_pause_is_cut() -> None:
    head = parse_head(b"HTTP/1.1 503 Busy\r\nretry-after: " + b"9" * 400)
    assert head.retry_after == RETRY_AFTER_S_MAX
