"""Which addresses a URL of somebody else's may lead to.

``ipaddress`` alone is not enough (measured, ``reference/security.md`` S1): it
calls multicast and NAT64 global, and does not look into addresses that carry
another one.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

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
