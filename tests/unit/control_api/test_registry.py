"""The registry: versions without endpoints, their lineage and bases, and deployments of them as they are."""

from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.management import Management
from tests.unit.control_api.test_uploads import CONTENT, upload

from modelyard.domain.catalog import VersionStatus
from modelyard.domain.tenants import PLATFORM, Identity, Scope
from modelyard.engines import GuestKind

REGISTRY = "/v1/registry/models"
DEPLOY = "/v1/models/deploy"
ORDER: dict[str, Any] = {"model_name": "smol", "framework": "simulated", "options": {"slots": 3}}


async def register(api: Management, who: Identity, **fields: object) -> dict[str, Any]:
    answer = await api.call(who, "POST", REGISTRY, {**ORDER, **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def told(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


async def test_a_version_is_registered_and_nothing_runs(api: Management, manager: Identity) -> None:
    got = await register(api, manager, hardware={"gpu_type": "h100", "gpu_count": 2})
    assert (got["name"], got["version"], got["status"], got["config"]) == ("smol", "v1", "registered", {"slots": 3})
    assert got["gpu_requirement"] == {"type": "h100", "count": 2}
    assert not await api.context.store.endpoints()
    assert not api.waked
    for reference in (got["id"], "smol", "smol@v1"):
        assert (await api.call(manager, "GET", f"{REGISTRY}/{reference}")).json() == got


async def test_a_version_of_uploaded_bytes_has_the_facts_of_their_header(api: Management, manager: Identity) -> None:
    done = await upload(api, manager)
    got = await register(api, manager, framework="weighed", model_artifact=done["uri"])
    assert (got["facts"]["format"], got["facts"]["architecture"]) == ("gguf", "llama")
    assert (await api.call(manager, "GET", f"{REGISTRY}/smol")).json()["facts"] == got["facts"]


async def test_a_version_whose_endpoint_went_is_not_deploying(api: Management, manager: Identity) -> None:
    await api.call(manager, "POST", DEPLOY, ORDER)
    (version,) = await api.context.store.versions()
    await api.context.store.put_version(msgspec.structs.replace(version, status=VersionStatus.DEPLOYING))
    assert (await api.call(manager, "GET", f"{REGISTRY}/smol")).json()["status"] == "deploying"
    assert (await api.call(manager, "DELETE", "/v1/endpoints/smol")).is_success
    assert (await api.call(manager, "GET", f"{REGISTRY}/smol")).json()["status"] == "registered"
    assert [one["status"] for one in (await api.call(manager, "GET", REGISTRY)).json()["data"]] == ["registered"]


async def test_versions_of_a_name_know_what_they_came_after(api: Management, manager: Identity) -> None:
    first = await register(api, manager)
    await register(api, manager, model_name="another")
    second = await register(api, manager)
    await api.call(manager, "POST", DEPLOY, ORDER)
    third = (await api.call(manager, "GET", f"{REGISTRY}/smol@v3")).json()
    assert (first["parent_id"], first["parent"]) == ("", "")
    assert (second["parent_id"], second["parent"]) == (first["id"], "v1")
    assert (third["parent_id"], third["parent"]) == (second["id"], "v2")
    assert (await api.call(manager, "DELETE", f"{REGISTRY}/{second['id']}")).json()["deleted"] is True
    assert (await api.call(manager, "GET", f"{REGISTRY}/smol@v3")).json()["parent"] == "v1"


async def test_a_registered_version_is_deployed_as_it_is(api: Management, manager: Identity) -> None:
    first = await register(api, manager)
    await register(api, manager)
    order = {"model_name": "chat", "model_artifact": "model:smol@v1", "hardware": {"max_replicas": 2}}
    answer = await api.call(manager, "POST", DEPLOY, order)
    assert answer.status_code == 202, answer.text
    assert set(answer.json()) == {"endpoint_id", "status", "estimated_ready_seconds", "endpoint_url"}
    (endpoint,) = await api.context.store.endpoints()
    assert (endpoint.name, [release.version_id for release in endpoint.releases]) == ("chat", [first["id"]])
    assert len(await api.context.store.versions()) == 2
    newest = {"model_name": "newest", "model_artifact": "model:smol", "framework": "simulated"}
    assert (await api.call(manager, "POST", DEPLOY, newest)).status_code == 202
    assert (await api.call(manager, "GET", "/v1/endpoints/newest")).json()["model_version"] == "v2"


async def test_a_registered_version_is_added_as_a_release(api: Management, manager: Identity) -> None:
    await api.call(manager, "POST", DEPLOY, ORDER)
    await register(api, manager)
    body = {"model_artifact": "model:smol@v2", "weight": 10}
    answer = await api.call(manager, "POST", "/v1/endpoints/smol/releases", body)
    assert answer.status_code == 202, answer.text
    assert [(one["version"], one["weight"]) for one in answer.json()["releases"]] == [("v1", 90), ("v2", 10)]
    assert (await api.call(manager, "POST", "/v1/endpoints/smol/releases", body)).status_code == 409


async def test_what_a_registered_version_has_cannot_be_asked_for_anew(api: Management, manager: Identity) -> None:
    await register(api, manager)
    order = {
        "model_name": "chat",
        "model_artifact": "model:smol@v1",
        "framework": "weighed",
        "options": {"slots": 9},
        "version": "v7",
        "base": "smol@v1",
        "hardware": {"gpu_type": "h100", "gpu_count": 8},
    }
    status, message = told(await api.call(manager, "POST", DEPLOY, order))
    assert status == 400
    for param in ("framework", "options", "version", "base", "hardware.gpu_type", "hardware.gpu_count"):
        assert f"{param}: " in message


@pytest.mark.parametrize(
    "reference", ["model:", "model:smol@v9", "model:other@v1", "model:../x@v1", "model:a@" + "b" * 999]
)
async def test_a_version_that_is_not_there_cannot_be_deployed(
    api: Management, manager: Identity, reference: str
) -> None:
    await register(api, manager)
    theirs, _ = await api.key(await api.tenant("rival"), Scope.MANAGE)
    await register(api, theirs, model_name="other")
    answer = await api.call(manager, "POST", DEPLOY, {"model_name": "chat", "model_artifact": reference})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model_artifact"
    if reference == "model:smol@v9":
        assert "'smol' has 'v1'" in answer.json()["error"]["message"]


async def test_of_many_versions_a_few_are_named_and_the_others_counted(api: Management, manager: Identity) -> None:
    for _ in range(7):
        await register(api, manager)
    order = {"model_name": "chat", "model_artifact": "model:smol@v9"}
    _, message = told(await api.call(manager, "POST", DEPLOY, order))
    assert "'smol' has 'v7', 'v6', 'v5', 'v4', 'v3' and 2 more." in message


async def test_a_version_in_use_stays(api: Management, manager: Identity) -> None:
    await api.call(manager, "POST", DEPLOY, ORDER)
    (version,) = await api.context.store.versions()
    status, message = told(await api.call(manager, "DELETE", f"{REGISTRY}/{version.id}"))
    assert status == 409
    assert "endpoint 'smol'" in message
    base = await register(api, manager, model_name="base")
    await register(api, manager, model_name="tuned", base="base@v1", options={})
    status, message = told(await api.call(manager, "DELETE", f"{REGISTRY}/{base['id']}"))
    assert status == 409
    assert "adapters of it (tuned@v1)" in message


async def test_another_tenants_version_cannot_be_deleted(api: Management, manager: Identity, admin: Identity) -> None:
    mine = await register(api, manager)
    theirs, _ = await api.key(await api.tenant("rival"), Scope.MANAGE)
    assert (await api.call(theirs, "DELETE", f"{REGISTRY}/{mine['id']}")).status_code == 404
    assert (await api.call(admin, "DELETE", f"{REGISTRY}/{mine['id']}")).status_code == 200
    assert (await api.call(manager, "DELETE", f"{REGISTRY}/{mine['id']}")).status_code == 404


async def test_an_adapter_knows_its_base(api: Management, manager: Identity) -> None:
    base = await register(api, manager)
    tuned = await register(api, manager, model_name="tuned", base="smol@v1", options={})
    assert (tuned["base_id"], tuned["base"]) == (base["id"], "smol@v1")
    deployed = await api.call(
        manager, "POST", DEPLOY, {**ORDER, "model_name": "live", "base": "smol@v1", "options": {}}
    )
    assert "no endpoint that you may use serves 'smol@v1'" in told(deployed)[1]
    host = {**ORDER, "model_name": "smol", "version": "v2", "options": {"max_adapters": 4}}
    assert (await api.call(manager, "POST", DEPLOY, host)).status_code == 202
    deployed = await api.call(
        manager, "POST", DEPLOY, {**ORDER, "model_name": "live", "base": "smol@v1", "options": {}}
    )
    assert deployed.status_code == 202, "another version of the same model takes it in"
    status, message = told(await api.call(manager, "POST", REGISTRY, {**ORDER, "base": "tuned@v1", "options": {}}))
    assert (status, "is an adapter itself" in message) == (400, True)


async def test_an_adapter_that_is_called_like_a_shared_base_does_not_hide_it(
    api: Management, manager: Identity, admin: Identity
) -> None:
    host = {**ORDER, "model_name": "llama", "options": {"max_adapters": 4}, "shared": True}
    assert (await api.call(admin, "POST", DEPLOY, host)).status_code == 202
    adapter = {"framework": "simulated", "base": "llama@v1"}
    for name in ("llama", "second"):
        answer = await api.call(manager, "POST", DEPLOY, {**adapter, "model_name": name})
        assert answer.status_code == 202, answer.text
    (version,) = [one for one in await api.context.store.versions() if one.name == "second"]
    (shared,) = [one for one in await api.context.store.versions() if one.tenant_id != manager.tenant_id]
    assert version.base_id == shared.id
    own = await register(api, manager, model_name="llama", version="v3")
    await register(api, admin, model_name="llama", version="v3")
    third = await register(api, manager, model_name="third", base="llama@v3", options={})
    assert third["base_id"] == own["id"], "what is the tenant's own comes first"


async def test_a_base_that_is_an_adapter_is_refused_with_those_that_are_none(
    api: Management, manager: Identity, admin: Identity
) -> None:
    host = {**ORDER, "model_name": "llama", "options": {"max_adapters": 4}, "shared": True}
    assert (await api.call(admin, "POST", DEPLOY, host)).status_code == 202
    assert (await api.call(admin, "POST", DEPLOY, {**ORDER, "model_name": "unshared"})).status_code == 202
    await register(api, manager, model_name="tuned", base="llama@v1", options={})
    for path in (REGISTRY, DEPLOY):
        _, message = told(await api.call(manager, "POST", path, {**ORDER, "base": "tuned@v1", "options": {}}))
        assert message.endswith(
            "base: 'tuned@v1' is an adapter itself; name the version that it is loaded onto; there is 'llama@v1'."
        )
    _, message = told(await api.call(manager, "POST", DEPLOY, {"model_name": "x", "base": "tunde@v1"}))
    assert "'tuned@v1'" not in message
    assert "unshared" not in message, "what another tenant does not share does not exist"


@pytest.mark.parametrize(("wrong", "right"), [("lama@v1", "llama@v1"), ("llama@v2", "llama@v1"), ("llama", "llama@v1")])
async def test_a_misspelt_base_is_guessed(api: Management, manager: Identity, wrong: str, right: str) -> None:
    await register(api, manager, model_name="llama")
    _, message = told(await api.call(manager, "POST", DEPLOY, {"model_name": "x", "base": wrong}))
    assert f"there is no version '{wrong}' of yours, nor a shared one; did you mean '{right}'?" in message
    assert not message.endswith("?.")


@pytest.mark.parametrize("base", ["smol@v9", "smol", "../x@y", "x" * 500])
async def test_a_base_that_is_not_there_is_refused(api: Management, manager: Identity, base: str) -> None:
    await register(api, manager)
    answer = await api.call(manager, "POST", REGISTRY, {**ORDER, "base": base, "options": {}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "base"


async def test_a_base_of_another_tenant_must_be_shared(api: Management, manager: Identity, admin: Identity) -> None:
    assert (await api.call(admin, "POST", DEPLOY, {**ORDER, "model_name": "private"})).status_code == 202
    assert (await api.call(admin, "POST", DEPLOY, {**ORDER, "model_name": "public", "shared": True})).status_code == 202
    refused = await api.call(manager, "POST", REGISTRY, {**ORDER, "base": "private@v1", "options": {}})
    assert refused.status_code == 400
    got = await register(api, manager, base="public@v1", options={})
    assert got["base"] == "public@v1"


async def test_an_engine_that_loads_no_adapters_says_so(
    api: Management, manager: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    await register(api, manager)
    monkeypatch.setattr(api.context.engines["simulated"], "guests", GuestKind.NONE, raising=False)
    await register(api, manager, model_name="tuned", base="smol@v1", options={})
    status, message = told(await api.call(manager, "POST", DEPLOY, {**ORDER, "base": "smol@v1", "options": {}}))
    assert (status, "cannot load an adapter onto a base" in message) == (400, True)
    deployed = await api.call(manager, "POST", DEPLOY, {"model_name": "x", "model_artifact": "model:tuned@v1"})
    assert told(deployed)[0] == 400


# --- what was uploaded ---------------------------------------------------------------


async def test_an_upload_is_deployed_by_its_digest(api: Management, manager: Identity) -> None:
    done = await upload(api, manager)
    order = {"model_name": "mine", "framework": "weighed", "model_artifact": done["uri"]}
    answer = await api.call(manager, "POST", DEPLOY, order)
    assert answer.status_code == 202, answer.text
    (version,) = await api.context.store.versions()
    assert (version.artifact.uri, version.artifact.digest) == (done["uri"], done["digest"])
    assert version.artifact.size_bytes == len(CONTENT)
    api.clock.advance(90_000)
    await api.context.uploads.sweep()
    assert (await api.call(manager, "GET", f"/v1/uploads/artifacts/{done['id']}")).status_code == 200, "it is used"


async def test_to_know_a_digest_is_not_to_have_the_bytes(api: Management, manager: Identity, admin: Identity) -> None:
    done = await upload(api, manager)
    order = {"model_name": "mine", "framework": "weighed", "model_artifact": done["uri"]}
    theirs, _ = await api.key(await api.tenant("rival"), Scope.MANAGE)
    refused = await api.call(theirs, "POST", DEPLOY, order)
    assert refused.json()["error"]["param"] == "model_artifact"
    assert "no complete upload" in refused.json()["error"]["message"]
    taken = await api.call(admin, "POST", DEPLOY, order)
    assert taken.status_code == 202, "an admin sees all"
    assert (await api.context.store.versions())[0].tenant_id == PLATFORM


@pytest.mark.parametrize("reference", ["upload:", "upload:sha256:../../x", "upload:sha256:" + "a" * 63, "upload:x"])
async def test_a_bad_reference_to_an_upload_is_a_fault(api: Management, manager: Identity, reference: str) -> None:
    order = {"model_name": "mine", "framework": "weighed", "model_artifact": reference}
    answer = await api.call(manager, "POST", DEPLOY, order)
    assert answer.json()["error"]["param"] == "model_artifact"


async def sent(api: Management, who: Identity, content: bytes) -> httpx2.Response:
    order = {"name": "other", "size_bytes": len(content)}
    begun = (await api.call(who, "POST", "/v1/uploads/artifacts", order)).json()
    path = f"/v1/uploads/artifacts/{begun['id']}"
    async with api.client(who) as client:
        await client.put(f"{path}/parts/1", content=content)
        return await client.post(f"{path}/complete")


async def test_an_upload_of_another_format_is_a_fault(api: Management, manager: Identity) -> None:
    uri = (await sent(api, manager, b"\x08\x07what")).json()["uri"]
    order = {"model_name": "mine", "framework": "weighed", "model_artifact": uri}
    status, message = told(await api.call(manager, "POST", DEPLOY, order))
    assert (status, "no GGUF file" in message) == (400, True)


@pytest.mark.parametrize("content", [b"PK\3\4" + bytes(60), b"\x80\x04\x95" + bytes(60)])
async def test_an_archive_or_a_pickle_never_becomes_an_artifact(
    api: Management, manager: Identity, content: bytes
) -> None:
    answer = await sent(api, manager, content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "artifact_invalid")
    assert not list((api.context.data.artifacts / "sha256").glob("*"))
