"""GET /v1/usage."""

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from tests.support.journals import intent_of, settle_of, write_run
from tests.support.management import Management

from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Endpoint, Release, Scaling
from modelyard.domain.tenants import PLATFORM, Identity, Scope
from modelyard.domain.usage import Intent, JournalRecord, Price, Settle, UsageStatus
from modelyard.metering.prices import usd
from modelyard.stores import JournalPosition

PRICE = Price(input=150_000_000_000, cached_input=75_000_000_000, output=600_000_000_000)


def request(request_id: str, identity: Identity, model: str, at: float) -> Sequence[JournalRecord]:
    return (
        Intent(
            request_id=request_id,
            at=at,
            tenant_id=identity.tenant_id,
            key_id=identity.key_id,
            endpoint_id="ep-x",
            model=model,
            version_id="ver-x",
            route="/v1/chat/completions",
            is_stream=True,
            prompt_estimate=10,
            reserved_tokens=100,
            price=PRICE,
        ),
        Settle(
            request_id=request_id,
            at=at + 1,
            prompt_tokens=10,
            cached_tokens=4,
            completion_tokens=5,
            status=UsageStatus.SUCCESS,
            http_status=200,
            error_code="",
            ttft_ms=12.5,
            latency_ms=1000.0,
            replica_id="rep-x",
            attempts=1,
            is_estimated=False,
        ),
    )


@pytest.fixture
async def user(api: Management, manager: Identity) -> Identity:
    """An inference key of acme with one request an hour ago; the manager has two, the platform one."""
    user, _ = await api.key(manager.tenant_id, Scope.INFERENCE)
    platform, _ = await api.key(PLATFORM, Scope.INFERENCE)
    now = api.clock.unix_s()
    records = [
        *request("req_user", user, "smol", now - 3600),
        *request("req_manager1", manager, "smol", now - 60),
        *request("req_manager2", manager, "big", now - 60),
        *request("req_platform", platform, "smol", now - 60),
        *request("req_old", manager, "smol", now - 5 * 86400),
    ]
    await api.context.usage.apply(records, JournalPosition("gateway-0", "1.journal", 1))
    return user


async def test_sums_are_exact_and_grouped(api: Management, manager: Identity, user: Identity) -> None:
    report = (await api.call(manager, "GET", "/v1/usage?group_by=model")).json()
    assert report["object"] == "list"
    assert [(row["model"], row["requests"]) for row in report["data"]] == [("big", 1), ("smol", 2)]
    one = report["data"][0]
    cost = 6 * 150_000 + 4 * 75_000 + 5 * 600_000
    assert (one["prompt_tokens"], one["cached_tokens"], one["completion_tokens"]) == (10, 4, 5)
    assert (one["cost_nanousd"], one["cost_usd"]) == (cost, "0.0042")
    assert report["total"]["requests"] == 3
    assert report["total"]["cost_nanousd"] == 3 * cost
    assert report["data_up_to"] == int(api.clock.unix_s())
    hour = datetime.fromtimestamp(api.clock.unix_s() - 60, UTC).strftime("%Y-%m-%dT%H:00:00Z")
    grouped = (await api.call(manager, "GET", "/v1/usage?group_by=model,hour,key")).json()["data"]
    assert {"model": "big", "hour": hour, "key": manager.key_id}.items() <= grouped[0].items()


async def test_everybody_sees_what_is_theirs(
    api: Management, manager: Identity, user: Identity, admin: Identity
) -> None:
    async def requests(identity: Identity, query: str = "") -> int:
        answer = await api.call(identity, "GET", f"/v1/usage?{query}")
        assert answer.status_code == 200, answer.text
        return int(answer.json()["total"]["requests"])

    assert await requests(user) == 1
    assert await requests(user, f"key={user.key_id}") == 1
    assert await requests(manager) == 3
    assert await requests(manager, f"key={user.key_id}") == 1
    assert await requests(manager, "model=big") == 1
    assert await requests(admin) == 4
    assert await requests(admin, f"tenant={manager.tenant_id}") == 3
    assert await requests(admin, f"tenant={PLATFORM}") == 1
    for identity, query in (
        (user, f"key={manager.key_id}"),
        (manager, f"key={admin.key_id}"),
        (manager, f"tenant={PLATFORM}"),
        (admin, "tenant=ten-none"),
    ):
        assert (await api.call(identity, "GET", f"/v1/usage?{query}")).status_code == 404


