"""A web server on loopback that holds files and misbehaves as told: where artifacts come from in tests.

Each file says how it is served; ``Origin.seen`` has every request. It runs in
threads of this process, in the clear or with a certificate of its own.
"""

import contextlib
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

STALL_S = 60.0
BLOCK_BYTES = 256 * 1024


@dataclass(slots=True)
class Served:
    """How one path answers."""

    content: bytes = b""
    etag: str = '"one"'
    has_ranges: bool = True
    has_length: bool = True
    cuts: list[int] = field(default_factory=list)
    """Bytes after which answers break off, one for each answer from now on."""
    stalls: list[int] = field(default_factory=list)
    """Bytes after which answers go silent, as above."""
    statuses: list[int] = field(default_factory=list)
    """Errors to answer with first."""
    redirect: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    told_size: int | None = None
    """What it says its size is, when that is a lie."""
    on_request: Callable[["Seen"], None] = lambda seen: None
    """Called before each answer."""
    ignores_if_range: bool = False
    bytes_per_s: float = 0.0
    """Most that one connection gets; 0: as fast as it goes."""
    shifted: int = 0
    """By how much the range of an answer is another one than was asked for."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that came in."""

    path: str
    headers: Mapping[str, str]

    @property
    def range(self) -> str:
        """Return the range that was asked for."""
        return self.headers.get("range", "")


class Origin:
    """A running server; ``url`` has no slash at its end."""

    def __init__(self, certificate: tuple[Path, Path] | None = None, host: str = "127.0.0.1") -> None:
        self.files: dict[str, Served] = {}
        self.seen: list[Seen] = []
        self.released = threading.Event()
        origin = self

        class Answering(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    origin.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Answering)
        self._server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self.url = f"{'https' if certificate else 'http'}://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def put(self, path: str, content: bytes, **how: object) -> Served:
        """Serve ``content`` at ``path``."""
        self.files[path] = served = Served(content, **how)  # type: ignore[arg-type]
        return served

    def sent_bytes(self, path: str) -> int:
        """Return how many bytes were asked for by ranges of a path, all answers together."""
        spans = [re.fullmatch(r"bytes=(\d+)-(\d+)", seen.range) for seen in self.seen if seen.path == path]
        return sum(int(span[2]) + 1 - int(span[1]) for span in spans if span)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        path = urlsplit(request.path).path
        seen = Seen(request.path, {name.lower(): value for name, value in request.headers.items()})
        self.seen.append(seen)
        served = self.files.get(request.path) or self.files.get(path)
        if served is None:
            _refuse(request, 404)
            return
        served.on_request(seen)
        if served.statuses:
            _refuse(request, served.statuses.pop(0))
        elif served.redirect:
            request.send_response(302)
            request.send_header("Location", served.redirect)
            request.send_header("Content-Length", "0")
            request.end_headers()
        else:
            self._send(request, served, seen)

    def _send(self, request: BaseHTTPRequestHandler, served: Served, seen: Seen) -> None:
        start, end, status = 0, len(served.content), 200
        size = len(served.content) if served.told_size is None else served.told_size
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", seen.range)
        is_same = served.ignores_if_range or seen.headers.get("if-range", served.etag) == served.etag
        if span and size and served.has_ranges and is_same:
            start, end, status = int(span[1]), min(int(span[2]) + 1, size), 206
        request.send_response(status)
        if status == 206:
            request.send_header("Content-Range", f"bytes {start + served.shifted}-{end - 1 + served.shifted}/{size}")
        if served.has_length:
            request.send_header("Content-Length", str(end - start if status == 206 else size))
        if served.etag:
            request.send_header("ETag", served.etag)
        for name, value in served.headers.items():
            request.send_header(name, value)
        request.end_headers()
        body = served.content[start:end]
        if end - start > 4096 or not span:  # first looks are not cut
            if served.cuts:
                body = body[: served.cuts.pop(0)]
            elif served.stalls:
                request.wfile.write(body[: served.stalls.pop(0)])
                request.wfile.flush()
                self.released.wait(STALL_S)
                return
        for at in range(0, len(body), BLOCK_BYTES):
            block = body[at : at + BLOCK_BYTES]
            request.wfile.write(block)
            if served.bytes_per_s:
                time.sleep(len(block) / served.bytes_per_s)


def _refuse(request: BaseHTTPRequestHandler, status: int) -> None:
    request.send_response(status)
    request.send_header("Content-Length", "0")
    request.end_headers()


@contextlib.contextmanager
def origin(certificate: tuple[Path, Path] | None = None, host: str = "127.0.0.1") -> Iterator[Origin]:
    """Run a server."""
    running = Origin(certificate, host)
    try:
        yield running
    finally:
        running.close()
