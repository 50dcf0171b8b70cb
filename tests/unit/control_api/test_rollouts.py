"""Rollouts over the management API: begin, move, promote, pause, go back, and what is refused."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.support.management import Management

from modelyard.control.passes import Passed
from modelyard.control.rollouts import Rollouts
from modelyard.control.supplies import SupplyError
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.signals import Window
from modelyard.domain.tenants import Identity, Scope
from modelyard.policy.rollouts import sizes

DEPLOY: dict[str, Any] = {"model_name": "org/smol", "framework": "simulated", "hardware": {"min_replicas": 2}}
PATH = "/v1/endpoints/org/smol"
NEW = {"framework": "simulated", "options": {"itl_ms": 3}}


@pytest.fixture
async def endpoint_id(api: Management, manager: Identity) -> str:
    answer = await api.call(manager, "POST", "/v1/models/deploy", DEPLOY)
    return str(answer.json()["endpoint_id"])


class Told:
    """What gateways counted, as a test says it."""

    def __init__(self) -> None:
        self.of: dict[str, Window] = {}

    def window(self, endpoint_id: str, version_id: str | None, seconds: float) -> Window:
        return msgspec.structs.replace(self.of.get(version_id or "", Window(seconds=0)), seconds=seconds)


class Stage:
    """The loop over the API's own store, with replicas and traffic that a test makes up."""

    def __init__(self, api: Management) -> None:
        self.api = api
        self.told = Told()
        self.troubles: dict[str, SupplyError] = {}
        self.has_replicas = True
        context = api.context
        self.loop = Rollouts(
            store=context.store,
            clock=context.clock,
            changing=context.changing,
            windows=self.told,
            passed=self._passed,
            refresh=context.refresh,
            wake=context.wake,
        )
        self._known: set[str] = set()

    def _passed(self) -> dict[str, Passed]:
        return {one: Passed(2, self.troubles, has_rollout=True) for one in self._known}

    async def endpoint(self) -> Endpoint:
        (endpoint,) = await self.api.context.store.endpoints()
        return endpoint

    async def pass_over(self) -> None:
        """Start and end replicas as the reconciler would, all of them at once, and look."""
        store, endpoint = self.api.context.store, await self.endpoint()
        now = self.api.clock.unix_s()
        self._known = {endpoint.id}
        wanted = sizes(2, endpoint, now) if self.has_replicas else {}
        there = await store.replicas(endpoint_id=endpoint.id)
        for replica in there:
            await store.remove_replica(replica.id)
        for version_id, number in wanted.items():
            if version_id in self.troubles:
                continue
            for ordinal in range(number):
                one = f"rep-{version_id}-{ordinal}"
                await store.put_replica(
                    Replica(
                        one, endpoint.id, version_id, ordinal, 0, ReplicaState.READY, now, slots=4, ready_at=now - 1000
                    )
                )
        await self.loop.look()

    async def counts(self) -> Counter[str]:
        endpoint = await self.endpoint()
        replicas = await self.api.context.store.replicas(endpoint_id=endpoint.id)
        names = {one.id: one.version for one in await self.api.context.store.versions()}
        return Counter(names[one.version_id] for one in replicas)


@pytest.fixture
def stage(api: Management) -> Stage:
    return Stage(api)


async def begin(api: Management, who: Identity, **wanted: object) -> dict[str, Any]:
    answer = await api.call(who, "POST", f"{PATH}/canary", {**NEW, **wanted})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


async def act(api: Management, who: Identity, verb: str) -> dict[str, Any]:
    answer = await api.call(who, "POST", f"{PATH}/{verb}", {})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def events(api: Management, endpoint_id: str) -> list[tuple[str, str]]:
    found = await api.context.store.events(endpoint_id, limit=50)
    return [(event.kind, event.reason) for event in found]


def shares(view: dict[str, Any]) -> dict[str, int]:
    return {release["version"]: release["weight"] for release in view["releases"]}


def window(requests: int, errors: int = 0) -> Window:
    return Window(seconds=1, requests=requests, errors=errors, ttft_p50_s=0.1, ttft_p95_s=0.2)


