"""An engine fails a request: what the client gets, what it is billed, and that nothing is lost on the way."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.gateway.test_exchange import DONE, END, PEPPER, STREAM, Bench, event, whole

from modelyard.domain.routing_table import ReleaseRoute, ReplicaRoute
from modelyard.domain.tenants import ApiKey, Scope, Tenant
from modelyard.gateway.relay import as_chunk
from modelyard.gateway.upstream import Receiver, UpstreamConnection
from modelyard.ids import hash_secret, new_api_key
from modelyard.policy.dispatch import ReplicaLoad


class Yard(Bench):
    """A bench with replicas of one slot at different ports, whose engine can go on with an answer."""

    def __init__(self, folder: Path, replicas: int = 3) -> None:
        super().__init__(folder)
        self.take(replicas)

    def take(self, replicas: int, *, first: int = 1, slots: int = 1) -> None:
        table = self.gateway.catalog.table
        assert table is not None
        routes = tuple(ReplicaRoute(f"r{port}", "h", port, "s", slots) for port in range(first, first + replicas))
        endpoint = msgspec.structs.replace(
            self.endpoint.route,
            is_shared=True,
            releases=(ReleaseRoute("v", 100, routes),),
            engine_extras=frozenset({"continue_final_message", "n"}),
        )
        new = msgspec.structs.replace(table, revision=table.revision + 1, endpoints=(endpoint,))
        self.gateway.catalog.take(new, now_s=self.clock.monotonic_s())

    @property
    def engine(self) -> UpstreamConnection:
        """The last connection that was opened."""
        return self.pool.opened[-1][0]

    def asked(self) -> Any:
        """Return the body of the last request to an engine."""
        return json.loads(self.pool.opened[-1][1].sent.rpartition(b"\r\n\r\n")[2])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Yard]:
    bench = Yard(tmp_path)
    yield bench
    bench.assert_at_rest()
    for replica in bench.endpoint.dispatcher.replicas:
        assert (replica.pending_tokens, replica.unanswered) == (0, 0), replica
    bench.journal.close()


def text_of(sent: bytes) -> str:
    """Return the text that a client was sent, of all choices."""
    return "".join(
        choice["delta"].get("content") or ""
        for line in sent.split(b"\n")
        if line.startswith(b"data: {")
        for choice in json.loads(line[6:]).get("choices", ())
    )


@pytest.mark.parametrize("error", [None, ConnectionResetError()])
def test_an_engine_lost_behind_its_finish_has_answered(bench: Yard, error: Exception | None) -> None:
    client, wire = bench.client()
    bench.ask(client, stream=True)
    bench.engine.data_received(STREAM + event(role="assistant", content="a") + event(finish="stop"))
    bench.engine.connection_lost(error)
    assert len(bench.pool.opened) == 1, "nothing is left to go on with"
    assert wire.sent.count(b'"finish_reason":"stop"') == 1
    assert wire.sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert [record.status for record in bench.settled()] == ["success"]


@pytest.mark.parametrize("end", ["body", "connection", "time"])
def test_one_finished_choice_of_two_is_no_whole_answer(bench: Yard, end: str) -> None:
    client, wire = bench.client()
    bench.ask(client, stream=True, n=2)
    bench.engine.data_received(STREAM + event(role="assistant", content="a") + event(finish="stop"))
    if end == "body":
        bench.engine.data_received(END)
    elif end == "connection":
        bench.engine.connection_lost(None)
    else:
        bench.clock.advance(200)
        bench.gateway.check_time(bench.clock.monotonic_s())
    assert b"[DONE]" not in wire.sent
    assert b'"error"' in wire.sent


def test_both_finished_choices_are_a_whole_answer(bench: Yard) -> None:
    client, wire = bench.client()
    bench.ask(client, stream=True, n=2)
    bench.engine.data_received(STREAM + event(role="assistant", content="a") + 2 * event(finish="stop") + END)
    assert wire.sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("field", [rb'"x":"\xff"', b'"x":1e999'])
def test_an_event_that_is_broken_where_nobody_looked_is_a_bad_answer_and_no_lost_engine(
    bench: Yard, field: bytes
) -> None:
    field = field.replace(rb"\xff", b"\xff")
    bad = b'data: {"choices":[{"delta":{"content":"a"}}],"usage":{},' + field + b"}\n\n"
    client, wire = bench.client()
    bench.ask(client, stream=True)
    bench.engine.data_received(STREAM + as_chunk(bad))
    assert not bench.gateway.suspects.has_any
    bench.engine.data_received(STREAM + event(role="assistant", content="b") + event(finish="stop") + DONE + END)
    assert text_of(wire.sent) == "b", "another replica may do better"


def test_the_next_engine_has_the_time_to_read_the_whole_prompt_again(bench: Yard) -> None:
    client, wire = bench.client()
    patience = bench.endpoint.patience
    bench.ask(client, stream=True)
    bench.engine.data_received(STREAM + event(role="assistant", content="a") + event(content="b"))
    bench.engine.connection_lost(None)
    second = bench.engine
    assert bench.asked()["messages"][-1] == {"role": "assistant", "content": "ab"}
    for _ in range(3):
        bench.gateway.check_time(bench.clock.monotonic_s())
        bench.clock.advance(patience.token_s / 2)
        bench.gateway.check_time(bench.clock.monotonic_s())
    second.data_received(STREAM + event(role="assistant", content="c"))
    (replica,) = [replica for replica in bench.endpoint.dispatcher.replicas if replica.running]
    assert (replica.pending_tokens, replica.unanswered) == (0, 0), "its prompt has been read"
    bench.gateway.check_time(bench.clock.monotonic_s())
    bench.clock.advance(patience.token_s + 1)
    bench.gateway.check_time(bench.clock.monotonic_s())
    assert bench.asked()["messages"][-1] == {"role": "assistant", "content": "abc"}, "a token is awaited as ever"
    bench.engine.data_received(STREAM + event(content="d") + event(finish="stop") + DONE + END)
    assert text_of(wire.sent) == "abcd"


def test_one_that_waits_to_go_on_waits_as_long_as_all_who_wait(bench: Yard) -> None:
    bench.take(2)
    bench.endpoint.patience = bench.endpoint.patience._replace(token_s=5)
    client, wire = bench.client()
    other, _ = bench.client()
    bench.ask(client, stream=True)
    first = bench.engine
    bench.ask(other, stream=True)
    first.data_received(STREAM + event(role="assistant", content="a"))
    first.connection_lost(None)
    bench.gateway.check_time(bench.clock.monotonic_s())
    bench.clock.advance(10)
    bench.gateway.check_time(bench.clock.monotonic_s())
    assert b"error" not in wire.sent
    other.connection_lost(None)
    bench.engine.data_received(STREAM + event(content="b") + event(finish="stop") + DONE + END)
    assert text_of(wire.sent) == "ab"


def test_a_client_that_was_behind_is_not_the_engines_silence(bench: Yard) -> None:
    client, wire = bench.client()
    bench.endpoint.patience = bench.endpoint.patience._replace(total_s=999)
    client.pause_writing()
    bench.ask(client, stream=True)
    bench.clock.advance(bench.endpoint.patience.first_token_s - 5)
    client.resume_writing()
    bench.clock.advance(10)
    bench.gateway.check_time(bench.clock.monotonic_s())
    bench.engine.data_received(STREAM + event(role="assistant", content="a") + event(finish="stop") + DONE + END)
    assert text_of(wire.sent) == "a"
    assert bench.settled()[-1].attempts == 1


@pytest.mark.parametrize("leaves", [True, False])
def test_tokens_that_the_first_engine_told_are_billed_once(bench: Yard, leaves: bool) -> None:
    bench.take(2)
    client, _ = bench.client()
    other, _ = bench.client()
    bench.ask(client, stream=True)
    first = bench.engine
    bench.ask(other, stream=True)
    chunk = {"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}
    first.data_received(STREAM + as_chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n"))
    first.connection_lost(None)
    if leaves:
        client.connection_lost(None)
    else:
        bench.clock.advance(100)
        bench.gateway.check_time(bench.clock.monotonic_s())
    (record,) = [record for record in bench.settled() if record.attempts == 1 and record.completion_tokens]
    assert (record.prompt_tokens, record.completion_tokens) == (9, 1)
    other.connection_lost(None)


def _refuse(address: tuple[str, int], receiver: Receiver, *, timeout_s: float) -> None:
    receiver.unreachable(address, "connection refused")


def _kill_all(bench: Yard, monkeypatch: pytest.MonkeyPatch, *, replicas: int = 3) -> bytes:
    """Ask on connections that were used before, of engines that die of it; return the answer."""
    for _ in range(replicas):
        client, wire = bench.client()
        bench.ask(client)
        bench.engine.data_received(whole(b'{"choices":[]}'))
    client, wire = bench.client()
    bench.ask(client, stop="deadly")
    with monkeypatch.context() as dead:
        dead.setattr(bench.pool, "open", _refuse)
        for engine, engine_wire in bench.pool.opened:
            if b"deadly" in engine_wire.sent:
                engine.connection_lost(None)
                engine_wire.is_closed = True
        for engine, engine_wire in bench.pool.opened:
            if b"deadly" in engine_wire.sent and not engine_wire.is_closed:
                engine.connection_lost(None)
                engine_wire.is_closed = True
    answer: bytes = wire.sent
    return answer


def test_two_engines_die_of_a_request_also_on_connections_that_were_used_before(
    bench: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = _kill_all(bench, monkeypatch)
    assert b"request_crashes_engine" in answer, answer
    assert sum(b"deadly" in wire.sent for _, wire in bench.pool.opened) == 2


def test_a_connection_that_closed_just_as_it_was_used_is_nobodys_failure(bench: Yard) -> None:
    bench.take(1)
    client, wire = bench.client()
    bench.ask(client)
    bench.engine.data_received(whole(b'{"choices":[]}'))
    bench.ask(client)
    bench.engine.connection_lost(None)
    bench.engine.data_received(whole(b'{"choices":[]}'))
    assert wire.sent.count(b"HTTP/1.1 200 OK") == 2
    assert not bench.gateway.suspects.has_any
    assert all(replica.health.is_closed for replica in bench.endpoint.dispatcher.replicas)


def test_what_kills_the_engines_of_one_endpoint_is_not_refused_to_another_of_that_name(
    bench: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert b"request_crashes_engine" in _kill_all(bench, monkeypatch)
    client, wire = bench.client()
    bench.ask(client, stop="deadly")
    assert b"request_crashes_engine" in wire.sent
    table = bench.gateway.catalog.table
    assert table is not None
    (route,) = table.endpoints
    new = msgspec.structs.replace(table, revision=99, endpoints=(msgspec.structs.replace(route, id="another"),))
    bench.gateway.catalog.take(new, now_s=bench.clock.monotonic_s())
    client, wire = bench.client()
    bench.ask(client, stop="deadly")
    assert wire.sent == b"", "an engine has it"
    client.connection_lost(None)


@pytest.mark.parametrize("asks_usage", [False, True])
def test_an_answer_that_has_all_its_tokens_is_ended_and_not_continued(bench: Yard, asks_usage: bool) -> None:
    client, wire = bench.client()
    options = {"stream_options": {"include_usage": True}} if asks_usage else {}
    bench.ask(client, stream=True, max_tokens=2, **options)
    bench.engine.data_received(STREAM + event(role="assistant", content="a") + event(content="b"))
    bench.engine.connection_lost(None)
    assert text_of(wire.sent) == "ab", "not a token more than was asked for"
    assert wire.sent.count(b'"finish_reason":"length"') == 1
    assert wire.sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert (b'"completion_tokens":2' in wire.sent) is asks_usage
    (record,) = bench.settled()
    assert (record.status, record.completion_tokens, record.attempts) == ("success", 2, 1)


def _delete(bench: Yard) -> None:
    table = bench.gateway.catalog.table
    assert table is not None
    new = msgspec.structs.replace(table, revision=table.revision + 1, endpoints=())
    bench.gateway.catalog.take(new, now_s=bench.clock.monotonic_s())


def test_who_is_admitted_after_its_endpoint_was_deleted_waits_for_nothing(
    bench: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.take(0)
    client, wire = bench.client()
    later: list[Any] = []
    with monkeypatch.context() as claimed:
        claimed.setattr(bench.gateway, "admit", lambda exchange, _wait_s: later.append(exchange))
        bench.ask(client)
    _delete(bench)
    bench.gateway.admit(later[0])
    assert wire.sent.startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("begun", [False, True])
def test_who_waits_again_after_an_engine_failed_it_is_not_told_that_none_had_it(bench: Yard, begun: bool) -> None:
    bench.take(2)
    client, wire = bench.client()
    other, _ = bench.client()
    bench.ask(client, stream=True)
    first = bench.engine
    bench.ask(other)
    if begun:
        first.data_received(STREAM + event(role="assistant", content="a"))
    first.connection_lost(None)
    assert len(bench.endpoint.dispatcher.line) == 1
    bench.clock.advance(bench.gateway.settings.queue_wait_s + 1)
    bench.gateway.check_time(bench.clock.monotonic_s())
    assert (b"engine_lost" if begun else b"engine_unavailable") in wire.sent
    other.connection_lost(None)


def test_a_lost_replica_is_probed_however_quiet_it_is(bench: Yard) -> None:
    bench.take(1)
    client, _ = bench.client()
    bench.ask(client)
    bench.engine.connection_lost(None)
    bench.clock.advance(3600)
    bench.gateway.check_time(bench.clock.monotonic_s())
    assert len(bench.pool.opened) == 2
    bench.engine.data_received(whole(b'{"choices":[]}'))
    assert all(replica.health.is_closed for replica in bench.endpoint.dispatcher.replicas)


def test_who_gets_a_replica_because_the_one_before_it_gives_up_is_not_told_that_it_waited_too_long(
    bench: Yard,
) -> None:
    bench.take(1)
    (replica,) = bench.endpoint.dispatcher.replicas
    clients = [bench.client() for _ in range(3)]
    bench.ask(clients[0][0])
    bench.ask(clients[1][0])
    bench.ask(clients[2][0])
    assert len(bench.endpoint.dispatcher.line) == 2
    bench.clock.advance(bench.gateway.settings.queue_wait_s + 1)
    replica.slots = 2  # as if the first of them had been too big for what is free
    bench.gateway.check_time(bench.clock.monotonic_s())
    assert clients[1][1].sent.startswith(b"HTTP/1.1 429 ")
    assert clients[2][1].sent == b"", "it is under way"
    for client, _ in clients:
        client.connection_lost(None)


def test_a_tenant_cannot_make_a_common_question_look_deadly_to_others(bench: Yard) -> None:
    for number in (1, 2):
        bench.take(1, first=number, slots=2)
        for fields in ({"stop": f"deadly {number}"}, {}):
            client, wire = bench.client()
            bench.ask(client, **fields)
        for engine, engine_wire in bench.pool.opened[-2:]:
            engine.connection_lost(None)
            engine_wire.is_closed = True
    bench.take(1, first=3)
    client, wire = bench.client()
    bench.ask(client)
    assert b"request_crashes_engine" in wire.sent, "it has only itself to blame"
    token = bench.token
    bench.token, parsed = new_api_key()
    table = bench.gateway.catalog.table
    assert table is not None
    other = ApiKey(parsed.key_id, "u", "k", hash_secret(PEPPER, parsed.secret), (Scope.INFERENCE,), 0)
    new = msgspec.structs.replace(
        table, revision=99, tenants=(*table.tenants, Tenant("u", "u", 0)), keys=(*table.keys, other)
    )
    bench.gateway.catalog.take(new, now_s=bench.clock.monotonic_s())
    client, wire = bench.client()
    bench.ask(client)
    assert wire.sent == b"", "an engine has it"
    client.connection_lost(None)
    bench.token = token
    bench.gateway.catalog.take(msgspec.structs.replace(table, revision=100), now_s=bench.clock.monotonic_s())


def test_what_kills_engines_on_its_own_is_refused_to_all_tenants(bench: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert b"request_crashes_engine" in _kill_all(bench, monkeypatch)
    (refused,) = bench.gateway.suspects.export(bench.clock.monotonic_s())[1:]
    assert refused[1] > 0


@pytest.mark.parametrize("status", [b"400 Bad", b"429 Busy", b"500 No", b"200 OK"])
def test_an_engine_that_refuses_the_rest_of_an_answer_does_not_make_the_question_wrong(
    bench: Yard, status: bytes
) -> None:
    client, wire = bench.client()
    bench.ask(client, stream=True)
    bench.engine.data_received(STREAM + event(role="assistant", content="a"))
    bench.engine.connection_lost(None)
    bench.engine.data_received(whole(b'{"error":{"message":"context length exceeded"}}', status))
    assert b'"code":"engine_lost"' in wire.sent
    assert b"[DONE]" not in wire.sent
    assert bench.settled()[-1].completion_tokens == 1


def test_a_late_refusal_of_one_replica_says_nothing_of_the_next(tmp_path: Path) -> None:
    bench = Yard(tmp_path, replicas=2)
    client, _ = bench.client()
    waiting: list[tuple[tuple[str, int], Receiver]] = []
    bench.pool.open = lambda address, receiver, *, timeout_s: waiting.append((address, receiver))  # type: ignore[method-assign]
    bench.ask(client, stream=True)
    ((first, receiver),) = waiting
    receiver.unreachable(first, "connection refused")
    assert len(waiting) == 2
    receiver.unreachable(first, "connection refused")
    second = next(r for r in bench.endpoint.dispatcher.replicas if (r.route.host, r.route.port) == waiting[1][0])
    assert second.health.is_closed
    assert len(waiting) == 2
    client.connection_lost(None)
    bench.journal.close()


def test_who_waits_for_a_first_token_leaves_an_engine_that_is_known_to_be_silent(tmp_path: Path) -> None:
    bench = Yard(tmp_path, replicas=2)
    bench.take(2, slots=16)
    clients = [bench.client() for _ in range(9)]
    bench.ask(clients[0][0], stream=True)
    first, port = bench.engine, bench.engine.address[1]
    first.data_received(STREAM + event(role="assistant", content="a"))
    bench.gateway.check_time(bench.clock.monotonic_s())
    # Those that follow have only asked; every other one is on the same engine.
    for client, _ in clients[1:]:
        bench.ask(client, stream=True)
    others = [(connection, wire) for connection, wire in bench.pool.opened[1:] if connection.address[1] == port]
    assert len(others) >= 3
    opened = len(bench.pool.opened)
    bench.clock.advance(bench.endpoint.patience.token_s + 1)
    for connection, _ in bench.pool.opened:
        if connection.address[1] != port:
            connection.data_received(STREAM + event(role="assistant", content="b"))
    bench.gateway.check_time(bench.clock.monotonic_s())
    # The one that had begun goes on elsewhere; so do those that had nothing yet, long before their own time.
    moved = bench.pool.opened[opened:]
    assert [connection.address[1] for connection, _ in moved] == [3 - port] * (1 + len(others))
    assert all(wire.is_closed for _, wire in others)
    for client, _ in clients:
        client.connection_lost(None)
    bench.journal.close()


@pytest.mark.parametrize("is_remote", [False, True])
def test_who_cannot_be_tried_again_or_would_be_paid_for_twice_stays_with_its_silent_engine(
    tmp_path: Path, *, is_remote: bool
) -> None:
    bench = Yard(tmp_path, replicas=2)
    bench.take(2, slots=16)
    table = bench.gateway.catalog.table
    assert table is not None
    releases = tuple(msgspec.structs.replace(one, is_remote=is_remote) for one in bench.endpoint.route.releases)
    endpoint = msgspec.structs.replace(bench.endpoint.route, releases=releases)
    new = msgspec.structs.replace(table, revision=table.revision + 1, endpoints=(endpoint,))
    bench.gateway.catalog.take(new, now_s=bench.clock.monotonic_s())
    clients = [bench.client() for _ in range(5)]
    bench.ask(clients[0][0], stream=True)
    (first,) = bench.gateway.exchanges
    silent = first.replica
    assert silent is not None
    bench.engine.data_received(STREAM + event(role="assistant", content="a"))
    bench.gateway.check_time(bench.clock.monotonic_s())
    for client, _ in clients[1:]:
        bench.ask(client, stream=True)
    others = [one for one in bench.gateway.exchanges if one.replica is silent and one is not first]
    assert others
    if not is_remote:
        for one in others:
            one.failed_on = [ReplicaLoad(silent.route, "v", 1), ReplicaLoad(silent.route, "v", 1)]
    bench.clock.advance(bench.endpoint.patience.token_s + 1)
    bench.gateway.check_time(bench.clock.monotonic_s())
    assert silent.ejected_until_s
    assert all(one.replica is silent and not one.is_over for one in others), "its own time is not over"
    for client, _ in clients:
        client.connection_lost(None)
    bench.journal.close()
