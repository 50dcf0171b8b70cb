"""A hub of models: ``hf://org/name@revision`` is a model's folder, ``hf://org/name@revision/file`` one file of it.

The revision is resolved to a commit first, and the commit is what the
artifact is remembered by: a branch that moves on changes no version.
"""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar
from urllib.parse import quote, unquote, urljoin

import msgspec

from modelyard.control.artifacts.errors import ArtifactError
from modelyard.control.artifacts.names import FILES_MAX, WEIGHTS, is_plain, is_taken, is_weights
from modelyard.control.artifacts.sources import Listing, SourceFile
from modelyard.control.artifacts.sources.https import Web
from modelyard.web.fetcher import Fetcher

_URI = re.compile(
    r"hf://(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:@(?P<revision>[A-Za-z0-9][\w.%-]{0,127}))?(?:/(?P<path>[^?#]{1,512}))?"
)
_PAGE_BYTES_MAX = 8 * 1024 * 1024
_PAGES_MAX = 20
_NEXT = re.compile(r'<([^>]{1,2048})>;\s*rel="next"')
_NAMED_MAX = 10

T = TypeVar("T")


class Place(NamedTuple):
    """What an ``hf://`` URI names."""

    repo: str
    revision: str
    path: str


class _Commit(msgspec.Struct, frozen=True):
    sha: str


class _Lfs(msgspec.Struct, frozen=True):
    oid: str
    size: int


class _Entry(msgspec.Struct, frozen=True):
    type: str
    path: str
    size: int = 0
    lfs: _Lfs | None = None


class HubSource:
    """One model of the hub at ``endpoint``."""

    def __init__(self, uri: str, fetcher: Fetcher, *, endpoint: str, token: str, bytes_max: int, parallel: int) -> None:
        self._place = place_of(uri)
        self._endpoint = endpoint.rstrip("/")

        def login(url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
            return {"authorization": f"Bearer {token}"} if token else {}

        self._web = Web(fetcher, bytes_max=bytes_max, credentials=login)
        self.parallel = parallel

    async def list(self) -> Listing:
        """Return the file, or those of the model that are taken."""
        repo, revision, path = self._place
        commit = _decoded(await self._document(f"api/models/{repo}/revision/{quote(revision, safe='')}"), _Commit).sha
        if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            raise ArtifactError("the hub names no commit")
        entries = [entry async for entry in self._tree(commit)]
        uri = f"hf://{repo}@{commit}" + (f"/{path}" if path else "")
        if path and not path.endswith("/"):
            found = next((entry for entry in entries if entry.path == path), None)
            if found is None:
                raise ArtifactError(f"{repo} has no file {path}; it has {_named([entry.path for entry in entries])}")
            return Listing(uri, (await self._file(commit, found, "model"),))
        taken = _chosen([entry for entry in entries if entry.path.startswith(path)], len(path))
        if not taken:
            raise ArtifactError(f"{repo} has no .safetensors, .gguf or .onnx file{f' in {path}' if path else ''}")
        ggufs = [entry.path for entry in taken if entry.path.endswith(".gguf")]
        if len(ggufs) == 1:
            return Listing(f"hf://{repo}@{commit}/{ggufs[0]}", (await self._file(commit, taken[0], "model"),))
        if ggufs:
            raise ArtifactError(f"{repo} has {len(ggufs)} GGUF files; name one: {_named(ggufs)}")
        files = [await self._file(commit, entry, entry.path[len(path) :]) for entry in taken]
        return Listing(uri, tuple(sorted(files, key=lambda file: file.path)), is_folder=True)

    @asynccontextmanager
    async def read(self, file: SourceFile, start: int, end: int | None) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a range of a file."""
        async with self._web.read(file, start, end) as chunks:
            yield chunks

    async def _file(self, commit: str, entry: _Entry, path: str) -> SourceFile:
        url = f"{self._endpoint}/{self._place.repo}/resolve/{commit}/{quote(entry.path, safe='/-_.~')}"
        if entry.lfs is not None:
            if not re.fullmatch(r"[0-9a-f]{64}", entry.lfs.oid):
                raise ArtifactError(f"the hub gives no SHA-256 of {entry.path}")
            # The digest is the mark: what holds the bytes is another server, with marks of its own.
            return SourceFile(path, url, entry.lfs.size, f"sha256:{entry.lfs.oid}")
        # Small texts, which the hub may compress or answer whole: a commit does not change, so no mark is needed.
        return SourceFile(path, url, entry.size, has_ranges=False)

    async def _document(self, path: str) -> bytes:
        return (await self._web.document(f"{self._endpoint}/{path}", bytes_max=_PAGE_BYTES_MAX))[0]

    async def _tree(self, commit: str) -> AsyncIterator[_Entry]:
        url = f"{self._endpoint}/api/models/{self._place.repo}/tree/{commit}?recursive=true"
        for _ in range(_PAGES_MAX):
            page, headers = await self._web.document(url, bytes_max=_PAGE_BYTES_MAX)
            for entry in _decoded(page, list[_Entry]):
                if entry.type == "file":
                    yield entry
            following = _NEXT.search(headers.get("link", ""))
            if following is None:
                return
            url = urljoin(url, following[1])
            if not url.startswith(f"{self._endpoint}/"):
                raise ArtifactError("the hub's list goes on at another host")
        raise ArtifactError(f"{self._place.repo} holds too many files")


def place_of(uri: str) -> Place:
    """Return what ``uri`` names.

    Raises:
        ArtifactError: it is no ``hf://`` URI.
    """
    match = _URI.fullmatch(uri)
    path = (match["path"] or "") if match else ""
    if match is None or (path and not is_plain(path.removesuffix("/"))) or ".." in match["repo"]:
        raise ArtifactError("a model of the hub is hf://org/name, hf://org/name@revision or …@revision/file")
    return Place(match["repo"], unquote(match["revision"] or "main"), path)


def _chosen(entries: Sequence[_Entry], skipped: int) -> list[_Entry]:
    """Return what to take: one kind of weights, safetensors first, and the texts; GGUF files need no texts."""
    taken = [entry for entry in entries if is_taken(entry.path[skipped:])]
    for kind in WEIGHTS:
        weights = [entry for entry in taken if entry.path.endswith(kind)]
        if not weights:
            continue
        beside = [] if kind == ".gguf" else [entry for entry in taken if not is_weights(entry.path)]
        if kind == ".safetensors":
            beside = [entry for entry in beside if not entry.path.endswith(".onnx_data")]
        if len(weights) + len(beside) > FILES_MAX:
            raise ArtifactError(f"it consists of more than {FILES_MAX} files")
        return [*weights, *beside]
    return []


def _named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _NAMED_MAX} more" if len(paths) > _NAMED_MAX else ""
    return (", ".join(sorted(paths)[:_NAMED_MAX]) or "none") + more


def _decoded(page: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(page, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ArtifactError(f"the hub answers with something else than its API promises: {error}") from error
