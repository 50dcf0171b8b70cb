"""Files as clients send them: forms by hand, whole or in pieces."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2

from modelyard.domain.tenants import Identity
from tests.support.management import Management

FILES = "/v1/files"
BOUNDARY = "a-boundary"
CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"

Field = tuple[str, str | bytes] | tuple[str, str | bytes, str]


def form(*fields: Field) -> bytes:
    """Return a form; a field of three is a file with its name."""
    pieces = []
    for name, content, *file_name in fields:
        named = f'; filename="{file_name[0]}"' if file_name else ""
        body = content.encode() if isinstance(content, str) else content
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
        pieces.append(head.encode() + body + b"\r\n")
    return b"".join(pieces) + f"--{BOUNDARY}--\r\n".encode()


def file_form(content: bytes, *, name: str = "lines.jsonl", purpose: str = "batch", **more: str) -> bytes:
    """Return a form with a file; ``more`` are other fields, ``anchor`` and ``seconds`` those of ``expires_after``."""
    texts = [("purpose", purpose)]
    texts += [(f"expires_after[{key}]" if key in ("anchor", "seconds") else key, text) for key, text in more.items()]
    return form(*texts, ("file", content, name))


async def send(api: Management, who: Identity, body: Any, **headers: str) -> httpx2.Response:
    """Send a form to the management API."""
    sent = {"content-type": CONTENT_TYPE, **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with api.client(who) as client:
        return await client.post(FILES, content=body, headers=sent)


async def upload(api: Management, who: Identity, content: bytes = b"{}\n", **fields: str) -> dict[str, Any]:
    """Upload a file; return what is answered."""
    answer = await send(api, who, file_form(content, **fields))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def left_of_files(root: Path) -> list[Path]:
    """Return every file that is on the disk of a data directory's files."""
    return sorted(file for file in root.rglob("*") if file.is_file())


def pieces_of(body: bytes, size: int) -> Iterable[bytes]:
    """Return a body in pieces."""
    return (body[at : at + size] for at in range(0, len(body), size))
