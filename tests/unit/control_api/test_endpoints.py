"""Endpoints, their events and logs, the registry, and the status."""

import asyncio
import sys
from typing import Any

import pytest
from msgspec import structs
from tests.support.management import Management
from tests.support.waiting import eventually_async

from modelyard.control.api.log_following import follow, follow_one, written
from modelyard.control.api.logs import clean
from modelyard.domain.demand import EndpointDemand, Report
from modelyard.domain.fleet import Replica, ReplicaState, replica_id
from modelyard.domain.tenants import Identity, Scope
from modelyard.engines import EngineCommand
from modelyard.fleet import StartOrder

SPEC: dict[str, Any] = {"model_name": "org/smol", "framework": "simulated", "hardware": {"max_replicas": 3}}


async def deploy(api: Management, identity: Identity, name: str = "org/smol") -> str:
    answer = await api.call(identity, "POST", "/v1/models/deploy", {**SPEC, "model_name": name})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["endpoint_id"])


async def add_replica(api: Management, endpoint_id: str, ordinal: int = 0) -> Replica:
    (endpoint,) = [one for one in await api.context.store.endpoints() if one.id == endpoint_id]
    version_id = endpoint.releases[0].version_id
    replica = Replica(
        id=replica_id(endpoint_id, version_id, ordinal, 1),
        endpoint_id=endpoint_id,
        version_id=version_id,
        ordinal=ordinal,
        generation=1,
        state=ReplicaState.READY,
        state_since=api.clock.unix_s(),
        host="127.0.0.1",
        port=45678,
        secret="engine-secret",
        slots=4,
        started_at=api.clock.unix_s() - 90,
    )
    await api.context.store.put_replica(replica)
    return replica


async def run_program(api: Management, replica: Replica, program: str) -> None:
    """Run ``program`` as the replica, so that it has a real log."""
    fleet = api.context.fleet
    address = await fleet.reserve(replica.id)
    command = EngineCommand((sys.executable, "-c", program), {})
    await fleet.start(StartOrder(replica.id, replica.endpoint_id, address.host, address.port, "engine-secret", command))


async def log_has(api: Management, replica: Replica, lines: int) -> None:
    async def check() -> bool:
        return (await written(api.context.fleet, replica.id, 0))[1] >= lines

    await eventually_async(check, 20, f"{lines} lines in the log")


async def test_endpoint_is_shown_with_what_is_known_of_it(api: Management, manager: Identity) -> None:
    endpoint_id = await deploy(api, manager)
    replica = await add_replica(api, endpoint_id)
    api.gateways["gateway-0"] = Report([EndpointDemand(endpoint_id, 3, 2, 0.0, 9)], [])
    api.gateways["gateway-1"] = Report([EndpointDemand(endpoint_id, 1, 0, 7.5, 1)], [])
    for reference in (endpoint_id, "org/smol", "org%2Fsmol"):
        answer = await api.call(manager, "GET", f"/v1/endpoints/{reference}")
        assert answer.status_code == 200, answer.text
        shown = answer.json()
        assert shown["id"] == shown["endpoint_id"] == endpoint_id
        assert (shown["queued"], shown["in_flight"], shown["idle_s"]) == (4, 2, 0)
        assert (shown["current_replicas"], shown["max_replicas"], shown["framework"]) == (1, 3, "simulated")
        expected = {"stage": "queued", "percent": None, "eta_s": None, "reason": "", "bytes_per_s": None}
        assert shown["progress"] == expected
        assert shown["replicas"] == [{"id": replica.id, "state": "ready", "reason": "", "slots": 4, "age_s": 90}]
        assert [event["kind"] for event in shown["events"]] == ["deployed"]
        assert "45678" not in answer.text
        assert "engine-secret" not in answer.text
    (listed,) = (await api.call(manager, "GET", "/v1/endpoints")).json()["data"]
    assert "events" not in listed
    events = (await api.call(manager, "GET", "/v1/endpoints/org/smol/events?limit=1")).json()
    assert [event["kind"] for event in events["data"]] == ["deployed"]


