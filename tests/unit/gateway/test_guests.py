"""Guests on replicas of a host, through the gateway: names, missing guests, reports, and who is blamed."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.simulated import end, launch, ready
from tests.unit.gateway.test_exchange import Bench, whole

from modelyard.domain.demand import ReplicaReport
from modelyard.domain.routing_table import ReleaseRoute, ReplicaRoute
from modelyard.gateway.server import ClientConnection
from modelyard.gateway.side_requests import GUEST_MISSING
from modelyard.gateway.upstream import CONNECT_TIMEOUT, Receiver, UpstreamPool
from modelyard.policy.seats import Seat

NOT_THERE = whole(b'{"error":{"message":"The model `m@1` does not exist.","code":404}}', b"404 Not Found")
ANSWER = whole(
    b'{"object":"chat.completion","model":"m@1","choices":[{"message":{"content":"hi"}}],'
    b'"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'
)


class Yard(Bench):
    """A bench whose model is a guest on replicas of a host at different ports."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reports = 0
        self.gateway.presence.report_now = self._report_now  # type: ignore[method-assign]
        self.take((1, 2))

    def _report_now(self) -> None:
        self.reports += 1

    def take(
        self,
        ports: tuple[int, ...],
        *,
        slots: int = 4,
        shadow: tuple[int, ...] = (),
        digest: int = 1,
        routes: tuple[str, ...] = ("/v1/chat/completions",),
    ) -> None:
        table = self.gateway.catalog.table
        assert table is not None

        def seats(ports: tuple[int, ...], digest: int) -> tuple[ReplicaRoute, ...]:
            return tuple(
                ReplicaRoute(
                    f"r{port}/m@{digest}", "127.0.0.1", port, "s", slots, model_name=f"m@{digest}", seat_of=f"r{port}"
                )
                for port in ports
            )

        releases = (ReleaseRoute("v1", 100, seats(ports, digest)),)
        if shadow:
            releases = (*releases, ReleaseRoute("v2", 0, seats(shadow, 2), shadow=100))
        guest = msgspec.structs.replace(self.endpoint.route, releases=releases, routes=frozenset(routes))
        replicas = tuple(ReplicaRoute(f"r{port}", "127.0.0.1", port, "s", slots) for port in {*ports, *shadow})
        host = msgspec.structs.replace(guest, id="host", name="base", releases=(ReleaseRoute("b1", 100, replicas),))
        new = msgspec.structs.replace(table, revision=table.revision + 1, endpoints=(guest, host))
        self.gateway.catalog.take(new, now_s=self.clock.monotonic_s())

    def asked(self) -> Any:
        """Return the body of the last request to an engine."""
        return json.loads(self.pool.opened[-1][1].sent.rpartition(b"\r\n\r\n")[2])

    def post(self, client: ClientConnection, path: str, body: bytes, content_type: str = "application/json") -> None:
        """Send a request of any route."""
        head = f"POST {path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {self.token}\r\n"
        head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        client.data_received(head.encode() + body)

    def answer(self, raw: bytes) -> None:
        """Have the engine of the last request answer."""
        self.pool.opened[-1][0].data_received(raw)

    def told(self, replica_id: str) -> ReplicaReport:
        report = self.gateway.catalog.report(now_s=self.clock.monotonic_s())
        (found,) = [one for one in report.replicas if one.replica_id == replica_id]
        return found

    def later(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.gateway.check_time(self.clock.monotonic_s())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Yard]:
    bench = Yard(tmp_path)
    yield bench
    bench.assert_at_rest()
    for replica in bench.endpoint.dispatcher.replicas:
        assert (replica.own, replica.pending_tokens, replica.unanswered) == (0, 0, 0), replica
    bench.journal.close()


def test_an_engine_is_asked_by_the_guests_name_and_the_caller_sees_its_own(bench: Yard) -> None:
    client, wire = bench.client()
    bench.ask(client)
    assert bench.asked()["model"] == "m@1"
    bench.answer(ANSWER)
    assert b'"model":"m"' in wire.sent
    assert [record.status for record in bench.settled()] == ["success"]


def test_a_name_in_a_path_is_the_engines_there_and_the_callers_in_the_answer(bench: Yard) -> None:
    bench.take((1,), shadow=(3,), routes=("/v2/models/{model}/infer",))
    client, wire = bench.client()
    body = b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1.0]}]}'
    bench.post(client, "/v2/models/m/infer", body)
    sent = [connection.sent.partition(b" HTTP/1.1")[0] for _, connection in bench.pool.opened]
    assert sorted(sent) == [b"POST /v2/models/m%401/infer", b"POST /v2/models/m%402/infer"], "the shadow has its own"
    for protocol, connection in bench.pool.opened:
        name = b"m@1" if b"m%401" in connection.sent else b"m@2"
        protocol.data_received(whole(b'{"model_name":"%b","outputs":[]}' % name))
    assert b'"model_name":"m"' in wire.sent


