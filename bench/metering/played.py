"""Requests played by hand through a real gateway: its clients and engines are wires that the play holds.

All that a request meets is the code of production (parser, limits, routing,
relay, billing, journal), without sockets, so that a million go by in minutes.
What each client got is read off its wire and noted, to be compared with what
the ledger says. Clients leave and engines break at random places, and now and
then the gateway is killed with all that it has under way.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from modelyard.clock import ManualClock
from modelyard.config import GatewayConfig
from modelyard.domain.endpoints import Progress, Stage
from modelyard.domain.routing_table import EndpointRoute, ReleaseRoute, ReplicaRoute, RoutingTable
from modelyard.domain.tenants import ApiKey, Scope, Tenant
from modelyard.domain.usage import Price, UsageRow, UsageStatus
from modelyard.gateway.catalog import Catalog
from modelyard.gateway.exchange import Exchange
from modelyard.gateway.flow import Gateway
from modelyard.gateway.relay import as_chunk
from modelyard.gateway.server import ClientConnection
from modelyard.gateway.upstream import Receiver, UpstreamConnection, UpstreamPool
from modelyard.ids import hash_secret, new_api_key
from modelyard.metering.journal import Journal

PEPPER = b"pepper"
TENANTS = 20
AT_ONCE = 48
REPLICAS = 4
TOKENS_MEAN = 8
MARK_TOKENS = 4
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ENDING = as_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_USAGE = b'"usage":{'
DONE = b"data: [DONE]\n\n\r\n0\r\n\r\n"
TURN = 100
"""Requests between two generations of replicas."""
_CONTENT = b'"content":"w"'


class Fate(Enum):
    """How a request is played."""

    COMPLETE = auto()
    CLIENT_LEAVES = auto()
    ENGINE_BREAKS = auto()
    ENGINE_REFUSES = auto()
    """Another replica answers."""


FATES = [(Fate.COMPLETE, 70), (Fate.CLIENT_LEAVES, 22), (Fate.ENGINE_BREAKS, 5), (Fate.ENGINE_REFUSES, 3)]


@dataclass(slots=True)
class Got:
    """What one client got, and what its engine told, if it came to that."""

    fate: Fate
    tenant: int
    is_stream: bool
    delivered: int = 0
    """Tokens on the client's wire; of an answer in one piece all or none."""
    told: tuple[int, int, int, int] | None = None
    """Prompt, cached, completion and reasoning tokens, as the engine told at the end."""
    is_whole: bool = False
    """The client got an answer with a good end."""
    was_killed: bool = False

    def flaw(self, row: UsageRow | None) -> str:
        """Say what is wrong with the ledger's row of it; empty: nothing."""
        if row is None:
            return "not billed"
        counts = (row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.reasoning_tokens)
        if row.status is UsageStatus.SUCCESS:
            if not self.is_whole:
                return "a success that was none"
            if self.told is None:  # the engine broke between its last token and its count
                return "" if row.is_estimated and row.completion_tokens == self.delivered else "a wrong estimate"
            return "" if counts == self.told else f"billed {counts}, the engine told {self.told}"
        if self.was_killed:
            # A kill costs what came after the last mark, in the customer's favour.
            return "" if 0 <= self.delivered - row.completion_tokens <= MARK_TOKENS else "not by its last mark"
        if self.told is not None and counts == self.told:
            return ""  # it left when the engine had told all
        if row.completion_tokens != self.delivered:
            return (
                f"billed {row.completion_tokens} tokens, {self.delivered} came ({row.status.value}, {self.fate.name})"
            )
        return "" if row.is_estimated or not self.delivered else "an estimate that does not say so"


class _Wire:
    """A transport that keeps what is written to it."""

    __slots__ = ("is_closed", "sent")

    def __init__(self) -> None:
        self.sent = bytearray()
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    resume_reading = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None: ...


class _Pool(UpstreamPool):
    """A pool whose connections open at once."""

    def open(self, address: tuple[str, int], receiver: Receiver, *, timeout_s: float) -> None:
        connection = UpstreamConnection(self, address)
        connection.connection_made(_Wire())  # type: ignore[arg-type]
        receiver.connected(connection)


