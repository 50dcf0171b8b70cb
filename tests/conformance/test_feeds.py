"""The feed brings every gateway the newest table, and no gateway costs another anything."""

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from tests.support.waiting import eventually_async

from modelyard.domain.demand import EndpointDemand, Hello, ReplicaReport, Report
from modelyard.domain.endpoints import Progress, Stage
from modelyard.domain.routing_table import (
    EndpointRoute,
    Heartbeat,
    ReleaseRoute,
    ReplicaRoute,
    RoutingTable,
    Spent,
    TableChange,
    Tidings,
)
from modelyard.domain.signals import ReleaseCounts
from modelyard.domain.tenants import ApiKey, Scope, Tenant
from modelyard.domain.usage import Price
from modelyard.domain.why import Ask, Bound, Considered, Line, Move, RequestStory, Told
from modelyard.errors import StartupError
from modelyard.stores.feed import ASKED_MAX, FeedClient, FeedServer

TOKEN = "internal-token"
WITHIN_S = 15.0
BUSY = Report([EndpointDemand("ep-1", 3, 2, 0.0, 17)], [ReplicaReport("rep-1", 1, 4, "connection refused")])


@dataclass
class Gateway:
    """A following gateway: what it received so far."""

    client: FeedClient
    tables: list[RoutingTable] = field(default_factory=list)
    beats: list[Heartbeat] = field(default_factory=list)
    tidings: list[Tidings] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    losses: int = 0
    task: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        async for update in self.client.updates():
            self.order.append(type(update).__name__)
            match update:
                case Tidings():
                    self.tidings.append(update)
                case RoutingTable():
                    self.tables.append(update)
                case Heartbeat():
                    self.beats.append(update)
                case None:
                    self.losses += 1

    @property
    def revision(self) -> int:
        return self.tables[-1].revision if self.tables else 0

    async def sees(self, revision: int) -> None:
        await eventually_async(lambda: self.revision == revision, WITHIN_S, f"revision {revision}")