def test_a_form_names_the_model_as_the_engine_calls_it(bench: Yard) -> None:
    bench.take((1,), routes=("/v1/audio/transcriptions",))
    client, wire = bench.client()
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x\r\nContent-Disposition: form-data; '
    form += b'name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\nRIFF\r\n--x--\r\n'
    bench.post(client, "/v1/audio/transcriptions", form, "multipart/form-data; boundary=x")
    assert b'name="model"\r\n\r\nm@1\r\n' in bench.pool.opened[-1][1].sent, wire.sent
    bench.answer(whole(b'{"text":"hi","usage":{"type":"duration","seconds":1}}'))
    assert b" 200 " in wire.sent


def test_a_seat_is_reported_by_its_own_requests_and_a_replica_by_everybodys(bench: Yard) -> None:
    bench.take((1,))
    clients = [bench.client()[0] for _ in range(3)]
    bench.ask(clients[0])
    bench.ask(clients[1])
    bench.ask(clients[2], model="base")
    assert (bench.told("r1/m@1").in_flight, bench.told("r1").in_flight) == (2, 3)
    assert bench.told("r1/m@1").reading is None
    assert bench.told("r1").reading
    for client in clients:
        client.connection_lost(None)
    assert (bench.told("r1/m@1").in_flight, bench.told("r1").in_flight) == (0, 0)


def test_a_request_whose_guest_was_evicted_goes_to_another_seat(bench: Yard) -> None:
    client, wire = bench.client()
    bench.ask(client)
    bench.answer(NOT_THERE)
    assert len(bench.pool.opened) == 2
    bench.answer(ANSWER)
    assert wire.sent.startswith(b"HTTP/1.1 200 OK")
    assert bench.reports, "the controller is to load it again"
    (missing,) = [one for one in ("r1", "r2") if bench.told(f"{one}/m@1").failures]
    assert bench.told(f"{missing}/m@1").reason == GUEST_MISSING
    assert (bench.told("r1").failures, bench.told("r2").failures) == (0, 0), "the replicas are well"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_waits_when_its_guest_is_nowhere_and_is_served_when_it_is_back(bench: Yard, is_stream: bool) -> None:
    bench.take((1,))
    client, wire = bench.client()
    bench.ask(client, stream=is_stream)
    bench.answer(NOT_THERE)
    assert len(bench.endpoint.dispatcher.line) == 1
    assert b"HTTP/1.1 4" not in wire.sent
    bench.later(1.5)
    bench.answer(NOT_THERE)  # to the probe
    assert len(bench.endpoint.dispatcher.line) == 1, "still away"
    bench.later(2.5)
    bench.answer(ANSWER)
    assert len(bench.endpoint.dispatcher.line) == 0
    client.connection_lost(None)
    assert bench.told("r1/m@1").failures == 0


def test_a_new_table_with_the_guest_on_another_replica_serves_who_waits(bench: Yard) -> None:
    bench.take((1,))
    client, wire = bench.client()
    bench.ask(client)
    bench.answer(NOT_THERE)
    bench.take((2,), digest=3)
    assert bench.asked()["model"] == "m@3"
    bench.answer(ANSWER)
    assert wire.sent.startswith(b"HTTP/1.1 200 OK")


def test_an_engine_that_says_it_with_400_and_names_all_that_it_has_is_understood(bench: Yard) -> None:
    client, wire = bench.client()
    bench.ask(client)
    said = (
        b'{"object":"error","message":"The following requested LoRA adapters are not loaded: m@1\\nLoaded adapters: '
        b'odict_keys([\'globex.legal@ba9876543210\']).","code":400}'
    )
    bench.answer(whole(said, b"400 Bad Request"))
    assert len(bench.pool.opened) == 2, "it goes to another seat"
    bench.answer(ANSWER)
    assert wire.sent.startswith(b"HTTP/1.1 200 OK")
    assert b"globex" not in wire.sent
    assert bench.reports, "the controller is to load it again"


def test_who_else_is_on_an_engine_is_not_told_to_a_caller(bench: Yard) -> None:
    client, wire = bench.client()
    bench.ask(client)
    said = b'{"error":{"message":"m@1 does not go with globex.legal@ba9876543210."}}'
    bench.answer(whole(said, b"400 Bad Request"))
    assert b'"m does not go with another guest."' in wire.sent


def test_a_caller_is_never_told_404_of_our_own_making(bench: Yard) -> None:
    bench.take((1, 2, 3))
    client, wire = bench.client()
    bench.ask(client)
    for _ in range(3):
        bench.answer(NOT_THERE)
    assert wire.sent.startswith(b"HTTP/1.1 503")
    assert b"engine_unavailable" in wire.sent


