"""The floor: a proxy on uvloop that copies bytes and does nothing else, ``python -m bench.gateway.floor PORT ENGINE``.

No Python gateway can cost less than this on the machine at hand, so the
distance to it, not to nginx, is what code can still gain.
"""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import uvloop

from bench.gateway.peers import Target
from bench.processes import free_port, is_listening, tree, wait_until


class _Side(asyncio.Protocol):
    """One end of a pair of connections; what comes in goes out at the other."""

    def __init__(self) -> None:
        self.other: _Side | None = None
        self.transport: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)
        else:
            self._early.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.abort()

    def pair(self, other: "_Side") -> None:
        """Join the two ends, and pass on what came before."""
        self.other, other.other = other, self
        if other.transport is not None:
            for data in self._early:
                other.transport.write(data)


async def _serve(port: int, engine_port: int) -> None:
    loop = asyncio.get_running_loop()
    pairing: set[asyncio.Task[None]] = set()

    class _Client(_Side):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            task = loop.create_task(self._connect())
            pairing.add(task)
            task.add_done_callback(pairing.discard)

        async def _connect(self) -> None:
            _, engine = await loop.create_connection(_Side, "127.0.0.1", engine_port, family=socket.AF_INET)
            self.pair(engine)

    server = await loop.create_server(_Client, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


class Floor:
    """The proxy as a peer: no HTTP, no key check; one upstream connection a client."""

    name = "floor (uvloop copy)"

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def missing(self) -> str:
        """Always there."""
        return ""

    def start(self, upstream_port: int, folder: Path, *, gateway_pin: list[str], other_pin: list[str]) -> Target:
        """Start it."""
        port = free_port()
        command = [sys.executable, "-m", "bench.gateway.floor", str(port), str(upstream_port)]
        self._process = subprocess.Popen([*gateway_pin, *command])
        wait_until(lambda: is_listening(port), "the floor listening")
        return Target(port, "")

    def pids(self) -> list[int]:
        """Return its process."""
        assert self._process is not None, "not started"
        return tree(self._process.pid)

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
