"""One request through the gateway, its client and its engine played by hand: everything taken is given back."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from modelyard.clock import ManualClock
from modelyard.config import GatewayConfig
from modelyard.domain.endpoints import Progress, Stage
from modelyard.domain.routing_table import EndpointRoute, ReleaseRoute, ReplicaRoute, RoutingTable
from modelyard.domain.tenants import ApiKey, Limits, Scope, Tenant
from modelyard.domain.usage import Price, Settle
from modelyard.gateway.catalog import Catalog
from modelyard.gateway.exchange import Exchange
from modelyard.gateway.flow import Gateway
from modelyard.gateway.relay import as_chunk
from modelyard.gateway.server import ClientConnection
from modelyard.gateway.upstream import Receiver, UpstreamConnection, UpstreamPool
from modelyard.ids import hash_secret, new_api_key
from modelyard.metering.journal import Journal, read_records, segments

PEPPER = b"pepper"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = as_chunk(b"data: [DONE]\n\n")
END = b"0\r\n\r\n"


def event(**delta: object) -> bytes:
    finish = delta.pop("finish", None)
    chunk = {"id": "c", "object": "chat.completion.chunk", "choices": [{"delta": delta, "finish_reason": finish}]}
    return as_chunk(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class Wire:
    """A transport that only notes what is done to it."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_paused = False
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None:
        pass


class Pool(UpstreamPool):
    """A pool whose connections open at once, onto wires that the test holds."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.opened: list[tuple[UpstreamConnection, Any]] = []

    def open(self, address: tuple[str, int], receiver: Receiver, *, timeout_s: float) -> None:
        connection, wire = UpstreamConnection(self, address), Wire()
        connection.connection_made(wire)  # type: ignore[arg-type]
        self.opened.append((connection, wire))
        receiver.connected(connection)


class Bench:
    """A gateway with one model on one replica of one slot."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock()
        self.token, parsed = new_api_key()
        key = ApiKey(
            parsed.key_id, "t", "k", hash_secret(PEPPER, parsed.secret), (Scope.INFERENCE,), 0,
            limits=Limits(tokens_per_minute=100_000, concurrency=10),
        )  # fmt: skip
        route = EndpointRoute(
            "ep", "t", "m", False, 0, (ReleaseRoute("v", 100, (ReplicaRoute("r", "h", 1, "s", 1),)),),
            frozenset({"/v1/chat/completions"}), frozenset(), 0, Price(1, 1, 1), Progress(Stage.READY),
        )  # fmt: skip
        catalog: Catalog[Exchange] = Catalog(
            worker=0,
            settings=GatewayConfig(queue_max=300),
            deliver=lambda e, r: self.gateway.deliver(e, r),
            chance=lambda: 0.0,
        )
        catalog.take(RoutingTable("e", 1, (Tenant("t", "t", 0),), (key,), (route,)), now_s=self.clock.monotonic_s())
        self.pool = Pool(self.clock)
        self.journal = Journal(folder, sync_s=1, clock=self.clock, soon=lambda flush: flush())
        presence: Any = SimpleNamespace(clock=self.clock, is_authoritative=True, silence_s=0.0, report_now=lambda: None)
        self.gateway = Gateway(
            settings=GatewayConfig(), catalog=catalog, pool=self.pool, journal=self.journal, presence=presence,
            control_socket=folder / "none", internal_token="x", pepper=PEPPER,
        )  # fmt: skip
        (self.endpoint,) = catalog.endpoints

    def ask(self, client: ClientConnection, **fields: object) -> None:
        body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields})
        client.data_received(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
            % (self.token.encode(), len(body), body)
        )

    def client(self) -> tuple[ClientConnection, Any]:
        client, wire = ClientConnection(self.gateway), Wire()
        client.connection_made(wire)  # type: ignore[arg-type]
        return client, wire

    def settled(self) -> list[Settle]:
        records = [record for path in segments(self.folder) for record in read_records(path, 0)[0]]
        return [record for record in records if isinstance(record, Settle)]

    def assert_at_rest(self) -> None:
        key = self.gateway.catalog.table.keys[0]  # type: ignore[union-attr]
        state, _ = self.gateway.catalog.key(self.token.encode(), PEPPER, now_unix_s=0.0)
        assert state is not None
        assert [a.running for a in state.allowances] == [0, 0], key
        assert not self.gateway.exchanges
        assert self.endpoint.in_flight == 0
        assert self.endpoint.dispatcher.running == 0
        assert len(self.endpoint.dispatcher.line) == 0
        ids = [record.request_id for record in self.settled()]
        assert len(ids) == len(set(ids))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.assert_at_rest()
    bench.journal.close()


