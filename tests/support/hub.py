"""A hub of models and an index of packages, served by an ``Origin`` as the real ones do."""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping

from tests.support.origin import Origin

COMMIT = "a1" * 20


def put_model(
    web: Origin,
    repo: str,
    files: Mapping[str, bytes],
    *,
    revision: str = "main",
    commit: str = COMMIT,
    page: int = 1000,
) -> None:
    """Serve a model: its revision, its tree in pages, its files; weights are LFS files at another path."""
    for name in (revision, commit):
        web.put(f"/api/models/{repo}/revision/{name}", json.dumps({"sha": commit}).encode())
    entries: list[dict[str, object]] = [{"type": "directory", "path": "sub", "size": 0, "oid": "0"}]
    for path, content in files.items():
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
        where = f"/{repo}/resolve/{commit}/{path}"
        if path.endswith((".gguf", ".safetensors", ".onnx")):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
            web.put(where, b"", redirect=f"{web.url}/cdn/{digest}?signature=secret")
            web.put(f"/cdn/{digest}", content, etag=f'"{digest[:8]}"')
        else:
            web.put(where, content, has_ranges=False, etag="")
        entries.append(entry)
    tree = f"/api/models/{repo}/tree/{commit}?recursive=true"
    for number in range(0, len(entries), page):
        here = tree if number == 0 else f"{tree}&cursor={number}"
        more = number + page < len(entries)
        link = {"Link": f'<{web.url}{tree}&cursor={number + page}>; rel="next"'} if more else {}
        web.put(here, json.dumps(entries[number : number + page]).encode(), headers=link)


def wheel_of(members: Mapping[str, bytes], *, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return a wheel."""
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return wheel.getvalue()


def put_package(
    web: Origin, name: str, wheels: Mapping[str, bytes], *, digests: Mapping[str, str] | None = None, yanked: str = ""
) -> None:
    """Serve the page of a package, and its wheels by file name."""
    files = []
    for filename, content in wheels.items():
        digest = (digests or {}).get(filename, hashlib.sha256(content).hexdigest())
        file: dict[str, object] = {"filename": filename, "url": f"../../files/{filename}", "hashes": {"sha256": digest}}
        files.append({**file, "size": len(content), "yanked": filename == yanked})
        web.put(f"/files/{filename}", content)
    page = json.dumps({"meta": {"api-version": "1.1"}, "name": name, "files": files}).encode()
    web.put(f"/simple/{name}/", page, headers={"Content-Type": "application/vnd.pypi.simple.v1+json"})