async def test_stopped_replicas_are_not_shown_and_failed_ones_are(
    api: Management, manager: Identity, admin: Identity
) -> None:
    endpoint_id = await deploy(api, manager)
    failed, stopped = await add_replica(api, endpoint_id), await add_replica(api, endpoint_id, 1)
    for replica, state, reason in (
        (failed, ReplicaState.FAILED, "killed by SIGKILL"),
        (stopped, ReplicaState.STOPPED, "drained"),
    ):
        await api.context.store.put_replica(structs.replace(replica, state=state, reason=reason))
    (listed,) = (await api.call(manager, "GET", "/v1/endpoints")).json()["data"]
    one = (await api.call(manager, "GET", f"/v1/endpoints/{endpoint_id}")).json()
    for shown in (listed, one):
        rows = [(replica["id"], replica["state"], replica["reason"]) for replica in shown["replicas"]]
        assert rows == [(failed.id, "failed", "killed by SIGKILL")]
        assert shown["current_replicas"] == 0
    assert (await api.call(admin, "GET", "/v1/status")).json()["replicas"] == {"failed": 1}


async def test_endpoint_that_no_gateway_had_a_request_for_has_no_idle_time(api: Management, manager: Identity) -> None:
    endpoint_id = await deploy(api, manager)
    assert (await api.call(manager, "GET", f"/v1/endpoints/{endpoint_id}")).json()["idle_s"] is None
    api.gateways["gateway-0"] = Report([EndpointDemand(endpoint_id, 0, 0, float("inf"), 0)], [])
    assert (await api.call(manager, "GET", f"/v1/endpoints/{endpoint_id}")).json()["idle_s"] is None


async def test_deletion_marks_and_wakes(api: Management, manager: Identity) -> None:
    endpoint_id = await deploy(api, manager)
    before = (len(api.waked), len(api.refreshed))
    for _ in range(2):
        answer = await api.call(manager, "DELETE", "/v1/endpoints/org/smol")
        assert answer.status_code == 202
        assert answer.json() == {"id": endpoint_id, "object": "endpoint", "deleted": True}
    assert (len(api.waked), len(api.refreshed)) == (before[0] + 2, before[1] + 2)
    (endpoint,) = await api.context.store.endpoints()
    assert endpoint.is_deleted
    kinds = [event.kind for event in await api.context.store.events(endpoint_id, limit=9)]
    assert kinds == ["deployed", "deleted"]
    assert (await api.call(manager, "DELETE", "/v1/endpoints/nothing")).status_code == 404


async def test_a_name_that_two_other_tenants_use_is_nobodys_until_one_is_chosen(
    api: Management, manager: Identity, admin: Identity
) -> None:
    beta = (await api.key(await api.tenant("beta"), Scope.MANAGE))[0]
    theirs = [await deploy(api, manager), await deploy(api, beta)]
    for method, path in (("DELETE", ""), ("GET", ""), ("GET", "/why"), ("PATCH", "")):
        answer = await api.call(admin, method, f"/v1/endpoints/org/smol{path}", {} if method == "PATCH" else None)
        assert answer.status_code == 409, (method, path, answer.text)
        assert all(one in answer.json()["error"]["message"] for one in (*theirs, "acme", "beta"))
    assert (await api.call(beta, "GET", "/v1/endpoints/org/smol")).json()["id"] == theirs[1], "their own is theirs"
    assert (await api.call(admin, "DELETE", f"/v1/endpoints/{theirs[0]}")).status_code in (200, 202)
    left = {one.id: one.is_deleted for one in await api.context.store.endpoints()}
    assert left == {theirs[0]: True, theirs[1]: False}
    assert (await api.call(admin, "GET", "/v1/endpoints/org/smol")).json()["id"] == theirs[1], "the other is going"


async def test_registry_has_every_version(api: Management, manager: Identity) -> None:
    await deploy(api, manager)
    await api.call(manager, "DELETE", "/v1/endpoints/org/smol")
    await deploy(api, manager)
    versions = (await api.call(manager, "GET", "/v1/registry/models?name=org/smol")).json()["data"]
    assert {version["version"] for version in versions} == {"v1", "v2"}
    one = (await api.call(manager, "GET", f"/v1/registry/models/{versions[0]['id']}")).json()
    assert one == versions[0]
    newest = (await api.call(manager, "GET", "/v1/registry/models/org/smol")).json()
    assert newest["version"] == "v2"
    assert (await api.call(manager, "GET", "/v1/registry/models/ver-none")).status_code == 404


