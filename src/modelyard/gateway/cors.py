"""Cross-origin calls from browsers, and OPTIONS.

A page of another origin may read an answer only if ``gateway.cors_origins``
names its origin. Credentials (cookies) are never allowed with it: an API key
in a header is what proves a caller, so a page without one can do nothing that
curl could not, and ``*`` is safe. Without configured origins nothing of this is
ever sent (https://fetch.spec.whatwg.org/#http-cors-protocol).
"""

import re
from typing import TYPE_CHECKING

from modelyard.errors import StartupError
from modelyard.gateway.routes import decoder_of

if TYPE_CHECKING:
    from modelyard.gateway.head import Request

PREFLIGHT_MAX_AGE_S = 7200
"""What Chrome keeps at most; every preflight costs the page a round trip."""
ASKED_BYTES_MAX = 4096
"""Longest list of header names that is repeated to who asks for it."""

_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._~-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_TOKENS = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")


def check_origins(origins: tuple[str, ...]) -> None:
    """Refuse what no browser would ever send as its ``Origin``, instead of never matching it.

    Raises:
        StartupError: an entry is neither ``*`` nor scheme, host and port.
    """
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise StartupError(
                f"Bad setting gateway.cors_origins: '{origin}' is no origin. "
                "Write it as browsers do, in lower case and without a path, like https://app.example.com, or '*'."
            )


def answer_lines(origins: tuple[str, ...], origin: bytes) -> bytes:
    """Return the header lines that let a page of ``origin`` read an answer; none if it may not."""
    if not origins:
        return b""
    # The wildcard shows every header: it stands for itself only beside credentials, which are never allowed here.
    if "*" in origins:
        allowed = b"*"
    elif origin.decode("latin-1") in origins:
        allowed = origin
    else:
        return b"vary: origin\r\n"
    return b"access-control-allow-origin: %b\r\nvary: origin\r\naccess-control-expose-headers: *\r\n" % allowed


def options_lines(request: "Request") -> bytes | None:
    """Return the header lines of the 204 to an OPTIONS request; None if it is for the controller to judge.

    A preflight (https://fetch.spec.whatwg.org/#cors-preflight-request) comes without a key and is answered for any
    path, so it tells nothing about what exists.
    """
    is_allowed = request.cors.startswith(b"access-control-")
    if is_allowed and request.header(b"access-control-request-method") is not None:
        lines = b"access-control-allow-methods: %b\r\naccess-control-max-age: %d\r\n" % (_METHODS, PREFLIGHT_MAX_AGE_S)
        asked = request.header(b"access-control-request-headers")
        if asked and len(asked) <= ASKED_BYTES_MAX and _TOKENS.fullmatch(asked):
            lines += b"access-control-allow-headers: %b\r\n" % asked
        return lines
    if request.path in _PROBES or request.path == "/v1/models":
        return b"allow: GET, HEAD, OPTIONS\r\n"
    if decoder_of(request.path) is not None:
        return b"allow: POST, OPTIONS\r\n"
    return None
