"""The one way to a URL that somebody else chose: webhooks, media, artifacts.

Whoever chooses a URL chooses where this machine connects to, and would love it
to be a neighbour (``reference/security.md`` S1, S2). So: ``https`` only, names
resolved once, all answers judged (``policy/addresses.py``), the connection made
to the very address that was judged, redirects followed by hand and judged
anew, and everything bounded in size and time. Networks that the operator names
in ``fetch.private_networks`` are allowed, there also ``http``.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from modelyard.policy.addresses import (
    URL_LENGTH_MAX,
    Address,
    Network,
    UrlError,
    UrlParts,
    is_private_network,
    may_connect,
    read_url,
)
from modelyard.web.downloads import Download, DownloadBounds, FetchError, NotPublicError, failure_of

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver

__all__ = [
    "Bounds",
    "Download",
    "DownloadBounds",
    "FetchError",
    "Fetched",
    "Fetcher",
    "NotPublicError",
    "Target",
    "trust",
]

LOCATION_LENGTH_MAX = 8192
"""Of a redirect of a download: stores sign their URLs at length."""
RESOLVE_TIMEOUT_S = 5.0
ADDRESSES_MAX = 16

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Addresses of a host name, as text; raises ``OSError``."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one fetch may take. ``content_types`` empty: any; ``is_cut``: a longer body is cut, not refused."""

    timeout_s: float
    bytes_max: int
    redirects_max: int = 0
    content_types: tuple[str, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer. ``url`` is where it came from, after redirects; ``retry_after`` the header of that name, or ""."""

    status: int
    content_type: str
    body: bytes
    url: str
    retry_after: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A judged URL: connect to ``address`` and to nothing else."""

    url: str
    scheme: str
    host: str
    port: int
    address: Address


async def system_resolve(host: str, port: int) -> Sequence[str]:
    """Ask the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class Fetcher:
    """Fetches URLs. ``private_networks`` are those of our own that may be reached; none by default."""

    def __init__(
        self,
        private_networks: Sequence[Network] = (),
        *,
        resolve: Resolve = system_resolve,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._private = tuple(private_networks)
        self._resolve = resolve
        self._tls = tls

    def __repr__(self) -> str:
        return f"<Fetcher, private: {', '.join(map(str, self._private)) or 'none'}>"

    async def check(self, url: str, *, length_max: int = URL_LENGTH_MAX) -> Target:
        """Return where ``url`` leads, now.

        Raises:
            FetchError: it may not be fetched, or its host does not resolve.
        """
        parts = _read(url, length_max)
        host, port = parts.host, parts.port
        found = [parts.address] if parts.address is not None else await self._addresses(host, port)
        for one in found:
            if not may_connect(one, self._private):
                raise NotPublicError(f"'{host}'")
        if parts.scheme == "http" and not all(is_private_network(one, self._private) for one in found):
            raise FetchError("use https")
        return Target(parts.url, parts.scheme, host, port, found[0])

    async def fetch(
        self,
        method: str,
        url: str,
        *,
        bounds: Bounds,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Fetched:
        """Send a request and return the answer, whatever its status.

        Raises:
            FetchError: the URL, a redirect or the answer breaks a rule, or nobody answered.
        """
        from aiohttp import ClientError

        try:
            async with asyncio.timeout(bounds.timeout_s):
                target = await self.check(url)
                first = target
                for _ in range(bounds.redirects_max + 1):
                    fetched, location = await self._ask(target, method, headers or {}, body, bounds)
                    if location is None or not bounds.redirects_max:
                        return fetched
                    target = await self._follow(first, target, location)
        except TimeoutError:
            raise FetchError(f"no whole answer within {bounds.timeout_s:g} s") from None
        except (ClientError, OSError, ValueError) as error:
            raise FetchError(failure_of(error)) from None
        raise FetchError(f"more than {bounds.redirects_max} redirects")

    @asynccontextmanager
    async def open(
        self,
        url: str,
        *,
        bounds: DownloadBounds,
        headers: Mapping[str, str] | None = None,
        credentials: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Download]:
        """Send a GET and give the answer, whatever its status, while its body still comes.

        ``credentials`` are headers for the host of ``url`` only: a redirect to another one goes without them.

        Raises:
            FetchError: the URL, a redirect or the answer breaks a rule, nobody answered, or the answer was cut off.
        """
        async with AsyncExitStack() as stack:
            # What goes wrong in the hands of the caller is the caller's, so only the opening is translated.
            yield await self._opened(stack, url, bounds, headers or {}, credentials or {})

    async def _opened(
        self,
        stack: AsyncExitStack,
        url: str,
        bounds: DownloadBounds,
        headers: Mapping[str, str],
        credentials: Mapping[str, str],
    ) -> Download:
        from aiohttp import ClientError

        try:
            async with asyncio.timeout(bounds.answer_timeout_s):
                first = target = await self.check(url)
                for _ in range(bounds.redirects_max + 1):
                    is_home = (target.scheme, target.host, target.port) == (first.scheme, first.host, first.port)
                    asking = self._asking(target, "GET", {**headers, **(credentials if is_home else {})})
                    answer = await stack.enter_async_context(asking)
                    location = _location(answer)
                    if location is None or not bounds.redirects_max:
                        return Download(answer, bounds, target.url)
                    await stack.pop_all().aclose()
                    target = await self._follow(first, target, location, length_max=LOCATION_LENGTH_MAX)
        except TimeoutError:
            raise FetchError(f"no answer within {bounds.answer_timeout_s:g} s", is_transient=True) from None
        except (ClientError, OSError, ValueError) as error:
            raise FetchError(failure_of(error), is_transient=True) from None
        raise FetchError(f"more than {bounds.redirects_max} redirects")

    async def _addresses(self, host: str, port: int) -> list[Address]:
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                texts = await self._resolve(host, port)
            # A zone ("%eth0") is this machine's own business: with one, it is no public address.
            found = [ipaddress.ip_address(text) for text in dict.fromkeys(texts)]
        except (OSError, UnicodeError):
            raise FetchError("its host does not resolve", is_transient=True) from None
        except ValueError:
            raise NotPublicError(f"'{host}'") from None
        if not 0 < len(found) <= ADDRESSES_MAX:
            raise FetchError("its host does not resolve")
        return found

    async def _follow(self, first: Target, at: Target, location: str, *, length_max: int = URL_LENGTH_MAX) -> Target:
        """Judge a redirect as if it were given, and keep it from other services of the same host."""
        try:
            target = await self.check(urljoin(at.url, location), length_max=length_max)
        except NotPublicError:
            raise NotPublicError("a host that it redirects to") from None  # which nobody but the server wrote
        if target.scheme not in (first.scheme, "https"):
            raise FetchError("it redirects away from https")
        if target.port not in (first.port, 443):
            raise FetchError("it redirects to another port")
        return target

    async def _ask(
        self, target: Target, method: str, headers: Mapping[str, str], body: bytes, bounds: Bounds
    ) -> tuple[Fetched, str | None]:
        async with self._asking(target, method, headers, body) as answer:
            location = _location(answer)
            content_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
            is_redirect = answer.status in _REDIRECTS
            if not is_redirect and bounds.content_types and content_type not in bounds.content_types:
                raise FetchError(f"its content type is none of {', '.join(bounds.content_types)}")
            body_of = await _body_of(answer, bounds)
            retry_after = answer.headers.get("retry-after", "")
            return Fetched(answer.status, content_type, body_of, target.url, retry_after), location

    @asynccontextmanager
    async def _asking(
        self, target: Target, method: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator["aiohttp.ClientResponse"]:
        """Connect to the judged address and to no other, and send the request."""
        import aiohttp
        from yarl import URL

        # As it was given: quoting it anew would change what some receivers sign.
        address = URL(target.url, encoded=True)
        if (address.host or "").lower() != target.host:
            raise FetchError("it names no valid host")  # two readers of one URL disagree
        connector = aiohttp.TCPConnector(
            resolver=_pinned(target),
            use_dns_cache=False,
            force_close=True,
            family=socket.AF_UNSPEC,
            ssl=self._tls or True,
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),  # every wait has a timeout of ours
            ) as session,
            session.request(
                method,
                address,
                data=body or None,
                headers={"accept-encoding": "identity", "user-agent": "modelyard", **headers},
                allow_redirects=False,
            ) as answer,
        ):
            yield answer


def trust(authorities: str) -> ssl.SSLContext | None:
    """Return what trusts the certificates in the file ``authorities`` beside those that the system does; None for "".

    Raises:
        ValueError: the file cannot be read or holds no certificate.
    """
    if not authorities:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cafile=Path(authorities))
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"{authorities}: {error.strerror or error}") from error
    return context


_REDIRECTS = frozenset({301, 302, 303, 307, 308})


def _location(answer: "aiohttp.ClientResponse") -> str | None:
    return answer.headers.get("location") if answer.status in _REDIRECTS else None


def _read(url: str, length_max: int) -> UrlParts:
    try:
        return read_url(url, length_max=length_max)
    except UrlError as error:
        raise FetchError(str(error)) from None


def _pinned(target: Target) -> "AbstractResolver":
    """Return a resolver that knows one answer."""
    from aiohttp.abc import AbstractResolver, ResolveResult

    kind = socket.AF_INET6 if target.address.version == 6 else socket.AF_INET

    class Pinned(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_UNSPEC) -> list[ResolveResult]:
            if host.lower() != target.host:
                raise OSError("another host than the one that was judged")
            address = str(target.address)
            return [ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=0)]

        async def close(self) -> None:
            """Nothing is held."""

    return Pinned()


async def _body_of(answer: "aiohttp.ClientResponse", bounds: Bounds) -> bytes:
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > bounds.bytes_max:
            if not bounds.is_cut:
                raise FetchError(f"the answer is larger than {bounds.bytes_max} bytes")
            break
    return bytes(body[: bounds.bytes_max])
