"""S22: however a client leaves, what it was given is billed, once, and its engine stops."""

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Outcome
from tests.support.waiting import eventually
from tests.support.wire import request_bytes
from tests.support.yard import Yard

SEEN: list[Exchange] = []
PROMPT = "[[sim: tokens=1000 slow=20]] on and on"
CHAT = {"model": "sim", "messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": 1100}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "sim", "prompt": PROMPT, "stream": True, "max_tokens": 1100},
    "/v1/responses": {"model": "sim", "input": PROMPT, "stream": True, "max_output_tokens": 1100},
    "/v1/messages": {"model": "sim", "messages": CHAT["messages"], "stream": True, "max_tokens": 1100},
}


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options={"slots": 2, "ttft_ms": 1, "itl_ms": 2})
    return "sim"


def close(peer: socket.socket) -> None:
    peer.close()


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def half_close(peer: socket.socket) -> None:
    peer.shutdown(socket.SHUT_WR)


WAYS: dict[str, Callable[[socket.socket], None]] = {"close": close, "reset": reset, "half-close": half_close}


class Leaver:
    """A client on a socket of its own."""

    def __init__(self, yard: Yard, path: str, body: dict[str, Any], *, version: bytes = b"HTTP/1.1") -> None:
        self.exchange = Exchange(f"#{len(SEEN)}", path, asks_stream=bool(body.get("stream")))
        self.peer = socket.create_connection(("127.0.0.1", yard.port), timeout=30)
        headers = [("Authorization", f"Bearer {yard.admin_key}"), ("Content-Type", "application/json")]
        request = request_bytes("POST", path, body=json.dumps(body).encode(), headers=headers)
        self.peer.sendall(request.replace(b"HTTP/1.1", version, 1))

    def read(self, events: int) -> None:
        """Read until so many events of text have come."""
        while bytes(self.exchange.received).count(b"data: ") < events:
            data = self.peer.recv(4096)
            assert data, f"ended early: {bytes(self.exchange.received)[-300:]!r}"
            self.exchange.received += data
            self.exchange.reader.feed(data)

    def leave(self, way: str) -> None:
        self.exchange.has_left = True
        WAYS[way](self.peer)
        self.exchange.outcome = Outcome.LEFT
        SEEN.append(self.exchange)


def bill(yard: Yard, rid: str) -> dict[str, Any]:
    eventually(lambda: yard.events_of(rid, "abort"), 30, "the engine is told to stop")
    check_ledger(yard, SEEN)
    eventually(lambda: not any(yard.gauges().values()), 30, "everything is given back")
    return yard.row_of(rid)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("events", [0, 1, 20])
def test_whoever_leaves_pays_for_what_was_made(yard: Yard, model: str, way: str, events: int) -> None:
    known = set(yard.generated())
    leaver = Leaver(yard, "/v1/chat/completions", CHAT)
    (rid,) = eventually(lambda: set(yard.generated()) - known, 30, "the engine has the request")
    leaver.read(events)
    leaver.leave(way)
    row = bill(yard, rid)
    leaver.peer.close()
    assert row["status"] == "client_closed"
    assert leaver.exchange.delivered <= row["completion_tokens"] <= sum(yard.generated()[rid].values())
    assert row["prompt_tokens"] > 0
    assert row["cost_nanousd"] > 0


@pytest.mark.parametrize("path", ROUTES)
def test_no_route_is_free(yard: Yard, model: str, path: str) -> None:
    known = set(yard.generated())
    leaver = Leaver(yard, path, ROUTES[path])
    (rid,) = eventually(lambda: set(yard.generated()) - known, 30, "the engine has the request")
    leaver.read(15)
    leaver.leave("close")
    row = bill(yard, rid)
    assert 5 <= row["completion_tokens"] <= sum(yard.generated()[rid].values()) < 1000
    assert row["cost_nanousd"] > 0


def test_an_old_protocol_is_not_free_either(yard: Yard, model: str) -> None:
    known = set(yard.generated())
    leaver = Leaver(yard, "/v1/chat/completions", CHAT, version=b"HTTP/1.0")
    (rid,) = eventually(lambda: set(yard.generated()) - known, 30, "the engine has the request")
    leaver.read(10)
    leaver.leave("close")
    row = bill(yard, rid)
    assert leaver.exchange.delivered <= row["completion_tokens"] < 1000


def test_who_leaves_the_line_pays_nothing_and_reaches_no_engine(yard: Yard, model: str) -> None:
    busy = [Leaver(yard, "/v1/chat/completions", CHAT) for _ in range(2)]
    for leaver in busy:
        leaver.read(2)
    begun = len(yard.generated())
    waiting = Leaver(yard, "/v1/chat/completions", CHAT)
    eventually(lambda: any(v for name, v in yard.gauges().items() if "queue" in name), 30, "it waits")
    waiting.peer.close()
    eventually(lambda: not any(v for name, v in yard.gauges().items() if "queue" in name), 30, "its place is free")
    for leaver in busy:
        leaver.leave("reset")
    check_ledger(yard, SEEN)
    assert len(yard.generated()) == begun