class House:
    """A gateway, its journal in ``folder``, and what has been played through it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.clock = ManualClock(start_s=1_795_953_600.0)
        self.got: dict[str, Got] = {}
        self.lives = 0
        self._keys = [new_api_key() for _ in range(TENANTS)]
        self._revision = 0
        self._asked = 0
        self._begin()

    def play(self, requests: int) -> None:
        """Play this many, some dozens at once, each a step at a time, and kill the gateway among the last ones."""
        plays: list[Iterator[Got]] = []
        under_way: list[Got] = []
        begun = 0
        while begun < requests or len(plays) > AT_ONCE // 2:
            self.clock.elapsed_s += 0.0005
            if begun < requests and len(plays) < AT_ONCE:
                if begun % TURN == 0:
                    self._turn_over()
                play = self._one()
                under_way.append(next(play))
                plays.append(play)
                begun += 1
                continue
            place = self.chance.randrange(len(plays))
            if next(plays[place], None) is None:
                for pile in (plays, under_way):
                    pile[place] = pile[-1]  # type: ignore[index,assignment]
                    pile.pop()  # type: ignore[attr-defined]
        for got, play in zip(under_way, plays, strict=True):
            got.was_killed = True
            play.close()
        os.close(self.journal._fd)  # as kill -9 leaves it: open work is what the next life finds in the journal
        os.close(self.journal._lock)
        self._begin()

    def close(self) -> None:
        """End well."""
        self.journal.close()

    def _begin(self) -> None:
        """Start the gateway, which settles what an earlier life left open."""
        self.lives += 1
        self.catalog: Catalog[Exchange] = Catalog(
            worker=0,
            settings=GatewayConfig(mark_tokens=MARK_TOKENS),
            deliver=lambda exchange, replica: self.gateway.deliver(exchange, replica),
            chance=self.chance.random,
        )
        self.journal = Journal(self.folder, sync_s=1, clock=self.clock, soon=lambda flush: flush())
        self._turn_over()
        presence: Any = SimpleNamespace(clock=self.clock, is_authoritative=True, silence_s=0.0, report_now=lambda: None)
        self.gateway = Gateway(
            settings=GatewayConfig(mark_tokens=MARK_TOKENS), catalog=self.catalog, pool=_Pool(clock=self.clock),
            journal=self.journal, presence=presence, control_socket=self.folder / "none", internal_token="x",
            pepper=PEPPER,
        )  # fmt: skip

    def _turn_over(self) -> None:
        """Put new replicas in the place of all: those that broke are ejected, and nobody here would probe them."""
        self._revision += 1
        tenants = tuple(Tenant(f"t{n}", f"t{n}", 0) for n in range(TENANTS))
        keys = tuple(
            ApiKey(parsed.key_id, f"t{n}", "k", hash_secret(PEPPER, parsed.secret), (Scope.INFERENCE,), 0)
            for n, (_, parsed) in enumerate(self._keys)
        )
        is_shared = False
        routes = tuple(
            EndpointRoute(
                f"ep{n}", f"t{n}", "m", is_shared, 0, (ReleaseRoute("v", 100, self._replicas(n)),),
                frozenset({"/v1/chat/completions"}), frozenset(), 0,
                Price(150_000_000, 75_000_000, 600_000_000), Progress(Stage.READY),
            )
            for n in range(TENANTS)
        )  # fmt: skip
        self.catalog.take(RoutingTable("e", self._revision, tenants, keys, routes), now_s=self.clock.monotonic_s())

    def _replicas(self, tenant: int) -> tuple[ReplicaRoute, ...]:
        return tuple(
            ReplicaRoute(f"r{self._revision}-{tenant}-{n}", "h", 1 + (self._revision + n) % 60_000, "s", AT_ONCE)
            for n in range(REPLICAS)
        )

    def _one(self) -> Iterator[Got]:
        """Play one request: yield what its client got so far, once a step."""
        chance = self.chance
        fate = chance.choices(*zip(*FATES, strict=True))[0]
        got = Got(fate, chance.randrange(TENANTS), chance.random() < 0.8)
        client, wire = ClientConnection(self.gateway), _Wire()
        client.connection_made(wire)  # type: ignore[arg-type]
        before = set(self.gateway.exchanges)
        self._ask(client, got)
        begun = [one for one in self.gateway.exchanges if one not in before]
        assert len(begun) == 1, f"not begun: {bytes(wire.sent)!r}"
        [exchange] = begun
        try:
            yield got
            yield from self._answered(exchange, client, got)
        finally:
            if got.is_stream:
                got.delivered = wire.sent.count(_CONTENT)
                got.is_whole = wire.sent.endswith(DONE)
            elif wire.sent.startswith(b"HTTP/1.1 200"):
                assert got.told is not None, "an answer that no engine gave"
                got.delivered = got.told[2]
                got.is_whole = True
            self.got[exchange.request_id] = got

    def _answered(self, exchange: Exchange, client: ClientConnection, got: Got) -> Iterator[Got]:
        """Play the engine, or its successor where the gateway tries another one, and the client's end."""
        fate, chance = got.fate, self.chance
        tokens = 1 + int(chance.expovariate(1 / TOKENS_MEAN))
        ends_at = chance.randrange(tokens + 2)
        if fate is Fate.ENGINE_REFUSES:
            _say(exchange, REFUSAL)
            yield got
            fate = Fate.COMPLETE
        usage = chance.randrange(1, 900), chance.randrange(400), tokens, chance.randrange(tokens + 1)
        told = usage[0], min(usage[1], usage[0]), usage[2], usage[3]
        for at, piece in enumerate(_stream(told) if got.is_stream else [_whole(told)]):
            if at == ends_at and fate is Fate.CLIENT_LEAVES:
                client.connection_lost(None)
                return
            if at == ends_at and fate is Fate.ENGINE_BREAKS:
                _break(exchange)
                if exchange.is_over:
                    return
                # Nothing had gone out: another replica has the request, from its beginning.
                yield got
                got.fate = Fate.COMPLETE  # of a second one
                yield from self._answered(exchange, client, got)
                return
            if exchange.is_over:
                return
            if _USAGE in piece:
                got.told = told
            _say(exchange, piece)
            yield got

    def _ask(self, client: ClientConnection, got: Got) -> None:
        token, _ = self._keys[got.tenant]
        fields: dict[str, Any] = {"stream": True} if got.is_stream else {}
        self._asked += 1  # a request that breaks two engines is refused: no two are alike
        messages = [{"role": "user", "content": f"hello there {self._asked}"}]
        body = msgspec.json.encode({"model": "m", "messages": messages, **fields})
        client.data_received(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
            % (token.encode(), len(body), body)
        )


