"""Everything at once, in any order: whatever happens to clients, engines, tables and the disk, nothing is lost.

A seeded walk over one gateway whose clients and engines are played by hand. The engines answer one known text, and go
on with it wherever a request for the rest stands, so every stream can be checked to the letter.
"""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.gateway.test_exchange import DONE, END, STREAM, Bench, Pool, Wire, whole

from modelyard.domain.endpoints import Serving
from modelyard.domain.routing_table import ReleaseRoute, ReplicaRoute
from modelyard.gateway.relay import as_chunk
from modelyard.gateway.server import ClientConnection
from modelyard.gateway.upstream import CONNECT_TIMEOUT, Receiver, UpstreamConnection

WORDS = [f"w{number}é " for number in range(12)]
TEXT = "".join(WORDS)
STEPS = 600
ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions")
ENDS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b"response.failed", b'"error"')


class Opening(Pool):
    """A pool whose connections open when the test says so, or do not."""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock)
        self.pending: list[tuple[tuple[str, int], Receiver]] = []

    def open(self, address: tuple[str, int], receiver: Receiver, *, timeout_s: float) -> None:
        self.pending.append((address, receiver))

    def settle(self, index: int, outcome: str) -> None:
        address, receiver = self.pending.pop(index)
        if outcome == "open":
            connection, wire = UpstreamConnection(self, address), Wire()
            connection.connection_made(wire)  # type: ignore[arg-type]
            self.opened.append((connection, wire))
            receiver.connected(connection)
        else:
            receiver.unreachable(address, outcome)


class Engine:
    """What one connection to a replica is asked and has said."""

    def __init__(self, connection: UpstreamConnection, wire: Any) -> None:
        self.connection = connection
        self.wire = wire
        self.seen = 0
        self.body: Any = None
        self.at = 0
        self.has_head = False
        self.has_role = False

    def ask(self) -> bool:
        """Take the next request, if there is one; say whether one is being answered."""
        if self.wire.is_closed:
            return False
        if self.body is None and len(self.wire.sent) > self.seen:
            raw = self.wire.sent[self.seen :]
            self.seen = len(self.wire.sent)
            self.body = json.loads(raw.partition(b"\r\n\r\n")[2])
            self.has_head = self.has_role = False
            said = ""
            if "messages" in self.body and self.body["messages"][-1]["role"] == "assistant":
                said = self.body["messages"][-1]["content"]
            elif "prompt" in self.body:
                said = self.body["prompt"].removeprefix("hello")
            assert TEXT.startswith(said), said
            self.at = said.count(" ")
        return self.body is not None

    def die(self, error: Exception | None) -> None:
        self.wire.is_closed = True
        self.connection.connection_lost(error)

    def say(self, data: bytes, rng: random.Random) -> None:
        """Say it in one read, or in two."""
        cut = rng.randrange(len(data) + 1) if rng.random() < 0.3 else 0
        for piece in (data[:cut], data[cut:]):
            if piece and not self.wire.is_closed:
                self.connection.data_received(piece)

    def event(self, **chunk: object) -> bytes:
        data = {"id": f"c{id(self)}", "created": 1, "model": "m", **chunk}
        return as_chunk(b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n")

    def choice(self, text: str | None, *, finish: str | None = None, role: bool = False) -> bytes:
        if "messages" not in self.body:
            return self.event(choices=[{"index": 0, "text": text or "", "finish_reason": finish}])
        delta: dict[str, object] = {"role": "assistant"} if role else {}
        if text is not None:
            delta["content"] = text
        return self.event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])

    def go_on(self, rng: random.Random) -> None:
        """Say the next piece of the answer, whole and well."""
        if not self.body.get("stream"):
            message = {"role": "assistant", "content": TEXT}
            answer: dict[str, object] = {"choices": [{"message": message, "text": TEXT, "finish_reason": "stop"}]}
            if rng.random() < 0.8:
                answer["usage"] = {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
            self.body = None
            self.connection.data_received(whole(json.dumps(answer).encode()))
            return
        out = b""
        if not self.has_head:
            self.has_head = True
            out += STREAM
        if not self.has_role and "messages" in self.body:
            self.has_role = True
            if rng.random() < 0.8:
                out += self.choice("" if rng.random() < 0.5 else None, role=True)
        for _ in range(rng.randint(1, 4)):
            if self.at < len(WORDS):
                out += self.choice(WORDS[self.at])
                self.at += 1
        if self.at == len(WORDS) and rng.random() < 0.7:
            out += self.choice(None, finish="stop")
            if rng.random() < 0.7:
                out += self.event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15})
            self.body = None
            end = rng.random()
            if end < 0.1:
                self.say(out, rng)
                self.die(None if end < 0.05 else ConnectionResetError())
                return
            out += DONE + END
        self.say(out, rng)

    def misbehave(self, rng: random.Random) -> None:
        """Fail the request in one of many ways."""
        fault = rng.choice(("lost", "reset", "error", "garbage", "status", "excess", "ended"))
        if fault in ("lost", "reset"):
            self.die(None if fault == "lost" else ConnectionResetError())
        elif self.has_head:
            self.body = None
            pieces = {
                "error": self.event(error={"message": "no"}),
                "garbage": as_chunk(b"data: {]\n\n"),
                "ended": END,
            }
            self.say(pieces.get(fault, b"zz\r\n"), rng)
            if not self.wire.is_closed:
                self.die(None)
        else:
            self.body = None
            status = rng.choice((b"503 Busy", b"500 No", b"400 Bad", b"429 Busy", b"404 No", b"200 OK"))
            data = whole(b'{"error":{"message":"no"}}', status)
            self.connection.data_received(data + (b"HTTP/1.1" if fault == "excess" else b""))