class Room:
    """A server on a socket of its own, and the gateways that follow it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "feed.sock"
        self.server = FeedServer(self.path, TOKEN)
        self.gateways: list[Gateway] = []

    def join(self, gateway_id: str = "gateway-0", token: str = TOKEN) -> Gateway:
        gateway = Gateway(FeedClient(self.path, token, gateway_id))
        gateway.task = asyncio.create_task(gateway.follow())
        self.gateways.append(gateway)
        return gateway

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.client.close()
            assert gateway.task is not None
            async with asyncio.timeout(WITHIN_S):
                await gateway.task
        await self.server.close()


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    opened = Room(tmp_path)
    await opened.server.start()
    yield opened
    await opened.close()


def a_table(revision: int, *, padding: int = 0) -> RoutingTable:
    replica = ReplicaRoute("rep-1", "127.0.0.1", 4000, "secret", 8)
    endpoint = EndpointRoute(
        id="ep-1",
        tenant_id="t1",
        name="smol",
        is_shared=False,
        created_at=1,
        releases=(ReleaseRoute("ver-1", 100, (replica,)),),
        routes=frozenset({"/v1/chat/completions", "/v1/completions"}),
        engine_extras=frozenset({"top_k"}),
        context_length=2048,
        price=Price(1, 2, 3),
        progress=Progress(Stage.READY, 100),
        failure="x" * padding,
    )
    key = ApiKey("k1", "t1", "laptop", b"\x00\xff" * 16, (Scope.INFERENCE,), 1)
    return RoutingTable("epoch-1", revision, (Tenant("t1", "acme", 1),), (key,), (endpoint,))


async def test_a_table_arrives_as_it_was_published(room: Room) -> None:
    gateway = room.join()
    await eventually_async(lambda: room.server.reports(), WITHIN_S, "the gateway is there")
    await room.server.publish(a_table(1))
    await gateway.sees(1)
    assert gateway.tables == [a_table(1)]


async def test_a_late_joiner_gets_the_current_table_at_once(room: Room) -> None:
    await room.server.publish(a_table(1))
    await room.server.publish(a_table(2))
    gateway = room.join()
    await gateway.sees(2)
    assert [table.revision for table in gateway.tables] == [2]


async def test_heartbeats_arrive(room: Room) -> None:
    gateway = room.join()
    await eventually_async(lambda: room.server.reports(), WITHIN_S, "the gateway is there")
    room.server.beat(Heartbeat(is_authoritative=False, reason="database locked"))
    await eventually_async(lambda: gateway.beats, WITHIN_S, "a heartbeat")
    assert gateway.beats == [Heartbeat(is_authoritative=False, reason="database locked")]


async def test_a_late_joiner_gets_the_last_heartbeat_at_once(room: Room) -> None:
    room.server.beat(Heartbeat(is_authoritative=True))
    gateway = room.join()
    await eventually_async(lambda: gateway.beats, WITHIN_S, "a heartbeat")
    assert gateway.beats == [Heartbeat(is_authoritative=True)]


async def test_a_wrong_token_gets_nothing_and_is_not_a_gateway(room: Room) -> None:
    await room.server.publish(a_table(1))
    stranger = room.join("gateway-9", token="internal-tokem")
    gateway = room.join()
    await gateway.sees(1)
    stranger.client.send(BUSY)
    async with asyncio.timeout(WITHIN_S):
        reader, writer = await asyncio.open_unix_connection(str(room.path))
        writer.write(framed(Hello("", "gateway-9")))
        assert await reader.read() == b""
    writer.close()
    assert stranger.tables == []
    assert stranger.losses == 0
    assert set(room.server.reports()) == {"gateway-0"}


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc", b"\x00\x01\x00\x00" + b"x" * 70_000, b"\x00\x00"],
    ids=["huge", "no msgpack", "too long for a hello", "cut short"],
)
async def test_garbage_instead_of_a_hello_is_hung_up_on(room: Room, garbage: bytes) -> None:
    async with asyncio.timeout(WITHIN_S):
        reader, writer = await asyncio.open_unix_connection(str(room.path))
        writer.write(garbage)
        writer.write_eof()
        with suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()
    gateway = room.join()
    await room.server.publish(a_table(1))
    await gateway.sees(1)


async def test_reports_are_heard_and_an_empty_one_when_the_gateway_leaves(room: Room) -> None:
    heard: list[tuple[str, Report]] = []
    room.server.on_report(lambda gateway_id, report: heard.append((gateway_id, report)))
    gateway = room.join()
    await eventually_async(lambda: room.server.reports(), WITHIN_S, "the gateway is there")
    gateway.client.send(BUSY)
    await eventually_async(lambda: heard, WITHIN_S, "a report")
    assert room.server.reports() == {"gateway-0": BUSY}
    await gateway.client.close()
    await eventually_async(lambda: len(heard) == 2, WITHIN_S, "the farewell")
    assert heard == [("gateway-0", BUSY), ("gateway-0", Report([], []))]
    assert room.server.reports() == {}


async def test_a_report_without_a_connection_is_dropped(tmp_path: Path) -> None:
    client = FeedClient(tmp_path / "nobody.sock", TOKEN, "gateway-0")
    client.send(BUSY)
    await client.close()
    assert [update async for update in client.updates()] == []


async def test_a_gateway_finds_a_restarted_controller_again(room: Room) -> None:
    gateway = room.join()
    await room.server.publish(a_table(1))
    await gateway.sees(1)
    await room.server.close()
    await eventually_async(lambda: gateway.losses == 1, WITHIN_S, "the loss is noticed")
    room.server = FeedServer(room.path, TOKEN)
    await room.server.publish(a_table(2))
    await room.server.start()
    await gateway.sees(2)
    assert gateway.losses == 1, "failed attempts are not losses"


async def test_a_gateway_may_be_there_before_its_controller(tmp_path: Path) -> None:
    room = Room(tmp_path)
    gateway = room.join()
    await room.server.publish(a_table(1))
    await room.server.start()
    await gateway.sees(1)
    assert gateway.losses == 0
    await room.close()


async def test_a_gateway_that_connects_again_is_still_one(room: Room) -> None:
    heard: list[Report] = []
    first = room.join()
    await room.server.publish(a_table(1))
    await first.sees(1)
    room.server.on_report(lambda _, report: heard.append(report))
    reader, writer = await asyncio.open_unix_connection(str(room.path))
    writer.write(framed(Hello(TOKEN, "gateway-0")))
    async with asyncio.timeout(WITHIN_S):
        assert await reader.readexactly(4)
    assert set(room.server.reports()) == {"gateway-0"}
    assert heard == [], "a gateway that is back has not left"
    writer.close()


async def test_a_slow_gateway_gets_only_the_newest_table_and_delays_nobody(room: Room) -> None:
    """Tables of a megabyte do not fit into the socket's buffers: all but one in flight must wait, as one."""
    slow_reader, slow_writer = await asyncio.open_unix_connection(str(room.path), limit=4096)
    slow_writer.write(framed(Hello(TOKEN, "slow")))
    await eventually_async(lambda: "slow" in room.server.reports(), WITHIN_S, "the slow gateway is there")
    prompt = room.join("prompt")
    await eventually_async(lambda: "prompt" in room.server.reports(), WITHIN_S, "the prompt gateway is there")
    for revision in range(1, 21):
        await room.server.publish(a_table(revision, padding=1_000_000))
        await prompt.sees(revision)
    assert [table.revision for table in prompt.tables] == list(range(1, 21))
    got: list[int] = []
    async with asyncio.timeout(WITHIN_S):
        while not got or got[-1] != 20:
            body = await slow_reader.readexactly(int.from_bytes(await slow_reader.readexactly(4), "big"))
            got.append(msgspec.msgpack.decode(body, type=RoutingTable | TableChange).revision)
    assert got == [1, 20]
    slow_writer.close()


