"""An object store: ``s3://bucket/key`` is a file, ``s3://bucket/prefix/`` the folder of a model.

Any store that speaks ListObjectsV2 and ranged GET with paths
(``https://endpoint/bucket/key``): AWS, MinIO, SeaweedFS, Ceph, R2.
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import quote
from xml.etree import ElementTree

from modelyard.config import S3Config
from modelyard.control.artifacts.errors import ArtifactError
from modelyard.control.artifacts.names import FILES_MAX, is_taken, is_weights
from modelyard.control.artifacts.sources import Listing, SourceFile
from modelyard.control.artifacts.sources.https import Web
from modelyard.control.artifacts.sources.sigv4 import Keys, signed
from modelyard.web.fetcher import Fetcher

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_KEY_LENGTH_MAX = 1024
_PAGE_BYTES_MAX = 8 * 1024 * 1024
_PAGES_MAX = 20


class S3Source:
    """One object, or all objects under a prefix."""

    def __init__(
        self, uri: str, fetcher: Fetcher, config: S3Config, *, bytes_max: int, parallel: int, now_s: Callable[[], float]
    ) -> None:
        self._uri = uri
        self._bucket, self._key = bucket_and_key(uri)
        self._base = config.endpoint.rstrip("/") or f"https://s3.{config.region}.amazonaws.com"
        keys = Keys(config.access_key, config.secret_key, config.session_token)

        def sign(url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
            return signed(keys, url, headers, region=config.region, at_s=now_s()) if keys.access_key else {}

        # A signature is for one host; a store that redirects wants another endpoint or region in the configuration.
        self._web = Web(fetcher, bytes_max=bytes_max, redirects_max=0, credentials=sign)
        self.parallel = parallel

    async def list(self) -> Listing:
        """Return the object, or those under the prefix that make up a model."""
        if not self._key.endswith("/"):
            return Listing(self._uri, (await self._web.look(self._url(self._key), "model"),))
        files = sorted([file async for file in self._under_prefix()], key=lambda file: file.path)
        if not any(is_weights(file.path) for file in files):
            raise ArtifactError(f"{self._uri} holds no .safetensors, .gguf or .onnx file")
        return Listing(self._uri, tuple(files), is_folder=True)

    @asynccontextmanager
    async def read(self, file: SourceFile, start: int, end: int | None) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a range of an object."""
        async with self._web.read(file, start, end) as chunks:
            yield chunks

    async def _under_prefix(self) -> AsyncIterator[SourceFile]:
        token, count = "", 0
        for _ in range(_PAGES_MAX):
            query = {"list-type": "2", "prefix": self._key, **({"continuation-token": token} if token else {})}
            pairs = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted(query.items()))
            page, _ = await self._web.document(f"{self._base}/{self._bucket}?{pairs}", bytes_max=_PAGE_BYTES_MAX)
            root = _parsed(page)
            for entry in root.iter("Contents"):
                key, size, mark = (entry.findtext(name, "") for name in ("Key", "Size", "ETag"))
                path = key.removeprefix(self._key)
                if not key.startswith(self._key) or not is_taken(path) or not size.isdigit():
                    continue
                count += 1
                if count > FILES_MAX:
                    raise ArtifactError(f"{self._uri} holds more than {FILES_MAX} files")
                yield SourceFile(path, self._url(key), int(size), mark=mark)
            token = root.findtext("NextContinuationToken", "")
            if not token:
                return
        raise ArtifactError(f"{self._uri} holds too many objects; give the model a prefix of its own")

    def _url(self, key: str) -> str:
        return f"{self._base}/{self._bucket}/{quote(key, safe='/-_.~')}"


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Return both parts of an ``s3://`` URI.

    Raises:
        ArtifactError: it is none.
    """
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    segments = key.removesuffix("/").split("/")
    if not _BUCKET.fullmatch(bucket) or not key or len(key) > _KEY_LENGTH_MAX or not key.isprintable():
        raise ArtifactError("an object is s3://bucket/key, a folder of them s3://bucket/prefix/")
    # Some servers resolve dots, and then another object is read than the one that was allowed.
    if any(segment in ("", ".", "..") for segment in segments):
        raise ArtifactError("the key of an object must not hold '//', '/./' or '/../'")
    return bucket, key


def is_shared(uri: str, prefixes: tuple[str, ...]) -> bool:
    """Say whether ``uri`` is under a prefix that every tenant may read."""
    bucket, key = bucket_and_key(uri)
    named = f"{bucket}/{key}"
    return any(named.startswith(prefix.removeprefix("s3://").rstrip("/") + "/") for prefix in prefixes)


def _parsed(page: bytes) -> ElementTree.Element:
    """Return a page of a list without its namespace; a document type, which could hold entities, is refused."""
    if b"<!DOCTYPE" in page or b"<!ENTITY" in page:
        raise ArtifactError("the object store answers with a document type")
    try:
        root = ElementTree.fromstring(page)  # noqa: S314 - bounded, and without entities
    except ElementTree.ParseError as error:
        raise ArtifactError(f"the object store answers with bad XML: {error}") from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root