class Client:
    """A client with one request at a time."""

    def __init__(self, bench: "Torture", rng: random.Random) -> None:
        self.connection = ClientConnection(bench.gateway)
        self.wire = Wire()
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]
        self.route = rng.choice(ROUTES)
        self.is_stream = rng.random() < 0.7
        self.begun = 0
        self.has_left = self.is_paused = self.was_behind = False

    def ask(self, bench: "Torture", rng: random.Random) -> None:
        fields: dict[str, object] = {"model": "m", "stream": self.is_stream}
        match self.route:
            case "/v1/responses":
                fields["input"] = "hello"
            case "/v1/completions":
                fields |= {"prompt": "hello", "max_tokens": 99}
            case _:
                fields["messages"] = [{"role": "user", "content": "hello"}]
        if self.route == "/v1/messages":
            fields["max_tokens"] = 99
        elif self.is_stream and self.route != "/v1/responses" and rng.random() < 0.5:
            fields["stream_options"] = {"include_usage": True}
        body = msgspec.json.encode(fields)
        self.begun = len(self.wire.sent)
        version = b"1.0" if rng.random() < 0.1 else b"1.1"
        self.connection.data_received(
            b"POST %b HTTP/%b\r\nHost: h\r\nAuthorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
            % (self.route.encode(), version, bench.token.encode(), len(body), body)
        )

    @property
    def is_idle(self) -> bool:
        return self.connection.current is None and not self.wire.is_closed and not self.has_left

    def check(self) -> None:
        """Whatever is whole must be right."""
        sent = self.wire.sent[self.begun :]
        head, _, body = sent.partition(b"\r\n\r\n")
        if self.has_left or self.connection.current is not None or not head.startswith(b"HTTP/1.1 200"):
            return
        if not self.is_stream:
            assert TEXT in json.dumps(json.loads(body), ensure_ascii=False)
            return
        if self.was_behind and self.wire.is_closed and not body.endswith(END):
            return  # it did not read for too long, and was cut off
        assert any(end in body for end in ENDS), body[-200:]
        if b"[DONE]" in body or b"message_stop" in body or b"response.completed" in body:
            assert b'"error":{' not in body, body
            assert _text(body) == TEXT, (self.route, _text(body))
            roles = body.count(b'"role":"assistant"')
            assert self.route != ROUTES[0] or roles == 1, body
            assert body.count(b'"finish_reason":"stop"') <= 1
        else:
            assert TEXT.startswith(_text(body)), _text(body)


def _text(body: bytes) -> str:
    found = []
    for line in body.decode().split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", ()):
            found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        if event.get("type") == "response.output_text.delta":
            found.append(event["delta"])
        elif event.get("type") == "content_block_delta":
            found.append(event["delta"].get("text", ""))
    return "".join(found)


