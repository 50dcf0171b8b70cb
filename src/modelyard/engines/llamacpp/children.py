"""A llama.cpp process below the front: started with a set of adapters, watched, and ended.

It stands in the front's process group, so that the fleet signals both as one,
and the kernel ends it when the front dies. It listens on a port of the
kernel's choice, which it tells through a pipe once its model is loaded, and
answers to a secret that only the front knows.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence

import aiohttp

from modelyard.engines.llamacpp.adapters import Adapter
from modelyard.engines.llamacpp.slots import Slots

START_S_MAX = 600.0
_KILLED_WITHIN_S = 10.0
_SCRAPE_S = 5.0
_LAST_LINES = 40
_LINE_BYTES = 4096


class ChildError(Exception):
    """A child that did not come up; the text is its last words, ``code`` how it ended."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Child:
    """A process that serves, its slots, and what it was started with."""

    def __init__(self, process: asyncio.subprocess.Process, adapters: Sequence[Adapter], slots: int) -> None:
        self.adapters = {adapter.name: index for index, adapter in enumerate(adapters)}
        self.slots = Slots(slots)
        self.url = ""
        self.secret = ""
        self.process = process
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._reading = asyncio.get_running_loop().create_task(self._read())

    def __repr__(self) -> str:
        return f"<Child {self.process.pid} at {self.url}: {len(self.adapters)} adapters, {self.slots!r}>"

    @property
    def headers(self) -> dict[str, str]:
        """Return what lets the front in."""
        return {"authorization": f"Bearer {self.secret}"}

    async def wait(self) -> int:
        """Return its exit code, as ``subprocess`` counts, once it has ended."""
        code = await self.process.wait()
        await self._reading
        return code

    def last_words(self) -> str:
        """Return the line of its log that says most of its end."""
        lines = list(self._lines)
        telling = [
            line for line in lines if any(word in line.lower() for word in ("error", "failed", "llama.cpp engine"))
        ]
        return (telling or lines or ["it said nothing"])[-1]

    async def page(self, session: aiohttp.ClientSession) -> str:
        """Return its metrics page, "" when it does not give one."""
        timeout = aiohttp.ClientTimeout(total=_SCRAPE_S)
        try:
            async with session.get(f"{self.url}/metrics", headers=self.headers, timeout=timeout) as response:
                return await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError):
            return ""

    async def end(self) -> None:
        """End it; nothing runs there any more."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(_KILLED_WITHIN_S):
                await self.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.wait()

    async def _read(self) -> None:
        """Pass its log on, and keep the end of it."""
        output = self.process.stdout
        assert output is not None, "its output is a pipe"
        rest = b""
        while chunk := await output.read(64 * 1024):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            *lines, rest = (rest + chunk).split(b"\n")
            self._lines.extend(
                text for line in lines if (text := line[:_LINE_BYTES].decode("utf-8", "replace").strip())
            )
            rest = rest[-_LINE_BYTES:]


async def start(
    arguments: Sequence[str], adapters: Sequence[Adapter], *, slots: int, environment: Mapping[str, str]
) -> Child:
    """Return a child that has loaded its model and ``adapters``.

    Raises:
        ChildError: it ended first, or took longer than ``START_S_MAX``.
    """
    secret = secrets.token_urlsafe(32)
    told, tell = os.pipe()
    loras = [word for adapter in adapters for word in ("--lora", str(adapter.file))]
    argv = [sys.executable, "-P", "-m", "modelyard.engines.llamacpp.server", *arguments, *loras]
    argv += ["--port", "0", "--ready-fd", str(tell), "--parent", str(os.getpid())]
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**environment, "ENGINE_SECRET": secret},
            pass_fds=(tell,),
        )
    except OSError as error:
        # Those that serve go on: no memory or descriptor for one more process is no reason to end them.
        os.close(told)
        raise ChildError(f"it cannot be started: {error.strerror or error}", 1) from error
    finally:
        os.close(tell)
    child = Child(process, adapters, slots)
    child.secret = secret
    try:
        async with asyncio.timeout(START_S_MAX):
            child.url = await _address(told)
    except BaseException as error:
        await child.end()
        if isinstance(error, TimeoutError):
            raise ChildError(f"it did not load within {START_S_MAX:.0f} s", -signal.SIGTERM) from None
        raise
    if not child.url:
        code = await child.wait()
        raise ChildError(child.last_words(), code)
    return child


async def _address(told: int) -> str:
    """Return what is written to the pipe, "" when it is closed without a word: its writer has ended."""
    reader = asyncio.StreamReader()
    with os.fdopen(told, "rb", buffering=0) as pipe:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            return (await reader.readline()).decode().strip()
        finally:
            transport.close()


def environment_for_children() -> dict[str, str]:
    """Return the front's own environment, which the fleet made minimal; the secret was taken out of it."""
    return dict(os.environ)


def die_as(code: int) -> None:
    """End this process as the child ended: the fleet reads the reason from it."""
    sys.stdout.flush()
    if code < 0:
        number = signal.Signals(-code)
        if number is not signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(code or 1)
