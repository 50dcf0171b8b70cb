"""F14: the disk fills up under a file: 507, nothing half is left, what was stored stays, and it goes on with space."""

import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.disks import small_disk
from tests.support.files import CONTENT_TYPE, FILES, file_form, left_of_files
from tests.support.waiting import eventually
from tests.support.yard import Reply, Yard

DISK_BYTES = 96 * 1024 * 1024
"""Little more than what files leave to others."""
MIB = 1024 * 1024


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with small_disk(tmp_path / "data" / "files", DISK_BYTES), Yard(tmp_path) as running:
        yield running


def send(yard: Yard, size: int) -> Reply:
    """Send a file."""
    body = file_form(bytes(size), purpose="user_data")
    connection = http.client.HTTPConnection("127.0.0.1", yard.port, timeout=30)
    try:
        headers = {"Authorization": f"Bearer {yard.admin_key}", "Content-Type": CONTENT_TYPE}
        connection.request("POST", FILES, body=body, headers=headers)
        answer = connection.getresponse()
        return Reply(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


def fill(yard: Yard, *, left: int) -> Path:
    """Take all of the disk but ``left`` bytes."""
    ballast = yard.data / "files" / "ballast"
    with ballast.open("wb") as writer, contextlib.suppress(OSError):
        while True:
            writer.write(bytes(MIB))
            writer.flush()
    with ballast.open("r+b") as writer:
        writer.truncate(ballast.stat().st_size - left)
    return ballast


def names(yard: Yard) -> list[str]:
    return [file.name for file in left_of_files(yard.data / "files") if file.name != "ballast"]


def refused(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.json()["error"]["code"]


def test_a_full_disk_refuses_files_keeps_none_half_and_takes_them_again_with_space(yard: Yard) -> None:
    first = send(yard, MIB)
    assert first.status == 200, first.body
    file_id = first.json()["id"]

    # What does not fit is refused by its announced size, with room still there for the database and the journal.
    assert refused(send(yard, 40 * MIB)) == (507, "storage_full")
    ballast = fill(yard, left=MIB)
    assert refused(send(yard, MIB)) == (507, "storage_full")
    assert names(yard) == [file_id]

    assert yard.get(f"{FILES}/{file_id}")["bytes"] == MIB
    assert yard.call("GET", f"{FILES}/{file_id}/content").body == bytes(MIB), "reads go on"
    assert [file["id"] for file in yard.get(FILES)["data"]] == [file_id]
    assert yard.call("DELETE", f"{FILES}/{file_id}").status == 200, "and so does what makes room"
    assert names(yard) == []

    ballast.unlink()
    again = send(yard, MIB)
    assert again.status == 200, again.body
    assert names(yard) == [again.json()["id"]]


def test_a_disk_that_fills_up_under_an_upload_keeps_nothing_of_it(yard: Yard) -> None:
    # The bytes that are left to others are taken by somebody else while the file comes.
    length = 20 * MIB
    body = file_form(bytes(length), purpose="user_data")
    connection = http.client.HTTPConnection("127.0.0.1", yard.port, timeout=30)
    ballast = yard.data / "files" / "ballast"

    def slowly() -> Iterator[bytes]:
        yield body[: 8 * MIB]
        fill(yard, left=MIB)
        yield body[8 * MIB :]

    headers = {"Authorization": f"Bearer {yard.admin_key}", "Content-Type": CONTENT_TYPE}
    connection.request("POST", FILES, body=slowly(), headers={**headers, "Content-Length": str(len(body))})
    answer = connection.getresponse()
    assert refused(Reply(answer.status, {}, answer.read())) == (507, "storage_full")
    connection.close()
    eventually(lambda: not names(yard), 30, "nothing of it is left")
    assert yard.get(FILES)["data"] == []
    ballast.unlink()
    assert send(yard, length).status == 200
