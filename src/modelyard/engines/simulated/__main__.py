"""The process of a simulated engine; ``SimulatedEngine.command`` renders its arguments."""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from modelyard.clock import SystemClock
from modelyard.engines.simulated.journal import TokenJournal
from modelyard.engines.simulated.options import SimulatedOptions
from modelyard.engines.simulated.server import SimulatedServer


def main() -> int:
    """Run the engine; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m modelyard.engines.simulated", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--work-dir", type=Path, default=Path())
    for name in SimulatedOptions.__struct_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", default=None)
    given = vars(parser.parse_args())
    wanted = {name: given[name] for name in SimulatedOptions.__struct_fields__ if given[name] is not None}
    # Out of the environment at once, so that nothing that this process starts inherits it.
    secret = os.environ.pop("ENGINE_SECRET", "")
    if not secret:
        return _refuse("set ENGINE_SECRET: what callers must send as 'Authorization: Bearer'")
    try:
        options = msgspec.convert(wanted, SimulatedOptions, strict=False)
        path = Path(options.journal) if options.journal else given["work_dir"] / "tokens.jsonl"
        clock = SystemClock()
        journal = TokenJournal(path, clock, replica=given["work_dir"].absolute().name)
        server = SimulatedServer(
            options=options, model=given["model_name"], secret=secret, journal=journal, clock=clock
        )
        return asyncio.run(_serve(server, given["host"], given["port"], ignore=options.ignore_sigterm))
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
