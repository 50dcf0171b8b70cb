"""What a gateway remembers of requests: enough to say why, bounded, and nothing of what was said."""

import gc
from bisect import bisect
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.unit.gateway.test_exchange import DONE, STREAM, event, whole
from tests.unit.gateway.test_recovery import Yard

from modelyard.domain.signals import BOUNDS_S
from modelyard.domain.why import Ask, RequestStory
from modelyard.gateway.exchange import Exchange
from modelyard.gateway.flow import Gateway
from modelyard.gateway.memory import INDEX_S, NEWEST, RequestMemory
from modelyard.policy.queueing import BATCH_BAND

ANSWER = b'{"choices":[{"message":{"content":"secret answer"}}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Yard]:
    bench = Yard(tmp_path, replicas=2)
    yield bench
    bench.assert_at_rest()
    bench.journal.close()


def last_id(bench: Yard) -> str:
    return f"{bench.gateway.ids.prefix}{int(bench.gateway.ids.next()[-8:], 16) - 1:08x}"


def story_of(bench: Yard, request_id: str) -> RequestStory | None:
    return bench.gateway.tell_story(Ask(1, request_id)).story


def told(bench: Yard) -> RequestStory:
    story = story_of(bench, last_id(bench))
    assert story is not None
    return story


def test_an_answered_request_is_remembered_with_the_replicas_that_were_looked_at(bench: Yard) -> None:
    client, _ = bench.client()
    bench.ask(client)
    bench.clock.advance(1.5)
    bench.engine.data_received(whole(ANSWER))
    story = told(bench)
    assert (story.status, story.tenant_id, story.model, story.source) == (200, "t", "m", bench.journal.source)
    assert (story.prompt_tokens, story.completion_tokens, story.cost_nanousd) == (7, 3, 0)
    assert story.latency_s == pytest.approx(1.5)
    assert [one.replica_id for one in story.considered] == ["r1", "r2"]
    (chosen,) = [one for one in story.considered if one.is_chosen]
    assert chosen.replica_id == story.replica_id
    assert {(bound.whose, bound.kind, bound.limit) for bound in story.bounds} == {
        ("key", "tokens_per_minute", 100_000),
        ("key", "concurrency", 10),
    }


def test_nothing_of_a_prompt_or_an_answer_is_remembered(bench: Yard) -> None:
    client, _ = bench.client()
    bench.ask(client, messages=[{"role": "user", "content": "secret prompt"}])
    bench.engine.data_received(whole(ANSWER))
    assert b"secret" not in msgspec.json.encode(told(bench))
    assert "secret" not in repr(bench.gateway.memory._served)


def test_the_time_to_the_first_token_counts_from_the_arrival(bench: Yard) -> None:
    client, _ = bench.client()
    bench.ask(client, stream=True)
    bench.clock.advance(0.5)
    bench.engine.data_received(STREAM + event(role="assistant", content="a"))
    bench.clock.advance(1.0)
    bench.engine.data_received(event(content="b") + event(finish="stop") + DONE + b"0\r\n\r\n")
    assert told(bench).ttft_s == pytest.approx(0.5)
    (counts,) = bench.gateway.catalog.releases(now_s=bench.clock.monotonic_s())
    assert (counts.endpoint_id, counts.version_id, counts.requests, counts.errors) == ("ep", "v", 1, 0)
    assert sum(counts.ttft) == sum(counts.itl) == sum(counts.latency) == 1
    assert counts.service_s == pytest.approx(1.5)


