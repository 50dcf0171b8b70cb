"""Requests that wish to change the protocol (``Upgrade: h2c``; Java's client asks by default).

HTTP lets a server ignore the wish, and this one does. The parser, however,
stops behind the head of such a request and would leave its body out; so the
head is written again without the wish, and the request read once more.
"""

_DROPPED = frozenset({b"connection", b"http2-settings", b"upgrade"})


def head_without_upgrade(method: bytes, target: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the head of the same request in plain HTTP, the last one of its connection."""
    kept = b"".join(b"%b: %b\r\n" % header for header in headers if header[0] not in _DROPPED)
    return b"%b %b HTTP/%b\r\n%bconnection: close\r\n\r\n" % (method, target, version.encode(), kept)