async def test_span_is_half_open_and_reads_dates(api: Management, manager: Identity, user: Identity) -> None:
    now = api.clock.unix_s()
    edge = now - 60

    async def requests(since: object, until: object) -> int:
        answer = await api.call(manager, "GET", f"/v1/usage?since={since}&until={until}")
        return int(answer.json()["total"]["requests"])

    assert await requests(edge, edge + 0.5) == 2
    assert await requests(edge - 10, edge) == 0
    day = datetime.fromtimestamp(now - 5 * 86400, UTC)
    assert await requests(day.isoformat().replace("+00:00", "Z"), int(now)) == 4
    assert await requests(day.isoformat().replace("+", "%2B"), int(now)) == 4


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("group_by=owner", "group_by"),
        ("group_by=model,model", "group_by"),
        ("since=yesterday", "since"),
        ("until=NaN", "until"),
        ("since=999999999999", "since"),
        ("since=1e5", "since"),
        ("since=2000&until=1000", "since"),
        ("group=model", "group"),
        ("model=a&model=b", "model"),
        ("model=%ff", "query"),
        ("model=a%00b", "model"),
        ("tz=%00", "tz"),
        ("tz=Europe", "tz"),
        ("tz=../../etc/passwd", "tz"),
    ],
)
async def test_bad_query_is_refused_by_parameter(api: Management, manager: Identity, query: str, param: str) -> None:
    answer = await api.call(manager, "GET", f"/v1/usage?{query}")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_single_requests_are_found_by_their_id(api: Management, manager: Identity, user: Identity) -> None:
    mine = (await api.call(user, "GET", "/v1/usage/requests?request_id=req_user")).json()["data"]
    assert [(row["request_id"], row["cost_usd"], row["status"]) for row in mine] == [("req_user", "0.0042", "success")]
    assert (await api.call(user, "GET", "/v1/usage/requests?request_id=req_manager1")).json()["data"] == []
    assert (await api.call(user, "GET", "/v1/usage/requests")).status_code == 403
    page = (await api.call(manager, "GET", "/v1/usage/requests?limit=2")).json()
    assert len(page["data"]) == 2
    assert page["has_more"] is True
    everything = (await api.call(manager, "GET", "/v1/usage/requests?limit=100")).json()["data"]
    assert "req_platform" not in {row["request_id"] for row in everything}


async def test_data_is_not_called_fresh_while_a_journal_waits(
    api: Management, manager: Identity, user: Identity
) -> None:
    folder = api.context.data.journal / "gateway-0"
    folder.mkdir()
    (folder / "1.journal").write_bytes(bytes(100))
    api.clock.advance(30)
    report = (await api.call(manager, "GET", "/v1/usage")).json()
    assert report["data_up_to"] == int(api.clock.unix_s()) - 30 - 60 + 1


async def test_the_ledger_is_complete_up_to_the_first_request_that_waits_whichever_worker_is_ahead(
    api: Management, manager: Identity, user: Identity
) -> None:
    root, now = api.context.data.journal, api.clock.unix_s()
    api.clock.advance(30)
    write_run(root, "gateway-0", [], api.clock, pairs=[(intent_of("a", now + 9), settle_of("a", now + 20))])
    write_run(
        root,
        "gateway-1",
        [],
        api.clock,
        pairs=[(intent_of("b", now - 900), settle_of("b", now - 300)), (intent_of("c", now), settle_of("c", now + 10))],
    )
    report = (await api.call(manager, "GET", "/v1/usage")).json()
    assert report["data_up_to"] == int(now) - 300, "not up to the newest row, which ended later"


