"""One ``/metrics`` for all workers of this machine, whichever of them is asked.

Each worker tells its own page to whoever connects to its unix socket in
``run/``; the one that is asked puts all of them together, every series with
the label ``worker``, and the controller's page behind them. Series are not
summed: a worker that starts anew begins at 0, which Prometheus understands of
a series and not of a sum.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from modelyard.gateway.server import ClientConnection
from modelyard.web.page_socket import TOLD_WITHIN_S, PageSocket

PAGE_BYTES_MAX = 16 * 1024 * 1024
CONTROL_PAGE = "m-control.sock"
"""Where the controller tells its page. It is no worker, and its series have no such label."""


class Siblings:
    """This worker's page and those of its siblings. ``folder`` is ``run/``, ``name`` this worker's own.

    One that is alone has no siblings, and no label.
    """

    def __init__(self, folder: Path, name: str, render: Callable[[], bytes], *, is_alone: bool = False) -> None:
        self._folder = folder
        self._name = name
        self._render = render
        self._is_alone = is_alone
        self._control = folder / CONTROL_PAGE
        self._socket = PageSocket(folder, name, render)
        self._asking: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Siblings of {self._name}>"

    async def start(self) -> None:
        """Tell this worker's page from now on; where no socket can be made, the others do without it."""
        if not self._is_alone:
            await self._socket.start()

    async def close(self) -> None:
        """Stop telling, and let go whoever still waits for a page."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._socket.close()

    def answer(self, client: ClientConnection, head: bytes) -> None:
        """Answer with the page of all workers and the controller; ``head`` are the answer's headers."""
        client.current = waiting = _Waiting()
        task = asyncio.get_running_loop().create_task(self._answer(client, head, waiting))
        waiting.task = task
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def page(self) -> bytes:
        """Return the page of all workers that answer in time, and of the controller if it does."""
        if self._is_alone:
            control = await _ask(self._control)
            return self._render() + control
        found = sorted(self._folder.glob("m-*.sock"))
        others = [path for path in found if path not in (self._socket.path, self._control)]
        control, *told = await asyncio.gather(_ask(self._control), *(_ask(path) for path in others))
        pages = {
            path.name.removeprefix("m-").removesuffix(".sock"): page for path, page in zip(others, told, strict=True)
        }
        return merged({self._name: self._render(), **{name: page for name, page in pages.items() if page}}) + control

    async def _answer(self, client: ClientConnection, head: bytes, waiting: "_Waiting") -> None:
        page = await self.page()
        if client.current is waiting:
            client.respond(200, head, page)


class _Waiting:
    """A client that waits for a page."""

    task: "asyncio.Task[None] | None" = None

    def client_left(self) -> None:
        """Stop asking."""
        if self.task is not None:
            self.task.cancel()

    def client_paused(self) -> None:
        """Nothing was written yet."""

    def client_resumed(self) -> None:
        """Nothing was written yet."""


async def _ask(path: Path) -> bytes:
    """Return the page that a worker tells, nothing where there is none any more."""
    try:
        async with asyncio.timeout(TOLD_WITHIN_S):
            reader, writer = await asyncio.open_unix_connection(os.fspath(path))
            try:
                page = bytearray()
                while data := await reader.read(1 << 16):
                    page += data
                    if len(page) > PAGE_BYTES_MAX:
                        return b""
                return bytes(page)
            finally:
                writer.transport.abort()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except OSError:  # a TimeoutError is one
        return b""  # a killed worker's socket stays: its name may just be about to listen again


def merged(pages: dict[str, bytes]) -> bytes:
    """Put pages in Prometheus' text format together, by worker; a metric's lines stay together, as they must."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for worker, page in pages.items():
        label = b'worker="%b"' % worker.encode()
        for name, head, lines in _families(page.splitlines()):
            heads.setdefault(name, head)
            samples.setdefault(name, []).extend(_labelled(line, label) for line in lines)
    return b"".join(line + b"\n" for name in heads for line in (*heads[name], *samples[name]))


def _families(lines: Iterable[bytes]) -> Iterable[tuple[bytes, list[bytes], list[bytes]]]:
    """Yield each metric's name, its ``#`` lines and its samples."""
    name, head, samples = b"", list[bytes](), list[bytes]()
    for line in lines:
        if line.startswith(b"# HELP "):
            if head or samples:
                yield name, head, samples
            name, head, samples = line.split(b" ", 3)[2], [line], []
        elif line.startswith(b"#"):
            head.append(line)
        elif line:
            samples.append(line)
    if head or samples:
        yield name, head, samples


def _labelled(line: bytes, label: bytes) -> bytes:
    brace, blank = line.find(b"{"), line.find(b" ")
    if 0 <= brace < blank:
        return b"%b{%b,%b" % (line[:brace], label, line[brace + 1 :])
    return b"%b{%b}%b" % (line[:blank], label, line[blank:])