def test_a_stream_is_relayed_billed_and_its_connection_used_again(bench: Bench) -> None:
    client, wire = bench.client()
    for _ in range(2):
        bench.ask(client, stream=True)
        ((engine, _),) = bench.pool.opened
        for part in (
            STREAM,
            event(role="assistant"),
            event(content="a"),
            event(finish="stop"),
            DONE,
            b"0\r\n",
            b"\r\n",
        ):
            engine.data_received(part)
        assert wire.sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert [record.status for record in bench.settled()] == ["success", "success"]


@pytest.mark.parametrize(("asked", "sent"), [(50, 50), (99, 99), (100, None), (10**6, None)])
def test_more_than_the_context_holds_means_as_much_as_there_is_room_for(
    bench: Bench, asked: int, sent: int | None
) -> None:
    bench.endpoint.route = msgspec.structs.replace(bench.endpoint.route, context_length=100)
    client, _ = bench.client()
    bench.ask(client, max_tokens=asked)
    ((_, engine_wire),) = bench.pool.opened
    body = msgspec.json.decode(engine_wire.sent.partition(b"\r\n\r\n")[2])
    assert body.get("max_tokens") == sent
    client.connection_lost(None)


def test_a_body_that_ends_without_its_answer_closes_the_connection(bench: Bench) -> None:
    client, wire = bench.client()
    bench.ask(client, stream=True)
    ((engine, engine_wire),) = bench.pool.opened
    engine.data_received(STREAM + event(role="assistant", content="a"))
    engine.data_received(END)
    assert engine_wire.is_closed
    assert b'"code":"engine_lost"' in wire.sent
    assert b"[DONE]" not in wire.sent


@pytest.mark.parametrize("first", [b"", event(role="assistant", content="")])
def test_an_end_without_any_answer_is_no_answer(bench: Bench, first: bytes) -> None:
    client, wire = bench.client()
    bench.ask(client, stream=True)
    ((engine, engine_wire),) = bench.pool.opened
    engine.data_received(STREAM + first + DONE + END)
    assert wire.sent.startswith(b"HTTP/1.1 502 ")
    assert engine_wire.is_closed
    (record,) = bench.settled()
    assert (record.status, record.completion_tokens, record.prompt_tokens) == ("error", 0, 0)


@pytest.mark.parametrize(
    "usage", [b'{"prompt_tokens":-5}', b'{"prompt_tokens":99999999999999999999999999,"completion_tokens":1}']
)
def test_absurd_usage_is_a_bad_answer_and_leaks_nothing(bench: Bench, usage: bytes) -> None:
    client, wire = bench.client()
    bench.ask(client)
    bench.pool.opened[0][0].data_received(whole(b'{"choices":[],"usage":' + usage + b"}"))
    assert wire.sent.startswith(b"HTTP/1.1 502 ")


def test_an_engine_that_asks_to_wait_for_ever_is_answered(bench: Bench) -> None:
    client, wire = bench.client()
    bench.ask(client)
    busy = whole(b"{}", b"429 Busy").replace(b"content-type", b"retry-after: " + b"9" * 400 + b"\r\ncontent-type")
    bench.pool.opened[0][0].data_received(busy)
    assert wire.sent.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 120\r\n" in wire.sent


def test_a_client_that_has_not_read_its_last_answer_holds_the_next_stream_back(bench: Bench) -> None:
    client, wire = bench.client()
    client.pause_writing()
    bench.ask(client, stream=True)
    ((engine, engine_wire),) = bench.pool.opened
    assert engine_wire.is_paused
    client.resume_writing()
    assert not engine_wire.is_paused
    engine.data_received(STREAM + event(role="assistant", content="a") + event(finish="stop") + DONE + END)
    assert wire.sent.endswith(b"0\r\n\r\n")


def test_a_paused_connection_is_not_used_again(bench: Bench) -> None:
    client, wire = bench.client()
    bench.ask(client, stream=True)
    ((engine, engine_wire),) = bench.pool.opened
    engine.data_received(STREAM + event(role="assistant", content="a"))
    client.pause_writing()
    engine.data_received(event(finish="stop") + END)  # read before the pause, and an engine that forgets [DONE]
    assert wire.sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert engine_wire.is_closed


def test_a_full_disk_with_a_long_line_refuses_all_and_leaks_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = [bench.client() for _ in range(250)]
    state, _ = bench.gateway.catalog.key(bench.token.encode(), PEPPER, now_unix_s=0.0)
    assert state is not None
    state.allowance.concurrency_limit = None
    state.allowance.tokens_limit = None
    pending: list[Any] = []
    bench.journal._soon = pending.append  # one turn after another, as the loop does
    for client, _ in clients:
        bench.ask(client)
    pending.pop(0)()
    bench.journal._unwritten = [object()]  # type: ignore[list-item]
    clients[0][0].connection_lost(None)
    while pending:
        pending.pop(0)()
    bench.journal._unwritten = []
    assert all(wire.sent.startswith(b"HTTP/1.1 503 ") for _, wire in clients[1:])
