"""GET /v1/endpoints/{endpoint}/why: what only the controller's world knows."""

from typing import Any

import pytest
from tests.support.management import Management

from modelyard.domain.demand import ReplicaReport, Report
from modelyard.domain.endpoints import EndpointStatus, Progress, Stage
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.tenants import Identity
from modelyard.policy.scaling import Decision, Memory, Seen

READY, LOADING, DRAINING = ReplicaState.READY, ReplicaState.LOADING, ReplicaState.DRAINING


async def why(api: Management, admin: Identity, path: str = "m") -> Any:
    answer = await api.call(admin, "GET", f"/v1/endpoints/{path}/why")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
async def endpoint_id(api: Management, admin: Identity) -> str:
    """Deploy ``m`` and return its id."""
    spec = {"model_name": "m", "framework": "simulated"}
    assert (await api.call(admin, "POST", "/v1/models/deploy", spec)).status_code == 202
    [endpoint] = await api.context.store.endpoints()
    return endpoint.id


async def put(api: Management, endpoint_id: str, *states: ReplicaState) -> None:
    """Store replicas r-0, r-1 …, which were started four seconds ago."""
    [endpoint] = await api.context.store.endpoints()
    version, now_s = endpoint.releases[0].version_id, api.clock.unix_s()
    for number, state in enumerate(states):
        one = Replica(f"r-{number}", endpoint_id, version, number, 1, state, now_s, started_at=now_s - 4)
        await api.context.store.put_replica(one)


async def test_what_is_deleted_says_how_many_requests_still_run(
    api: Management, admin: Identity, endpoint_id: str
) -> None:
    await put(api, endpoint_id, DRAINING)
    assert (await api.call(admin, "DELETE", "/v1/endpoints/m")).is_success
    for gateway, running in (("a", 1), ("b", 2)):
        rows = [ReplicaReport("r-0", running, 0, ""), ReplicaReport("another's", 7, 0, "")]
        api.gateways[gateway] = Report([], rows)
    found = await why(api, admin, endpoint_id)
    assert (found["status"], found["progress"]["reason"]) == ("stopped", "it is being deleted")
    assert found["answers"][0]["answer"].startswith("it is being deleted; 3 requests still run; it ends with the last")
    assert "after 120 s" in found["answers"][0]["answer"]


async def test_what_loads_behind_a_ready_replica_is_told_with_its_progress(
    api: Management, admin: Identity, endpoint_id: str
) -> None:
    await put(api, endpoint_id, READY, LOADING)
    grows = Progress(Stage.READY, percent=100, eta_s=0.0, reason="1 of 2 replicas are ready")
    await api.context.store.put_outlook(endpoint_id, status=EndpointStatus.SCALING, progress=grows, failure="")
    seen = Seen(now_s=1.0, replicas=2, ready=1, slots=1, gateways=1, load_s=10.0)
    api.context.size = lambda _: (seen, Decision(2, "2 is the configured least", Memory(2, 1.0)))
    state = (await why(api, admin))["answers"][0]
    assert state["answer"] == "1 of 2 replicas are ready; the next is loading (40 %); about 6 s are left"
    assert state["next_step"] == ""
