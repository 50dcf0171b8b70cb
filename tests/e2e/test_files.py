"""Files through the unmodified ``openai`` SDK, a raw line and kills: what was sent comes back whole, or is 404."""

import hashlib
import http.client
import io
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from tests.support.files import BOUNDARY, CONTENT_TYPE, FILES, file_form, left_of_files
from tests.support.waiting import eventually
from tests.support.yard import Yard

MB = 1_000_000
SETTINGS = {"gateway.file_bytes_max": 200 * MB, "control.batch_file_bytes_max": 30 * MB}
LINES = b'{"custom_id": "1", "method": "POST"}\n' * 3


@pytest.fixture
def client(yard: Yard) -> Iterator[OpenAI]:
    """Return a client of a tenant of its own, with a key that may only infer."""
    name = f"tenant-{time.monotonic_ns()}"
    with connected(yard, yard.new_tenant(name)) as sdk:
        yield sdk


def connected(yard: Yard, key: str) -> OpenAI:
    return OpenAI(base_url=f"{yard.url}/v1", api_key=key, max_retries=0, timeout=60)


# --- the SDK ------------------------------------------------------------------------


def test_a_file_goes_its_whole_way_in_the_sdks_words(client: OpenAI) -> None:
    file = client.files.create(file=("lines.jsonl", LINES), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(LINES), "lines.jsonl", "batch")
    assert file.status == "processed"
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 2_592_000
    assert client.files.retrieve(file.id) == file
    assert [one.id for one in client.files.list()] == [file.id]
    assert client.files.content(file.id).read() == LINES
    with client.files.with_streaming_response.content(file.id) as streamed:
        assert b"".join(streamed.iter_bytes(7)) == LINES
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file.id, True, "file")
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as refused:
            gone(file.id)
        assert refused.value.code == "not_found"
    assert list(client.files.list()) == []


