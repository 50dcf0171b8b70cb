"""Uploads by parts, as the management API takes them: all faults at once, bounds, and nobody else's."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.management import Management, management
from tests.support.models import safetensors
from tests.support.uploading import content_of, digest_of

from modelyard.config import Config, ControlConfig
from modelyard.control.artifacts import ArtifactError
from modelyard.control.artifacts.sweep import Sweep
from modelyard.domain.catalog import Artifact
from modelyard.domain.tenants import Identity, Scope
from modelyard.domain.uploads import FOLDERS_PATH

UPLOADS = "/v1/uploads/artifacts"
PART = 64 * 1024
CONTENT = content_of(3 * PART - 5)


async def begin(api: Management, who: Identity, **fields: object) -> dict[str, Any]:
    order = {"name": "smol", "size_bytes": len(CONTENT), "part_bytes": PART, **fields}
    answer = await api.call(who, "POST", UPLOADS, order)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def send(
    api: Management, who: Identity, upload_id: str, number: object, body: Any = None, **headers: str
) -> httpx2.Response:
    if body is None:
        body = CONTENT[(int(str(number)) - 1) * PART : int(str(number)) * PART]
    async with api.client(who) as client:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await client.put(f"{UPLOADS}/{upload_id}/parts/{number}", content=body, headers=sent)


async def upload(api: Management, who: Identity, **fields: object) -> dict[str, Any]:
    upload_id = (await begin(api, who, **fields))["id"]
    for number in (1, 2, 3):
        assert (await send(api, who, upload_id, number)).status_code == 200
    answer = await api.call(who, "POST", f"{UPLOADS}/{upload_id}/complete")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def code_of(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_parts_make_the_file_in_any_order(api: Management, manager: Identity) -> None:
    begun = await begin(api, manager, digest=digest_of(CONTENT))
    assert (begun["part_count"], begun["parts"], begun["uri"], begun["status"]) == (3, [], "", "open")
    assert begun["expires_at"] == begun["created_at"] + 86_400
    for number in (3, 1):
        assert (await send(api, manager, begun["id"], number)).json()["number"] == number
    half = (await api.call(manager, "GET", f"{UPLOADS}/{begun['id']}")).json()
    assert (half["parts"], half["received_bytes"]) == ([1, 3], 2 * PART - 5)
    await send(api, manager, begun["id"], 2)
    done = (await api.call(manager, "POST", f"{UPLOADS}/{begun['id']}/complete")).json()
    assert (done["status"], done["uri"]) == ("complete", f"upload:{digest_of(CONTENT)}")
    file = api.context.data.artifacts / "sha256" / digest_of(CONTENT).removeprefix("sha256:")
    assert file.read_bytes() == CONTENT
    assert await api.context.uploads.kept_digests() == {digest_of(CONTENT)}


async def test_all_that_is_wrong_with_an_upload_is_told_at_once(api: Management, manager: Identity) -> None:
    order = {"name": "../../etc/passwd", "size_bytes": 0, "digest": "sha256:../../x", "part_bytes": 1 << 40}
    answer = await api.call(manager, "POST", UPLOADS, order)
    assert code_of(answer) == (400, "invalid_value")
    for param in order:
        assert f"{param}:" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "name", ["..", "a/../../b", "a\0b", "a\u202eb", "x" * 300, "model#/../../", "", "CON/../x", "..%2f"]
)
async def test_a_name_is_never_a_path(api: Management, manager: Identity, name: str) -> None:
    answer = await api.call(manager, "POST", UPLOADS, {"name": name, "size_bytes": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "name"


@pytest.mark.parametrize("digest", ["sha256:" + "a" * 63, "sha256:../../x", "md5:" + "a" * 32, "sha256:" + "A" * 64])
async def test_a_digest_is_one_or_refused(api: Management, manager: Identity, digest: str) -> None:
    answer = await api.call(manager, "POST", UPLOADS, {"name": "a", "size_bytes": 1, "digest": digest})
    assert answer.json()["error"]["param"] == "digest"


@pytest.mark.parametrize("number", ["0", "4", "-1", "1.5", "x", "9" * 30])
async def test_a_part_that_the_upload_does_not_have_is_refused(api: Management, manager: Identity, number: str) -> None:
    begun = await begin(api, manager)
    answer = await send(api, manager, begun["id"], number, b"x")
    assert answer.status_code in (400, 404)
    assert (await api.call(manager, "GET", f"{UPLOADS}/{begun['id']}")).json()["parts"] == []


@pytest.mark.parametrize("size", [PART - 1, PART + 1, 0])
@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_part_of_the_wrong_length_leaves_nothing(
    api: Management, manager: Identity, size: int, is_announced: bool
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield bytes(size // 2)
        yield bytes(size - size // 2)

    begun = await begin(api, manager)
    answer = await send(api, manager, begun["id"], 1, bytes(size) if is_announced else pieces())
    assert answer.status_code == 400
    assert f"{PART} bytes" in answer.json()["error"]["message"]
    assert not [file for file in api.context.data.uploads.rglob("*") if file.is_file()]


async def test_a_part_must_have_the_digest_that_comes_with_it(api: Management, manager: Identity) -> None:
    begun = await begin(api, manager)
    right = digest_of(CONTENT[:PART]).removeprefix("sha256:")
    assert code_of(await send(api, manager, begun["id"], 1, x_content_sha256="0" * 64)) == (400, "digest_mismatch")
    assert code_of(await send(api, manager, begun["id"], 1, x_content_sha256="zz")) == (400, "invalid_value")
    assert (await send(api, manager, begun["id"], 1, x_content_sha256=right.upper())).status_code == 200


async def test_what_is_missing_is_named(api: Management, manager: Identity) -> None:
    begun = await begin(api, manager)
    await send(api, manager, begun["id"], 2)
    answer = await api.call(manager, "POST", f"{UPLOADS}/{begun['id']}/complete")
    assert code_of(answer) == (400, "upload_incomplete")
    assert "1, 3 of 3" in answer.json()["error"]["message"]


async def test_a_part_that_vanished_from_the_disk_is_asked_for_again(api: Management, manager: Identity) -> None:
    begun = await begin(api, manager)
    for number in (1, 2, 3):
        await send(api, manager, begun["id"], number)
    (api.context.data.uploads / begun["id"] / "2").unlink()
    answer = await api.call(manager, "POST", f"{UPLOADS}/{begun['id']}/complete")
    assert code_of(answer) == (400, "upload_incomplete")
    assert "parts 2 of 3" in answer.json()["error"]["message"]
    await send(api, manager, begun["id"], 2)
    assert (await api.call(manager, "POST", f"{UPLOADS}/{begun['id']}/complete")).status_code == 200


async def test_a_complete_upload_takes_no_part(api: Management, manager: Identity) -> None:
    done = await upload(api, manager)
    assert code_of(await send(api, manager, done["id"], 1)) == (409, "conflict")


async def test_several_calls_complete_it_once(api: Management, manager: Identity) -> None:
    begun = await begin(api, manager)
    for number in (1, 2, 3):
        await send(api, manager, begun["id"], number)
    path = f"{UPLOADS}/{begun['id']}/complete"
    answers = await asyncio.gather(*(api.call(manager, "POST", path) for _ in range(4)))
    assert {(one.status_code, one.json()["status"]) for one in answers} == {(200, "complete")}


async def test_another_tenants_upload_does_not_exist(api: Management, manager: Identity, admin: Identity) -> None:
    mine = await begin(api, manager)
    theirs, _ = await api.key(await api.tenant("other"), Scope.MANAGE)
    assert (await send(api, theirs, mine["id"], 1)).status_code == 404
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/complete")):
        assert code_of(await api.call(theirs, method, f"{UPLOADS}/{mine['id']}{path}")) == (404, "not_found")
    assert (await api.call(theirs, "GET", UPLOADS)).json()["data"] == []
    assert [one["id"] for one in (await api.call(admin, "GET", UPLOADS)).json()["data"]] == [mine["id"]]
    reader, _ = await api.key("ten-acme", Scope.INFERENCE)
    assert (await send(api, reader, mine["id"], 1)).status_code == 403


async def test_an_upload_is_deleted_with_its_parts(api: Management, manager: Identity) -> None:
    begun = await begin(api, manager)
    await send(api, manager, begun["id"], 1)
    assert (await api.call(manager, "DELETE", f"{UPLOADS}/{begun['id']}")).json()["deleted"] is True
    assert (await api.call(manager, "GET", f"{UPLOADS}/{begun['id']}")).status_code == 404
    assert not (api.context.data.uploads / begun["id"]).exists()


async def test_a_tenant_may_have_so_many_uploads_and_bytes(tmp_path: Path) -> None:
    bounds = ControlConfig(uploads_open_max=2, upload_bytes_held_max=3 * len(CONTENT), upload_bytes_max=10_000_000)
    async with management(tmp_path, Config(control=bounds)) as api:
        who, _ = await api.key(await api.tenant("acme"), Scope.MANAGE)
        first = await begin(api, who)
        await begin(api, who)
        order = {"name": "smol", "size_bytes": 10}
        refused = await api.call(who, "POST", UPLOADS, order)
        assert code_of(refused) == (429, "uploads_full")
        assert "2 uploads are open" in refused.json()["error"]["message"]
        await api.call(who, "DELETE", f"{UPLOADS}/{first['id']}")
        refused = await api.call(who, "POST", UPLOADS, {"name": "smol", "size_bytes": 2 * len(CONTENT) + 1})
        assert code_of(refused) == (429, "uploads_full")
        refused = await api.call(who, "POST", UPLOADS, {"name": "smol", "size_bytes": 10_000_001})
        assert refused.json()["error"]["param"] == "size_bytes"
        other, _ = await api.key(await api.tenant("other"), Scope.MANAGE)
        await begin(api, other)


async def test_what_a_folder_keeps_counts_when_the_uploads_of_its_files_are_gone(tmp_path: Path) -> None:
    weights = safetensors(
        {"x.lora_A.weight": ("F32", [4, 4], bytes(64)), "x.lora_B.weight": ("F32", [4, 4], bytes(64))}
    )
    files = {
        "adapter_config.json": b'{"r": 4, "lora_alpha": 8, "peft_type": "LORA"}',
        "adapter_model.safetensors": weights,
    }
    size = sum(map(len, files.values()))
    async with management(tmp_path, Config(control=ControlConfig(upload_bytes_held_max=size + 10))) as api:
        who, _ = await api.key(await api.tenant("acme"), Scope.MANAGE)
        begun = []
        for content in files.values():
            begun.append(await begin(api, who, size_bytes=len(content)))
            assert (await send(api, who, begun[-1]["id"], 1, content)).status_code == 200
            assert (await api.call(who, "POST", f"{UPLOADS}/{begun[-1]['id']}/complete")).status_code == 200
        listed = [{"path": path, "digest": digest_of(content)} for path, content in files.items()]
        folder = await api.call(who, "POST", FOLDERS_PATH, {"name": "bot", "files": listed})
        assert folder.status_code == 201, folder.text
        await begin(api, who, size_bytes=10)
        for one in begun:
            assert (await api.call(who, "DELETE", f"{UPLOADS}/{one['id']}")).status_code == 200
        refused = await api.call(who, "POST", UPLOADS, {"name": "smol", "size_bytes": 11})
        assert code_of(refused) == (429, "uploads_full")
        assert (await api.call(who, "DELETE", f"{UPLOADS}/{folder.json()['id']}")).status_code == 200
        await begin(api, who, size_bytes=11)


async def test_an_upload_whose_bytes_are_gone_is_forgotten(api: Management, manager: Identity) -> None:
    done = await upload(api, manager)
    (api.context.data.artifacts / "sha256" / done["digest"].removeprefix("sha256:")).unlink()
    order = {"model_name": "m", "framework": "weighed", "model_artifact": done["uri"]}
    refused = await api.call(manager, "POST", "/v1/models/deploy", order)
    assert "upload them again" in refused.json()["error"]["message"]
    await api.context.uploads.sweep()
    assert (await api.call(manager, "GET", UPLOADS)).json()["data"] == []


async def test_an_upload_whose_bytes_were_damaged_is_none_and_is_sent_again_at_once(
    api: Management, manager: Identity
) -> None:
    done = await upload(api, manager, digest=digest_of(CONTENT))
    file = api.context.data.artifacts / "sha256" / done["digest"].removeprefix("sha256:")
    file.chmod(0o600)
    file.write_bytes(CONTENT[:-1] + b"?")
    artifact = Artifact(done["uri"], done["digest"], len(CONTENT))
    with pytest.raises(ArtifactError, match="upload it again"):
        await api.context.artifacts.fetch(artifact, lambda _: None, lambda *_: None)
    of_content = f"{UPLOADS}?digest={done['digest']}"
    assert (await api.call(manager, "GET", of_content)).json()["data"] == []
    assert (await api.call(manager, "GET", f"{UPLOADS}/{done['id']}")).status_code == 404
    again = await upload(api, manager, digest=digest_of(CONTENT))
    assert api.context.artifacts.path(artifact) == file
    assert file.read_bytes() == CONTENT
    assert [one.id for one in await api.context.uploads.store.uploads()] == [again["id"]]


async def test_what_was_uploaded_outlives_the_sweep_of_artifacts(api: Management, manager: Identity) -> None:
    desk, context = api.context.uploads, api.context
    done = await upload(api, manager)
    file = context.data.artifacts / "sha256" / done["digest"].removeprefix("sha256:")
    api.clock.advance(2 * ControlConfig().artifact_ttl_s)
    parts = (context.artifacts.contents, context.store, context.config.control, api.clock)
    await Sweep(*parts, spared=desk.kept_digests).sweep()
    assert file.exists()
    await Sweep(*parts).sweep()
    assert not file.exists(), "without being spared it goes"


async def test_the_sweep_forgets_what_is_over_and_folders_of_nobody(api: Management, manager: Identity) -> None:
    desk, data = api.context.uploads, api.context.data
    old = await begin(api, manager)
    await send(api, manager, old["id"], 1)
    complete = await upload(api, manager)
    stray = data.uploads / ("upl-" + "a" * 26)
    stray.mkdir()
    (stray / "1").write_bytes(b"left")
    api.clock.advance(86_000)
    fresh = await begin(api, manager)
    await send(api, manager, fresh["id"], 1)
    await desk.sweep()
    assert not stray.exists()
    assert (data.uploads / old["id"] / "1").exists()
    api.clock.advance(500)
    await desk.sweep()
    left = [one["id"] for one in (await api.call(manager, "GET", UPLOADS)).json()["data"]]
    assert left == [fresh["id"]], f"{complete['id']} is used by no version"
    assert sorted(folder.name for folder in data.uploads.iterdir()) == [fresh["id"]]