def test_404_of_a_replica_of_its_own_is_what_it_was(bench: Yard) -> None:
    client, wire = bench.client()
    bench.ask(client, model="base")
    bench.answer(NOT_THERE)
    assert wire.sent.startswith(b"HTTP/1.1 502")


def test_a_bad_request_to_a_guest_blames_nobody(bench: Yard) -> None:
    client, wire = bench.client()
    bench.ask(client)
    bench.answer(whole(b'{"error":{"message":"no"}}', b"400 Bad Request"))
    assert wire.sent.startswith(b"HTTP/1.1 400")
    assert not any(replica.failures or replica.ejected_until_s for replica in bench.endpoint.dispatcher.replicas)


def test_an_engine_that_dies_is_told_of_and_blamed_as_the_replica(bench: Yard) -> None:
    bench.take((1,))
    client, wire = bench.client()
    bench.ask(client)
    bench.pool.opened[-1][0].connection_lost(ConnectionResetError())
    assert wire.sent.startswith(b"HTTP/1.1 503")
    assert (bench.told("r1").failures, bench.told("r1/m@1").failures) == (1, 0)
    assert {name.removesuffix(" alone") for name in bench.gateway.suspects._crashes} == {"r1"}
    base = bench.gateway.catalog.by_id("host")
    assert base is not None
    assert [replica.ejected_until_s > 0 for replica in base.dispatcher.replicas] == [True]


def test_how_long_a_guest_waits_for_a_connection_puts_nobody_else_out(
    bench: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(address: tuple[str, int], receiver: Receiver, *, timeout_s: float) -> None:
        receiver.unreachable(address, CONNECT_TIMEOUT)

    monkeypatch.setattr(bench.pool, "open", too_late)
    client, _ = bench.client()
    bench.ask(client)
    host = bench.gateway.catalog.by_id("host")
    assert host is not None
    assert not any(replica.ejected_until_s for replica in host.dispatcher.replicas)
    assert any(replica.ejected_until_s for replica in bench.endpoint.dispatcher.replicas)
    client.connection_lost(None)


def test_a_copy_for_a_guest_that_is_not_there_tells_the_controller(bench: Yard) -> None:
    bench.take((1,), shadow=(2,))
    client, _ = bench.client()
    bench.ask(client)
    ((copy, copied), (engine, _)) = sorted(bench.pool.opened, key=lambda one: -one[0].address[1])
    assert json.loads(copied.sent.rpartition(b"\r\n\r\n")[2])["model"] == "m@2"
    copy.data_received(NOT_THERE)
    engine.data_received(ANSWER)
    assert bench.told("r2/m@2").failures == 1
    assert bench.reports


def test_a_table_that_takes_a_seat_away_lets_its_request_end(bench: Yard) -> None:
    bench.take((1,))
    client, wire = bench.client()
    bench.ask(client)
    bench.take(())
    assert bench.told("r1/m@1").in_flight == 1
    bench.answer(ANSWER)
    assert wire.sent.startswith(b"HTTP/1.1 200 OK")
    assert not bench.endpoint.dispatcher.replicas


def test_a_guest_of_two_real_engines_of_which_one_lost_it(tmp_path: Path) -> None:
    """The other engine answers, then the first one has it again and is used again."""
    folders = [tmp_path / name for name in ("gone", "there", "again")]
    for folder in folders:
        folder.mkdir()
    gone, there = ready(launch(folders[0], model_name="x@1")), ready(launch(folders[1], model_name="m@1"))
    again = gone

    async def talk() -> None:
        nonlocal again
        bench = Yard(tmp_path)
        bench.gateway.pool = pool = UpstreamPool(clock=bench.clock)
        bench.take((gone.port, there.port))

        async def ask() -> bytes:
            client, wire = bench.client()
            bench.ask(client, max_tokens=3)
            async with asyncio.timeout(60):
                while b"\r\n\r\n" not in wire.sent:
                    await asyncio.sleep(0.01)
            return bytes(wire.sent)

        answers = [await ask() for _ in range(4)]
        assert all(answer.startswith(b"HTTP/1.1 200 OK") for answer in answers), answers
        assert all(b'"model":"m"' in answer for answer in answers)
        (missing,) = [seat for seat in bench.endpoint.dispatcher.replicas if seat.failures]
        assert isinstance(missing, Seat)
        assert missing.route.port == gone.port
        end(gone)
        again = ready(launch(folders[2], model_name="m@1", port=gone.port))
        async with asyncio.timeout(60):
            while missing.failures:
                bench.later(2.0)
                await asyncio.sleep(0.05)
        await asyncio.gather(*(ask() for _ in range(8)))
        assert missing.last_dispatch > 4, "it is used again"
        await pool.close()
        bench.assert_at_rest()
        bench.journal.close()

    try:
        asyncio.run(talk())
    finally:
        for sim in {id(one): one for one in (gone, there, again)}.values():
            end(sim)
