"""The controller's HTTP server: uvicorn on a unix socket that only this user can open."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from modelyard.errors import StartupError

CLOSE_TIMEOUT_S = 2
"""Time that answers under way (followed logs, mostly) get when the controller stops."""
LAST_READ_S = 0.2
"""Time between taking the name of the socket away and the stop: requests that were just sent are read, and answered."""
UNREAD_S_MAX = 3.0
"""Longest wait for the request of somebody who has connected, as on a machine that is short of cores."""
UNANSWERED_S_MAX = 8.0
"""Longest wait for answers that have not begun; uvicorn would cut them off after ``CLOSE_TIMEOUT_S``."""


class ControlServer(uvicorn.Server):
    """A server that leaves signals to ``compose``, which stops the whole plane."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def bind(path: Path) -> socket.socket:
    """Return a listening unix socket, mode 0600; what a killed controller left behind is replaced.

    Raises:
        StartupError: the socket cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before we listen
        listener.listen(128)
        listener.settimeout(0)
    except OSError as error:
        listener.close()
        raise StartupError(f"Cannot listen on {path}: {error}. Choose a shorter or writable --data-dir.") from error
    return listener


async def serve(app: ASGIApp, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serve ``app`` until ``stop`` is set; closes ``listener``."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        loop="none",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )
    server = ControlServer(config)
    async with asyncio.TaskGroup() as group:
        path = Path(listener.getsockname())
        stopping = group.create_task(_stop_with(server, stop, path, path.stat().st_ino))  # noqa: ASYNC240 - in memory
        await server.serve(sockets=[listener])
        stopping.cancel()


async def _stop_with(server: ControlServer, stop: asyncio.Event, path: Path, inode: int) -> None:
    await stop.wait()
    # uvicorn drops connections whose request it has not read. A gateway that cannot connect has sent nothing yet, and
    # waits for the next controller.
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == inode:  # noqa: ASYNC240 - in memory; else it is that of a controller that took over
            path.unlink()  # noqa: ASYNC240 - a name in memory, once a life
    await asyncio.sleep(LAST_READ_S)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while any(_is_owed(one, loop.time() - began_s) for one in server.server_state.connections):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    server.should_exit = True


def _is_owed(connection: object, waited_s: float) -> bool:
    """Say whether somebody is still to be waited for. What is followed (logs) has begun, and may never end."""
    cycle = getattr(connection, "cycle", None)
    if cycle is None:  # until its first request is read, a connection of uvicorn has none
        return waited_s < UNREAD_S_MAX
    return not cycle.response_started and waited_s < UNANSWERED_S_MAX