async def test_canary_begins_without_traffic_and_gets_it_with_its_replicas(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    view = await begin(api, manager)
    assert shares(view) == {"v1": 100, "v2": 0}
    assert (view["rollout"]["target"], view["rollout"]["steps"]) == (10, [10, 25, 50, 100])
    stage.has_replicas = False
    await stage.pass_over()
    shown = (await api.call(manager, "GET", f"{PATH}/rollout")).json()
    assert (shown["weight"], shown["reason"]) == (0, "no replica of the candidate is ready yet")
    stage.has_replicas = True
    published = len(api.refreshed)
    await stage.pass_over()
    shown = (await api.call(manager, "GET", PATH)).json()
    assert shares(shown) == {"v1": 90, "v2": 10}
    assert len(api.refreshed) == published + 1, "gateways are told at once"
    assert shown["events"][-1]["data"]["weight"] == 10


async def test_good_candidate_is_promoted_by_steps_and_the_old_one_kept(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    await begin(api, manager, keep_previous_seconds=60)
    endpoint = await stage.endpoint()
    assert endpoint.rollout is not None
    stage.told.of = {endpoint.rollout.stable_id: window(900), endpoint.rollout.candidate_id: window(100)}
    seen = []
    for _ in range(12):
        await stage.pass_over()
        api.clock.advance(299)
        seen.append(shares((await api.call(manager, "GET", PATH)).json())["v2"])
        if seen[-1] == 100:
            break
        await stage.pass_over()
        api.clock.advance(2)
    assert list(dict.fromkeys(seen)) == [10, 25, 50, 100]
    shown = (await api.call(manager, "GET", f"{PATH}/rollout")).json()
    promotions = [one for one in shown["judgements"] if one["verdict"] == "promote"]
    assert (shown["state"], [one["weight"] for one in promotions]) == ("promoted", [10, 25, 50])
    assert "0 of 100 requests failed (stable 0 of 900)" in promotions[-1]["reason"]
    await stage.pass_over()
    kinds = [kind for kind, _ in await events(api, endpoint_id)]
    assert kinds.count("rollout_step") == 3
    assert kinds[-1] == "rollout_ended", "the minute is over"
    (left,) = (await stage.endpoint()).releases
    assert left.weight == 100


async def test_bad_candidate_is_rolled_back_with_its_numbers(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    await begin(api, manager)
    await stage.pass_over()
    endpoint = await stage.endpoint()
    assert endpoint.rollout is not None
    api.clock.advance(5)
    stage.told.of = {endpoint.rollout.stable_id: window(90), endpoint.rollout.candidate_id: window(12, 6)}
    await stage.pass_over()
    view = (await api.call(manager, "GET", PATH)).json()
    assert (shares(view), view["rollout"]["state"]) == ({"v1": 100}, "rolled_back")
    event = view["events"][-1]
    assert event["kind"] == "rollout_rolled_back"
    assert event["reason"].startswith("from v2 to v1: the candidate failed 6 of 12 requests (50.0%), stable 0 of 90")
    assert event["data"]["candidate_errors"] == 6
    before = await stage.endpoint()
    await stage.pass_over()
    assert await stage.endpoint() == before, "once is enough"


async def test_candidate_that_breaks_under_all_traffic_goes_back_while_the_old_one_is_kept(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    await begin(api, manager, weight=100, keep_previous_seconds=60)
    await stage.pass_over()
    endpoint = await stage.endpoint()
    assert endpoint.rollout is not None
    api.clock.advance(5)
    await stage.pass_over()
    assert await stage.endpoint() == endpoint, "nothing to tell"
    stage.told.of = {endpoint.rollout.candidate_id: window(100, 60)}
    await stage.pass_over()
    view = (await api.call(manager, "GET", PATH)).json()
    assert (shares(view), view["rollout"]["state"]) == ({"v1": 100}, "rolled_back")
    assert "with all traffic the candidate failed 60 of 100" in view["events"][-1]["reason"]


async def test_candidate_whose_artifact_is_corrupt_is_rolled_back_and_never_gets_traffic(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    await begin(api, manager)
    endpoint = await stage.endpoint()
    assert endpoint.rollout is not None
    for attempts in (1, 2):
        stage.troubles[endpoint.rollout.candidate_id] = SupplyError("this is no GGUF file", attempts=attempts)
        api.clock.advance(10)
        await stage.pass_over()
        view = (await api.call(manager, "GET", PATH)).json()
        assert shares(view) == {"v1": 100, "v2": 0}
        assert f"(start {attempts} of 3 failed: this is no GGUF file)" in view["rollout"]["reason"]
    stage.troubles[endpoint.rollout.candidate_id] = SupplyError("this is no GGUF file", attempts=3)
    await stage.pass_over()
    view = (await api.call(manager, "GET", PATH)).json()
    assert (shares(view), view["rollout"]["state"]) == ({"v1": 100}, "rolled_back")
    assert "this is no GGUF file" in view["rollout"]["reason"]


async def test_rollback_by_hand_at_any_time_while_the_old_one_is_kept(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    await begin(api, manager, weight=50)
    await stage.pass_over()
    view = await act(api, manager, "promote")
    assert (view["rollout"]["mode"], shares(view)) == ("manual", {"v1": 50, "v2": 50})
    await stage.pass_over()
    assert await stage.counts() == {"v1": 2, "v2": 2}
    view = (await api.call(manager, "GET", PATH)).json()
    assert (shares(view), view["rollout"]["state"]) == ({"v1": 0, "v2": 100}, "promoted")
    published = len(api.refreshed)
    view = await act(api, manager, "rollback")
    assert (shares(view), view["rollout"]["state"]) == ({"v1": 100}, "rolled_back")
    assert len(api.refreshed) == published + 1
    answer = await api.call(manager, "POST", f"{PATH}/rollback", {})
    assert (answer.status_code, "no rollout to go back from" in answer.text) == (409, True)


async def test_version_that_was_rolled_back_can_be_removed_and_the_rollout_is_still_told(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    await begin(api, manager, weight=50)
    await stage.pass_over()
    bad = (await act(api, manager, "rollback"))["rollout"]["candidate_id"]
    for replica in await api.context.store.replicas():
        if replica.version_id == bad:
            await api.context.store.put_replica(msgspec.structs.replace(replica, state=ReplicaState.STOPPED))
    assert (await api.call(manager, "DELETE", f"/v1/registry/models/{bad}")).status_code == 200
    view = (await api.call(manager, "GET", PATH)).json()
    assert (view["rollout"]["state"], view["rollout"]["candidate"]) == ("rolled_back", bad)


async def test_rollback_to_what_is_kept_no_longer_rolls_back_replica_by_replica(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    await begin(api, manager, weight=100, keep_previous_seconds=0)
    for _ in range(2):
        await stage.pass_over()
    assert len((await stage.endpoint()).releases) == 1
    view = await act(api, manager, "rollback")
    assert (view["rollout"]["kind"], view["rollout"]["candidate"], shares(view)) == (
        "rolling",
        "v1",
        {"v2": 100, "v1": 0},
    )
    weights = []
    for _ in range(4):
        await stage.pass_over()
        weights.append(shares((await api.call(manager, "GET", PATH)).json()).get("v1"))
    assert weights == [50, 100, 100, 100]


async def test_release_with_everything_takes_over_replica_by_replica(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    answer = await api.call(manager, "POST", f"{PATH}/releases", {**NEW, "weight": 100})
    assert answer.status_code == 202, answer.text
    assert (shares(answer.json()), answer.json()["rollout"]["kind"]) == ({"v1": 100, "v2": 0}, "rolling")
    await stage.pass_over()
    assert await stage.counts() == {"v1": 2, "v2": 1}
    await stage.pass_over()
    assert await stage.counts() == {"v1": 1, "v2": 2}
    await stage.pass_over()
    assert shares((await api.call(manager, "GET", PATH)).json()) == {"v2": 100}


async def test_pause_keeps_the_step_and_resume_begins_it_anew(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    await begin(api, manager)
    await stage.pass_over()
    assert (await act(api, manager, "pause"))["rollout"]["state"] == "paused"
    endpoint = await stage.endpoint()
    assert endpoint.rollout is not None
    stage.told.of = {endpoint.rollout.candidate_id: window(100, 100)}
    api.clock.advance(1000)
    await stage.pass_over()
    assert shares((await api.call(manager, "GET", PATH)).json()) == {"v1": 90, "v2": 10}
    assert (await act(api, manager, "resume"))["rollout"]["state"] == "running"
    api.clock.advance(1)
    await stage.pass_over()
    assert (await api.call(manager, "GET", f"{PATH}/rollout")).json()["state"] == "rolled_back"


async def test_canary_is_moved_by_hand_and_can_be_tried_again(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    await begin(api, manager, mode="manual")
    await stage.pass_over()
    answer = await api.call(manager, "POST", f"{PATH}/canary", {"weight": 30, "auto": {"min_requests": 7}})
    assert answer.status_code == 202, answer.text
    assert (answer.json()["rollout"]["target"], answer.json()["rollout"]["auto"]["min_requests"]) == (30, 7)
    await stage.pass_over()
    view = (await api.call(manager, "GET", PATH)).json()
    assert (shares(view), view["rollout"]["steps"]) == ({"v1": 70, "v2": 30}, [30, 50, 100])
    answer = await api.call(manager, "POST", f"{PATH}/canary", {"version": "v2", "weight": 5})
    assert shares(answer.json()) == {"v1": 95, "v2": 5}
    await act(api, manager, "rollback")
    answer = await api.call(manager, "POST", f"{PATH}/canary", {"version": "v2", "weight": 5})
    assert (answer.status_code, shares(answer.json())) == (202, {"v1": 100, "v2": 0})


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/canary", {**NEW, "version": "v3"}),
        ("POST", "/canary", {"version": "v1"}),
        ("POST", "/releases", {**NEW, "weight": 10}),
        ("POST", "/releases", {**NEW, "weight": 100}),
        ("DELETE", "/releases/v2", None),
        ("PATCH", "", {"releases": [{"version": "v2", "weight": 50}]}),
    ],
)
async def test_nothing_else_moves_traffic_beside_a_rollout(
    api: Management, manager: Identity, endpoint_id: str, method: str, path: str, body: Any
) -> None:
    await begin(api, manager)
    before = (await api.context.store.endpoints(), await api.context.store.versions())
    answer = await api.call(manager, method, PATH + path, body)
    assert answer.status_code == 409, answer.text
    assert "a rollout of version 'v2' is running at 0 %; promote it or roll it back first" in answer.text
    assert (await api.context.store.endpoints(), await api.context.store.versions()) == before


async def test_other_changes_go_on_beside_a_rollout(api: Management, manager: Identity, endpoint_id: str) -> None:
    await begin(api, manager)
    answer = await api.call(manager, "PATCH", PATH, {"hardware": {"max_replicas": 5}})
    assert (answer.status_code, answer.json()["rollout"]["state"]) == (200, "running")


async def test_shares_by_hand_end_what_is_kept(
    api: Management, manager: Identity, endpoint_id: str, stage: Stage
) -> None:
    await begin(api, manager, weight=100)
    await stage.pass_over()
    answer = await api.call(manager, "PATCH", PATH, {"releases": [{"version": "v1", "weight": 20}]})
    assert (shares(answer.json()), answer.json()["rollout"]) == ({"v1": 20, "v2": 80}, None)
    api.clock.advance(10_000)
    await stage.pass_over()
    assert len((await stage.endpoint()).releases) == 2
    answer = await api.call(manager, "POST", f"{PATH}/canary", NEW)
    assert (answer.status_code, "one version with all traffic" in answer.text) == (409, True)


async def test_all_faults_of_a_canary_are_listed_at_once(api: Management, manager: Identity, endpoint_id: str) -> None:
    bad = {
        "framework": "vllm",
        "version": "no spaces",
        "weight": 0,
        "mode": "magic",
        "auto": {"steps": [50, 20], "step_seconds": -1, "min_requests": 0, "ttft_ratio": 1e9},
        "keep_previous_seconds": -1,
    }
    answer = await api.call(manager, "POST", f"{PATH}/canary", bad)
    assert answer.status_code == 400
    for param in (
        "framework", "version", "weight", "mode", "auto.steps", "auto.step_seconds", "auto.min_requests",
        "auto.ttft_ratio", "keep_previous_seconds",
    ):  # fmt: skip
        assert f"{param}: " in answer.json()["error"]["message"], param
    for body, says in (
        ({}, "name a version of the model"),
        ({"version": "v9"}, "there is no 'v9' of 'org/smol'; there are 'v1'"),
        ({"options": {"itl_ms": 1}, "version": "v1"}, "name the engine of the new version"),
    ):
        answer = await api.call(manager, "POST", f"{PATH}/canary", body)
        assert (answer.status_code, says in answer.text) == (400, True), answer.text
    answer = await api.call(manager, "POST", f"{PATH}/canary", {"version": "v1"})
    assert (answer.status_code, "has all traffic already" in answer.text) == (409, True)
    assert (await api.call(manager, "GET", f"{PATH}/rollout")).status_code == 404


@pytest.mark.parametrize("verb", ["canary", "promote", "rollback", "pause", "resume"])
async def test_rollouts_of_another_tenant_do_not_exist(
    api: Management, manager: Identity, endpoint_id: str, verb: str
) -> None:
    await begin(api, manager)
    stranger, _ = await api.key(await api.tenant("other"), Scope.MANAGE)
    body = {"version": "v2"} if verb == "canary" else {}
    assert (await api.call(stranger, "POST", f"/v1/endpoints/{endpoint_id}/{verb}", body)).status_code == 404
    assert (await api.call(stranger, "GET", f"/v1/endpoints/{endpoint_id}/rollout")).status_code == 404


@pytest.mark.parametrize("verb", ["promote", "rollback", "pause", "resume"])
async def test_without_a_rollout_there_is_nothing_to_do(
    api: Management, manager: Identity, endpoint_id: str, verb: str
) -> None:
    answer = await api.call(manager, "POST", f"{PATH}/{verb}", {})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
