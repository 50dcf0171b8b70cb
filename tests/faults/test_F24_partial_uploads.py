"""F24: an upload whose client dies, two clients with one file, a part sent twice: nothing half is ever visible."""

from collections.abc import Iterator
from pathlib import Path

import pytest
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
    send_some,
    stored,
)
from tests.support.waiting import eventually
from tests.support.yard import Yard


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with Yard(tmp_path_factory.mktemp("uploads")) as running:
        yield running


def test_an_upload_whose_client_dies_at_60_percent_goes_on_where_it_was(yard: Yard) -> None:
    content = content_of(5 * PART, seed=1)
    upload = announce(yard, content)
    for number in (1, 2):
        assert send(yard, upload["id"], number, part_of(content, number)).status == 200
    send_some(yard, upload["id"], 3, part_of(content, 3), share=0.99)
    eventually(lambda: not [file for file in left_of_uploads(yard) if file.name.endswith(".draft")], 30, "no draft")
    found = yard.get(f"{UPLOADS}?digest={digest_of(content)}")["data"]
    assert [(one["id"], one["parts"], one["status"]) for one in found] == [(upload["id"], [1, 2], "open")]
    refused = complete(yard, upload["id"])
    assert (refused.status, refused.json()["error"]["code"]) == (400, "upload_incomplete")
    assert "3-5 of 5" in refused.json()["error"]["message"]
    assert not stored(yard, digest_of(content)).exists()
    for number in (5, 4, 3):
        assert send(yard, upload["id"], number, part_of(content, number)).status == 200
    done = complete(yard, upload["id"])
    assert done.status == 200, done.body
    assert done.json()["uri"] == f"upload:{digest_of(content)}"
    assert stored(yard, digest_of(content)).read_bytes() == content
    assert not [file for file in left_of_uploads(yard) if upload["id"] in str(file)]
    assert complete(yard, upload["id"]).json()["status"] == "complete"


def test_two_clients_with_one_file_make_it_once(yard: Yard) -> None:
    content = content_of(3 * PART + 17, seed=2)
    uploads = [announce(yard, content)["id"] for _ in range(2)]
    for number in range(1, 5):
        for upload_id in uploads:
            assert send(yard, upload_id, number, part_of(content, number)).status == 200
    assert [complete(yard, upload_id).status for upload_id in uploads] == [200, 200]
    assert stored(yard, digest_of(content)).read_bytes() == content


def test_of_a_part_sent_twice_the_last_whole_one_counts(yard: Yard) -> None:
    content = content_of(2 * PART, seed=3)
    upload = announce(yard, content)
    assert send(yard, upload["id"], 1, bytes(PART)).status == 200
    assert send(yard, upload["id"], 2, part_of(content, 2)).status == 200
    assert send(yard, upload["id"], 1, part_of(content, 1)).status == 200
    send_some(yard, upload["id"], 1, bytes(PART), share=0.5)
    eventually(lambda: not [file for file in left_of_uploads(yard) if file.name.endswith(".draft")], 30, "no draft")
    assert complete(yard, upload["id"]).status == 200
    assert stored(yard, digest_of(content)).read_bytes() == content


def test_parts_that_make_another_file_are_refused_and_can_be_put_right(yard: Yard) -> None:
    content = content_of(2 * PART, seed=4)
    upload = announce(yard, content)
    wrong = send(yard, upload["id"], 1, part_of(content, 1), x_content_sha256="00" * 32)
    assert (wrong.status, wrong.json()["error"]["code"]) == (400, "digest_mismatch")
    assert yard.get(f"{UPLOADS}/{upload['id']}")["parts"] == []
    for number in (1, 2):
        assert send(yard, upload["id"], number, bytes(PART)).status == 200
    refused = complete(yard, upload["id"])
    assert (refused.status, refused.json()["error"]["code"]) == (400, "digest_mismatch")
    assert digest_of(content) in refused.json()["error"]["message"]
    assert not stored(yard, digest_of(bytes(2 * PART))).exists()
    for number in (1, 2):
        assert send(yard, upload["id"], number, part_of(content, number)).status == 200
    assert complete(yard, upload["id"]).status == 200


def test_a_controller_that_is_killed_loses_no_whole_part(yard: Yard) -> None:
    content = content_of(3 * PART, seed=5)
    upload = announce(yard, content)
    for number in (1, 2):
        assert send(yard, upload["id"], number, part_of(content, number)).status == 200
    (old,) = yard.plane_pids("control")
    yard.kill(old)
    eventually(lambda: yard.plane_pids("control") not in ([], [old]), 30, "a new controller")
    eventually(lambda: yard.call("GET", f"{UPLOADS}/{upload['id']}").status == 200, 30, "it answers")
    assert yard.get(f"{UPLOADS}/{upload['id']}")["parts"] == [1, 2]
    assert send(yard, upload["id"], 3, part_of(content, 3)).status == 200
    assert complete(yard, upload["id"]).status == 200


def test_what_nobody_finishes_is_gone_after_its_time(tmp_path: Path) -> None:
    content = content_of(2 * PART, seed=6)
    with Yard(tmp_path, settings={"control.upload_ttl_s": 4}) as yard:
        upload = announce(yard, content)
        assert send(yard, upload["id"], 1, part_of(content, 1)).status == 200
        eventually(lambda: yard.call("GET", f"{UPLOADS}/{upload['id']}").status == 404, 30, "it is forgotten")
        eventually(lambda: not left_of_uploads(yard), 30, "nothing is left on the disk")
