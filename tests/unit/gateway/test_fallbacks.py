"""A gateway with a fallback: who may go there, what it costs, and where a request goes that fails."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.gateway.test_exchange import STREAM, Bench, event, whole

from modelyard.domain.endpoints import Serving
from modelyard.domain.routing_table import ReleaseRoute, ReplicaRoute, RoutingTable
from modelyard.domain.usage import Intent, Price
from modelyard.gateway.server import ClientConnection
from modelyard.metering.journal import read_records, segments

CHAT = "/v1/chat/completions"
OWN, THEIRS = Price(1_000_000, 1_000_000, 1_000_000), Price(2_000_000, 500_000, 9_000_000)
ANSWER = whole(
    b'{"choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":10,"completion_tokens":2,"total_tokens":12}}'
)


class Fallen(Bench):
    """One replica of one slot with weight, and a fallback of two."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reports = 0
        self.gateway.presence.report_now = self._count  # type: ignore[method-assign]
        self.revision = 1
        self.offer(own=1)

    def _count(self) -> None:
        self.reports += 1

    def offer(self, *, own: int, after_s: float = 0.0, routes: frozenset[str] = frozenset({CHAT})) -> None:
        """Take a table in which the release with weight has ``own`` replicas."""
        table = self.gateway.catalog.table
        assert table is not None
        first = ReleaseRoute("v", 100, tuple(ReplicaRoute(f"r{n}", "own", 1, "s", 1) for n in range(own)))
        second = ReleaseRoute("w", 0, (ReplicaRoute("f", "theirs", 2, "s", 2),), fallback=1, price=THEIRS)
        (route,) = table.endpoints
        route = msgspec.structs.replace(
            route,
            releases=(first, second),
            routes=frozenset({CHAT, "/v1/completions"}),
            engine_extras=frozenset({"n", "continue_final_message"}),
            fallback_routes=routes,
            price=OWN,
            serving=Serving(fallback_after_s=after_s),
        )
        self.revision += 1
        new = RoutingTable("e", self.revision, table.tenants, table.keys, (route,))
        self.gateway.catalog.take(new, now_s=self.clock.monotonic_s())

    def went_to(self) -> list[str]:
        """Return the hosts that were connected to, in their order."""
        return [connection.address[0] for connection, _ in self.pool.opened]

    def records(self) -> list[Any]:
        return [record for path in segments(self.folder) for record in read_records(path, 0)[0]]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Fallen]:
    bench = Fallen(tmp_path)
    yield bench
    bench.assert_at_rest()
    bench.journal.close()


def asked(bench: Fallen, **fields: object) -> ClientConnection:
    client, _ = bench.client()
    bench.ask(client, **fields)
    return client


def test_each_is_billed_by_who_answered(bench: Fallen) -> None:
    first, second = asked(bench), asked(bench)
    assert bench.went_to() == ["own", "theirs"]
    for connection, _ in bench.pool.opened:
        connection.data_received(ANSWER)
    intents = [one for one in bench.records() if isinstance(one, Intent)]
    assert [(one.version_id, one.price) for one in intents] == [("v", OWN), ("w", THEIRS)]
    assert [one.price for one in bench.settled()] == [None, None], "as their intents say"
    assert first.current is None
    assert second.current is None


@pytest.mark.parametrize("status", [b"503 Busy", b"429 Too Many"])
def test_one_that_moved_is_settled_as_who_answered(bench: Fallen, status: bytes) -> None:
    asked(bench)
    bench.pool.opened[0][0].data_received(whole(b"{}", status))
    assert bench.went_to() == ["own", "theirs"]
    bench.pool.opened[1][0].data_received(ANSWER)
    (settle,) = bench.settled()
    assert (settle.version_id, settle.price, settle.replica_id) == ("w", THEIRS, "f")


