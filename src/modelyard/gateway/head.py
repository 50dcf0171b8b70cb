"""The head of a request: what it says, and what is refused before any of the body is kept.

The parser (llhttp) has read it by then. What it lets through and we do not: no
Host or two, a target that is not a path, heads over the limit, compressed
bodies (``reference/security.md`` S24, S26, S28).
"""

import re
from collections.abc import Iterable

from modelyard import errors
from modelyard.config import GatewayConfig
from modelyard.domain.batches import Caller
from modelyard.domain.files import FILES_PATH, FORM_BYTES_MAX
from modelyard.domain.tenants import Scope
from modelyard.domain.uploads import PART_BYTES_MAX, UPLOADS_PATH
from modelyard.gateway import cors
from modelyard.gateway.preferences import NAMES

PUBLIC = ("/console", "/docs", "/openapi.json", "/favicon.ico")
"""Paths (and what lies below) that need no key here; the console has its own session."""

HOT_PATHS = {
    path.encode(): path
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
}
"""Targets that need not be taken apart; as the same text each time, they are also found faster in every dict."""

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_WATCHED = _CREDENTIALS | NAMES | {
    b"host", b"content-length", b"content-encoding", b"transfer-encoding", b"expect", b"origin",
}  # fmt: skip
_PART = re.compile(rf"{UPLOADS_PATH}/[^/?]+/parts/[^/?]+")
_HOST_BYTES = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:[]%~"


class Request:
    """A whole request as the client sent it; ``headers`` have lower-case names.

    ``preferences`` are those headers that say how it is to be answered (``preferences.py``), empty for nearly all.
    ``cors`` are header lines for its answer, empty unless a page of an allowed origin asks. ``caller`` is whom another
    plane asks for (``callers.py``), None for every client.
    """

    __slots__ = (
        "body",
        "caller",
        "cors",
        "credentials",
        "expects",
        "headers",
        "host",
        "is_http10",
        "keep_alive",
        "length",
        "method",
        "path",
        "preferences",
        "query",
    )

    def __init__(self) -> None:
        self.method = b""
        self.path = ""
        self.query = b""
        self.host = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.credentials: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.caller: Caller | None = None
        self.cors = b""
        self.length = 0
        self.preferences: tuple[tuple[bytes, bytes], ...] = ()
        self.expects = False
        self.keep_alive = True
        self.is_http10 = False

    def header(self, name: bytes) -> bytes | None:
        """Return the first header of this name."""
        for known, value in self.headers:
            if known == name:
                return value
        return None


def check_headers(request: Request, settings: GatewayConfig, read_bytes: int) -> None:
    """Judge all headers, and note in ``request`` what they say; ``read_bytes`` is an upper bound of their size.

    Raises:
        ApiError: 400, 413, 415 or 431.
    """
    headers = request.headers
    if len(headers) > settings.headers_max or (
        read_bytes > settings.header_bytes_max and head_size(request) > settings.header_bytes_max
    ):
        raise errors.headers_too_large(settings.header_bytes_max)
    hosts = 0
    for header in headers:
        name = header[0]
        if name not in _WATCHED:
            continue
        # Those that every request has come first.
        if name == b"host":
            hosts += 1
            request.host = header[1]
        elif name == b"content-length":
            request.length = length = int(header[1])
            if length > settings.body_bytes_max:
                _check_large(request, settings, length)
        elif name in _CREDENTIALS:
            request.credentials.append(header)
        else:
            _check_rare(request, settings, header)
    # The host goes into links of answers, so it may hold nothing but a name or address with its port.
    if (hosts != 1 and not (hosts == 0 and request.is_http10)) or request.host.translate(None, _HOST_BYTES):
        raise errors.bad_request("invalid_host", "A request needs exactly one Host header, with a host and a port.")


def _check_large(request: Request, settings: GatewayConfig, length: int) -> None:
    # The target is still whole in ``query``.
    needed = streamed_scope(request, request.query.decode("latin-1"))
    if needed is Scope.INFERENCE:
        if length > settings.file_bytes_max + FORM_BYTES_MAX:
            raise errors.file_too_large(settings.file_bytes_max, "gateway.file_bytes_max")
    elif needed is None or length > PART_BYTES_MAX:
        raise errors.body_too_large(settings.body_bytes_max if needed is None else PART_BYTES_MAX)


def _check_rare(request: Request, settings: GatewayConfig, header: tuple[bytes, bytes]) -> None:
    name, value = header
    if name == b"origin":
        request.cors = cors.answer_lines(settings.cors_origins, value)
    elif name == b"expect":
        request.expects = value.lower() == b"100-continue"
    elif name in NAMES:
        request.preferences = (*request.preferences, header)
    elif name == b"content-encoding":
        if value.lower() != b"identity":
            raise errors.unsupported_content_encoding(value.decode("latin-1"))
    elif value.lower() != b"chunked":
        raise errors.bad_request("invalid_http", "Transfer-Encoding must be chunked or absent.")


def head_size(request: Request) -> int:
    """Return about how many bytes the head took."""
    return len(request.query) + sum(len(name) + len(value) + 4 for name, value in request.headers)


def streamed_scope(request: Request, path: str) -> Scope | None:
    """Return what a key needs for a request whose body is passed on as it comes, a file or a part of an upload.

    None for all others, whose body is taken whole.
    """
    if request.method == b"POST":
        return Scope.INFERENCE if path == FILES_PATH else None
    if request.method == b"PUT" and _PART.fullmatch(path) is not None:
        return Scope.MANAGE
    return None


def is_public(path: str) -> bool:
    """Say whether ``path`` needs no key."""
    if ".." in path or "%" in path or "//" in path:
        return False
    return any(path == prefix or path.startswith(prefix + "/") for prefix in PUBLIC)


def origin_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the Origin of a request that may be half read, empty without one."""
    return next((value for name, value in headers if name == b"origin"), b"")
