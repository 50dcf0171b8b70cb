"""A loopback proxy that puts a real key in place of the made-up one of an outside test suite.

OpenAI's and Anthropic's own suites send ``My API Key`` and the like. Keys here
have a checksum and none can be chosen (S15), so the suites cannot be let in as
they are. The proxy replaces the value of ``authorization`` and ``x-api-key``
where they are sent, and passes every other byte in both directions as it is.
"""

import asyncio
import contextlib
import threading
import urllib.parse
from collections.abc import Iterator

STOP_WITHIN_S = 10.0


def with_key(head: bytes, key: str) -> bytes:
    """Return the head of a request, its line and headers, with our key where it had one."""
    lines = head.split(b"\r\n")
    for number, line in enumerate(lines[1:], 1):
        name = line.partition(b":")[0].strip().lower()
        if name == b"authorization":
            lines[number] = b"Authorization: Bearer " + key.encode()
        elif name == b"x-api-key":
            lines[number] = b"x-api-key: " + key.encode()
    return b"\r\n".join(lines)


def header_of(head: bytes, wanted: bytes) -> bytes:
    """Return a header's value in lower case; b"" without it."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == wanted:
            return value.strip().lower()
    return b""


async def pass_body(head: bytes, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass the body that belongs to a head, in either of HTTP/1.1's two framings."""
    if header_of(head, b"transfer-encoding") == b"chunked":
        while True:
            size = await source.readuntil(b"\r\n")
            target.write(size + await source.readexactly(int(size.split(b";")[0], 16) + 2))
            if size.strip(b"0\r\n") == b"":
                break
    else:
        target.write(await source.readexactly(int(header_of(head, b"content-length") or 0)))
    await target.drain()


async def pass_requests(source: asyncio.StreamReader, target: asyncio.StreamWriter, key: str) -> None:
    """Pass request after request until the client closes."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await source.readuntil(b"\r\n\r\n")
            target.write(with_key(head, key))
            await pass_body(head, source, target)
    target.close()


async def pass_answers(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass bytes until the platform closes."""
    with contextlib.suppress(ConnectionError):
        while piece := await source.read(65_536):
            target.write(piece)
            await target.drain()
    target.close()


async def serve(port: int, key: str, ports: list[int], ready: threading.Event, stop: asyncio.Event) -> None:
    """Serve until ``stop``; append the port and set ``ready`` once it listens."""
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(pass_requests(reader, upstream_writer, key))
                ways.create_task(pass_answers(upstream_reader, writer))
        finally:
            for end in (writer, upstream_writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(talk(reader, writer))
        talks.add(task)
        task.add_done_callback(talks.discard)

    server = await asyncio.start_server(begin, "127.0.0.1", 0, limit=1 << 20)
    ports.append(int(server.sockets[0].getsockname()[1]))
    ready.set()
    await stop.wait()
    server.close()
    left = list(talks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await server.wait_closed()


@contextlib.contextmanager
def key_proxy(url: str, key: str) -> Iterator[str]:
    """Run the proxy in a thread before the platform at ``url``; the value is the proxy's own URL."""
    ports: list[int] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    port = urllib.parse.urlsplit(url).port or 80
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(port, key, ports, ready, stop)))
    thread.start()
    try:
        assert ready.wait(STOP_WITHIN_S), "the proxy did not start"
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(STOP_WITHIN_S)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
