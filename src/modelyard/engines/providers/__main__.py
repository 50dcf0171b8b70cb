"""The process of a provider's replica; ``ProviderEngine.command`` renders its arguments."""

import argparse
import asyncio
import os
import signal
import ssl
import sys
from functools import partial
from pathlib import Path

from aiohttp import web

from modelyard.clock import SystemClock
from modelyard.engines.providers.anthropic import AnthropicDialect
from modelyard.engines.providers.dialect import Dialect
from modelyard.engines.providers.keys import KeyFault
from modelyard.engines.providers.openai import OpenAIDialect
from modelyard.engines.providers.server import ProviderServer
from modelyard.engines.providers.upstream import Bounds, Key, NotAllowedError, Upstream
from modelyard.policy.addresses import networks

SHUTDOWN_S = 0.5
"""The platform drains before it asks; what is still under way then has lost its caller."""


def main() -> int:
    """Run the server; return the exit code."""
    arguments = _read_arguments()
    # Out of the environment at once, so that nothing that this process starts inherits them.
    secret, key = os.environ.pop("ENGINE_SECRET", ""), os.environ.pop("PROVIDER_KEY", "")
    if not secret:
        return _refuse("set ENGINE_SECRET: what callers must send as 'Authorization: Bearer'", 2)
    if not key and arguments.key_file is None:
        return _refuse("set PROVIDER_KEY, or give --key-file", 2)
    try:
        upstream = Upstream(
            arguments.url,
            Key(key, arguments.key_file),
            private=networks(arguments.private_network),
            tls=_trust(arguments.authorities),
            bounds=Bounds(arguments.timeout_s, arguments.silence_s),
        )
    except (KeyFault, NotAllowedError, ValueError, OSError) as error:
        return _refuse(str(error), 2)
    say = partial(print, flush=True)
    server = ProviderServer(
        _dialect(arguments),
        upstream,
        model=arguments.model,
        name=arguments.model_name,
        secret=secret,
        say=say,
        is_checked=not arguments.unchecked,
    )
    return asyncio.run(_serve(server, upstream, arguments.host, arguments.port))


async def _serve(server: ProviderServer, upstream: Upstream, host: str, port: int) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, handle_signals=False
    )
    async with upstream:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
            getting_ready = asyncio.create_task(server.get_ready())
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({getting_ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                getting_ready.cancel()
                return 0
            if why := await getting_ready:
                stopping.cancel()
                return _refuse(why, 1)
            print("ready", flush=True)  # noqa: T201 - the log
            await stopping
            return 0
        finally:
            await runner.cleanup()


def _dialect(arguments: argparse.Namespace) -> Dialect:
    if arguments.kind == "anthropic":
        return AnthropicDialect(
            model=arguments.model,
            name=arguments.model_name,
            version=arguments.api_version,
            has_sampling=arguments.sampling,
            now=SystemClock().unix_s,
        )
    return OpenAIDialect(model=arguments.model, name=arguments.model_name, limit_field=arguments.limit_field)


def _trust(authorities: str) -> ssl.SSLContext | None:
    if not authorities:
        return None
    context = ssl.create_default_context()
    context.load_verify_locations(cafile=authorities)
    return context


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m modelyard.engines.providers", description=__doc__)
    parser.add_argument("--kind", choices=("openai", "anthropic"), required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key-file", type=Path)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--silence-s", type=float, default=120.0)
    parser.add_argument("--private-network", action="append", default=[])
    parser.add_argument("--authorities", default="")
    parser.add_argument("--limit-field", default="max_tokens")
    parser.add_argument("--api-version", default="2023-06-01")
    parser.add_argument("--sampling", action="store_true")
    parser.add_argument("--unchecked", action="store_true")
    return parser.parse_args()


def _refuse(why: str, code: int) -> int:
    print(f"provider: {why}", file=sys.stderr, flush=True)  # noqa: T201 - the log
    return code


if __name__ == "__main__":
    sys.exit(main())