def test_expires_after_is_kept_in_brackets(client: OpenAI) -> None:
    file = client.files.create(
        file=("a.txt", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(
            file=("a.txt", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3599}
        )
    assert refused.value.param == "expires_after[seconds]"


def test_files_come_from_paths_bytes_and_streams(client: OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "größe.jsonl"
    path.write_bytes(LINES)
    assert client.files.create(file=path, purpose="batch").filename == "größe.jsonl"
    assert client.files.create(file=b"raw", purpose="assistants").filename == "upload"
    assert client.files.create(file=io.BytesIO(b"raw"), purpose="evals").bytes == 3
    with pytest.raises(openai.BadRequestError, match=r"must end in \.jsonl"):
        client.files.create(file=("lines.csv", LINES), purpose="batch")


def test_lists_page_by_themselves(client: OpenAI) -> None:
    made = [client.files.create(file=(f"{n}.txt", b"x"), purpose="vision").id for n in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == made[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == made
    assert list(client.files.list(purpose="batch")) == []


def test_another_tenants_files_do_not_exist(client: OpenAI, yard: Yard) -> None:
    file = client.files.create(file=("a.txt", b"theirs"), purpose="user_data")
    with connected(yard, yard.new_tenant(f"stranger-{time.monotonic_ns()}")) as stranger:
        for forbidden in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
            with pytest.raises(openai.NotFoundError):
                forbidden(file.id)
        assert list(stranger.files.list()) == []
    assert client.files.content(file.id).read() == b"theirs"


def test_a_request_sent_twice_with_an_idempotency_key_makes_one_file(client: OpenAI) -> None:
    headers = {"Idempotency-Key": "once"}
    first = client.files.create(file=("a.jsonl", LINES), purpose="batch", extra_headers=headers)
    assert client.files.create(file=("a.jsonl", LINES), purpose="batch", extra_headers=headers) == first
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a.jsonl", LINES * 2), purpose="batch", extra_headers=headers)
    assert refused.value.code == "idempotency_key_reused"


# --- size ---------------------------------------------------------------------------


def peak_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def test_a_large_file_passes_through_and_is_held_by_nobody(client: OpenAI, yard: Yard, tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    block = bytes(range(256)) * 4096
    hashed = hashlib.sha256()
    with path.open("wb") as writer:
        for number in range(150):
            piece = number.to_bytes(8) + block
            hashed.update(piece)
            writer.write(piece)
    pids = [*yard.plane_pids("gateway"), *yard.plane_pids("control")]
    client.files.create(file=("warm.bin", block), purpose="user_data")
    before = [peak_kb(pid) for pid in pids]
    file = client.files.create(file=path, purpose="user_data")
    assert file.bytes == path.stat().st_size
    got = hashlib.sha256()
    with client.files.with_streaming_response.content(file.id) as streamed:
        for piece in streamed.iter_bytes(1 << 20):
            got.update(piece)
    assert got.digest() == hashed.digest()
    grown_kb = [peak_kb(pid) - kb for pid, kb in zip(pids, before, strict=True)]
    assert max(grown_kb) < 40_000, f"150 MB took {grown_kb} kB of memory"


def head(yard: Yard, length: int, *more: str, key: str | None = None) -> bytes:
    lines = [f"POST {FILES} HTTP/1.1", "host: x", f"authorization: Bearer {key or yard.admin_key}"]
    lines += [f"content-type: {CONTENT_TYPE}", f"content-length: {length}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def answer(line: socket.socket) -> tuple[int, str, bytes]:
    found = http.client.HTTPResponse(line)
    found.begin()
    body = found.read()
    return found.status, json.loads(body).get("error", {}).get("code", ""), body


def begun(purpose: str) -> bytes:
    """Return a form up to the content of its file."""
    return file_form(b"", purpose=purpose).removesuffix(f"\r\n--{BOUNDARY}--\r\n".encode())


def test_what_is_too_large_is_refused_by_its_head(yard: Yard) -> None:
    with socket.create_connection(("127.0.0.1", yard.port), timeout=20) as line:
        line.sendall(head(yard, 201 * MB))
        status, code, body = answer(line)
        assert (status, code) == (413, "request_too_large")
        assert b"gateway.file_bytes_max" in body


def test_a_refusal_comes_at_once_and_not_behind_the_body(yard: Yard) -> None:
    # 190 MB are announced and a few kilobytes sent: the answer does not wait for the rest.
    with socket.create_connection(("127.0.0.1", yard.port), timeout=20) as line:
        line.sendall(head(yard, 190 * MB) + begun("fun") + bytes(10_000))
        assert answer(line)[:2] == (400, "invalid_value")


def test_a_batch_file_above_its_limit_is_refused_on_the_way_though_it_is_sent_whole(client: OpenAI) -> None:
    # The SDK reads no answer before it has sent everything.
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("large.jsonl", bytes(100 * MB)), purpose="batch")
    assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
    assert "control.batch_file_bytes_max" in refused.value.message
    assert list(client.files.list()) == []


def test_a_chunked_upload_is_taken_up_to_the_size_of_any_body(client: OpenAI, yard: Yard) -> None:
    def chunks() -> Iterator[bytes]:
        yield from (file_form(LINES)[at : at + 50] for at in range(0, len(file_form(LINES)), 50))

    connection = http.client.HTTPConnection("127.0.0.1", yard.port, timeout=20)
    headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": CONTENT_TYPE}
    connection.request("POST", FILES, body=chunks(), headers=headers, encode_chunked=True)
    made = json.loads(connection.getresponse().read())
    connection.close()
    assert client.files.content(made["id"]).read() == LINES


def test_ranges_and_heads_pass_the_gateway(client: OpenAI, yard: Yard) -> None:
    file = client.files.create(file=("a.bin", bytes(range(200))), purpose="user_data")
    connection = http.client.HTTPConnection("127.0.0.1", yard.port, timeout=20)
    headers = {"Authorization": f"Bearer {client.api_key}"}

    def ask(method: str, **more: str) -> tuple[int, dict[str, str], bytes]:
        connection.request(method, f"{FILES}/{file.id}/content", headers={**headers, **more})
        found = connection.getresponse()
        return found.status, {name.lower(): value for name, value in found.getheaders()}, found.read()

    status, told, body = ask("GET", Range="bytes=10-19")
    assert (status, told["content-range"], body) == (206, "bytes 10-19/200", bytes(range(10, 20)))
    status, told, body = ask("HEAD")
    assert (status, told["content-length"], body) == (200, "200", b"")
    status, told, body = ask("GET", **{"If-None-Match": told["etag"]})
    assert (status, body) == (304, b"")
    assert ask("GET", Range="bytes=200-")[0] == 416
    assert ask("GET")[2] == bytes(range(200)), "the connection is still good"
    connection.close()


# --- what breaks ----------------------------------------------------------------------


def test_a_client_that_dies_in_its_upload_leaves_nothing(client: OpenAI, yard: Yard) -> None:
    before = left_of_files(yard.data / "files")
    body = file_form(bytes(5 * MB), purpose="user_data")
    with socket.create_connection(("127.0.0.1", yard.port), timeout=20) as line:
        line.sendall(head(yard, len(body), key=client.api_key) + body[: 4 * MB])
        eventually(lambda: len(left_of_files(yard.data / "files")) > len(before), 30, "some of it is on the disk")
    eventually(lambda: left_of_files(yard.data / "files") == before, 30, "nothing is left of it")
    assert list(client.files.list()) == []


def test_a_controller_that_is_killed_in_an_upload_leaves_nothing_and_keeps_the_rest(client: OpenAI, yard: Yard) -> None:
    kept = client.files.create(file=("kept.jsonl", LINES), purpose="batch")
    before = left_of_files(yard.data / "files")
    body = file_form(bytes(5 * MB), purpose="user_data")
    (control,) = yard.plane_pids("control")
    with socket.create_connection(("127.0.0.1", yard.port), timeout=20) as line:
        line.sendall(head(yard, len(body), key=client.api_key) + body[: 4 * MB])
        eventually(lambda: len(left_of_files(yard.data / "files")) > len(before), 30, "some of it is on the disk")
        yard.kill(control)
        assert answer(line)[:2] == (503, "control_unavailable")
    eventually(lambda: left_of_files(yard.data / "files") == before, 40, "the next controller removes the draft")
    eventually(lambda: yard.call("GET", FILES).status == 200, 40, "and answers")
    assert [file.id for file in client.files.list()] == [kept.id]
    assert client.files.content(kept.id).read() == LINES
