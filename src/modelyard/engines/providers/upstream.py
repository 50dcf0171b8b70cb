"""The way to the provider: over TLS, to an address that was judged, with the key, with a limit on every wait.

The name is resolved for each connection, every answer is judged, and the
connection is made to one of them: a name that changes its mind (DNS rebinding)
leads nowhere else (``reference/security.md`` S1, S2). Redirects are not
followed and proxies of the environment not used.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from modelyard.engines.providers.keys import KeyFault, read_key
from modelyard.policy.addresses import Network, is_private_network, may_connect, read_url

CONNECT_S = 10.0
RESOLVE_S = 5.0
ADDRESSES_MAX = 16
IDLE_S = 30.0
"""Longest time that an idle connection is kept; providers close theirs after a minute or so."""
ATTEMPTS = 2
"""Tries to reach a provider, all before a byte of an answer."""


class UnreachableError(Exception):
    """No connection to the provider, or none that gave an answer; the text has no secret."""


class NotAllowedError(Exception):
    """The URL leads where it must not."""


class Key:
    """The provider's key: given, or in a ``file`` that is read anew when the provider refuses what it held."""

    def __init__(self, text: str, file: Path | None) -> None:
        self.text = text if file is None else read_key(file)
        self._file = file

    def __repr__(self) -> str:
        """Return it without the key."""
        return f"<Key from {self._file or 'the environment'}>"

    def renew(self) -> bool:
        """Read the file again; say whether it holds another key by now."""
        if self._file is None:
            return False
        try:
            new = read_key(self._file)
        except KeyFault:
            return False
        is_other = new != self.text
        self.text = new
        return is_other

    def scrubbed(self, text: str) -> str:
        """Return ``text`` without the key, should somebody have quoted it."""
        return text.replace(self.text, "[key]")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds of a request in all, and without a byte."""

    timeout_s: float
    silence_s: float


class _Judged(AbstractResolver):
    """Gives out only addresses that may be connected to; one bad answer among good ones refuses the name."""

    def __init__(self, private: Sequence[Network], *, is_plain: bool) -> None:
        self._private = private
        self._is_plain = is_plain

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise OSError(f"{host} did not resolve within {RESOLVE_S:g} s") from None
        texts = list(dict.fromkeys(str(entry[4][0]) for entry in found))[:ADDRESSES_MAX]
        for text in texts:
            judge(text, host, self._private, is_plain=self._is_plain)
        return [
            ResolveResult(
                hostname=host,
                host=text,
                port=port,
                family=socket.AF_INET6 if ":" in text else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for text in texts
        ]

    async def close(self) -> None:
        """Nothing is held."""


def judge(text: str, host: str, private: Sequence[Network], *, is_plain: bool) -> None:
    """Refuse an address that the platform may not connect to; ``is_plain``: without TLS.

    Raises:
        NotAllowedError: with the reason.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # one with a zone is this machine's own business
        raise NotAllowedError(f"'{host}' is no public address") from None
    if not may_connect(address, private):
        raise NotAllowedError(f"'{host}' leads to no public address, and to no network of fetch.private_networks")
    if is_plain and not is_private_network(address, private):
        raise NotAllowedError("use https: http is only for networks in fetch.private_networks")


class Upstream:
    """One provider's API at ``base``; ``async with`` opens and closes its connections."""

    def __init__(
        self, base: str, key: Key, *, private: Sequence[Network], tls: ssl.SSLContext | None, bounds: Bounds
    ) -> None:
        parts = read_url(base)
        is_plain = parts.scheme == "http"
        if parts.address is not None:
            # aiohttp asks no resolver for it.
            judge(str(parts.address), parts.host, private, is_plain=is_plain)
        self.base = parts.url.rstrip("/")
        self.host = parts.host
        self.path = urlsplit(self.base).path
        self.key = key
        self._resolver = _Judged(private, is_plain=is_plain)
        self._tls = tls
        self._bounds = bounds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Upstream":
        """Open nothing yet; a connection comes with the first request."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=self._resolver,
                use_dns_cache=False,
                limit=0,
                keepalive_timeout=IDLE_S,
                ssl=self._tls or True,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=True,
            read_bufsize=256 * 1024,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close every connection."""
        assert self._session is not None, "opened before it is closed"
        await self._session.close()

    @asynccontextmanager
    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Give the answer, whatever its status, while its body still comes; leaving early ends the request there.

        Nothing but a failure to connect, or a connection that was closed as it was used, is tried once more: what the
        provider may have begun to compute is not asked for twice.

        Raises:
            UnreachableError: nobody answered.
            NotAllowedError: the name leads where it must not.
        """
        response = await self._answer(method, path, headers, body)
        try:
            yield response
        finally:
            response.close()

    async def _answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> aiohttp.ClientResponse:
        assert self._session is not None, "asked outside of 'async with'"
        limits = aiohttp.ClientTimeout(
            total=self._bounds.timeout_s, sock_connect=CONNECT_S, sock_read=self._bounds.silence_s
        )
        reason = ""
        for _ in range(ATTEMPTS):
            try:
                return await self._session.request(
                    method,
                    self.base + path,
                    data=body or None,
                    headers={"user-agent": "modelyard", "accept-encoding": "identity", **headers},
                    allow_redirects=False,
                    timeout=limits,
                )
            except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
                reason = _why(error)
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                raise UnreachableError(self.key.scrubbed(_why(error))) from None
        raise UnreachableError(self.key.scrubbed(reason))


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted; see fetch.ca_file for authorities of your own"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"it cannot be reached ({error.os_error.strerror or 'no connection'})"
    return "it closed the connection without an answer"
