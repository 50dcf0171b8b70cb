"""F14: the disk fills up under an upload: 507, nothing half is left, and it goes on once there is space."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.disks import small_disk
from tests.support.uploading import (
    PART,
    UPLOADS,
    announce,
    complete,
    content_of,
    digest_of,
    left_of_uploads,
    part_of,
    send,
    stored,
)
from tests.support.yard import Yard

DISK_BYTES = 96 * 1024 * 1024
"""Little more than what uploads leave to others."""


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with small_disk(tmp_path / "data" / "artifacts", DISK_BYTES), Yard(tmp_path) as running:
        yield running


def fill(yard: Yard, *, left: int) -> Path:
    """Take all of the disk but ``left`` bytes."""
    ballast = yard.data / "artifacts" / "ballast"
    with ballast.open("wb") as writer, contextlib.suppress(OSError):
        while True:
            writer.write(bytes(1024 * 1024))
            writer.flush()
    with ballast.open("r+b") as writer:
        writer.truncate(ballast.stat().st_size - left)
    return ballast


def test_a_full_disk_costs_no_part_that_was_whole(yard: Yard) -> None:
    content = content_of(6 * PART, seed=7)
    upload = announce(yard, content)
    assert send(yard, upload["id"], 1, part_of(content, 1)).status == 200
    ballast = fill(yard, left=PART // 2)
    refused = send(yard, upload["id"], 2, part_of(content, 2))
    assert (refused.status, refused.json()["error"]["code"]) == (507, "storage_full"), refused.body
    assert yard.get(f"{UPLOADS}/{upload['id']}")["parts"] == [1]
    assert [file.name for file in left_of_uploads(yard)] == ["1"]
    too_much = yard.call("POST", UPLOADS, {"name": "more", "size_bytes": PART})
    assert (too_much.status, too_much.json()["error"]["code"]) == (507, "storage_full")

    ballast.unlink()
    for number in range(2, 7):
        assert send(yard, upload["id"], number, part_of(content, number)).status == 200
    ballast = fill(yard, left=2 * PART)
    refused = complete(yard, upload["id"])
    assert (refused.status, refused.json()["error"]["code"]) == (507, "storage_full"), refused.body
    assert not stored(yard, digest_of(content)).exists()
    assert [file.name for file in left_of_uploads(yard)] == ["1", "2", "3", "4", "5", "6"]

    ballast.unlink()
    assert complete(yard, upload["id"]).status == 200
    assert stored(yard, digest_of(content)).read_bytes() == content
