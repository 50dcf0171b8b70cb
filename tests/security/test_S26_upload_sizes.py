"""S26, S5 for uploads, through the gateway: parts are bounded by their heads, slow ones end, and no id is a path."""

import json
import socket
import time
from collections.abc import Iterator

import pytest
from tests.support.uploading import PART, UPLOADS, announce, complete, content_of, part_of, send
from tests.support.waiting import eventually
from tests.support.yard import Yard

SETTINGS = {"gateway.header_read_timeout_s": 1}
TOO_LARGE = 64 * 1024 * 1024 + 1


@pytest.fixture
def line(yard: Yard) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", yard.port), timeout=20) as opened:
        yield opened


def head(yard: Yard, path: str, *more: str, key: str | None = None) -> bytes:
    lines = [f"PUT {path} HTTP/1.1", "host: x", f"authorization: Bearer {key or yard.admin_key}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def answer(line: socket.socket) -> tuple[int, str]:
    return answers(line, 1)[0]


def answers(line: socket.socket, count: int) -> list[tuple[int, str]]:
    """Read answers with one reader: what it has read ahead belongs to the next of them."""
    found = []
    with line.makefile("rb") as reader:
        for _ in range(count):
            status = int(reader.readline().split()[1])
            lengths = [
                int(row.partition(b":")[2]) for row in iter(reader.readline, b"\r\n") if row.startswith(b"content-l")
            ]
            body = json.loads(reader.read(lengths[0]))
            found.append((status, body.get("error", {}).get("code", "")))
    return found


def test_a_part_above_the_limit_is_refused_by_its_head(yard: Yard, line: socket.socket) -> None:
    line.sendall(head(yard, f"{UPLOADS}/upl-x/parts/1", f"content-length: {TOO_LARGE}"))
    assert answer(line) == (413, "request_too_large")


@pytest.mark.parametrize("path", ["/v1/uploads/artifacts", "/v1/models/deploy", f"{UPLOADS}/a/parts/1/x"])
def test_only_parts_may_be_that_large(yard: Yard, line: socket.socket, path: str) -> None:
    line.sendall(head(yard, path, f"content-length: {TOO_LARGE - 1}"))
    assert answer(line) == (413, "request_too_large")


def test_a_part_without_a_length_has_the_limit_of_all_others(yard: Yard, line: socket.socket) -> None:
    line.sendall(head(yard, f"{UPLOADS}/upl-x/parts/1", "transfer-encoding: chunked"))
    block = b"100000\r\n" + bytes(0x100000) + b"\r\n"
    for _ in range(40):
        line.sendall(block)
    assert answer(line) == (413, "request_too_large")


def test_nobody_sends_a_body_without_a_key_that_may(yard: Yard, line: socket.socket) -> None:
    line.sendall(head(yard, f"{UPLOADS}/upl-x/parts/1", "content-length: 60000000", key="my_wrong"))
    assert answer(line) == (401, "invalid_api_key")
    with socket.create_connection(("127.0.0.1", yard.port), timeout=20) as other:
        other.sendall(head(yard, f"{UPLOADS}/upl-x/parts/1", "content-length: 60000000", key=yard.new_key()))
        assert answer(other) == (403, "permission_denied")


def test_a_body_that_drips_is_ended(yard: Yard, line: socket.socket) -> None:
    upload = announce(yard, content_of(PART))
    line.sendall(head(yard, f"{UPLOADS}/{upload['id']}/parts/1", f"content-length: {PART}") + b"G")
    begun_s = time.monotonic()
    assert answer(line) == (408, "request_timeout")
    assert time.monotonic() - begun_s >= 0.9
    folder = yard.data / "artifacts" / "uploads" / upload["id"]
    eventually(lambda: not list(folder.glob("*")), 30, "nothing is left of it")


def test_parts_share_a_connection_and_may_even_be_pipelined(yard: Yard, line: socket.socket) -> None:
    content = content_of(3 * PART)
    upload = announce(yard, content)
    sent = b"".join(
        head(yard, f"{UPLOADS}/{upload['id']}/parts/{number}", f"content-length: {PART}") + part_of(content, number)
        for number in (1, 2, 3)
    )
    line.sendall(sent)
    assert answers(line, 3) == [(200, "")] * 3
    assert complete(yard, upload["id"]).status == 200


def test_a_client_that_asks_first_sends_its_part_after_100(yard: Yard, line: socket.socket) -> None:
    content = content_of(PART, seed=3)
    upload = announce(yard, content)
    path = f"{UPLOADS}/{upload['id']}/parts/1"
    line.sendall(head(yard, path, f"content-length: {PART}", "expect: 100-continue"))
    assert line.recv(64) == b"HTTP/1.1 100 Continue\r\n\r\n"
    line.sendall(content)
    assert answer(line) == (200, "")


@pytest.mark.parametrize("upload_id", ["..", "..%2f..%2fx", "upl-" + "a" * 26, "a%00b", "%e2%80%ae", "x" * 300])
def test_an_id_that_nobody_was_given_writes_nothing(yard: Yard, upload_id: str) -> None:
    before = sorted(str(path) for path in (yard.data / "artifacts").rglob("*"))
    assert send(yard, upload_id, 1, b"x" * 1000).status in (400, 404)
    assert sorted(str(path) for path in (yard.data / "artifacts").rglob("*")) == before


def test_a_refused_part_gets_its_answer_though_it_was_sent_whole(yard: Yard) -> None:
    for _ in range(5):
        refused = send(yard, "upl-" + "a" * 26, 1, bytes(20_000_000))
        assert (refused.status, refused.json()["error"]["code"]) == (404, "not_found")
