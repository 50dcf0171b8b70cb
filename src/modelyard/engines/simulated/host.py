"""Many simulated engines in one process: thousands of replicas on one machine.

Each is a whole ``SimulatedServer`` with a listening socket, a secret, a journal
and a log of its own; only the process is shared. It outlives the controller, as
any engine does. ``python -m modelyard.engines.simulated.host FOLDER`` listens
on ``FOLDER/.host.sock``; a second one for the same folder ends at once.
"""

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from modelyard.clock import Clock, SystemClock
from modelyard.engines.simulated.arguments import Arguments, read_arguments
from modelyard.engines.simulated.hosting import ENGINE_MODULE, STOP_WAIT_S, HostAnswer, HostCall, socket_of
from modelyard.engines.simulated.journal import TokenJournal
from modelyard.engines.simulated.server import SimulatedServer

CALL_TIMEOUT_S = 10.0
CALL_BYTES_MAX = 1024 * 1024
BACKLOG = 4096
EXIT_REFUSED = 2

_decode = msgspec.json.Decoder(HostCall).decode


class Hosted:
    """One replica: its task, and how it ended."""

    __slots__ = ("ignores_stop", "is_stopping", "reason", "stop", "task")

    def __init__(self, *, ignores_stop: bool) -> None:
        self.stop = asyncio.Event()
        self.ignores_stop = ignores_stop
        self.is_stopping = False
        self.reason = ""
        self.task: asyncio.Task[None] | None = None

    def end(self, reason: str) -> None:
        """End now, as a killed process does."""
        self.reason = self.reason or reason
        if self.task is not None:
            self.task.cancel()


class Host:
    """The replicas of this process by id."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hosted: dict[str, Hosted] = {}

    def __repr__(self) -> str:
        return f"<Host of {len(self._hosted)} replicas>"

    async def answer(self, call: HostCall) -> HostAnswer:
        """Do what is asked."""
        found = self._hosted.get(call.replica_id)
        match call.op:
            case "start":
                return self._start(call)
            case "stop" if found is not None:
                found.is_stopping = True
                if not found.ignores_stop:
                    found.stop.set()
                await _until_ended(found)
            case "kill" if found is not None:
                found.is_stopping = True
                found.end("stopped")
                await _until_ended(found)
            case "forget" if found is not None and found.reason:
                del self._hosted[call.replica_id]
        return HostAnswer(os.getpid(), self._states(call.replica_id))

    async def end_all(self) -> None:
        """Ask all to end, and wait for it."""
        for hosted in self._hosted.values():
            hosted.is_stopping = True
            if not hosted.ignores_stop:
                hosted.stop.set()
        tasks = [hosted.task for hosted in self._hosted.values() if hosted.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _states(self, replica_id: str) -> dict[str, str]:
        if not replica_id:
            return {one: hosted.reason for one, hosted in self._hosted.items()}
        return {replica_id: self._hosted[replica_id].reason} if replica_id in self._hosted else {}

    def _start(self, call: HostCall) -> HostAnswer:
        earlier = self._hosted.get(call.replica_id)
        if earlier is not None and not earlier.reason:
            return HostAnswer(os.getpid(), self._states(call.replica_id))
        try:
            arguments = read_arguments(call.argv[call.argv.index(ENGINE_MODULE) + 1 :])
            options = arguments.options()
        except (ValueError, SystemExit) as error:
            return HostAnswer(os.getpid(), error=f"its command line is none of a simulated engine: {error}")
        self._hosted[call.replica_id] = hosted = Hosted(ignores_stop=options.ignore_sigterm)
        hosted.task = asyncio.get_running_loop().create_task(self._run(hosted, arguments, call), name=call.replica_id)
        return HostAnswer(os.getpid(), {call.replica_id: ""})

    async def _run(self, hosted: Hosted, arguments: Arguments, call: HostCall) -> None:
        """Be the replica, from its start to its end."""
        say = _log(Path(call.log))
        code = EXIT_REFUSED
        try:
            options = arguments.options()
            journal = TokenJournal(arguments.journal(options), self._clock, replica=call.replica_id)
            server = SimulatedServer(
                options=options,
                model=arguments.model_name,
                secret=call.secret,
                journal=journal,
                clock=self._clock,
                say=say,
                crash=lambda code: hosted.end(_crash_reason(code)),
            )
            code = await server.serve(arguments.host, arguments.port, hosted.stop)
        except (ValueError, OSError) as error:
            say(f"simulated engine: {error}")
        finally:
            hosted.reason = hosted.reason or ("stopped" if hosted.is_stopping else f"exited with code {code}")


async def _until_ended(hosted: Hosted) -> None:
    if hosted.task is not None:
        await asyncio.wait([hosted.task], timeout=STOP_WAIT_S)


def _crash_reason(code: int | None) -> str:
    return "killed by SIGKILL (out of memory?)" if code is None else f"exited with code {code}"


def _log(file: Path) -> Callable[[str], None]:
    """Return a writer of lines that keeps no file open: there are thousands of it, and each writes a line an hour."""

    def say(line: str) -> None:
        output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(output, f"{line}\n".encode())
        finally:
            os.close(output)

    return say


async def serve(folder: Path) -> None:
    """Answer calls until SIGTERM; then end all replicas."""
    host = Host(SystemClock())
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                answer = await host.answer(_decode(await reader.readline()))
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        except (OSError, ValueError, TimeoutError) as error:
            print(f"a call failed: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log
        finally:
            writer.close()

    server = await asyncio.start_unix_server(talk, sock=_bind(socket_of(folder)), limit=CALL_BYTES_MAX, backlog=BACKLOG)
    async with server:
        await stop.wait()
        await host.end_all()


def _bind(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    listener.bind(str(draft))
    draft.chmod(0o600)
    listener.listen(BACKLOG)
    listener.settimeout(0)
    draft.rename(path)  # whoever finds the socket finds somebody listening
    return listener


def main() -> int:
    """Host until SIGTERM; return the exit code."""
    folder = Path(sys.argv[1])
    lock = os.open(folder / ".host.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0  # another one hosts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    asyncio.run(serve(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
