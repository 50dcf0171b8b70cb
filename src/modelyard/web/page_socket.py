"""A page of metrics for whoever connects to a unix socket in ``run/``; ``gateway/siblings.py`` puts all together.

No request is read: to connect is to ask.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

TOLD_WITHIN_S = 1.0
"""A process that is busier than this is left out of a page; Prometheus marks its series stale."""

_log = logging.getLogger(__name__)


class PageSocket:
    """The page of this process. ``name`` is its own among those in ``folder``, and the label of its series."""

    def __init__(self, folder: Path, name: str, render: Callable[[], bytes]) -> None:
        self.path = folder / f"m-{name}.sock"
        self._render = render
        self._server: asyncio.Server | None = None
        self._inode = 0

    def __repr__(self) -> str:
        return f"<PageSocket {self.path.name}>"

    async def start(self) -> None:
        """Tell the page from now on; where no socket can be made, the others do without it."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)  # what a killed process of this name left behind
            listener.bind(os.fspath(self.path))
            self.path.chmod(0o600)  # nobody can connect before we listen
            self._inode = self.path.stat().st_ino
            self._server = await asyncio.start_unix_server(self._tell, sock=listener)
        except OSError as error:
            listener.close()
            _log.warning("%s: metrics of this process are not shown: %s", self.path.name, error)

    async def close(self) -> None:
        """Stop telling."""
        if self._server is None:
            return
        self._server.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:  # else another process of this name is here already
                self.path.unlink()

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TOLD_WITHIN_S):
                writer.write(self._render())
                await writer.drain()
        except OSError:  # a TimeoutError is one
            writer.transport.abort()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
