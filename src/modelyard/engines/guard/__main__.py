"""The guard's process: read the plan, listen, start the engine, and end with it."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from modelyard.engines.guard import KEY, Plan
from modelyard.engines.guard.child import Filling, end_like, prepare, start
from modelyard.engines.guard.proxy import Proxy
from modelyard.engines.http import Connection
from modelyard.fleet import FleetError
from modelyard.fleet.ports import free_port


def main(arguments: Sequence[str]) -> int:
    """Run guard and engine; return the exit code."""
    # Out of the environment at once: the engine must not inherit what callers prove themselves with.
    secret = os.environ.pop("ENGINE_SECRET", "")
    if not secret:
        return _refuse("set ENGINE_SECRET: what callers must send as 'Authorization: Bearer'")
    if len(arguments) < 3 or arguments[1] != "--":
        return _refuse("give a plan, '--' and the engine's command")
    try:
        plan = msgspec.json.decode(arguments[0], type=Plan)
        ports = _ports(plan)
    except (msgspec.MsgspecError, FleetError) as error:
        return _refuse(f"the plan cannot be carried out: {error}")
    try:
        code = uvloop.run(_run(plan, secret, ports, arguments[2:]))
    except OSError as error:
        return _refuse(f"{error.filename or f'{plan.host}:{plan.port}'}: {error.strerror or error}")
    return end_like(code)


def _ports(plan: Plan) -> dict[str, int]:
    ports: dict[str, int] = {}
    for name in plan.ports:
        ports[name] = free_port({plan.port, *ports.values()})
    return ports


async def _run(plan: Plan, secret: str, ports: dict[str, int], words: Sequence[str]) -> int:
    key = secrets.token_urlsafe(32) if plan.has_key else ""
    fill = Filling({KEY: key, **{name: str(port) for name, port in ports.items()}})
    proxy = Proxy(plan, secret, ports, key)
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()
    # First, so that an address that is taken costs no start of the engine.
    server = await loop.create_server(lambda: Connection(proxy.handle, connections), plan.host, plan.port)
    try:
        prepare(plan, fill)
        child = start(plan, words, os.environ, fill)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, child.send_signal, signal.SIGTERM)
        return await _ended(child)
    finally:
        server.close()
        for connection in list(connections):
            await connection.end()


async def _ended(child: "subprocess.Popen[bytes]") -> int:
    """Wait for the engine's end, serving meanwhile; return its exit code, negative for a signal."""
    ended = asyncio.Event()
    descriptor = os.pidfd_open(child.pid)
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return child.wait()


def _refuse(why: str) -> int:
    print(f"guard: {why}", file=sys.stderr)  # noqa: T201 - the log
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
