"""Files as OpenAI has them: fields, limits, lists, ranges, expiry, and nobody else's."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.files import CONTENT_TYPE, FILES, file_form, form, left_of_files, pieces_of, send, upload
from tests.support.management import Management, management

from modelyard.config import Config, ControlConfig, GatewayConfig
from modelyard.control.files import OPEN_MAX
from modelyard.domain.files import File, FilePurpose
from modelyard.domain.tenants import Identity, Scope
from modelyard.ids import new_id

DAY_S = 86_400
LINES = b'{"custom_id": "1"}\n{"custom_id": "2"}\n'


def code_of(answer: httpx2.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@pytest.fixture
async def user(api: Management) -> Identity:
    """Someone with a key that may only infer."""
    return (await api.key(await api.tenant("users"), Scope.INFERENCE))[0]


async def listed(api: Management, who: Identity, query: str = "") -> list[str]:
    answer = await api.call(who, "GET", f"{FILES}{query}")
    assert answer.status_code == 200, answer.text
    return [file["id"] for file in answer.json()["data"]]


async def test_an_uploaded_file_is_openais_object_and_its_content_comes_back(api: Management, user: Identity) -> None:
    file = await upload(api, user, LINES)
    now = int(api.clock.unix_s())
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": len(LINES),
        "created_at": now,
        "expires_at": now + 30 * DAY_S,
        "filename": "lines.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert (await api.call(user, "GET", f"{FILES}/{file['id']}")).json() == file
    content = await api.call(user, "GET", f"{FILES}/{file['id']}/content")
    assert (content.status_code, content.content) == (200, LINES)
    stored = await api.context.files.find(file["id"], tenant_id=user.tenant_id)
    assert stored is not None
    assert stored.digest == f"sha256:{hashlib.sha256(LINES).hexdigest()}"
    assert stored.key_id == user.key_id


async def test_only_batches_expire_by_themselves(api: Management, user: Identity) -> None:
    assert "expires_at" not in await upload(api, user, purpose="user_data")
    file = await upload(api, user, purpose="assistants", anchor="created_at", seconds="3600")
    assert file["expires_at"] == file["created_at"] + 3600


async def test_the_file_may_come_before_the_fields(api: Management, user: Identity) -> None:
    fields = (("expires_after[seconds]", "3600"), ("purpose", "batch"), ("expires_after[anchor]", "created_at"))
    answer = await send(api, user, form(("file", LINES, "a.jsonl"), *fields))
    assert (answer.status_code, answer.json()["purpose"]) == (200, "batch")


BAD_FORMS: dict[str, tuple[bytes, str, str]] = {
    "no file": (form(("purpose", "batch")), "missing_required_parameter", "file"),
    "no purpose": (form(("file", b"x", "a.jsonl")), "missing_required_parameter", "purpose"),
    "nothing": (b"--a-boundary--\r\n", "missing_required_parameter", "file"),
    "an unknown purpose": (file_form(b"x", purpose="fun"), "invalid_value", "purpose"),
    "a purpose that batches make": (file_form(b"x", purpose="batch_output"), "invalid_value", "purpose"),
    "a purpose that is a file": (form(("purpose", "batch", "x")), "invalid_type", "purpose"),
    "a purpose twice": (form(("purpose", "batch"), ("purpose", "batch")), "invalid_value", "purpose"),
    "an endless purpose": (form(("purpose", "x" * 100_000)), "invalid_value", "purpose"),
    "a purpose that is no text": (form(("purpose", b"\xff")), "invalid_value", "purpose"),
    "two files": (form(("file", b"x", "a"), ("file", b"x", "b")), "invalid_value", "file"),
    "an unknown field": (file_form(b"x", nonsense="y"), "unsupported_parameter", "nonsense"),
    "a batch that is no jsonl": (file_form(b"x", name="a.csv"), "invalid_value", "file"),
    "a batch that is no jsonl, told at the end": (
        form(("file", b"x", "a.csv"), ("purpose", "batch")), "invalid_value", "file"),
    "another anchor": (
        file_form(b"x", anchor="last_active_at", seconds="3600"), "invalid_value", "expires_after[anchor]"),
    "no anchor": (file_form(b"x", seconds="3600"), "missing_required_parameter", "expires_after[anchor]"),
    "no seconds": (file_form(b"x", anchor="created_at"), "missing_required_parameter", "expires_after[seconds]"),
    **{
        f"{seconds!r} seconds": (
            file_form(b"x", anchor="created_at", seconds=seconds), "invalid_value", "expires_after[seconds]")
        for seconds in ("3599", "2592001", "-3600", "3600.5", "1e9", "", "٣٦٠٠", "9" * 200)
    },
}  # fmt: skip


@pytest.mark.parametrize(("body", "code", "param"), BAD_FORMS.values(), ids=BAD_FORMS.keys())
async def test_a_bad_form_is_refused_by_name_and_leaves_nothing(
    api: Management, user: Identity, body: bytes, code: str, param: str
) -> None:
    assert code_of(await send(api, user, body)) == (400, code, param)
    assert left_of_files(api.context.data.files) == []
    assert await listed(api, user) == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\temp\\x.jsonl", "x.jsonl"),
        ("a\u202eb\u0007.txt", "ab.txt"),
        ("größe 😀.txt", "größe 😀.txt"),
        ("..", "upload"),
        ("", "upload"),
        ("x" * 300 + ".jsonl", "x" * 249 + ".jsonl"),
    ],
)
async def test_a_file_name_is_a_name(api: Management, user: Identity, given: str, shown: str) -> None:
    file = await upload(api, user, name=given, purpose="user_data")
    assert file["filename"] == shown
    content = await api.call(user, "GET", f"{FILES}/{file['id']}/content")
    assert content.headers["content-disposition"].startswith('attachment; filename="')
    assert content.headers["content-disposition"].isascii()


async def test_a_file_without_a_name_gets_one(api: Management, user: Identity) -> None:
    answer = await send(api, user, form(("purpose", "user_data"), ("file", b"x")))
    assert (answer.status_code, answer.json()["filename"]) == (200, "upload")


async def test_content_is_sent_as_what_no_browser_runs(api: Management, user: Identity) -> None:
    binary = "application/octet-stream"
    for name, kind in (("a.JSONL", "application/jsonl"), ("a.html", binary), ("a.svg", binary), ("a", binary)):
        file = await upload(api, user, name=name, purpose="user_data")
        headers = (await api.call(user, "GET", f"{FILES}/{file['id']}/content")).headers
        assert headers["content-type"] == kind
        assert headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in headers["content-security-policy"]
        assert headers["content-disposition"].startswith("attachment")


async def test_a_range_a_head_and_a_tag_save_bytes(api: Management, user: Identity) -> None:
    content = bytes(range(256)) * 20_000
    path = f"{FILES}/{(await upload(api, user, content, purpose='user_data'))['id']}/content"

    async def get(method: str = "GET", **headers: str) -> httpx2.Response:
        async with api.client(user) as client:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, headers=sent)

    whole = await get()
    assert (whole.status_code, whole.content == content, whole.headers["accept-ranges"]) == (200, True, "bytes")
    tag = whole.headers["etag"]
    some = await get(range="bytes=1000-1999", if_range=tag)
    assert (some.status_code, some.content) == (206, content[1000:2000])
    assert some.headers["content-range"] == f"bytes 1000-1999/{len(content)}"
    assert some.headers["content-length"] == "1000"
    assert (await get(range="bytes=-5")).content == content[-5:]
    assert (await get(range="bytes=1000-1999", if_range='"another"')).status_code == 200
    assert (await get(range="bytes=0-1,5-6")).content == content, "several ranges are answered with all of it"
    behind = await get(range=f"bytes={len(content)}-")
    assert code_of(behind) == (416, "range_not_satisfiable", "Range")
    assert behind.headers["content-range"] == f"bytes */{len(content)}"
    head = await get("HEAD")
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(content)))
    assert (await get("HEAD", range="bytes=0-9")).headers["content-length"] == "10"
    for known in (tag, f'"x", W/{tag}', "*"):
        unchanged = await get(if_none_match=known)
        assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert (await get(if_none_match='"x"')).status_code == 200


async def test_an_empty_file_is_a_file(api: Management, user: Identity) -> None:
    file = await upload(api, user, b"", purpose="user_data")
    content = await api.call(user, "GET", f"{FILES}/{file['id']}/content")
    assert (file["bytes"], content.status_code, content.content) == (0, 200, b"")


async def test_lists_turn_their_pages_and_say_where_they_are(api: Management, user: Identity) -> None:
    ids = []
    for number in range(5):
        api.clock.advance(1)
        purpose = "batch" if number % 2 else "vision"
        ids.append((await upload(api, user, purpose=purpose))["id"])
    newest = ids[::-1]
    page = (await api.call(user, "GET", f"{FILES}?limit=2")).json()
    assert (page["object"], [file["id"] for file in page["data"]]) == ("list", newest[:2])
    assert (page["first_id"], page["last_id"], page["has_more"]) == (newest[0], newest[1], True)
    assert await listed(api, user, f"?limit=2&after={page['last_id']}") == newest[2:4]
    assert await listed(api, user, "?order=asc") == ids
    assert await listed(api, user, f"?order=asc&after={ids[3]}") == ids[4:]
    assert await listed(api, user, "?purpose=batch") == [newest[1], newest[3]]
    assert await listed(api, user, "?limit=10000") == newest
    last = (await api.call(user, "GET", f"{FILES}?after={ids[0]}")).json()
    assert last == {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}
    assert await listed(api, user, "?purpose=assistants_output") == []


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=10001", "limit"), ("order=up", "order"), ("purpose=fun", "purpose"),
     ("after=file-" + "a" * 26, "after"), ("after=x", "after")],
)  # fmt: skip
async def test_a_bad_list_is_refused_by_name(api: Management, user: Identity, query: str, param: str) -> None:
    answer = await api.call(user, "GET", f"{FILES}?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_deleted_file_is_gone_and_cannot_be_deleted_again(api: Management, user: Identity) -> None:
    file = await upload(api, user)
    path = f"{FILES}/{file['id']}"
    answer = await api.call(user, "DELETE", path)
    assert answer.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert left_of_files(api.context.data.files) == []
    for method, where in (("DELETE", path), ("GET", path), ("GET", f"{path}/content")):
        assert code_of(await api.call(user, method, where)) == (404, "not_found", None)
    assert await listed(api, user) == []


async def test_an_expired_file_is_gone_before_it_is_swept(api: Management, user: Identity) -> None:
    file = await upload(api, user, anchor="created_at", seconds="3600")
    keeper = await upload(api, user, purpose="user_data")
    api.clock.advance(3600)
    path = f"{FILES}/{file['id']}"
    for method, where in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
        assert code_of(await api.call(user, method, where)) == (404, "not_found", None)
    assert await listed(api, user) == [keeper["id"]]
    assert len(left_of_files(api.context.data.files)) == 2
    await api.context.files.sweep()
    assert [kept.name for kept in left_of_files(api.context.data.files)] == [keeper["id"]]


async def test_a_file_whose_bytes_are_gone_is_said_to_be_so(api: Management, user: Identity) -> None:
    file = await upload(api, user)
    for place in left_of_files(api.context.data.files):
        place.unlink()
    path = f"{FILES}/{file['id']}"
    for headers in ({}, {"range": "bytes=0-1"}):
        async with api.client(user) as client:
            answer = await client.get(f"{path}/content", headers=headers)
        assert code_of(answer) == (500, "content_missing", None)
        assert answer.headers["x-should-retry"] == "false"
        assert "database" not in answer.json()["error"]["message"], "it has nothing to do with it"
    assert (await api.call(user, "DELETE", path)).status_code == 200


async def test_a_colleague_shares_files_and_a_stranger_has_none(api: Management, user: Identity) -> None:
    file = await upload(api, user)
    colleague, _ = await api.key(user.tenant_id, Scope.INFERENCE)
    stranger, _ = await api.key(await api.tenant("strangers"), Scope.MANAGE)
    admin, _ = await api.key("platform", Scope.ADMIN)
    path = f"{FILES}/{file['id']}"
    for who, status in ((colleague, 200), (stranger, 404), (admin, 200)):
        assert (await api.call(who, "GET", path)).status_code == status
        assert (await api.call(who, "GET", f"{path}/content")).status_code == status
    assert await listed(api, stranger) == []
    assert code_of(await api.call(stranger, "GET", f"{FILES}?after={file['id']}")) == (400, "invalid_value", "after")
    assert (await api.call(stranger, "DELETE", path)).status_code == 404
    assert await listed(api, admin) == [file["id"]]
    for place in (path, FILES):
        seen = (await api.call(admin, "GET", place)).json()
        assert seen.get("data", [seen])[0]["modelyard"] == {"tenant_id": user.tenant_id}, "an admin sees whose it is"


# --- limits -----------------------------------------------------------------------


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Management]:
    """A platform where a file has at most 10 kB, for batches 5 kB, and a tenant three files or 20 kB."""
    config = Config(
        gateway=GatewayConfig(file_bytes_max=10_000),
        control=ControlConfig(batch_file_bytes_max=5_000, files_held_max=3, file_bytes_held_max=100_000),
    )
    async with management(tmp_path / "small", config) as running:
        yield running


async def user_of(api: Management, name: str = "users") -> Identity:
    return (await api.key(await api.tenant(name), Scope.INFERENCE))[0]


async def test_a_file_above_its_limit_is_413_and_at_it_is_taken(small: Management) -> None:
    user = await user_of(small)
    assert (await upload(small, user, bytes(5_000)))["bytes"] == 5_000
    assert (await upload(small, user, bytes(10_000), purpose="vision"))["bytes"] == 10_000
    for body in (
        file_form(bytes(5_001)),
        file_form(bytes(10_001), purpose="vision"),
        form(("file", bytes(5_001), "a.jsonl"), ("purpose", "batch")),
        file_form(bytes(1_000_000), purpose="vision"),
    ):
        assert code_of(await send(small, user, body)) == (413, "request_too_large", "file")
    assert len(left_of_files(small.context.data.files)) == 2


async def test_a_body_without_a_length_is_held_to_the_limit_too(small: Management) -> None:
    user = await user_of(small)
    told = []

    async def endless() -> AsyncIterator[bytes]:
        yield file_form(b"", purpose="vision").partition(b"\r\n--a-boundary--")[0]
        for number in range(1_000):
            told.append(number)
            yield bytes(1_000)

    assert code_of(await send(small, user, endless())) == (413, "request_too_large", "file")
    assert left_of_files(small.context.data.files) == []


async def test_a_tenant_has_so_many_files_and_no_more(small: Management) -> None:
    user, other = await user_of(small), await user_of(small, "others")
    files = [await upload(small, user) for _ in range(3)]
    assert code_of(await send(small, user, file_form(b"x"))) == (429, "files_full", None)
    await upload(small, other)
    await small.call(user, "DELETE", f"{FILES}/{files[0]['id']}")
    await upload(small, user)


async def test_a_tenant_has_so_many_bytes_however_many_come_at_once(tmp_path: Path) -> None:
    config = Config(control=ControlConfig(file_bytes_held_max=50_000))
    async with management(tmp_path / "bytes", config) as api:
        user = await user_of(api)
        answers = await asyncio.gather(*(send(api, user, file_form(bytes(9_000), purpose="vision")) for _ in range(10)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 5 + [429] * 5
        held = await api.context.files.store.held_files(user.tenant_id)
        assert held == (5, 45_000)
        assert len(left_of_files(api.context.data.files)) == 5


async def test_uploads_at_once_are_bounded_and_counted_out(api: Management, user: Identity) -> None:
    go = asyncio.Event()
    begun = asyncio.Semaphore(0)

    async def slow() -> AsyncIterator[bytes]:
        first, *rest = pieces_of(file_form(bytes(1_000), purpose="vision"), 300)
        yield first
        begun.release()
        await go.wait()
        for piece in rest:
            yield piece

    sending = [asyncio.ensure_future(send(api, user, slow())) for _ in range(OPEN_MAX)]
    for _ in range(OPEN_MAX):
        await begun.acquire()
    refused = await send(api, user, file_form(b"x"))
    assert (code_of(refused)[:2], "retry-after" in refused.headers) == ((429, "rate_limit_exceeded"), True)
    go.set()
    assert [answer.status_code for answer in await asyncio.gather(*sending)] == [200] * OPEN_MAX
    assert (await send(api, user, file_form(b"x"))).status_code == 200


# --- the same request again ---------------------------------------------------------


async def test_an_idempotency_key_makes_one_file(api: Management, user: Identity) -> None:
    first = await send(api, user, file_form(LINES), idempotency_key="once")
    # Another boundary and order of the fields is the same request all the same.
    other = form(("file", LINES, "lines.jsonl"), ("purpose", "batch")).replace(b"a-boundary", b"another")
    again = await send(
        api, user, other, idempotency_key="once", content_type=CONTENT_TYPE.replace("a-boundary", "another")
    )
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.json() == first.json()
    assert len(left_of_files(api.context.data.files)) == 1
    colleague, _ = await api.key(user.tenant_id, Scope.INFERENCE)
    theirs = await send(api, colleague, file_form(LINES), idempotency_key="once")
    assert theirs.json()["id"] != first.json()["id"], "a key is of an API key"


@pytest.mark.parametrize(
    "other",
    [file_form(LINES + b"\n"), file_form(LINES, name="b.jsonl"), file_form(LINES, purpose="evals"),
     file_form(LINES, anchor="created_at", seconds="3600")],
)  # fmt: skip
async def test_an_idempotency_key_with_another_file_is_refused(api: Management, user: Identity, other: bytes) -> None:
    await send(api, user, file_form(LINES), idempotency_key="once")
    refused = await send(api, user, other, idempotency_key="once")
    assert code_of(refused) == (400, "idempotency_key_reused", "Idempotency-Key")
    assert len(left_of_files(api.context.data.files)) == 1


async def test_an_idempotency_key_is_forgotten_with_its_time_or_its_file(api: Management, user: Identity) -> None:
    first = (await send(api, user, file_form(LINES), idempotency_key="once")).json()["id"]
    await api.call(user, "DELETE", f"{FILES}/{first}")
    second = (await send(api, user, file_form(LINES), idempotency_key="once")).json()["id"]
    assert second != first
    api.clock.advance(api.context.config.control.kept_s)
    third = (await send(api, user, file_form(LINES), idempotency_key="once")).json()["id"]
    assert third not in (first, second)
    assert await listed(api, user) == [third, second]


async def test_an_idempotency_key_in_use_is_409_and_to_be_tried_again(api: Management, user: Identity) -> None:
    go, begun = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        first, *rest = pieces_of(file_form(LINES), 50)
        yield first
        begun.set()
        await go.wait()
        for piece in rest:
            yield piece

    sending = asyncio.ensure_future(send(api, user, slow(), idempotency_key="once"))
    await begun.wait()
    busy = await send(api, user, file_form(LINES), idempotency_key="once")
    assert code_of(busy)[:2] == (409, "idempotency_key_in_use")
    assert busy.headers["x-should-retry"] == "true"
    go.set()
    first = (await sending).json()["id"]
    assert (await send(api, user, file_form(LINES), idempotency_key="once")).json()["id"] == first


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
async def test_a_bad_idempotency_key_is_refused(api: Management, user: Identity, key: str) -> None:
    answer = await send(api, user, file_form(LINES), idempotency_key=key)
    assert code_of(answer) == (400, "invalid_value", "Idempotency-Key")


async def test_what_a_batch_made_is_read_like_any_file(api: Management, user: Identity) -> None:
    output = File(
        id=new_id("file-"),
        tenant_id=user.tenant_id,
        key_id=user.key_id,
        filename="batch_1_output.jsonl",
        purpose=FilePurpose.BATCH_OUTPUT,
        bytes=len(LINES),
        created_at=api.clock.unix_s(),
    )
    writer = await api.context.files.contents.create(output.id)
    await writer.write(LINES)
    await writer.keep()
    await api.context.files.store.add_file(output)
    assert await listed(api, user, "?purpose=batch_output") == [output.id]
    content = await api.call(user, "GET", f"{FILES}/{output.id}/content")
    assert (content.content, content.headers["content-type"]) == (LINES, "application/jsonl")


async def test_the_form_is_documented(api: Management) -> None:
    document: Any = (await api.call(None, "GET", "/openapi.json")).json()
    body = document["paths"][FILES]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert schema["required"] == ["file", "purpose"]
    assert schema["properties"]["file"]["format"] == "binary"
