"""The client side: strict HTTP/1.1 on ``asyncio.Protocol``.

Parsing is llhttp's (httptools), the strictest of those measured; ``head.py``
refuses what it lets through. Requests of one connection are answered in order,
one at a time. After a protocol error the connection is closed, so that nothing
behind it can be taken for a request (``reference/security.md`` S24).
"""

import asyncio
import logging
from typing import TYPE_CHECKING, cast

import httptools

from modelyard import errors
from modelyard.errors import ApiError
from modelyard.gateway import cors
from modelyard.gateway.answering import Exchange
from modelyard.gateway.framing import status_line, without_framing
from modelyard.gateway.head import HOT_PATHS, Request, check_headers, is_public, origin_of, streamed_scope
from modelyard.gateway.upgrades import head_without_upgrade

if TYPE_CHECKING:
    from modelyard.gateway.flow import Gateway
    from modelyard.gateway.streamed_body import StreamedExchange

__all__ = ["ClientConnection", "Exchange", "Request"]

_log = logging.getLogger(__name__)

WRITE_HIGH_WATER = 32 * 1024
"""Unsent bytes above which the engine is held back; with what one more read of it brings, 64 KiB are not passed."""
PIPELINED_MAX = 8
UNPROVEN_BODY_BYTES_MAX = 64 * 1024
"""Most of a body that is kept for a caller who has not shown a good key."""
RETIRED_IDLE_S = 1.0
"""Time without a request after which a connection of a retiring worker is closed: its client is not about to send."""


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_connections_max",
        "_gateway",
        "_has_head",
        "_head_bytes",
        "_is_deaf",
        "_is_hurried",
        "_is_last_told",
        "_is_paused",
        "_is_streaming",
        "_parser",
        "_refusal",
        "_request",
        "_rest",
        "_serving",
        "_sink",
        "_unsent",
        "_waiting",
        "current",
        "is_closing",
        "since_s",
        "transport",
    )

    def __init__(self, gateway: "Gateway", *, connections_max: int = 2**31) -> None:
        self._gateway = gateway
        self._connections_max = connections_max
        self._parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport | None = None
        self.current: Exchange | None = None
        self.since_s = gateway.clock.monotonic_s()
        self.is_closing = False
        self._waiting: list[Request] = []
        self._request = Request()
        self._serving: Request | None = None
        self._body = b""
        self._rest = bytearray()
        self._sink: StreamedExchange | None = None
        self._body_bytes = 0
        self._head_bytes = 0
        self._has_head = False
        self._is_streaming = False
        self._is_paused = False
        self._is_deaf = False
        self._is_hurried = False
        self._is_last_told = False
        self._unsent = 0
        self._refusal: ApiError | None = None

    # --- what an exchange does ---

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Send a whole response; ``headers`` are complete lines. Then the next request is taken."""
        transport = self.transport
        request = self._serving
        if transport is None or transport.is_closing() or request is None:
            return
        is_last = self._is_last(request)
        content = b"" if request.method == b"HEAD" else body
        close = b"connection: close\r\n" if is_last else b""
        transport.write(
            b"%b%b%b%bcontent-length: %d\r\n\r\n%b"
            % (status_line(status), headers, request.cors, close, len(body), content)
        )
        self._next(is_last=is_last)

    def start_stream(self, headers: bytes) -> None:
        """Send the head of a stream."""
        transport = self.transport
        request = self._serving
        if transport is None or transport.is_closing() or request is None:
            return
        self._is_streaming = True
        framing = b"transfer-encoding: chunked\r\n\r\n"
        self._is_last_told = request.is_http10 or self._is_last(request)
        if self._is_last_told:
            framing = b"connection: close\r\n" + (b"\r\n" if request.is_http10 else framing)
        transport.write(status_line(200) + headers + request.cors + framing)

    def write_stream(self, chunks: bytes) -> None:
        """Send whole HTTP chunks of a stream."""
        transport = self.transport
        if transport is not None:
            request = self._serving
            if request is not None and request.is_http10:
                chunks = without_framing(chunks)
            transport.write(chunks)

    def end_stream(self, chunks: bytes, *, is_last: bool = False) -> None:
        """Send the rest of a stream and its end; ``is_last`` closes the connection behind it."""
        transport = self.transport
        request = self._serving
        if transport is None or transport.is_closing() or request is None:
            return
        transport.write(without_framing(chunks) if request.is_http10 else chunks + b"0\r\n\r\n")
        self._end(is_last=is_last or self._is_last_told)

    def send_raw(self, data: bytes) -> None:
        """Send bytes of a response that somebody else has framed."""
        if self.transport is not None:
            self.transport.write(data)

    def end_raw(self, *, is_last: bool) -> None:
        """Say that a raw response is over; ``is_last`` closes the connection behind it, as its head said."""
        self._end(is_last=is_last or self._serving is None)

    def hold_body(self, *, is_held: bool) -> None:
        """Read no more of the client, or go on."""
        if self.transport is not None and not self.transport.is_closing():
            (self.transport.pause_reading if is_held else self.transport.resume_reading)()

    def refuse_body(self, refusal: ApiError) -> None:
        """Answer a request whose body still comes, and close."""
        self.current = self._serving = self._sink = None
        self._refuse(refusal)

    def end_early(self) -> None:
        """End a whole answer to a request whose body still comes: read that away, then close.

        Closing now would reset the connection while the client still sends, and could take the answer with it.
        """
        self.current = self._serving = self._sink = None
        self._stop_listening()

    def abort(self) -> None:
        """Drop the connection in the middle of a response, so that it cannot be taken for a whole one."""
        self.is_closing = True
        self.current = None
        if self.transport is not None:
            self.transport.abort()

    def close_when_idle(self) -> None:
        """Close now if nothing is being answered, else after the answer (drain)."""
        self.is_closing = self._is_hurried = True
        if self.current is None and self._serving is None and self.transport is not None:
            self.transport.close()

    def retire(self) -> None:
        """Close after the next answer that says so, or when nothing was asked for a while.

        Closing an idle connection at once would meet the requests that are just on their way with a reset, and so would
        closing behind an answer that began before: its head promised that there may be another.
        """
        self.is_closing = True

    def check_time(self, now_s: float) -> None:
        """Close a connection that is idle, sends its request too slowly, or does not read its last answer."""
        transport = self.transport
        if self.current is not None or transport is None:
            return
        settings = self._gateway.settings
        unsent = transport.get_write_buffer_size()
        if unsent:
            if unsent != self._unsent:
                self._unsent, self.since_s = unsent, now_s
            elif now_s - self.since_s > settings.write_stall_timeout_s:
                # Closing would wait for the client to read the rest.
                transport.abort()
            return
        spent_s = now_s - self.since_s
        if not self._has_head and not self._head_bytes:
            if spent_s > (RETIRED_IDLE_S if self.is_closing else settings.idle_timeout_s):
                transport.close()
            return
        limit_s = settings.header_read_timeout_s
        if self._has_head:
            # A pace, not an end: a big body over a slow line is honest.
            limit_s += self._body_bytes / settings.body_bytes_per_s_min
        if spent_s > limit_s:
            if self._is_deaf:
                transport.close()
            else:
                self._refuse(errors.request_timeout())

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register."""
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        if len(self._gateway.connections) >= self._connections_max:
            # Better a word now than no file left for engines and the journal.
            self._write_refusal(self.transport, errors.overloaded(retry_after_s=1))
            self._is_deaf = True
            self.transport.close()
            return
        self._gateway.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchange that its client is gone."""
        self._gateway.connections.discard(self)
        self.transport = None
        self._waiting.clear()
        current, self.current = self.current, None
        if current is not None:
            current.client_left()

    def eof_received(self) -> bool:
        """Close: a client that will not read the answer to the end, or that has ended."""
        return False

    def pause_writing(self) -> None:
        """Hold the engine back."""
        self._is_paused = True
        if self.current is not None:
            self.current.client_paused()

    def resume_writing(self) -> None:
        """Let the engine go on."""
        self._is_paused = False
        if self.current is not None:
            self.current.client_resumed()

    def data_received(self, data: bytes) -> None:
        """Parse a read."""
        transport = self.transport
        if self._is_deaf or transport is None or transport.is_closing():
            return
        # Bytes since the last of a body: of a head, but also of trailers and chunk extensions, however long.
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError:
            refusal, self._refusal = self._refusal, None
            self._refuse(refusal or errors.bad_request("invalid_http", "The request could not be read."))
        except httptools.HttpParserError:
            self._refuse(errors.bad_request("invalid_http", "The request is not well-formed HTTP/1.1."))
        else:
            if self._head_bytes > self._gateway.settings.header_bytes_max:
                self._refuse(errors.headers_too_large(self._gateway.settings.header_bytes_max))

    # --- httptools ---

    def on_message_begin(self) -> None:
        """Start a request."""
        self._request = Request()
        self._body = b""
        self._body_bytes = 0
        self.since_s = self._gateway.clock.monotonic_s()

    def on_url(self, url: bytes) -> None:
        """Collect the target; it may come in pieces."""
        self._request.query += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header; trailers, which come behind the body, are none."""
        if not self._has_head:
            self._request.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Judge the head before any of the body is kept."""
        if self._parser.should_upgrade():
            return
        self._has_head = True
        try:
            self._check_head(self._request)
            if self._request.length > UNPROVEN_BODY_BYTES_MAX or self._request.expects:
                self._check_caller(self._request)
            if self._request.length and self._serving is None:
                self._stream_body(self._request)
        except ApiError as refusal:
            self._serving = None if self._serving is self._request else self._serving
            # httptools turns what a callback raises into its own error; the reason is kept beside it.
            self._refusal = refusal
            raise

    def on_body(self, body: bytes) -> None:
        """Collect a piece of the body, up to the limit."""
        self._head_bytes = 0
        self._body_bytes += len(body)
        if self._sink is not None:
            self._sink.feed(body)
            return
        limit = self._gateway.settings.body_bytes_max
        if self._body_bytes > limit:
            self._refusal = errors.body_too_large(limit)
            raise self._refusal
        if self._body_bytes > UNPROVEN_BODY_BYTES_MAX >= self._body_bytes - len(body) and not self._request.length:
            try:  # a chunked body; one with a length was judged by that
                self._check_caller(self._request)
            except ApiError as refusal:
                self._refusal = refusal
                raise
        if self._body:
            self._rest += body
        else:
            self._body = body

    def on_message_complete(self) -> None:
        """Answer the request, or let it wait for the one before."""
        if self._parser.should_upgrade():
            return
        request = self._request
        request.body = self._body
        if self._rest:
            request.body += self._rest
            self._rest = bytearray()
        self._has_head = False
        self._head_bytes = 0
        # Nothing behind the last request of a connection is a request, and must not disturb that one's answer.
        self._is_deaf = not request.keep_alive
        if self._sink is not None:
            self._sink = None
            return
        if self._serving is not None:
            self._waiting.append(request)
            if len(self._waiting) >= PIPELINED_MAX and self.transport is not None:
                self.transport.pause_reading()
            return
        self._serve(request)

    # --- inside ---

    def _stream_body(self, request: Request) -> None:
        if (needed := streamed_scope(request, request.path)) is not None:
            self._serving = request
            self._sink = self._gateway.stream(self, request, needed)

    def _ignore_upgrade(self, rest: bytes) -> None:
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(errors.bad_request("upgrade_unsupported", "This server is no proxy."))
            return
        request, version = self._request, self._parser.get_http_version()
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(head_without_upgrade(method, request.query, version, request.headers) + rest)

    def _check_head(self, request: Request) -> None:
        parser = self._parser
        version = parser.get_http_version()
        if version != "1.1":
            if version != "1.0":
                raise errors.bad_request("invalid_http", "This server speaks HTTP/1.1.")
            request.is_http10 = True
        request.method = parser.get_method()
        request.keep_alive = parser.should_keep_alive()
        check_headers(request, self._gateway.settings, self._head_bytes)
        if (known := HOT_PATHS.get(request.query)) is not None:
            request.path, request.query = known, b""
            return
        path, _, request.query = request.query.partition(b"?")
        if path[:1] != b"/":
            raise errors.bad_request("invalid_target", "The request target must be a path like /v1/models.")
        request.path = path.decode("latin-1")

    def _check_caller(self, request: Request) -> None:
        """Refuse a big body, or one that the client has not sent yet, whose answer is known to be 401 without it."""
        if not is_public(request.path):
            self._gateway.authenticate(request, None)
        if request.expects and not request.is_http10 and self._serving is None:
            self._ask_for_body(request)

    def _ask_for_body(self, request: Request) -> None:
        request.expects = False
        if self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _serve(self, request: Request) -> None:
        self._serving = request
        if request.method == b"OPTIONS" and (lines := cors.options_lines(request)) is not None:
            self._answer_options(request, lines)
        else:
            self._gateway.begin(self, request)

    def _answer_options(self, request: Request, lines: bytes) -> None:
        """Answer 204, which has no body and so no length."""
        is_last = self._is_last(request)
        close = b"connection: close\r\n" if is_last else b""
        request_id = self._gateway.ids.next().encode()
        self.send_raw(b"%b%b%bx-request-id: %b\r\n%b\r\n" % (status_line(204), lines, request.cors, request_id, close))
        self.end_raw(is_last=is_last)

    def _end(self, *, is_last: bool) -> None:
        """End an answer whose head went out a while ago: only if that said so, or in a hurry, is it the last."""
        self._next(is_last=is_last or self._is_hurried)

    def _next(self, *, is_last: bool) -> None:
        self.current = None
        self._serving = None
        self._is_streaming = False
        if is_last:
            self.is_closing = True
            if self.transport is not None:
                self.transport.close()
            return
        self.since_s = self._gateway.clock.monotonic_s()
        if self._waiting:
            request = self._waiting.pop(0)
            if len(self._waiting) == PIPELINED_MAX - 1 and self.transport is not None:
                self.transport.resume_reading()
            # Not from here: answering a pipeline in one call stack could nest without end.
            self._serving = request
            asyncio.get_running_loop().call_soon(self._serve_if_open, request)
        elif self._has_head and self._request.expects and not self._request.is_http10:
            self._ask_for_body(self._request)

    def _serve_if_open(self, request: Request) -> None:
        if self.transport is not None:
            self._serve(request)

    def _refuse(self, refusal: ApiError) -> None:
        """Answer a request that could not be read, and close; if one is being answered, cut both off."""
        if self._is_deaf:
            return
        self.is_closing = True
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._serving is not None:
            current, self.current = self.current, None
            transport.abort()
            if current is not None:
                current.client_left()
            return
        self._write_refusal(transport, refusal)
        self._stop_listening()

    def _stop_listening(self) -> None:
        """Drop whatever else comes until the client closes; TLS knows no half of a close: there the sweep ends it."""
        self.since_s = self._gateway.clock.monotonic_s()
        self._is_deaf = self.is_closing = True
        if self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()

    def _write_refusal(self, transport: asyncio.Transport, refusal: ApiError) -> None:
        body = refusal.body()
        request_id = self._gateway.ids.next()
        self._gateway.note_refusal(refusal, request_id)
        lines = "".join(f"{name}: {value}\r\n" for name, value in refusal.headers()).encode()
        lines += cors.answer_lines(self._gateway.settings.cors_origins, origin_of(self._request.headers))
        transport.write(
            b"%b%bcontent-type: application/json\r\nconnection: close\r\nx-request-id: %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (status_line(refusal.status), lines, request_id.encode(), len(body), body)
        )

    def _is_last(self, request: Request) -> bool:
        return self.is_closing or not request.keep_alive

    @property
    def is_paused(self) -> bool:
        """Say whether the client is behind."""
        return self._is_paused

    @property
    def has_unsent(self) -> bool:
        """Say whether bytes wait to be written."""
        return self.transport is not None and self.transport.get_write_buffer_size() > 0

    @property
    def is_streaming(self) -> bool:
        """Say whether the head of a stream is out."""
        return self._is_streaming