def _say(exchange: Exchange, piece: bytes) -> None:
    if exchange.connection is not None:
        exchange.connection.data_received(piece)


def _break(exchange: Exchange) -> None:
    if exchange.connection is not None:
        exchange.connection.connection_lost(ConnectionResetError())


def _stream(told: tuple[int, int, int, int]) -> Iterator[bytes]:
    yield HEAD + ROLE
    for _ in range(told[2]):
        yield TOKEN
    yield FINISH
    yield (
        as_chunk(b'data: {"id":"c","object":"chat.completion.chunk","choices":[],"usage":%b}\n\n' % _usage(told))
        + ENDING
    )


def _whole(told: tuple[int, int, int, int]) -> bytes:
    text = b" ".join([b"w"] * told[2])
    body = (
        b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"finish_reason":"stop",'
        b'"logprobs":null,"message":{"role":"assistant","content":"%b","refusal":null}}],"usage":%b}'
        % (text, _usage(told))
    )
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _usage(told: tuple[int, int, int, int]) -> bytes:
    prompt, cached, completion, reasoning = told
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d},'
        b'"completion_tokens_details":{"reasoning_tokens":%d}}'
        % (prompt, completion, prompt + completion, cached, reasoning)
    )


def _event(delta: bytes, finish: bytes = b"null") -> bytes:
    return as_chunk(
        b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        b'"delta":%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (delta, finish)
    )


ROLE = _event(b'{"role":"assistant","content":""}')
TOKEN = _event(b'{"content":"w"}')
FINISH = _event(b"{}", b'"stop"')
REFUSAL = b"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