async def test_logs_are_text_without_escape_sequences(api: Management, manager: Identity) -> None:
    replica = await add_replica(api, await deploy(api, manager))
    await run_program(api, replica, r"print('one'); print('\x1b[31mtwo\x1b[0m\x1b]0;title\x07'); print('three')")

    await log_has(api, replica, 3)
    answer = await api.call(manager, "GET", "/v1/endpoints/org/smol/logs")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == "one\ntwo\nthree\n"
    last = await api.call(manager, "GET", f"/v1/endpoints/org/smol/logs?tail=1&replica={replica.id}")
    assert last.text == "three\n"
    for bad in ("../../secrets", "rep-aaaaaaaaaaaa-bbbbbbbb-0-1", replica.id + "/.."):
        refused = await api.call(manager, "GET", f"/v1/endpoints/org/smol/logs?replica={bad}")
        assert refused.status_code == 404
    await api.context.fleet.stop(replica.id, grace_s=5)


async def test_followed_logs_have_each_line_once_and_those_of_new_replicas(api: Management, manager: Identity) -> None:
    endpoint_id = await deploy(api, manager)
    first = await add_replica(api, endpoint_id)
    fleet = api.context.fleet
    program = "import time\nfor n in range(20): print('line', n, flush=True); time.sleep(0.01)"
    await run_program(api, first, program)
    await log_has(api, first, 1)
    replicas = [first.id]
    found: list[str] = []
    stream = follow(fleet, lambda: _ids(replicas), 1000)
    async with asyncio.timeout(30):
        while len(found) < 20:
            found.append(await anext(stream))
        assert found == [f"line {n}" for n in range(20)]
        second = await add_replica(api, endpoint_id, 1)
        await run_program(api, second, "print('hello')")
        replicas.append(second.id)
        assert await anext(stream) == f"{second.id}: hello"
    await stream.aclose()
    for replica in (first, second):
        await fleet.stop(replica.id, grace_s=5)


async def test_followed_log_of_one_replica_ends_with_it(api: Management, manager: Identity) -> None:
    replica = await add_replica(api, await deploy(api, manager))
    fleet = api.context.fleet
    await run_program(api, replica, "for n in range(3000): print('line', n)")
    await log_has(api, replica, 3000)
    await fleet.stop(replica.id, grace_s=5)
    stream = follow_one(fleet, replica.id, 2500)
    async with asyncio.timeout(30):
        assert await anext(stream) == "line 500"
        await fleet.forget(replica.id)
        assert [line async for line in stream] == [f"line {n}" for n in range(501, 3000)]


async def _ids(replicas: list[str]) -> list[str]:
    return list(replicas)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain\ttext ünï", "plain\ttext ünï"),
        ("\x1b[2J\x1b[1;1Hgone", "gone"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x07", "link"),
        ("\x1bP payload \x1b\\x", "x"),
        ("a\rb\x00c\x9bd", "abcd"),
        ("x\u202ey", "xy"),
        ("\x1b", ""),
    ],
)
def test_untrusted_line_cannot_repaint_a_terminal(line: str, shown: str) -> None:
    assert clean(line) == shown


async def test_status_counts_what_the_caller_may_see(api: Management, manager: Identity, admin: Identity) -> None:
    endpoint_id = await deploy(api, manager)
    await add_replica(api, endpoint_id)
    await deploy(api, admin, "platform-model")
    api.gateways["gateway-0"] = Report([EndpointDemand(endpoint_id, 3, 2, 0.0, 9)], [])
    api.clock.advance(12)
    seen = (await api.call(admin, "GET", "/v1/status")).json()
    assert seen["endpoints"] == {"provisioning": 2}
    assert seen["replicas"] == {"ready": 1}
    assert seen["gateways"] == [{"id": "gateway-0", "queued": 3, "in_flight": 2}]
    assert seen["database"] == {"is_healthy": True, "reason": ""}
    assert seen["journal"] == {"backlog_bytes": 0, "open_requests": 0}
    assert seen["uptime_s"] == 12
    theirs = (await api.call(manager, "GET", "/v1/status")).json()
    assert theirs["endpoints"] == {"provisioning": 1}
    assert (theirs["journal"], theirs["reconcile"]) == (None, None), "these are of all tenants"


async def test_status_answers_while_the_database_does_not(api: Management, admin: Identity) -> None:
    await api.context.store.close()
    answer = await api.call(admin, "GET", "/v1/status")
    assert answer.status_code == 200
    assert answer.json()["database"]["is_healthy"] is False
    assert answer.json()["endpoints"] is None
    refused = await api.call(admin, "GET", "/v1/endpoints")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "storage_unavailable"
    assert refused.headers["retry-after"] == "5"