class Torture(Bench):
    """The walk."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        super().__init__(folder)
        self.rng = rng
        self.lines = self.pool = self.gateway.pool = Opening(self.clock)
        self.turns: list[Any] = []
        self.journal._soon = self.turns.append
        self.engines: dict[int, Engine] = {}
        self.clients: list[Client] = []
        self.starts = 0
        self.keep = self.endpoint
        self.take(3)

    def take(self, replicas: int, *, is_gone: bool = False, is_calm: bool = False) -> None:
        rng, table = self.rng, self.gateway.catalog.table
        assert table is not None
        known = [replica.route for replica in self.keep.dispatcher.replicas if not replica.is_gone]
        kept = [route for route in known if rng.random() < 0.8][:replicas]
        while len(kept) < replicas:
            self.starts += 1
            kept.append(ReplicaRoute(f"r{self.starts}", "h", self.starts, "s", 2))
        kv = rng.choice((0, 0, 400))
        routes = [
            msgspec.structs.replace(route, is_draining=not is_calm and rng.random() < 0.1, kv_tokens=kv)
            for route in kept
        ]
        half = rng.randrange(len(routes) + 1) if not is_calm and rng.random() < 0.3 else len(routes)
        shadow = rng.choice((0, 50))
        releases: tuple[ReleaseRoute, ...] = (ReleaseRoute("v", 100, tuple(routes[:half])),)
        if half < len(routes):
            releases += (ReleaseRoute("w", 0 if shadow else 50, tuple(routes[half:]), shadow),)
        route = msgspec.structs.replace(
            self.keep.route,
            releases=releases,
            engine_extras=frozenset({"continue_final_message"}),
            routes=frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}),
            serving=Serving(coalesce_ms=rng.choice((0, 0, 1))),
        )
        new = msgspec.structs.replace(table, revision=table.revision + 1, endpoints=() if is_gone else (route,))
        self.gateway.catalog.take(new, now_s=self.clock.monotonic_s())
        self.gateway.forget_heads()
        for endpoint in self.gateway.catalog.endpoints:
            self.keep = self.endpoint = endpoint

    def turn(self) -> None:
        turns, self.turns[:] = list(self.turns), []
        for flush in turns:
            flush()

    def talking(self) -> list[Engine]:
        for number, (connection, wire) in enumerate(self.pool.opened):
            if number not in self.engines:
                self.engines[number] = Engine(connection, wire)
        return [engine for engine in self.engines.values() if engine.ask() and not engine.wire.is_paused]

    def step(self) -> None:
        rng = self.rng
        match rng.choices(
            ("ask", "turn", "open", "say", "fail", "leave", "pause", "resume", "time", "table", "disk"),
            (14, 20, 20, 30, 5, 2, 2, 6, 4, 2, 1),
        )[0]:
            case "ask":
                idle = [client for client in self.clients if client.is_idle]
                if not idle or rng.random() < 0.5:
                    self.clients.append(Client(self, rng))
                    idle.append(self.clients[-1])
                client = rng.choice(idle)
                client.check()
                client.ask(self, rng)
            case "turn":
                self.turn()
            case "open" if self.lines.pending:
                outcome = rng.choices(("open", "connection refused", CONNECT_TIMEOUT), (8, 1, 1))[0]
                self.lines.settle(rng.randrange(len(self.lines.pending)), outcome)
            case "say" if talking := self.talking():
                rng.choice(talking).go_on(rng)
            case "fail" if talking := self.talking():
                rng.choice(talking).misbehave(rng)
            case "leave":
                self.leave(rng.choice(self.clients) if self.clients else None)
            case "pause" if self.clients:
                client = rng.choice(self.clients)
                if not client.is_paused and not client.has_left:
                    client.is_paused = client.was_behind = True
                    client.connection.pause_writing()
            case "resume":
                for client in self.clients:
                    self.resume(client)
            case "time":
                self.clock.advance(rng.choice((0.1, 0.3, 1, 3, 12, 31)))
                self.gateway.check_time(self.clock.monotonic_s())
                self.pool.close_old(self.clock.monotonic_s())
            case "table":
                self.take(rng.choice((0, 1, 2, 3)), is_gone=rng.random() < 0.1)
            case "disk":
                self.journal._unwritten = [] if self.journal._unwritten else [_Nothing()]  # type: ignore[list-item]
            case _:
                pass  # nobody is there for it

    def leave(self, client: Client | None) -> None:
        if client is not None and not client.has_left:
            client.check()
            client.has_left = client.wire.is_closed = True
            client.connection.connection_lost(None)

    def resume(self, client: Client) -> None:
        if client.is_paused and not client.has_left:
            client.is_paused = False
            client.connection.resume_writing()


class _Nothing(msgspec.Struct):
    """Stands for a settlement that the full disk did not take."""


async def _walk(bench: Torture) -> None:
    for _ in range(STEPS):
        bench.step()
        if bench.rng.random() < 0.1:
            await asyncio.sleep(0)
    bench.journal._unwritten = []
    bench.take(3, is_calm=True)
    for client in bench.clients:
        bench.resume(client)
    for _ in range(24):
        bench.turn()
        while bench.lines.pending:
            bench.lines.settle(0, "open")
        for engine in bench.talking():
            engine.go_on(bench.rng)
        await asyncio.sleep(0)
        if not bench.gateway.exchanges:
            break
        bench.clock.advance(0.1)
        bench.gateway.check_time(bench.clock.monotonic_s())


@pytest.mark.parametrize("seed", range(24))
async def test_whatever_happens_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    bench = Torture(tmp_path, random.Random(seed))
    await _walk(bench)
    assert not bench.gateway.exchanges, "somebody waits for nothing"
    await asyncio.sleep(0.01)  # longer than anything is held together
    for client in bench.clients:
        client.check()
        bench.leave(client)
    bench.turn()
    bench.clock.advance(300)  # longer than any copy may take
    bench.gateway.check_time(bench.clock.monotonic_s())
    for probe in list(bench.gateway.side_requests):
        probe.cancel()
    assert not bench.gateway.side_requests
    for endpoint in bench.gateway.catalog.endpoints:
        assert endpoint.in_flight == 0
        for replica in endpoint.dispatcher.replicas:
            assert not replica.kv.held
            assert (replica.kv.reserved, replica.pending_tokens, replica.unanswered) == (0, 0, 0), replica
    bench.assert_at_rest()
    bench.journal.close()
