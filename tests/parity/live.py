"""The real gateway in virtual time: its own code from the client's bytes to the engine's, and simulated engines.

Nothing of the gateway is replaced but the sockets, whose other ends are here, and the clock, which is the calendar of
the simulator. What comes is sent as HTTP by the byte; a request to an engine is read off the wire and given to the same
engine model that the simulated world has, whose answers go back as the events of a stream.
"""

import json
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec

from modelyard.config import GatewayConfig
from modelyard.domain.endpoints import Progress, Stage
from modelyard.domain.routing_table import EndpointRoute, ReleaseRoute, ReplicaRoute, RoutingTable
from modelyard.domain.tenants import ApiKey, Scope, Tenant
from modelyard.domain.usage import Price
from modelyard.gateway.catalog import Catalog
from modelyard.gateway.exchange import Exchange
from modelyard.gateway.flow import Gateway
from modelyard.gateway.server import ClientConnection
from modelyard.gateway.upstream import Receiver, UpstreamConnection, UpstreamPool
from modelyard.ids import hash_secret, new_api_key
from modelyard.metering.journal import Journal
from modelyard.policy.job import BANDS
from modelyard.policy.routing import stable_hash
from modelyard.sim.engine import Engine
from modelyard.sim.events import Event, Events
from modelyard.sim.faults import Fault, Kind
from modelyard.sim.requests import Arrival
from modelyard.sim.tasks import Task
from modelyard.sim.world import SWEEP_S
from modelyard.sim.world_spec import WorldSpec

PEPPER = b"pepper"
PATH = "/v1/completions"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}


def prompt_of(shared: str, number: int, tokens: int) -> str:
    """Return a prompt of so many tokens that begins with ``shared`` and is nobody else's."""
    text = f"{shared}{number:06d}".ljust(4 * tokens, "x")
    return text[: 4 * tokens]


