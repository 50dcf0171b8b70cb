"""Files of the web: ``https://host/path``, in ranges where the server can.

Whatever a server does, either the bytes are those of one content or there is
an error: each answer must name the very range that was asked for and the mark
(ETag, or the time of the last change) that the fetch began with.
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.parse import urlsplit

from modelyard.control.artifacts.errors import ArtifactError, ChangedError
from modelyard.control.artifacts.names import HEAD_BYTES
from modelyard.control.artifacts.sources import Listing, SourceFile
from modelyard.web.fetcher import Download, DownloadBounds, Fetcher, FetchError, NotPublicError

REDIRECTS_MAX = 5
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_SOON = frozenset({408, 425, 429, 500, 502, 503, 504})

Credentials = Callable[[str, Mapping[str, str]], Mapping[str, str]]
"""What to add to a GET of a URL with these headers; it goes to the URL's own host only."""


def no_credentials(url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
    """Add nothing."""
    return {}


class Web:
    """Files by URL, for all sources that speak HTTP; ``is_named``: whoever is told of failures wrote the host."""

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        bytes_max: int,
        redirects_max: int = REDIRECTS_MAX,
        credentials: Credentials = no_credentials,
        is_named: bool = False,
    ) -> None:
        self._fetcher = fetcher
        self._bytes_max = bytes_max
        self._redirects_max = redirects_max
        self._credentials = credentials
        self._is_named = is_named

    async def document(self, url: str, *, accept: str = "", bytes_max: int) -> tuple[bytes, Mapping[str, str]]:
        """Return the body and the headers of a small answer.

        Raises:
            ArtifactError: nobody answers, or with something else than 200.
        """
        headers = {"accept": accept} if accept else {}
        try:
            async with self._open(url, headers, bytes_max) as answer:
                _expect(url, answer, 200)
                return await answer.read(), answer.headers
        except FetchError as error:
            raise self._error(url, error) from error

    async def look(self, url: str, path: str) -> SourceFile:
        """Ask for the first bytes of a file, and return what the answer says of all of it."""
        try:
            async with self._open(url, {"range": f"bytes=0-{HEAD_BYTES - 1}"}, self._bytes_max) as answer:
                if answer.status == 416:  # there is no first byte
                    raise ArtifactError(f"{shown(url)} is empty")
                _expect(url, answer, 200, 206)
                size = _whole_of(answer)
                if size is None and answer.status == 206:
                    raise ArtifactError(f"{shown(url)} answers with a range of unknown size")
                if answer.status == 200 and not answer.tells_its_end:
                    raise ArtifactError(f"{shown(url)} does not say how long it is, so a cut could not be told")
                mark = _mark_of(answer)
                return SourceFile(path, url, size, mark=mark, has_ranges=answer.status == 206 and bool(mark))
        except FetchError as error:
            raise self._error(url, error) from error

    @asynccontextmanager
    async def read(self, file: SourceFile, start: int, end: int | None) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a range of a file, or all of it."""
        headers: dict[str, str] = {}
        if file.has_ranges and end is not None:
            headers["range"] = f"bytes={start}-{end - 1}"
            if file.mark:
                headers["if-range"] = file.mark
        bytes_max = self._bytes_max if end is None else end - start
        try:
            async with self._open(file.location, headers, bytes_max) as answer:
                _check_range(file, answer, start, end)
                yield _translated(file.location, answer.chunks())
        except FetchError as error:
            raise self._error(file.location, error) from error

    def _open(self, url: str, headers: Mapping[str, str], bytes_max: int) -> AbstractAsyncContextManager[Download]:
        bounds = DownloadBounds(bytes_max=bytes_max, redirects_max=self._redirects_max)
        return self._fetcher.open(url, bounds=bounds, headers=headers, credentials=self._credentials(url, headers))

    def _error(self, url: str, error: FetchError) -> ArtifactError:
        if isinstance(error, NotPublicError) and not self._is_named:
            error = NotPublicError("its host")
        return _error(url, error)


class HttpsSource:
    """One file by its URL."""

    def __init__(self, web: Web, url: str, *, parallel: int) -> None:
        self._web = web
        self._url = url
        self.parallel = parallel

    async def list(self) -> Listing:
        """Return the file, as a first range of it shows it."""
        return Listing(self._url, (await self._web.look(self._url, "model"),))

    @asynccontextmanager
    async def read(self, file: SourceFile, start: int, end: int | None) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a range of the file."""
        async with self._web.read(file, start, end) as chunks:
            yield chunks


def shown(url: str) -> str:
    """Return a URL for people: its path, since the host may be one of ours and the query a secret."""
    try:
        path = urlsplit(url).path
    except ValueError:
        path = ""
    return path[:256] if len(path) > 1 and path.isprintable() else "the URL"


def _expect(url: str, answer: Download, *statuses: int) -> None:
    status = answer.status
    if status in statuses:
        return
    why = {401: "it needs a login", 403: "access is denied", 404: "there is nothing", 410: "it is gone"}.get(status, "")
    raise ArtifactError(f"{shown(url)} answers {status}{f': {why}' if why else ''}", is_transient=status in _SOON)


def _check_range(file: SourceFile, answer: Download, start: int, end: int | None) -> None:
    """Hold an answer to what was asked for: this range, of this content."""
    url = shown(file.location)
    if answer.status in (412, 416):
        raise ChangedError(url)
    _expect(file.location, answer, 200, 206)
    if file.mark and _mark_of(answer) not in ("", file.mark):
        raise ChangedError(url)
    if file.has_ranges and end is not None:
        if answer.status == 200:  # If-Range does not match any more
            raise ChangedError(url)
        span = _RANGE.fullmatch(answer.headers.get("content-range", "").strip())
        if span is None or (int(span[1]), int(span[2]) + 1) != (start, end):
            raise ArtifactError(f"{url} answers with another range than was asked for")
        if int(span[3]) != file.size_bytes:
            raise ChangedError(url)
        if answer.headers.get("content-length", str(end - start)) != str(end - start):
            raise ArtifactError(f"{url} answers with another length than that of its range")
    elif answer.status == 206:
        raise ArtifactError(f"{url} answers with a range that was not asked for")
    elif not (answer.tells_its_end or file.digest or file.size_bytes is not None):
        raise ArtifactError(f"{url} does not say how long it is, so a cut could not be told")


def _whole_of(answer: Download) -> int | None:
    """Return the size of the whole file."""
    if answer.status == 206:
        span = _RANGE.fullmatch(answer.headers.get("content-range", "").strip())
        return int(span[3]) if span and span[1] == "0" else None
    length = answer.headers.get("content-length", "")
    return int(length) if re.fullmatch(r"\d{1,19}", length) else None


def _mark_of(answer: Download) -> str:
    """Return what stands for the content, byte for byte, which a weak ETag does not."""
    tag = answer.headers.get("etag", "")
    return tag if tag and not tag.startswith("W/") else answer.headers.get("last-modified", "")


async def _translated(url: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield chunk
    except FetchError as error:
        raise _error(url, error) from error


def _error(url: str, error: FetchError) -> ArtifactError:
    return ArtifactError(f"{shown(url)} cannot be fetched: {error}", is_transient=error.is_transient)