async def test_publish_returns_when_the_gateways_have_the_table(room: Room) -> None:
    gateways = [room.join(f"gateway-{number}") for number in range(3)]
    await eventually_async(lambda: len(room.server.reports()) == 3, WITHIN_S, "three gateways")
    await room.server.publish(a_table(1, padding=3_000_000))
    for gateway in gateways:
        await gateway.sees(1)


async def test_only_the_owner_may_connect(room: Room) -> None:
    assert stat.S_IMODE(room.path.stat().st_mode) == 0o600


async def test_a_path_too_long_for_a_socket_is_explained(tmp_path: Path) -> None:
    server = FeedServer(tmp_path / ("x" * 120), TOKEN)
    with pytest.raises(StartupError, match="--data-dir"):
        await server.start()


def framed(message: Hello) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


NEWS = Tidings(
    spent=(Spent("k1", "2026-11-29", "2026-11", 1, 2, 3, 4, "gateway-0"),), delivered={"gateway-0": ("1.journal", 70)}
)


async def test_tidings_arrive_and_a_late_joiner_gets_the_last_at_once(room: Room) -> None:
    first = room.join()
    await eventually_async(lambda: room.server.reports(), WITHIN_S, "the gateway is there")
    room.server.tell(Tidings())
    await eventually_async(lambda: first.tidings, WITHIN_S, "tidings")
    room.server.tell(NEWS)
    second = room.join("gateway-1")
    await eventually_async(lambda: second.tidings and first.tidings[1:], WITHIN_S, "tidings for both")
    assert (first.tidings, second.tidings) == ([Tidings(), NEWS], [NEWS])


async def test_sums_for_a_key_arrive_before_the_table_that_has_it(room: Room) -> None:
    gateway = room.join()
    await eventually_async(lambda: room.server.reports(), WITHIN_S, "the gateway is there")
    room.server.tell(NEWS)
    await room.server.publish(a_table(1))
    await gateway.sees(1)
    assert gateway.order == ["Tidings", "RoutingTable"]


async def test_a_change_among_many_endpoints_is_sent_as_the_change_and_arrives_as_the_whole_table(room: Room) -> None:
    before = a_table(1)
    many = tuple(msgspec.structs.replace(before.endpoints[0], id=f"ep-{number}") for number in range(500))
    before = msgspec.structs.replace(before, endpoints=many)
    after = msgspec.structs.replace(
        before, revision=2, endpoints=(*many[:7], msgspec.structs.replace(many[7], failure="x"), *many[9:])
    )
    reader, writer = await asyncio.open_unix_connection(str(room.path))
    writer.write(framed(Hello(TOKEN, "raw")))
    gateway = room.join()
    await eventually_async(lambda: len(room.server.reports()) == 2, WITHIN_S, "both are there")
    sizes = []
    for table in (before, after):
        await room.server.publish(table)
        await gateway.sees(table.revision)
        async with asyncio.timeout(WITHIN_S):
            sizes.append(len(await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))))
    writer.transport.abort()
    assert gateway.tables == [before, after]
    assert sizes[1] < sizes[0] / 100


async def test_a_gateway_that_joins_between_changes_gets_all_of_it_and_then_changes(room: Room) -> None:
    await room.server.publish(a_table(1))
    first = room.join("first")
    await first.sees(1)
    await room.server.publish(a_table(2))
    second = room.join("second")
    await second.sees(2)
    await room.server.publish(a_table(3, padding=3))
    for gateway in (first, second):
        await gateway.sees(3)
        assert gateway.tables[-1] == a_table(3, padding=3)
        assert gateway.losses == 0


async def answering(gateway: Gateway, story: RequestStory | None) -> None:
    """Answer every question of the controller with ``story``."""
    async for update in gateway.client.updates():
        if isinstance(update, Ask):
            gateway.client.send(Told(update.number, story))


def a_story(request_id: str = "req_1") -> RequestStory:
    return RequestStory(
        request_id=request_id,
        tenant_id="t1",
        key_id="k1",
        source="gateway-1",
        arrived_at=1.5,
        route="/v1/chat/completions",
        model="smol",
        endpoint_id="ep-1",
        status=429,
        code="queue_full",
        facts={"waiting": 3, "predicted_wait_s": 1.25},
        bounds=(Bound("key", "concurrency", 4),),
        line=Line(3, None, is_cold=True),
        considered=(Considered("rep-1", 1, 8, is_chosen=True, cached_tokens=256, total_s=0.5),),
        moves=(Move("rep-2", "ver-1", 0.25, "connection lost"),),
    )


