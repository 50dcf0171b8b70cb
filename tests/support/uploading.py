"""Uploads as a client makes them: parts over raw connections, whole or cut off."""

import hashlib
import http.client
import socket
import struct
from pathlib import Path
from typing import Any

from tests.support.yard import Reply, Yard

UPLOADS = "/v1/uploads/artifacts"
PART = 256 * 1024
HEADER = b"".join(
    [
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1),
        struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama",
        struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 32, 0, 0),
    ]
)
"""The head of a GGUF file of one small tensor, of the architecture llama."""


def content_of(size: int, seed: int = 0) -> bytes:
    """Return bytes that look like a GGUF file and do not repeat from part to part."""
    block = hashlib.sha256(b"%d" % seed).digest()
    body = b"".join(hashlib.sha256(block + b"%d" % at).digest() for at in range(size // 32 + 1))
    return (HEADER + body)[:size]


def digest_of(content: bytes) -> str:
    """Return the digest of an artifact."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def announce(yard: Yard, content: bytes, *, key: str | None = None, **fields: object) -> dict[str, Any]:
    """Begin an upload."""
    order = {"name": "a-model", "size_bytes": len(content), "part_bytes": PART, "digest": digest_of(content), **fields}
    reply = yard.call("POST", UPLOADS, order, key=key)
    assert reply.status == 201, reply.body
    return dict(reply.json())


def part_of(content: bytes, number: int) -> bytes:
    """Return the bytes of a part."""
    return content[(number - 1) * PART : number * PART]


def send(yard: Yard, upload_id: str, number: int, body: bytes, *, key: str = "", **headers: str) -> Reply:
    """Send a part."""
    connection = http.client.HTTPConnection("127.0.0.1", yard.port, timeout=30)
    try:
        sent = {
            "Authorization": f"Bearer {key or yard.admin_key}",
            **{n.replace("_", "-"): v for n, v in headers.items()},
        }
        connection.request("PUT", f"{UPLOADS}/{upload_id}/parts/{number}", body=body, headers=sent)
        answer = connection.getresponse()
        return Reply(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


def send_some(yard: Yard, upload_id: str, number: int, body: bytes, *, share: float) -> None:
    """Send the first ``share`` of a part and die."""
    head = (
        f"PUT {UPLOADS}/{upload_id}/parts/{number} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {yard.admin_key}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", yard.port), timeout=30) as line:
        line.sendall(head.encode() + body[: int(len(body) * share)])


def complete(yard: Yard, upload_id: str, *, key: str | None = None) -> Reply:
    """Ask for the whole."""
    return yard.call("POST", f"{UPLOADS}/{upload_id}/complete", key=key, within_s=60)


def left_of_uploads(yard: Yard) -> list[Path]:
    """Return every file that uploads have on disk."""
    return sorted(file for file in (yard.data / "artifacts" / "uploads").rglob("*") if file.is_file())


def stored(yard: Yard, digest: str) -> Path:
    """Return where an artifact of this digest is once it is whole."""
    return yard.data / "artifacts" / "sha256" / digest.removeprefix("sha256:")
