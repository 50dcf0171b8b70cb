"""S9 for forms: mutated, cut and mixed forms are refused as what they are, leave nothing, and are never a 500."""

import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest
from tests.support.files import BOUNDARY, FILES, file_form, form, left_of_files, pieces_of, send
from tests.support.management import Management, management

from modelyard.domain.tenants import Identity, Scope

TRIES = 400
GOOD = (
    file_form(b'{"custom_id": "1"}\r\n--not-it\r\n' * 40),
    form(("file", b"\x00\xff\r\n" * 300, "a.jsonl"), ("purpose", "batch")),
    form(("purpose", "vision"), ("file", b"-" * 500)),
)
SPICE = (
    b"\r\n", b"\n", b"\r", b"--", f"--{BOUNDARY}".encode(), f"\r\n--{BOUNDARY}--\r\n".encode(), b"\x00", b"\xff\xfe",
    b'"', b'; filename="../../x"', b"; filename*=utf-8''..%2f..%2fx", b'; name="purpose"', b"A" * 5000, b":" * 300,
    b"content-disposition: form-data\r\n", b"content-transfer-encoding: base64\r\n",
    b"content-type: multipart/mixed; boundary=inner\r\n",
)  # fmt: skip


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Management]:
    async with management(tmp_path) as running:
        yield running


@pytest.fixture
async def user(api: Management) -> Identity:
    return (await api.key(await api.tenant("users"), Scope.INFERENCE))[0]


def mutants(seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    for _ in range(TRIES):
        body = bytearray(chance.choice(GOOD))
        for _ in range(chance.randint(1, 4)):
            at = chance.randint(0, len(body))
            match chance.randint(0, 4):
                case 0:
                    del body[at : at + chance.randint(1, 60)]
                case 1:
                    body[at:at] = chance.choice(SPICE)
                case 2:
                    body[at:at] = body[max(0, at - chance.randint(1, 200)) : at]
                case 3:
                    body[at : at + 1] = bytes([chance.randrange(256)])
                case _:
                    del body[at:]
        yield bytes(body)


async def test_mutated_forms_are_taken_or_refused_and_never_a_500(api: Management, user: Identity) -> None:
    taken = refused = 0
    for number, body in enumerate(mutants(1)):

        async def cut(body: bytes = body, size: int = 1 + number % 97) -> AsyncIterator[bytes]:
            for piece in pieces_of(body, size):
                yield piece

        answer = await send(api, user, cut() if number % 2 else body)
        assert answer.status_code in (200, 400), f"{body!r}: {answer.status_code} {answer.text}"
        if answer.status_code == 200:
            taken += 1
            assert await is_whole(api, user, answer)
        else:
            refused += 1
            error = answer.json()["error"]
            assert error["code"]
            assert len(answer.content) < 1000
    assert min(taken, refused) > TRIES / 10, "both are tried"
    assert len(left_of_files(api.context.data.files)) == taken, "nothing is left of what was refused"


async def is_whole(api: Management, user: Identity, answer: httpx2.Response) -> bool:
    file = answer.json()
    content = await api.call(user, "GET", f"{FILES}/{file['id']}/content")
    name = file["filename"]
    return len(content.content) == file["bytes"] and "/" not in name and "\\" not in name and name.isprintable()


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "multipart/form-data",
        "multipart/mixed; boundary=a-boundary",
        'multipart/form-data; boundary="',
        "application/x-www-form-urlencoded",
    ],
)
async def test_what_is_called_no_form_is_no_form(api: Management, user: Identity, content_type: str) -> None:
    answer = await send(api, user, GOOD[0], content_type=content_type)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_content_type")
    assert left_of_files(api.context.data.files) == []
