"""GET /v1/requests/{id}/why and GET /v1/endpoints/{endpoint}/stats."""

from typing import Any

import msgspec
import pytest
from tests.support.management import Management

from modelyard.domain.demand import EndpointDemand, Report
from modelyard.domain.signals import ReleaseCounts
from modelyard.domain.tenants import PLATFORM, Identity, Scope
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.domain.why import Considered, Move, RequestStory
from modelyard.stores import JournalPosition

REQUEST = "req_abcdefghijkmnpqr00000001"
STORY = RequestStory(
    request_id=REQUEST,
    tenant_id=PLATFORM,
    key_id="k",
    source="gateway-0",
    arrived_at=1_000_000.25,
    route="/v1/chat/completions",
    model="demo",
    endpoint_id="ep-none",
    status=200,
    code="",
    version_id="ver-1",
    replica_id="rep-1",
    considered=(Considered("rep-1", 0, 8, True, 0, 0.0, 0.1, 0.0, 0.1), Considered("rep-2", 8, 8, False)),
    moves=(Move("rep-3", "ver-1", 0.1, "connection lost"),),
    facts={},
    attempts=2,
    latency_s=1.0,
    completion_tokens=4,
    cost_nanousd=2400,
)
ADMIN = Identity("adm", PLATFORM, (Scope.ADMIN,))


async def ask(api: Management, identity: Identity, request_id: str = REQUEST) -> tuple[int, Any]:
    answer = await api.call(identity, "GET", f"/v1/requests/{request_id}/why")
    return answer.status_code, answer.json()


async def test_what_a_gateway_remembers_is_told_in_words_and_numbers(api: Management) -> None:
    api.stories[REQUEST] = STORY
    status, answer = await ask(api, ADMIN)
    assert status == 200
    assert (answer["id"], answer["source"], answer["cost_usd"]) == (REQUEST, "gateway-0", "0.0000024")
    assert answer["arrived_at"] == "1970-01-12T13:46:40.250+00:00"
    assert answer["considered"][0]["total_s"] == 0.1
    assert any("rep-3 failed it (connection lost)" in sentence for sentence in answer["why"])


async def test_a_tenant_sees_its_own_requests_and_no_others(api: Management) -> None:
    own, other = await api.tenant("own"), await api.tenant("other")
    api.stories[REQUEST] = msgspec.structs.replace(STORY, tenant_id=own)
    mine, _ = await api.key(own, Scope.INFERENCE)
    theirs, _ = await api.key(other, Scope.MANAGE)
    assert (await ask(api, mine))[0] == 200
    assert (await ask(api, theirs))[0] == 404
    assert (await ask(api, ADMIN))[0] == 200


async def test_what_came_without_a_key_is_for_the_operator_alone(api: Management) -> None:
    api.stories[REQUEST] = msgspec.structs.replace(STORY, tenant_id="", key_id="", status=401)
    mine, _ = await api.key(await api.tenant("own"), Scope.MANAGE)
    assert (await ask(api, mine))[0] == 404
    assert (await ask(api, ADMIN))[0] == 200


async def test_of_another_tenants_endpoint_neither_replicas_nor_load_are_told(api: Management) -> None:
    own = await api.tenant("own")
    facts: dict[str, str | int | float] = {"slots": 8, "running": 8, "places": 5, "waiting": 5, "predicted_wait_s": 1.0}
    api.stories[REQUEST] = msgspec.structs.replace(STORY, tenant_id=own, facts=facts)
    mine, _ = await api.key(own, Scope.INFERENCE)
    _, answer = await ask(api, mine)
    assert (answer["replica_id"], answer["version_id"], answer["considered"], answer["facts"]) == ("", "", [], {})
    assert "rep-" not in msgspec.json.encode(answer).decode()
    assert answer["moves"][0]["reason"] == "connection lost"


@pytest.mark.parametrize("request_id", ["req_none", "ep-1", "req_" + "a" * 200, "req_a%0Ab", "x"])
async def test_an_unknown_id_is_404(api: Management, request_id: str) -> None:
    status, answer = await ask(api, ADMIN, request_id)
    assert (status, answer["error"]["code"]) == (404, "not_found")


async def test_what_gateways_have_forgotten_is_told_from_the_ledger(api: Management) -> None:
    intent = Intent(
        REQUEST, 5.0, PLATFORM, "k", "ep-x", "demo", "ver-x", "/v1/chat/completions", True, 10, 100, Price(1, 1, 1)
    )
    settle = Settle(REQUEST, 6.0, 10, 4, 5, UsageStatus.SUCCESS, 200, "", 120.0, 900.0, "rep-x", 2, False)
    await api.context.usage.apply([intent, settle], JournalPosition("gateway-0", "1", 10))
    status, answer = await ask(api, ADMIN)
    assert (status, answer["source"], answer["replica_id"], answer["attempts"]) == (200, "ledger", "rep-x", 2)
    assert (answer["ttft_s"], answer["latency_s"]) == (0.12, 0.9)
    assert answer["why"][0].startswith("No gateway remembers it")


DEPLOYMENT = {"model_name": "demo", "framework": "simulated", "hardware": {"min_replicas": 1, "max_replicas": 1}}


async def test_stats_are_of_the_endpoint_and_each_release(api: Management) -> None:
    reply = await api.call(ADMIN, "POST", "/v1/models/deploy", DEPLOYMENT)
    assert reply.status_code == 202
    (endpoint,) = await api.context.store.endpoints()
    version_id = endpoint.releases[0].version_id

    def report(requests: int, queued: int) -> Report:
        counts = ReleaseCounts(
            endpoint.id,
            version_id,
            requests,
            requests // 4,
            ttft=(requests,),
            completion_tokens=8 * requests,
            service_s=2.0,
        )
        demand = EndpointDemand(endpoint.id, queued, 1, 0.0, requests, 1.5)
        return Report([demand], [], "e", 1, releases=[counts] if requests else [])

    for requests in (0, 20):
        api.clock.advance(4.0)
        api.gateways["g"] = report(requests, 3)
        api.context.signals.hear("g", api.gateways["g"])
    answer = (await api.call(ADMIN, "GET", "/v1/endpoints/demo/stats?window=30")).json()
    stats = answer["stats"]
    assert (stats["requests"], stats["errors"], stats["error_share"]) == (20, 5, 0.25)
    assert stats["completion_tokens_per_s"] == pytest.approx(160 / stats["window_s"])
    assert stats["ttft_p95_s"] is not None
    assert stats["latency_p99_s"] is None
    assert (answer["queued"], answer["queued_max"], answer["predicted_wait_s"]) == (3, 3, 1.5)
    (release,) = answer["releases"]
    assert (release["model_id"], release["weight"], release["stats"]) == (version_id, 100, stats)
    assert answer["arrivals_per_s"]["60"] > 0


@pytest.mark.parametrize("window", ["0", "4.9", "1201", "x", "-1"])
async def test_a_window_that_cannot_be_is_refused_by_name(api: Management, window: str) -> None:
    await api.call(ADMIN, "POST", "/v1/models/deploy", DEPLOYMENT)
    reply = await api.call(ADMIN, "GET", f"/v1/endpoints/demo/stats?window={window}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "window"


async def test_stats_of_another_tenants_endpoint_are_404(api: Management) -> None:
    await api.call(ADMIN, "POST", "/v1/models/deploy", DEPLOYMENT)
    theirs, _ = await api.key(await api.tenant("other"), Scope.MANAGE)
    assert (await api.call(theirs, "GET", "/v1/endpoints/demo/stats")).status_code == 404
