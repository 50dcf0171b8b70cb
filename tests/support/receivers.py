"""Receivers of webhooks: real HTTP servers that answer as they are told."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Behaviour = int | Literal["cut", "hang", "drip"]
"""A status; a connection that is closed; one that stays open and silent; one that answers byte by byte."""

Message = tuple[dict[str, str], bytes]
"""Headers with lower-case names, and the body."""


class Receiver:
    """Takes messages; ``answers`` are its next ones, then ``always``. What it says has ``body``, ``retry_after``."""

    def __init__(self, port: int = 0) -> None:
        self.got: list[Message] = []
        self.paths: list[str] = []
        self.answers: list[Behaviour] = []
        self.always: Behaviour = 200
        self.body = b""
        self.retry_after = ""
        self.at_once_most = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._ends = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.take(self)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A caller that gave up is nobody's fault."""

        self.server = Server(("127.0.0.1", port), Handler)
        self.port = int(self.server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}/in"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def take(self, request: BaseHTTPRequestHandler) -> None:
        """Note a message and answer it."""
        body = request.rfile.read(int(request.headers["content-length"]))
        with self._lock:
            self.got.append(({name.lower(): value for name, value in request.headers.items()}, body))
            self.paths.append(request.path)
            self._at_once += 1
            self.at_once_most = max(self.at_once_most, self._at_once)
            answer = self.answers.pop(0) if self.answers else self.always
        try:
            self._answer(request, answer)
        finally:
            with self._lock:
                self._at_once -= 1

    def _answer(self, request: BaseHTTPRequestHandler, answer: Behaviour) -> None:
        if answer == "cut":
            request.close_connection = True
        elif answer == "hang":
            self._ends.wait(60)
            request.close_connection = True
        elif answer == "drip":
            request.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            while not self._ends.wait(0.02):
                request.wfile.write(b".")
        else:
            request.send_response(answer)
            if self.retry_after:
                request.send_header("retry-after", self.retry_after)
            request.send_header("location", f"http://127.0.0.1:{self.port}/elsewhere")
            request.send_header("content-length", str(len(self.body)))
            request.end_headers()
            request.wfile.write(self.body)

    def close(self) -> None:
        """Stop, and let go of who hangs."""
        self._ends.set()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@contextmanager
def port_without_listener() -> Iterator[int]:
    """Yield a port that refuses: nobody listens, and nobody else can take it, while ``receiving`` may begin there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    """Yield a receiver."""
    receiver = Receiver(port)
    try:
        yield receiver
    finally:
        receiver.close()