def blocks_of(prompt: str, tenant_id: str) -> tuple[int, ...]:
    """Return what beginnings of a tenant's prompts are told by: a hash for each kilobyte of it as JSON."""
    data = msgspec.json.encode(prompt).decode()
    return tuple(stable_hash(tenant_id + data[: 1024 * (block + 1)]) for block in range(len(data) // 1024))


@dataclass
class Asked:
    """A request and what its caller saw."""

    arrival: Arrival
    prompt: str
    client: ClientConnection
    wire: "Wire"
    replica_id: str = ""
    dispatched_s: float = inf
    told: int = 0
    """Tokens from engines that are gone."""
    first_s: float = inf
    done_s: float = inf
    refused_s: float = inf


class Wire:
    """The other end of a connection."""

    def __init__(self, wrote: Any = None, closed: Any = None) -> None:
        self.sent = bytearray()
        self.is_closed = False
        self.wrote = wrote
        self.closed = closed

    def write(self, data: bytes) -> None:
        self.sent += data
        if self.wrote is not None:
            self.wrote()

    def close(self) -> None:
        self.is_closed = True
        if self.closed is not None:
            self.closed()

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None: ...


@dataclass
class Clock:
    """The calendar's time."""

    events: Events

    def monotonic_s(self) -> float:
        return self.events.now_s

    def unix_s(self) -> float:
        return self.events.now_s


class Pool(UpstreamPool):
    """Connections open at once, onto wires that end in an engine; each request has one of its own."""

    def __init__(self, live: "Live") -> None:
        super().__init__(clock=Clock(live.events))
        self.live = live

    def take(self, address: tuple[str, int]) -> UpstreamConnection | None:
        return None

    def open(self, address: tuple[str, int], receiver: Receiver, *, timeout_s: float) -> None:
        if address[1] in self.live.down:
            self.live.events.after(0.0, lambda: receiver.unreachable(address, "connection refused"))
            return
        connection = UpstreamConnection(self, address)
        wire = Wire(lambda: self.live.sent(connection, wire), lambda: self.live.dropped(connection))
        connection.connection_made(wire)  # type: ignore[arg-type]
        receiver.connected(connection)


@dataclass
class Live:
    """The gateway of a world's spec. ``run`` sends arrivals; what came of each is in ``asked``."""

    spec: WorldSpec
    folder: Path
    seed: int
    events: Events = field(default_factory=Events)
    asked: list[Asked] = field(default_factory=list)
    engines: dict[int, Engine] = field(default_factory=dict)
    due: dict[int, Event] = field(default_factory=dict)
    down: set[int] = field(default_factory=set)
    hung_s: dict[int, float] = field(default_factory=dict)
    tasks: dict[Task, tuple[Asked | None, UpstreamConnection, list[int]]] = field(default_factory=dict)
    """What is on engines: whose it is (nobody's: a probe), on which connection, and how many tokens were sent."""
    started: int = 0
    asides: int = 0
    """Probes and copies that engines were asked."""
    left: int = 0

    def __post_init__(self) -> None:
        spec = self.spec
        # As a world draws for its first gateway.
        chance = Random(Random(self.seed).random())
        settings = GatewayConfig(
            queue_max=spec.rules.places,
            queue_wait_s=spec.queue_wait_s,
            load_wait_s=spec.load_wait_s,
            kv_share_max=spec.rules.kv_share_max,
        )
        self.catalog: Catalog[Exchange] = Catalog(
            worker=0,
            settings=settings,
            deliver=lambda exchange, replica: self.gateway.deliver(exchange, replica),
            chance=chance.random,
        )
        self.journal = Journal(self.folder, sync_s=1, clock=Clock(self.events), soon=lambda flush: flush())
        presence: Any = SimpleNamespace(
            clock=Clock(self.events), is_authoritative=True, silence_s=0.0, report_now=lambda: None
        )
        self.gateway = Gateway(
            settings=settings, catalog=self.catalog, pool=Pool(self), journal=self.journal, presence=presence,
            control_socket=self.folder / "none", internal_token="x", pepper=PEPPER,
        )  # fmt: skip
        self.tokens: dict[str, str] = {}

    def run(self, arrivals: list[Arrival], prompts: list[str]) -> list[Asked]:
        """Let everything come and end."""
        self.left = len(arrivals)
        self.tell(arrivals)
        for arrival, prompt in zip(arrivals, prompts, strict=True):
            self.events.at(arrival.at_s, lambda arrival=arrival, prompt=prompt: self.ask(arrival, prompt))
        self.events.at(SWEEP_S, self.sweep)
        for fault in self.spec.faults:
            assert fault.back_s < inf or fault.kind is Kind.HANG, "there is no controller here"
            self.events.at(fault.at_s, partial(self.fail, fault))
        while self.left and self.events.step():
            assert self.events.now_s < 10_000, f"{self.left} requests were forgotten"
        self.journal.close()
        return self.asked

    def tell(self, arrivals: list[Arrival]) -> None:
        """Give the gateway its first table."""
        tenants, keys = {}, {}
        for arrival in arrivals:
            tenant_id = arrival.tenant_id
            if tenant_id not in tenants:
                token, parsed = new_api_key()
                self.tokens[tenant_id] = token
                secret = hash_secret(PEPPER, parsed.secret)
                tenants[tenant_id] = Tenant(tenant_id, tenant_id, 0, plan=BANDS[arrival.band], weight=arrival.weight)
                keys[tenant_id] = ApiKey(parsed.key_id, tenant_id, "k", secret, (Scope.INFERENCE,), 0)
        releases, number = [], 0
        for release in self.spec.releases:
            routes = []
            for _ in range(release.replicas):
                self.engines[1 + number] = Engine(release.engine)
                slots = self.spec.slots or release.engine.max_num_seqs
                kv_tokens = release.engine.kv_tokens if self.spec.knows_kv else 0
                routes.append(
                    ReplicaRoute(f"rep_{number:03d}", "127.0.0.1", 1 + number, "s", slots, kv_tokens=kv_tokens)
                )
                number += 1
            shadow = release.shadow
            releases.append(ReleaseRoute(release.version_id, release.weight, tuple(routes), shadow=shadow))
        route = EndpointRoute(
            "ep_sim", "t", "m", True, 0, tuple(releases), frozenset({PATH}), frozenset(), 0, Price(1, 1, 1),
            Progress(Stage.READY),
        )  # fmt: skip
        table = RoutingTable("e", 1, tuple(tenants.values()), tuple(keys.values()), (route,))
        self.catalog.take(table, now_s=0.0)

    # --- clients ---

    def ask(self, arrival: Arrival, prompt: str) -> None:
        """Send a request, as a client does."""
        wire = Wire()
        client = ClientConnection(self.gateway)
        client.connection_made(wire)  # type: ignore[arg-type]
        asked = Asked(arrival, prompt, client, wire)
        wire.wrote = lambda: self.heard(asked)
        self.asked.append(asked)
        body = msgspec.json.encode(
            {
                "model": "m",
                "prompt": prompt,
                "max_tokens": arrival.output_max,
                "stream": arrival.is_stream,
                "stop": [str(len(self.asked) - 1)],
            }
        )
        client.data_received(
            b"POST %b HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
            % (PATH.encode(), self.tokens[arrival.tenant_id].encode(), len(body), body)
        )

    def heard(self, asked: Asked) -> None:
        """Note what a client gets."""
        if asked.done_s < inf or asked.refused_s < inf:
            return
        # Who waited for long has been told so by comments, and hears of a refusal in the stream.
        if not asked.wire.sent.startswith(b"HTTP/1.1 200 ") or b'"error":' in asked.wire.sent[-1000:]:
            asked.refused_s = self.events.now_s
            self.left -= 1
        elif not asked.arrival.is_stream or b"data: [DONE]" in asked.wire.sent[-40:]:
            asked.done_s = self.events.now_s
            self.left -= 1

    # --- engines ---

    def sent(self, connection: UpstreamConnection, wire: Wire) -> None:
        """Take what the gateway wrote to an engine, if it is a whole request."""
        head, found, body = bytes(wire.sent).partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if not found or len(body) < length:
            return
        wire.sent.clear()
        request = json.loads(body)
        port = connection.address[1]
        if b" side-" in head:
            # A probe for one token, or a shadow copy; nobody hears what it says.
            of = self.asked[int(request["stop"][0])].arrival if "stop" in request else PROBE
            sizes = {"prompt_tokens": of.prompt_tokens, "output_tokens": of.output_tokens}
            self.asides += 1
            asked, task = None, Task("side", number=self.started, **sizes)
        else:
            asked = self.asked[int(request["stop"][0])]
            asked.dispatched_s = self.events.now_s
            asked.replica_id = f"rep_{port - 1:03d}"
            arrival = asked.arrival
            assert len(request["prompt"]) == len(asked.prompt) + asked.told, "not the rest of the answer"
            task = Task(
                asked.prompt,
                number=self.started,
                prompt_tokens=arrival.prompt_tokens + asked.told,
                output_tokens=arrival.output_tokens - asked.told,
                blocks=arrival.blocks,
                band=arrival.band,
            )
        self.started += 1
        self.tasks[task] = (asked, connection, [0])
        if port not in self.hung_s:
            self.engines[port].submit(task, self.events.now_s)
            self.plan(port)

    def dropped(self, connection: UpstreamConnection) -> None:
        """Let an engine stop what nobody waits for any more."""
        port = connection.address[1]
        for task in [task for task, (_, other, _) in self.tasks.items() if other is connection]:
            asked, _, sent = self.tasks.pop(task)
            if asked is not None:
                asked.told += sent[0]
            if port not in self.hung_s:
                self.engines[port].abort(task, self.events.now_s)
                self.plan(port)

    def plan(self, port: int) -> None:
        event, next_s = self.due.get(port), self.engines[port].next_s
        if event is not None and event.act is not None and event.at_s == next_s:
            return
        if event is not None:
            event.call_off()
        if next_s < inf and port not in self.hung_s:
            self.due[port] = self.events.at(next_s, lambda: self.advance(port))

    def advance(self, port: int) -> None:
        """Let an engine go on, and send what it wrote."""
        begun, done = self.engines[port].advance(self.events.now_s)
        for task in [task for task in begun if task in self.tasks]:
            asked, connection, _ = self.tasks[task]
            if asked is not None:
                if not asked.told:
                    asked.first_s = self.events.now_s
                if asked.arrival.is_stream:
                    connection.data_received(HEAD)
                    self.write(task, 1)
        for task in [task for task in done if task in self.tasks]:
            asked, connection, _ = self.tasks[task]
            if asked is None:
                del self.tasks[task]
                connection.data_received(PROBED)
                continue
            if asked.arrival.is_stream:
                self.write(task, task.output_tokens)
            usage = {"prompt_tokens": task.prompt_tokens, "completion_tokens": task.output_tokens}
            usage["total_tokens"] = sum(usage.values())
            finish = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
            del self.tasks[task]
            if not asked.arrival.is_stream:
                connection.data_received(whole(CHUNK | {"choices": [finish | {"text": "a"}], "usage": usage}))
                continue
            connection.data_received(
                chunk(CHUNK | {"choices": [finish]}) + chunk(CHUNK | {"choices": [], "usage": usage}) + DONE
            )
        self.plan(port)

    def fail(self, fault: Fault) -> None:
        """Let an engine crash, or hang."""
        ports = [port for port in self.engines if port not in self.down and port not in self.hung_s]
        port = ports[fault.place % len(ports)]
        if fault.kind is Kind.CRASH:
            self.crash(port, fault.back_s)
        else:
            self.hung_s[port] = self.events.now_s
            self.due.pop(port).call_off()

    def generated(self, task: Task) -> int:
        """Return how many tokens there are by now."""
        port = self.tasks[task][1].address[1]
        return self.engines[port].generated_by(task, min(self.events.now_s, self.hung_s.get(port, inf)))

    def crash(self, port: int, back_s: float) -> None:
        """Let an engine's process end: its clients have what it wrote, and then their connections break."""
        release = self.spec.releases[0]
        there = [task for task, (_, connection, _) in self.tasks.items() if connection.address[1] == port]
        for task in there:
            asked = self.tasks[task][0]
            if asked is not None and asked.arrival.is_stream:
                self.write(task, self.generated(task))
        self.down.add(port)
        self.engines[port] = Engine(release.engine)
        self.plan(port)
        self.events.after(back_s, lambda: self.down.discard(port))
        lost = [self.tasks.pop(task) for task in there]
        for asked, _, sent in lost:
            if asked is not None:
                asked.told += sent[0]
        for asked, connection, _ in sorted(lost, key=lambda one: one[0] is not None):
            connection.connection_lost(None if asked is None else ConnectionResetError())

    def write(self, task: Task, tokens: int) -> None:
        """Send the tokens that a client has not got."""
        _, connection, sent = self.tasks[task]
        event = chunk(CHUNK | {"choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]})
        while sent[0] < tokens:
            sent[0] += 1
            connection.data_received(event)

    def sweep(self) -> None:
        """Send what was written, and let the gateway look at its deadlines."""
        now_s = self.events.now_s
        for task, (asked, _, _) in list(self.tasks.items()):
            if asked is not None and asked.arrival.is_stream:
                self.write(task, self.generated(task))
                assert not asked.wire.is_closed, "a client was cut off"
        self.gateway.check_time(now_s)
        self.events.after(SWEEP_S, self.sweep)


def whole(answer: dict[str, Any]) -> bytes:
    """Return an answer that is no stream."""
    body = json.dumps(answer | {"object": "text_completion"}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunk(event: dict[str, Any]) -> bytes:
    """Return an event of a stream, in a chunk of its own."""
    data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


PROBE = Arrival(at_s=0.0, prompt_tokens=1, output_tokens=1)
PROBED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