def test_lines_of_batches_are_told_apart(bench: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Gateway.admit

    def as_line(gateway: Gateway, exchange: Exchange, wait_s_max: float | None = None) -> None:
        exchange.batch_line, exchange.job.band = "a line", BATCH_BAND
        admit(gateway, exchange, wait_s_max)

    bench.take(1)
    bench.ask(bench.client()[0])
    with monkeypatch.context() as patch:
        patch.setattr(Gateway, "admit", as_line)
        for _ in range(3):
            bench.ask(bench.client()[0])
    told = []
    for _ in range(4):
        (demand,) = bench.gateway.catalog.report(now_s=bench.clock.monotonic_s()).endpoints
        told.append((demand.queued, demand.in_flight, demand.batch_queued, demand.batch_running))
        bench.engine.data_received(whole(ANSWER))
    assert told == [(3, 4, 3, 0), (2, 3, 2, 1), (1, 2, 1, 1), (0, 1, 0, 1)]
    assert (demand.arrivals, demand.batch_arrivals) == (4, 3)


def test_the_wait_of_a_line_of_a_batch_says_nothing_of_its_release(bench: Yard) -> None:
    bench.take(1)
    clients = [bench.client()[0] for _ in range(3)]
    for client in clients:
        bench.ask(client)
    for exchange in bench.endpoint.dispatcher.line.order():
        exchange.batch_line = "a line"
    bench.clock.advance(200.0)
    for _ in clients:
        bench.engine.data_received(whole(ANSWER))
        bench.clock.advance(1.0)
    assert told(bench).latency_s == pytest.approx(202.0)
    (counts,) = bench.gateway.catalog.releases(now_s=bench.clock.monotonic_s())
    slow = bisect(BOUNDS_S, 100.0)
    assert (sum(counts.latency), sum(counts.latency[slow:])) == (3, 1), "only the first one, which ran for so long"


def test_an_attempt_that_was_moved_is_told_and_counts_against_the_release(bench: Yard) -> None:
    client, _ = bench.client()
    bench.ask(client)
    bench.clock.advance(0.25)
    bench.engine.connection_lost(None)
    bench.engine.data_received(whole(ANSWER))
    story = told(bench)
    (move,) = story.moves
    assert (move.at_s, move.reason) == (pytest.approx(0.25), "connection lost")
    assert move.replica_id != story.replica_id
    (counts,) = bench.gateway.catalog.releases(now_s=bench.clock.monotonic_s())
    assert (counts.requests, counts.errors) == (2, 1)
    assert counts.service_s == pytest.approx(0.25)


def test_a_request_that_waits_knows_how_many_stood_before_it(bench: Yard) -> None:
    bench.take(1)
    clients = [bench.client()[0] for _ in range(4)]
    for client in clients:
        bench.ask(client)
    assert bench.endpoint.wait_s(bench.clock.monotonic_s()) > 0
    bench.clock.advance(2.0)
    for _ in clients:
        bench.engine.data_received(whole(ANSWER))
        bench.clock.advance(1.0)
    story = told(bench)
    assert story.line is not None
    assert (story.line.ahead, story.line.is_cold) == (2, False)
    assert story.waited_s == pytest.approx(4.0)
    assert bench.endpoint.wait_s(bench.clock.monotonic_s()) == 0.0


def test_a_client_that_left_and_a_request_of_its_own_fault_are_no_errors(bench: Yard) -> None:
    client, _ = bench.client()
    bench.ask(client)
    client.connection_lost(None)
    assert told(bench).status == 499
    client, _ = bench.client()
    bench.ask(client)
    bench.engine.data_received(whole(b'{"error":{"message":"bad"}}', b"400 Bad Request"))
    assert told(bench).status == 400
    (counts,) = bench.gateway.catalog.releases(now_s=bench.clock.monotonic_s())
    assert (counts.requests, counts.errors, counts.latency) == (2, 0, ())


def test_a_refusal_is_remembered_with_who_was_refused(bench: Yard) -> None:
    client, wire = bench.client()
    bench.ask(client, model="other")
    assert b"HTTP/1.1 404" in wire.sent
    story = told(bench)
    assert (story.status, story.code, story.tenant_id, story.model) == (404, "model_not_found", "t", "other")


def test_what_came_without_a_good_key_is_nobodys(bench: Yard) -> None:
    client, _ = bench.client()
    good, bench.token = bench.token, "my_wrong"
    bench.ask(client)
    bench.token = good
    story = told(bench)
    assert (story.status, story.tenant_id, story.key_id) == (401, "", "")


def test_a_storm_of_refusals_drives_out_nothing_that_was_served(bench: Yard) -> None:
    bench.take(1)
    memory = bench.gateway.memory = RequestMemory("g", served=3, refused=2)
    client, _ = bench.client()
    bench.ask(client)
    bench.engine.data_received(whole(ANSWER))
    served = last_id(bench)
    for _ in range(10):
        bench.ask(client, model="other")
    assert dict(memory.sizes()) == {("served",): 1, ("refused",): 2}
    assert story_of(bench, served) is not None
    for _ in range(3):
        bench.clock.advance(INDEX_S + 0.1)
        bench.ask(client)
        bench.engine.data_received(whole(ANSWER))
    bench.clock.advance(INDEX_S + 0.1)
    assert story_of(bench, served) is None, "the oldest is forgotten first"


def test_ids_of_another_process_are_not_looked_for(bench: Yard) -> None:
    assert story_of(bench, "req_abcdefghijkmnpqr00000001") is None
    assert not bench.gateway.memory._index


def test_whoever_asks_in_a_loop_has_everything_searched_once_a_second(bench: Yard) -> None:
    bench.gateway.memory = memory = RequestMemory("g", served=NEWEST * 4, refused=NEWEST * 4)
    client, _ = bench.client()
    bench.ask(client, model="first")
    first = last_id(bench)
    assert story_of(bench, "x" + first) is None
    assert story_of(bench, bench.gateway.ids.prefix + "none") is None
    made = memory._index
    for _ in range(NEWEST + 1):
        bench.ask(client, model="other")
    newest = last_id(bench)
    assert story_of(bench, first) is not None
    assert story_of(bench, newest) is not None, "the newest are found beside an index that is older"
    assert memory._index is made
    bench.clock.advance(INDEX_S + 0.1)
    assert story_of(bench, newest) is not None
    assert memory._index is not made
    bench.clock.advance(10)
    memory.tidy(bench.clock.monotonic_s())
    assert not memory._index


def test_a_refusal_keeps_no_request_alive(bench: Yard) -> None:
    """An exception that is kept holds its frames, and with them the body."""
    client, _ = bench.client()
    bench.ask(client, model="other", messages=[{"role": "user", "content": "unforgettable"}])
    gc.collect()
    held = [one for one in gc.get_referents(*bench.gateway.memory._away) if isinstance(one, BaseException)]
    assert not held


def test_a_release_that_was_quiet_for_long_is_told_no_more_and_begins_at_0(bench: Yard) -> None:
    client, _ = bench.client()
    for expected in (1, 1):
        bench.ask(client)
        bench.engine.data_received(whole(ANSWER))
        (counts,) = bench.gateway.catalog.releases(now_s=bench.clock.monotonic_s())
        assert counts.requests == expected
        bench.clock.advance(901)
        assert bench.gateway.catalog.releases(now_s=bench.clock.monotonic_s()) == []
