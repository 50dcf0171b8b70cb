"""The process of a simulated engine; ``SimulatedEngine.command`` renders its arguments."""

import asyncio
import os
import signal
import sys

from modelyard.clock import SystemClock
from modelyard.engines.simulated.arguments import read_arguments
from modelyard.engines.simulated.journal import TokenJournal
from modelyard.engines.simulated.server import SimulatedServer


def main() -> int:
    """Run the engine; return the exit code."""
    arguments = read_arguments(sys.argv[1:])
    # Out of the environment at once, so that nothing that this process starts inherits it.
    secret = os.environ.pop("ENGINE_SECRET", "")
    if not secret:
        return _refuse("set ENGINE_SECRET: what callers must send as 'Authorization: Bearer'")
    try:
        options, clock = arguments.options(), SystemClock()
        journal = TokenJournal(arguments.journal(options), clock, replica=arguments.work_dir.absolute().name)
        server = SimulatedServer(
            options=options, model=arguments.model_name, secret=secret, journal=journal, clock=clock
        )
        return asyncio.run(_serve(server, arguments.host, arguments.port, ignore=options.ignore_sigterm))
    except (ValueError, OSError) as error:
        return _refuse(str(error))


async def _serve(server: SimulatedServer, host: str, port: int, *, ignore: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if ignore else stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    return await server.serve(host, port, stop)


def _refuse(why: str) -> int:
    print(f"simulated engine: {why}", file=sys.stderr)  # noqa: T201 - the log
    return 2


if __name__ == "__main__":
    sys.exit(main())
