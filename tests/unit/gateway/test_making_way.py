"""Who is put out for a tenant that asks for little: what it is billed, and who never is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.gateway.test_exchange import PEPPER, Bench, whole

from modelyard.domain.routing_table import ReleaseRoute, ReplicaRoute
from modelyard.domain.tenants import ApiKey, Scope, Tenant
from modelyard.gateway.exchange import Exchange
from modelyard.ids import hash_secret, new_api_key

ANSWER = (
    b'{"id":"c","object":"chat.completion","choices":[{"index":0,"finish_reason":"stop","message":'
    b'{"role":"assistant","content":"x"}}],"usage":{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12}}'
)


class Yard(Bench):
    """One replica of two slots, a tenant that floods it, and a quiet one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tokens = {"flood": self.token}
        table = self.gateway.catalog.table
        assert table is not None
        token, parsed = new_api_key()
        self.tokens["quiet"] = token
        key = ApiKey(parsed.key_id, "q", "k", hash_secret(PEPPER, parsed.secret), (Scope.INFERENCE,), 0)
        tenants = (*table.tenants, Tenant("q", "q", 0))
        self.take(tenants=tenants, keys=(*table.keys, key))

    def take(self, *, is_remote: bool = False, **changes: Any) -> None:
        table = self.gateway.catalog.table
        assert table is not None
        release = ReleaseRoute("v", 100, (ReplicaRoute("r", "h", 1, "s", 2),), is_remote=is_remote)
        endpoint = msgspec.structs.replace(
            self.endpoint.route,
            is_shared=True,
            releases=(release,),
            routes=frozenset({"/v1/chat/completions", "/v1/embeddings"}),
        )
        table = msgspec.structs.replace(table, revision=table.revision + 1, endpoints=(endpoint,), **changes)
        self.gateway.catalog.take(table, now_s=self.clock.monotonic_s())

    def send(self, who: str, *, path: str = "/v1/chat/completions", head: bytes = b"", **fields: object) -> Exchange:
        """Send a request; return its exchange."""
        client, _ = self.client()
        asked = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"input": "hello"}
        body = msgspec.json.encode({"model": "m", **asked, **fields})
        client.data_received(
            b"POST %b HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %b\r\n%bContent-Length: %d\r\n\r\n%b"
            % (path.encode(), self.tokens[who].encode(), head, len(body), body)
        )
        return list(self.gateway.exchanges)[-1]

    def leave(self, exchange: Exchange) -> None:
        """Let the caller of a request go."""
        exchange.client.connection_lost(None)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    for exchange in list(yard.gateway.exchanges):
        yard.leave(exchange)
    yard.assert_at_rest()
    yard.journal.close()


def test_the_youngest_is_put_out_and_billed_once_for_the_answer_that_it_gets(yard: Yard) -> None:
    _, second = yard.send("flood"), yard.send("flood")
    quiet = yard.send("quiet")
    assert quiet.replica is not None
    assert second.gave_way == 1
    yard.pool.opened[-1][0].data_received(whole(ANSWER))
    assert second.replica is not None
    yard.pool.opened[-1][0].data_received(whole(ANSWER))
    assert [(one.status, one.prompt_tokens, one.completion_tokens) for one in yard.settled()] == [("success", 5, 7)] * 2


def test_who_goes_away_while_put_out_pays_nothing_for_the_answer_that_was_thrown_away(yard: Yard) -> None:
    _, second = yard.send("flood"), yard.send("flood")
    yard.send("quiet")
    assert second.gave_way == 1
    yard.leave(second)
    assert [(one.status, one.prompt_tokens, one.completion_tokens) for one in yard.settled()] == [
        ("client_closed", 0, 0)
    ]


def test_what_a_provider_was_asked_is_not_asked_again(yard: Yard) -> None:
    yard.take(is_remote=True)
    first, second = yard.send("flood"), yard.send("flood")
    quiet = yard.send("quiet")
    assert quiet.replica is None
    assert first.gave_way == second.gave_way == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"head": b"Prefer: wait=5\r\n"},
        {"path": "/v1/embeddings"},
    ],
)  # fmt: skip
def test_who_wants_to_wait_no_longer_or_generates_nothing_stays(yard: Yard, asked: dict[str, Any]) -> None:
    first, second = yard.send("flood", **asked), yard.send("flood", **asked)
    assert second.replica is not None
    quiet = yard.send("quiet")
    assert quiet.replica is None
    assert first.gave_way == second.gave_way == 0


def test_an_old_one_is_not_made_to_begin_anew(yard: Yard) -> None:
    first, second = yard.send("flood"), yard.send("flood")
    yard.clock.advance(yard.gateway.settings.queue_wait_s + 1)
    yard.send("quiet")
    assert first.gave_way == second.gave_way == 0


def test_a_release_is_not_judged_by_the_time_that_a_request_lost_by_making_way(yard: Yard) -> None:
    _, second = yard.send("flood"), yard.send("flood")
    yard.clock.advance(8)
    quiet = yard.send("quiet")
    assert second.gave_way == 1
    yard.pool.opened[-1][0].data_received(whole(ANSWER))
    assert quiet.is_over
    yard.clock.advance(0.1)
    yard.pool.opened[-1][0].data_received(whole(ANSWER))
    assert second.is_over
    (tally,) = yard.endpoint.tallies.values()
    assert sum(tally.latency) == 2
    assert sum(tally.latency[32:]) == 0, "nobody's answer took seconds"


def test_room_is_kept_beside_what_cannot_be_put_out(yard: Yard) -> None:
    yard.send("flood", path="/v1/embeddings")
    assert [one.job.is_seen for one in yard.gateway.exchanges] == [True]
    yard.take(is_remote=True)
    yard.send("flood")
    assert [one.job.is_seen for one in yard.gateway.exchanges] == [True, True]


def test_who_made_way_is_not_refused_because_the_next_slot_falls_free_late(yard: Yard) -> None:
    yard.send("flood")
    first = yard.pool.opened[-1][0]
    second = yard.send("flood")
    yard.send("quiet")
    assert second.gave_way == 1
    for _ in range(3):
        yard.clock.advance(yard.gateway.settings.queue_wait_s)
        yard.gateway.check_time(yard.clock.monotonic_s())
    assert not second.is_over
    first.data_received(whole(ANSWER))
    assert second.replica is not None