async def test_versions_have_their_names_beside_their_ids(
    api: Management, manager: Identity, admin: Identity, user: Identity
) -> None:
    version = ModelVersion(
        id="ver-x",
        tenant_id=manager.tenant_id,
        name="smol",
        version="v3",
        framework="simulated",
        artifact=Artifact(""),
        options={},
        created_at=0,
    )
    endpoint = Endpoint("ep-x", manager.tenant_id, "smol", (Release("ver-x"),), Scaling(), created_at=0)
    await api.context.store.add_deployment(version, endpoint)
    stranger, _ = await api.key(PLATFORM, Scope.MANAGE)
    for who, names in ((manager, ["smol@v3"]), (user, ["smol@v3"]), (admin, ["smol@v3"]), (stranger, [None])):
        rows = (await api.call(who, "GET", "/v1/usage?group_by=version")).json()["data"]
        assert [row["version"] for row in rows] == ["ver-x"]
        assert [row.get("version_name") for row in rows] == names, "another tenant's name is none of its business"
    rows = (await api.call(manager, "GET", "/v1/usage?group_by=model")).json()["data"]
    assert "version_name" not in rows[0]


@pytest.mark.parametrize(
    ("nano", "text"),
    [(0, "0"), (1, "0.000000001"), (4_200_000, "0.0042"), (12_000_000_000, "12"), (10**19, "10000000000")],
)
def test_dollars_are_exact(nano: int, text: str) -> None:
    assert usd(nano) == text


async def test_tenants_have_their_names_beside_their_ids_and_may_be_asked_for_by_them(
    api: Management, manager: Identity, admin: Identity, user: Identity
) -> None:
    report = (await api.call(admin, "GET", "/v1/usage?group_by=tenant&tenant=acme")).json()
    (row,) = report["data"]
    assert (row["tenant"], row["tenant_name"]) == (manager.tenant_id, "acme")
    assert report["currency"] == "USD"
    (row,) = (await api.call(manager, "GET", "/v1/usage?group_by=tenant&tenant=acme")).json()["data"]
    assert row["tenant_name"] == "acme"
    for who in (admin, manager):
        assert (await api.call(who, "GET", "/v1/usage?tenant=nobody")).status_code == 404
    await api.tenant("other")
    assert (await api.call(manager, "GET", "/v1/usage?tenant=other")).status_code == 404
    start = int(api.clock.unix_s()) - 86_400
    path = f"/v1/organization/usage/completions?start_time={start}&project_ids="
    for name, is_there in (("acme", True), ("other", False)):
        buckets = (await api.call(admin, "GET", path + name)).json()["data"]
        assert any(bucket["results"] for bucket in buckets) is is_there
    assert (await api.call(admin, "GET", path + "nobody")).status_code == 404
    refused = await api.call(admin, "GET", f"{path}acme&bucket_width=1w")
    assert "'1w'; use one of 1m, 1h, 1d" in refused.json()["error"]["message"]


async def test_an_endpoint_is_asked_for_by_its_name_while_it_is_there_and_by_its_id_for_good(
    api: Management, manager: Identity, user: Identity
) -> None:
    async def requests(reference: str) -> int | None:
        answer = await api.call(manager, "GET", f"/v1/usage?endpoint={reference}")
        return answer.json()["total"]["requests"] if answer.status_code == 200 else None

    known = (await api.call(manager, "GET", "/v1/usage?group_by=endpoint")).json()["data"]
    ((endpoint_id, count),) = [(row["endpoint"], row["requests"]) for row in known]
    assert await requests(endpoint_id) == count, "one that is gone"
    assert await requests("smol") is None
    version = ModelVersion("ver-x", manager.tenant_id, "smol", "v3", "simulated", Artifact(""), {}, created_at=0)
    endpoint = Endpoint(endpoint_id, manager.tenant_id, "smol", (Release("ver-x"),), Scaling(), created_at=0)
    await api.context.store.add_deployment(version, endpoint)
    assert await requests("smol") == count
    assert await requests(endpoint_id) == count
    assert await requests("ep-nosuch") == 0
