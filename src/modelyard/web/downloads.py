"""An answer that is read while it comes: too large to hold, too long to wait for as a whole.

Each chunk has its own timeout, a peer that trickles is left, and no more bytes
are taken than were agreed on. ``web/fetcher.py`` opens one.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp


class FetchError(Exception):
    """The URL may not be fetched, or could not be; the text may be shown to whoever gave it.

    ``is_transient``: it may well go better soon (a cut, a silence, a name server), so that going on makes sense.
    """

    def __init__(self, text: str, *, is_transient: bool = False) -> None:
        super().__init__(text)
        self.is_transient = is_transient


class NotPublicError(FetchError):
    """A host leads to a network that nobody allowed; ``who`` is a host that the caller wrote, or words for another."""

    def __init__(self, who: str) -> None:
        super().__init__(f"{who} has no public address; the operator can allow its network in fetch.private_networks")


def failure_of(error: Exception) -> str:
    """Return why a request failed, in words: the network's own texts name classes, and addresses behind the name."""
    import aiohttp

    match error:
        case aiohttp.ClientConnectorCertificateError():
            return "the server's certificate is not trusted"
        case aiohttp.ClientSSLError():
            return "the server cannot be reached: TLS failed"
        case aiohttp.ClientConnectorError():
            return f"the server cannot be reached{_reason_of(error)}"
        case aiohttp.ServerDisconnectedError():
            return "the server cut the connection without an answer"
        case OSError():
            return f"the connection was lost{_reason_of(error)}"
        case aiohttp.ClientPayloadError():
            return "the server cut the connection in the middle of its answer"
        case _:
            return "the server's answer is no valid HTTP"


def _reason_of(error: OSError) -> str:
    return f": {os.strerror(error.errno).lower()}" if error.errno and error.errno > 0 else ""


@dataclass(frozen=True, slots=True)
class DownloadBounds:
    """What a download may take; ``redirects_max`` 0: a redirect is an answer."""

    bytes_max: int
    redirects_max: int = 0
    answer_timeout_s: float = 30.0
    """From the look-up of the name to the head of the answer, redirects and all."""
    idle_timeout_s: float = 30.0
    """Longest wait for a chunk."""
    bytes_per_s_min: float = 1024.0
    """Slowest average pace, after ``idle_timeout_s`` of grace."""


class Download:
    """An answer whose body is yet to be read. ``url`` is where it came from, after redirects."""

    __slots__ = ("_answer", "_bounds", "headers", "status", "url")

    def __init__(self, answer: "aiohttp.ClientResponse", bounds: DownloadBounds, url: str) -> None:
        self._answer = answer
        self._bounds = bounds
        self.status = answer.status
        self.headers = {name.lower(): value for name, value in answer.headers.items()}
        self.url = url

    @property
    def tells_its_end(self) -> bool:
        """Say whether a cut can be told from the end: by a length or by chunks."""
        return "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Raises:
            FetchError: it is cut off, stalls, trickles, is compressed, or is larger than allowed.
        """
        from aiohttp import ClientError

        if self.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise FetchError("it answers with compressed content, which nobody asked for")
        bounds, loop = self._bounds, asyncio.get_running_loop()
        begun_s, got = loop.time(), 0
        try:
            while True:
                async with asyncio.timeout(bounds.idle_timeout_s):
                    chunk = await self._answer.content.readany()
                if not chunk:
                    return
                got += len(chunk)
                if got > bounds.bytes_max:
                    raise FetchError(f"the answer is larger than {bounds.bytes_max} bytes")
                elapsed_s = loop.time() - begun_s
                if elapsed_s > bounds.idle_timeout_s and got < bounds.bytes_per_s_min * elapsed_s:
                    raise FetchError(f"it sends less than {bounds.bytes_per_s_min:g} bytes/s", is_transient=True)
                yield chunk
        except TimeoutError:
            raise FetchError(f"nothing came for {bounds.idle_timeout_s:g} s", is_transient=True) from None
        except (ClientError, OSError, ValueError):
            raise FetchError(f"it was cut off after {self._share(got)}", is_transient=True) from None

    def _share(self, got: int) -> str:
        length = self.headers.get("content-length", "")
        whole = f" of {length}" if length.isdigit() else ""
        return f"{got}{whole} bytes{' of a part' if self.status == 206 else ''}"

    async def read(self) -> bytes:
        """Return the whole body, for answers that are small by their bounds."""
        return b"".join([chunk async for chunk in self.chunks()])
