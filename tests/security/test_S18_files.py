"""S18: a file belongs to its tenant, by every way to reach it; and when that cannot be judged, nobody gets it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.files import FILES, file_form, left_of_files, send, upload
from tests.support.management import Management, management

from modelyard.domain.tenants import Identity, Scope
from modelyard.stores import StoreUnavailableError

WAYS = (("GET", ""), ("HEAD", ""), ("GET", "/content"), ("HEAD", "/content"), ("DELETE", ""))


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Management]:
    async with management(tmp_path) as running:
        yield running


@pytest.fixture
async def owner(api: Management) -> Identity:
    return (await api.key(await api.tenant("owners"), Scope.INFERENCE))[0]


@pytest.fixture
async def stranger(api: Management) -> Identity:
    """Someone of another tenant, whose key may do all that a tenant's may."""
    return (await api.key(await api.tenant("strangers"), Scope.MANAGE))[0]


async def test_a_strangers_every_way_is_the_same_404_as_for_nothing(
    api: Management, owner: Identity, stranger: Identity
) -> None:
    theirs, nobodys = (await upload(api, owner))["id"], "file-" + "a" * 26
    for method, more in WAYS:
        answers = [await api.call(stranger, method, f"{FILES}/{file_id}{more}") for file_id in (theirs, nobodys)]
        assert [answer.status_code for answer in answers] == [404, 404]
        told = [answer.text.replace(theirs, "ID").replace(nobodys, "ID") for answer in answers]
        assert told[0] == told[1], "that it exists is not told"
    async with api.client(stranger) as client:
        tricks = {"range": "bytes=0-1", "if-none-match": "*"}
        assert (await client.get(f"{FILES}/{theirs}/content", headers=tricks)).status_code == 404
    for query in ("", f"?after={theirs}", "?purpose=batch", "?order=asc&limit=10000"):
        assert theirs not in (await api.call(stranger, "GET", f"{FILES}{query}")).text.replace(query, "")
    assert (await api.call(owner, "GET", f"{FILES}/{theirs}/content")).status_code == 200


async def test_a_strangers_idempotency_key_finds_nothing(api: Management, owner: Identity, stranger: Identity) -> None:
    mine = await send(api, owner, file_form(b"x"), idempotency_key="guessed")
    theirs = await send(api, stranger, file_form(b"x"), idempotency_key="guessed")
    assert mine.json()["id"] != theirs.json()["id"]
    assert (await send(api, stranger, file_form(b"y"), idempotency_key="guessed")).status_code == 400


async def test_when_it_cannot_be_judged_whose_a_file_is_nobody_gets_it(
    api: Management, owner: Identity, stranger: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = (await upload(api, owner))["id"]

    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailableError("locked")

    with monkeypatch.context() as broken:
        broken.setattr("modelyard.stores.sql.files.SqlFileStore.file", away)
        for who in (owner, stranger):
            for method, more in WAYS:
                answer = await api.call(who, method, f"{FILES}/{file_id}{more}")
                assert answer.status_code == 503, f"{method} {more}"
    assert (await api.call(owner, "GET", f"{FILES}/{file_id}/content")).content == b"{}\n"


@pytest.mark.parametrize(
    "file_id",
    ["..", "%2e%2e%2f%2e%2e%2fsecrets%2fpepper", "file-..%2f..%2f..%2fcontrol.sqlite", "file-" + "a" * 25, "drafts",
     "file-" + "A" * 26, "file-" + "a" * 27, "file-%00" + "a" * 25, "%e2%80%ae", "file-" + "a" * 26 + "%0a",
     "x" * 5000],
)  # fmt: skip
async def test_an_id_that_nobody_was_given_reaches_no_file(api: Management, owner: Identity, file_id: str) -> None:
    before = left_of_files(api.context.data.root)
    for method, more in WAYS:
        assert (await api.call(owner, method, f"{FILES}/{file_id}{more}")).status_code in (404, 405)
    assert left_of_files(api.context.data.root) == before
