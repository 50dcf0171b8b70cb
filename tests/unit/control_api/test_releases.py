"""Releases, and changes of an endpoint that lives."""

import asyncio
from typing import Any

import pytest
from tests.support.management import Management

from modelyard.domain.endpoints import Endpoint, Release, Serving, Sticky, Timeouts
from modelyard.domain.tenants import Identity, Scope

DEPLOY: dict[str, Any] = {"model_name": "org/smol", "framework": "simulated", "hardware": {"gpu_type": "h100"}}
PATH = "/v1/endpoints/org/smol"


@pytest.fixture
async def endpoint_id(api: Management, manager: Identity) -> str:
    answer = await api.call(manager, "POST", "/v1/models/deploy", DEPLOY)
    return str(answer.json()["endpoint_id"])


async def stored(api: Management) -> Endpoint:
    (endpoint,) = await api.context.store.endpoints()
    return endpoint


async def kinds(api: Management, endpoint_id: str) -> list[str]:
    return [event.kind for event in await api.context.store.events(endpoint_id, limit=20)]


def shares(view: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {release["version"]: (release["weight"], release["shadow"]) for release in view["releases"]}


async def add(api: Management, who: Identity, **wanted: object) -> Any:
    return await api.call(who, "POST", f"{PATH}/releases", {"framework": "simulated", **wanted})


# --- deploying with serving ------------------------------------------------------------


async def test_deployment_says_how_it_is_served(api: Management, manager: Identity) -> None:
    serving = {"timeouts": {"first_token_s": 60, "total_s": 900.5}, "coalesce_ms": 20, "sticky": "user"}
    answer = await api.call(manager, "POST", "/v1/models/deploy", {**DEPLOY, "serving": serving})
    assert answer.status_code == 202, answer.text
    assert (await stored(api)).serving == Serving(Timeouts(first_token_s=60.0, total_s=900.5), 20, Sticky.USER)
    shown = (await api.call(manager, "GET", PATH)).json()["serving"]
    assert shown == {
        "timeouts": {"connect_s": None, "first_token_s": 60.0, "token_s": None, "total_s": 900.5},
        "coalesce_ms": 20,
        "sticky": "user",
        "fallback_after_s": 0.0,
    }


async def test_all_faults_of_serving_are_listed_with_those_of_the_rest(api: Management, manager: Identity) -> None:
    bad = {
        **DEPLOY,
        "version": "no spaces",
        "serving": {
            "timeouts": {"connect_s": 0, "first_token_s": 500, "token_s": -1},
            "coalesce_ms": 1001,
            "sticky": "glue",
        },
    }
    answer = await api.call(manager, "POST", "/v1/models/deploy", bad)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    for param in (
        "version",
        "serving.timeouts.connect_s",
        "serving.timeouts.first_token_s",
        "serving.timeouts.token_s",
        "serving.coalesce_ms",
        "serving.sticky",
    ):
        assert f"{param}: " in message
    assert "none, key, user" in message
    assert "'total_s' (120 s)" in message, "the gateway's own, since none is given"
    assert not await api.context.store.endpoints()


# --- changing --------------------------------------------------------------------------


async def test_change_keeps_what_it_does_not_name(api: Management, manager: Identity, endpoint_id: str) -> None:
    first = {"timeouts": {"first_token_s": 60}, "coalesce_ms": 20}
    assert (await api.call(manager, "PATCH", PATH, {"serving": first})).status_code == 200
    answer = await api.call(manager, "PATCH", PATH, {"serving": {"timeouts": {"token_s": 9}, "sticky": "key"}})
    assert answer.json()["serving"] == {
        "timeouts": {"connect_s": None, "first_token_s": 60.0, "token_s": 9.0, "total_s": None},
        "coalesce_ms": 20,
        "sticky": "key",
        "fallback_after_s": 0.0,
    }
    answer = await api.call(manager, "PATCH", PATH, {"serving": {"timeouts": {"first_token_s": None}}})
    assert (await stored(api)).serving == Serving(Timeouts(token_s=9.0), 20, Sticky.KEY), "null is the gateway's own"
    assert answer.json()["events"][-1]["kind"] == "changed"


async def test_bounds_of_a_living_endpoint_change(api: Management, manager: Identity, endpoint_id: str) -> None:
    before = (len(api.waked), len(api.refreshed))
    change = {
        "hardware": {"min_replicas": 0, "max_replicas": 5},
        "scaling": {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 7},
    }
    answer = await api.call(manager, "PATCH", PATH, change)
    assert answer.status_code == 200, answer.text
    scaling = (await stored(api)).scaling
    assert (scaling.min_replicas, scaling.max_replicas, scaling.scale_to_zero, scaling.idle_s) == (0, 5, True, 7.0)
    assert (len(api.waked), len(api.refreshed)) == (before[0] + 1, before[1] + 1)


async def test_change_that_changes_nothing_is_no_event_and_still_published(
    api: Management, manager: Identity, endpoint_id: str
) -> None:
    before = len(api.refreshed)
    assert (await api.call(manager, "PATCH", PATH, {"serving": {"sticky": "none"}})).status_code == 200
    assert await kinds(api, endpoint_id) == ["deployed"]
    assert len(api.refreshed) == before + 1


async def test_all_faults_of_a_change_are_listed_at_once(api: Management, manager: Identity, endpoint_id: str) -> None:
    bad = {
        "serving": {"coalesce_ms": -1, "sticky": ""},
        "hardware": {"min_replicas": 3, "max_replicas": 2},
        "scaling": {"scale_to_zero_after_idle_seconds": 0},
        "releases": [{"version": "v9", "weight": 1}],
    }
    before = await stored(api)
    answer = await api.call(manager, "PATCH", PATH, bad)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    for param in (
        "serving.coalesce_ms",
        "serving.sticky",
        "hardware.max_replicas",
        "scaling.scale_to_zero_after_idle_seconds",
        "releases.0.version",
    ):
        assert f"{param}: " in message
    assert "it has 'v1'" in message
    assert await stored(api) == before


async def test_changes_at_once_all_happen(api: Management, manager: Identity, endpoint_id: str) -> None:
    changes: list[dict[str, Any]] = [
        {"serving": {"sticky": "user"}},
        {"serving": {"coalesce_ms": 33}},
        {"hardware": {"max_replicas": 7}},
    ]
    answers = await asyncio.gather(*(api.call(manager, "PATCH", PATH, change) for change in changes))
    assert [answer.status_code for answer in answers] == [200] * 3
    endpoint = await stored(api)
    assert (endpoint.serving.sticky, endpoint.serving.coalesce_ms, endpoint.scaling.max_replicas) == ("user", 33, 7)


async def test_deleted_endpoint_cannot_be_changed_back_to_life(
    api: Management, manager: Identity, endpoint_id: str
) -> None:
    await api.call(manager, "DELETE", PATH)
    for answer in (
        await api.call(manager, "PATCH", PATH, {"serving": {"coalesce_ms": 1}}),
        await add(api, manager, weight=10),
        await api.call(manager, "DELETE", f"{PATH}/releases/v1"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert (await stored(api)).is_deleted


async def test_endpoint_of_another_tenant_does_not_exist(api: Management, manager: Identity, endpoint_id: str) -> None:
    stranger, _ = await api.key(await api.tenant("other"), Scope.MANAGE)
    for answer in (
        await api.call(stranger, "PATCH", f"/v1/endpoints/{endpoint_id}", {"serving": {"coalesce_ms": 1}}),
        await api.call(stranger, "POST", f"/v1/endpoints/{endpoint_id}/releases", {"framework": "simulated"}),
        await api.call(stranger, "DELETE", f"/v1/endpoints/{endpoint_id}/releases/v1"),
    ):
        assert answer.status_code == 404
    assert len((await stored(api)).releases) == 1


# --- releases --------------------------------------------------------------------------


async def test_release_takes_its_share_and_gives_it_back(api: Management, manager: Identity, endpoint_id: str) -> None:
    answer = await add(api, manager, weight=25, options={"itl_ms": 3})
    assert answer.status_code == 202, answer.text
    assert shares(answer.json()) == {"v1": (75, 0), "v2": (25, 0)}
    assert answer.json()["canary_weight"] == 25
    first, second = sorted(await api.context.store.versions(), key=lambda one: one.version)
    assert (second.version, second.name, second.tenant_id) == ("v2", "org/smol", "ten-acme")
    assert (second.options, second.gpu_type) == ({"itl_ms": 3}, first.gpu_type)
    answer = await api.call(manager, "PATCH", PATH, {"releases": [{"version": "v2", "weight": 40}]})
    assert shares(answer.json()) == {"v1": (60, 0), "v2": (40, 0)}
    assert (answer.json()["model_version"], answer.json()["canary_weight"]) == ("v1", 40)
    answer = await api.call(manager, "PATCH", PATH, {"releases": [{"version": "v2", "weight": 100}]})
    assert (answer.json()["model_version"], answer.json()["canary_weight"]) == ("v2", 0), "v1 is only kept"
    answer = await api.call(manager, "DELETE", f"{PATH}/releases/v1")
    assert answer.status_code == 202
    assert shares(answer.json()) == {"v2": (100, 0)}
    wanted = ["deployed", "release_added", "changed", "changed", "release_removed"]
    assert await kinds(api, endpoint_id) == wanted


async def test_shadow_takes_no_traffic_and_can_be_promoted(
    api: Management, manager: Identity, endpoint_id: str
) -> None:
    answer = await add(api, manager, version="next", shadow=100)
    assert shares(answer.json()) == {"v1": (100, 0), "next": (0, 100)}
    answer = await api.call(manager, "PATCH", PATH, {"releases": [{"version": "next", "weight": 10}]})
    assert shares(answer.json()) == {"v1": (90, 0), "next": (10, 0)}
    answer = await api.call(manager, "PATCH", PATH, {"releases": [{"version": "next", "shadow": 5}]})
    assert shares(answer.json()) == {"v1": (100, 0), "next": (0, 5)}
    (version_id,) = [one.id for one in await api.context.store.versions() if one.version == "next"]
    answer = await api.call(manager, "PATCH", PATH, {"releases": [{"version": version_id, "shadow": 0}]})
    assert (await stored(api)).releases[1] == Release(version_id, 0, 0)


async def test_all_faults_of_a_release_are_listed_at_once(api: Management, manager: Identity, endpoint_id: str) -> None:
    answer = await add(api, manager, framework="vllm", version="no spaces", weight=101, options={"journal": "/etc/x"})
    assert answer.status_code == 400
    for param in ("version", "framework", "options.journal", "weight"):
        assert f"{param}: " in answer.json()["error"]["message"]
    assert len(await api.context.store.versions()) == 1


@pytest.mark.parametrize(
    ("wanted", "status", "param"),
    [
        ({"weight": 10, "shadow": 10}, 400, "shadow"),
        ({"shadow": 101}, 400, "shadow"),
        ({"version": "v1"}, 409, "version"),
        ({"options": {"nothing": 1}}, 400, "options.nothing"),
    ],
)
async def test_release_that_cannot_be_is_refused(
    api: Management, manager: Identity, endpoint_id: str, wanted: dict[str, Any], status: int, param: str
) -> None:
    answer = await add(api, manager, **wanted)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert len((await stored(api)).releases) == 1


async def test_last_release_with_traffic_stays(api: Management, manager: Identity, endpoint_id: str) -> None:
    await add(api, manager, shadow=10)
    answer = await api.call(manager, "DELETE", f"{PATH}/releases/v1")
    assert answer.status_code == 409
    assert "no other release has traffic" in answer.json()["error"]["message"]
    assert (await api.call(manager, "DELETE", f"{PATH}/releases/v7")).status_code == 404
    assert (await api.call(manager, "DELETE", f"{PATH}/releases/v2")).status_code == 202
