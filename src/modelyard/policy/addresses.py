"""Where a URL of somebody else's may lead: how it is read, and which addresses it may resolve to; pure.

What resolves names and connects uses this and nothing else: ``web/fetcher.py`` for the platform, and
``engines/providers`` for what goes to a provider.

``ipaddress`` alone is not enough (measured, ``reference/security.md`` S1): it
calls multicast and NAT64 global, and does not look into addresses that carry
another one.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

URL_LENGTH_MAX = 2048
SCHEMES = {"https": 443, "http": 80}
"""With their ports; ``http`` is for networks of the operator's own."""

_HOST = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
)
_NUMERIC = re.compile(r"(?:\d+|0x[0-9a-f]*)")

_NEVER = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # carriers' own, and a cloud's metadata (100.100.100.200)
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's host, on a public address
        "169.254.0.0/16",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/96",
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",
        "2001:db8::/32",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
)
"""Beyond what is not global anyway."""
_CARRIERS = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("::ffff:0:0:0/96"))
"""NAT64 (RFC 6052) and SIIT: the last 32 bits are an IPv4 address."""


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return CIDRs as networks.

    Raises:
        ValueError: one is none.
    """
    return tuple(ipaddress.ip_network(text) for text in texts)


def may_connect(address: Address, private: Sequence[Network]) -> bool:
    """Say whether ``address`` and all that it carries are public, or in a network that the operator allows."""
    return all(_is_public(one) or is_private_network(one, private) for one in carried(address))


def is_private_network(address: Address, private: Sequence[Network]) -> bool:
    """Say whether ``address`` is in one of these networks."""
    return any(address in network for network in private if network.version == address.version)


def carried(address: Address) -> Iterator[Address]:
    """Yield the address that counts: itself, or the IPv4 addresses inside (mapped, NAT64, 6to4, Teredo)."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
    elif address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    elif any(address in carrier for carrier in _CARRIERS):
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    elif address.sixtofour is not None:
        yield address.sixtofour
    elif address.teredo is not None:
        yield from address.teredo
    else:
        yield address


def _is_public(address: Address) -> bool:
    return (
        address.is_global
        and not address.is_multicast
        and getattr(address, "scope_id", None) is None
        and not any(address in network for network in _NEVER if network.version == address.version)
    )


class UrlError(ValueError):
    """Why a URL is not taken, in words that follow its name: "use https"."""


class UrlParts(NamedTuple):
    """A URL taken apart; ``address`` is None where the host is a name."""

    url: str
    scheme: str
    host: str
    port: int
    address: Address | None


def read_url(url: str, *, length_max: int = URL_LENGTH_MAX) -> UrlParts:
    """Take a URL apart, strictly: what parsers read differently is refused. Its fragment is left out.

    Raises:
        UrlError: it is none of ours.
    """
    if len(url) > length_max:
        raise UrlError(f"it is longer than {length_max} characters")
    if not url.isascii() or not url.isprintable() or any(sign in url for sign in ' \\"<>^`{|}'):
        raise UrlError("it holds characters that a URL cannot have")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").lower()
    except ValueError:
        raise UrlError("it is no URL") from None
    if parts.scheme not in SCHEMES:
        raise UrlError("use https")
    if "@" in parts.netloc:
        raise UrlError("it must not hold a user or password")
    if not host or "%" in host or port == 0:
        raise UrlError("it names no host")
    whole = parts._replace(fragment="").geturl()
    return UrlParts(whole, parts.scheme, host, port or SCHEMES[parts.scheme], _literal(host))


def _literal(host: str) -> Address | None:
    """Return the address that ``host`` is, None for a name.

    Raises:
        UrlError: it is neither, or one of the old spellings of an IPv4 address (``127.1``, ``0x7f000001``).
    """
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    name = host.removesuffix(".")
    # As browsers do: a last label that is a number makes it an address, and ours must be the plain kind.
    if not _HOST.fullmatch(name) or _NUMERIC.fullmatch(name.rpartition(".")[2]):
        raise UrlError("it names no valid host")
    return None