class Answerers:
    """Gateways that only answer questions."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.tasks: list[asyncio.Task[None]] = []

    async def join(self, gateway_id: str, story: RequestStory | None) -> Gateway:
        gateway = Gateway(FeedClient(self.room.path, TOKEN, gateway_id))
        self.tasks.append(asyncio.create_task(answering(gateway, story)))
        await eventually_async(lambda: gateway_id in self.room.server.reports(), WITHIN_S, f"{gateway_id} follows")
        return gateway

    async def close(self, *gateways: Gateway) -> None:
        for gateway in gateways:
            await gateway.client.close()
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*self.tasks)


async def test_a_question_is_answered_by_the_gateway_that_remembers(room: Room) -> None:
    await room.server.publish(a_table(1))
    answerers = Answerers(room)
    gateways = [
        await answerers.join("gateway-0", None),
        await answerers.join("gateway-1", a_story()),
        await answerers.join("gateway-2", None),
    ]
    assert await room.server.ask("req_1", timeout_s=WITHIN_S) == a_story()
    await answerers.close(*gateways)


async def test_a_question_that_nobody_can_answer_has_no_answer(room: Room) -> None:
    assert await room.server.ask("req_1", timeout_s=WITHIN_S) is None
    answerers = Answerers(room)
    gateway = await answerers.join("gateway-0", None)
    assert await room.server.ask("req_1", timeout_s=WITHIN_S) is None
    await answerers.close(gateway)


async def test_a_gateway_that_does_not_answer_is_waited_for_as_long_as_was_said_and_no_longer(room: Room) -> None:
    silent = room.join("gateway-0")  # it takes questions for news and goes on
    answerers = Answerers(room)
    other = await answerers.join("gateway-1", None)
    await eventually_async(lambda: len(room.server.reports()) == 2, WITHIN_S, "both follow")
    async with asyncio.timeout(WITHIN_S):
        assert await room.server.ask("req_1", timeout_s=0.2) is None
    await eventually_async(lambda: "Ask" in silent.order, WITHIN_S, "the question came")
    # An answer that comes too late is nobody's.
    silent.client.send(Told(1, a_story()))
    silent.client.send(BUSY)
    await eventually_async(lambda: room.server.reports()["gateway-0"] == BUSY, WITHIN_S, "the feed goes on")
    await answerers.close(other)


async def test_whoever_waits_for_a_gateway_that_leaves_is_told_at_once(room: Room) -> None:
    gateway = room.join("gateway-0")
    await eventually_async(lambda: "gateway-0" in room.server.reports(), WITHIN_S, "it follows")
    asking = asyncio.create_task(room.server.ask("req_1", timeout_s=600))
    await eventually_async(lambda: "Ask" in gateway.order, WITHIN_S, "the question came")
    await gateway.client.close()
    async with asyncio.timeout(WITHIN_S):
        assert await asking is None


async def test_one_gateway_is_asked_a_bounded_number_of_questions_at_a_time(room: Room) -> None:
    gateway = room.join("gateway-0")
    await eventually_async(lambda: "gateway-0" in room.server.reports(), WITHIN_S, "it follows")
    asking = [asyncio.create_task(room.server.ask(f"req_{n}", timeout_s=600)) for n in range(ASKED_MAX + 5)]
    await eventually_async(lambda: gateway.order.count("Ask") == ASKED_MAX, WITHIN_S, "the questions came")
    await eventually_async(lambda: sum(task.done() for task in asking) == 5, WITHIN_S, "the rest is not asked")
    await gateway.client.close()
    async with asyncio.timeout(WITHIN_S):
        assert set(await asyncio.gather(*asking)) == {None}


async def test_counts_of_releases_arrive_as_they_were_told_and_silence_of_them_too(room: Room) -> None:
    gateway = room.join("gateway-0")
    await eventually_async(lambda: "gateway-0" in room.server.reports(), WITHIN_S, "it follows")
    counts = ReleaseCounts("ep-1", "ver-1", 9, 1, (0, 3), (), (1, 2, 3), 70, 80, 1.25)
    told = msgspec.structs.replace(BUSY, releases=[counts])
    gateway.client.send(told)
    await eventually_async(lambda: room.server.reports()["gateway-0"] == told, WITHIN_S, "counts")
    gateway.client.send(BUSY)
    await eventually_async(lambda: room.server.reports()["gateway-0"].releases is None, WITHIN_S, "not said")