@pytest.mark.parametrize("fields", [{"n": 2}, {"n": 1}])
def test_what_a_fallback_cannot_do_waits_for_the_others(bench: Fallen, fields: dict[str, Any]) -> None:
    holding = asked(bench)
    waiting = asked(bench, **fields)
    assert bench.went_to() == (["own"] if fields["n"] > 1 else ["own", "theirs"])
    for client in (holding, waiting):
        client.connection_lost(None)


def test_a_route_that_it_lacks_waits_for_the_others(bench: Fallen) -> None:
    bench.offer(own=1, routes=frozenset({"/v1/completions"}))
    clients = [asked(bench), asked(bench)]
    assert bench.went_to() == ["own"]
    for client in reversed(clients):
        client.connection_lost(None)


def test_a_request_waits_as_long_as_the_endpoint_says(bench: Fallen) -> None:
    bench.offer(own=1, after_s=2.0)
    clients = [asked(bench), asked(bench)]
    bench.clock.advance(1.9)
    bench.gateway.check_time(bench.clock.monotonic_s())
    assert bench.went_to() == ["own"]
    bench.clock.advance(0.2)
    bench.gateway.check_time(bench.clock.monotonic_s())
    assert bench.went_to() == ["own", "theirs"]
    for client in clients:
        client.connection_lost(None)


def test_who_sleeps_hears_of_what_a_fallback_answers(bench: Fallen) -> None:
    bench.offer(own=0)
    client = asked(bench)
    assert bench.went_to() == ["theirs"]
    assert bench.reports == 1
    client.connection_lost(None)


def test_who_was_answered_by_a_fallback_is_told_of_until_the_sleeper_is_awake(bench: Fallen) -> None:
    """The answer may be over before the controller looks: it would sleep on, and the fallback be paid for."""

    def wanted() -> int:
        (endpoint,) = bench.gateway.catalog.report(now_s=bench.clock.monotonic_s()).endpoints
        return endpoint.queued

    bench.offer(own=0)
    assert wanted() == 0
    asked(bench).connection_lost(None)
    assert wanted() == 1
    bench.clock.advance(29.0)
    assert wanted() == 1
    bench.offer(own=1)
    assert wanted() == 0
    bench.offer(own=0)
    assert wanted() == 0, "it went to sleep again, and nobody has come since"
    asked(bench).connection_lost(None)
    bench.clock.advance(31.0)
    assert wanted() == 0, "it cannot be had, and nobody asks for it any more"


def test_an_answer_that_has_begun_is_not_gone_on_with_by_somebody_else(bench: Fallen) -> None:
    bench.offer(own=2)
    client, wire = bench.client()
    bench.ask(client, stream=True)
    connection, _ = bench.pool.opened[0]
    other = asked(bench)
    connection.data_received(STREAM + event(role="assistant", content="a"))
    connection.connection_lost(None)
    assert bench.went_to() == ["own", "own"], "it waits for the other one of its own"
    assert len(bench.endpoint.dispatcher.line) == 1
    assert b"engine_lost" not in wire.sent
    client.connection_lost(None)
    other.connection_lost(None)


def test_the_dearest_is_reserved_and_what_answered_is_spent(bench: Fallen) -> None:
    prices = bench.endpoint.sheet("ten-1", 0.0)
    assert prices.most == Price(2_000_000, 1_000_000, 9_000_000)
    assert prices.of("w") == THEIRS
    assert prices.of("v") == OWN
    client = asked(bench)
    (exchange,) = bench.gateway.exchanges
    assert exchange.reservation._price == prices.most
    client.connection_lost(None)


def test_a_story_says_why_it_went_there(bench: Fallen) -> None:
    clients = [asked(bench), asked(bench)]
    request_id = next(one.request_id for one in bench.gateway.exchanges if one.replica and one.replica.route.id == "f")
    for client in clients:
        client.connection_lost(None)
    story = bench.gateway.memory.story(request_id, bench.gateway.catalog, now_s=bench.clock.monotonic_s())
    assert story is not None
    assert story.fallback == "no room on the 1 replica of the releases with weight (1 full)"
    assert story.cost_nanousd == story.prompt_tokens * 2
