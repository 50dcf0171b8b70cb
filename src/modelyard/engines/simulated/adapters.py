"""The adapters of a simulated engine: taken in and forgotten while it runs, with vLLM's calls.

An adapter changes nothing of an answer but the model that it names: whoever
asks for a name that was not loaded gets 404, as at a real engine, and the
journal has the name of each request, so that a ledger can be checked by it.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec

from modelyard.engines.http import Connection, Request
from modelyard.engines.simulated.journal import TokenJournal
from modelyard.engines.simulated.options import SimulatedOptions
from modelyard.engines.simulated.requests import Refused, decode

FINISH_S = 30.0
"""Longest that an adapter that is to go is kept for what is computed for it."""


class LoadAdapter(msgspec.Struct):
    """``POST /v1/load_lora_adapter``."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1)]
    lora_path: str = ""


class UnloadAdapter(msgspec.Struct):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str


class Adapters:
    """What was loaded, by name, and the requests that use it."""

    def __init__(self, options: SimulatedOptions, journal: TokenJournal) -> None:
        self._options = options
        self._journal = journal
        self._loaded: dict[str, str] = {}
        self._coming: set[str] = set()
        self._going: set[str] = set()
        self._used: Counter[str] = Counter()
        self._freed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Adapters {sorted(self._loaded)}>"

    def __contains__(self, name: str) -> bool:
        return name in self._loaded and name not in self._going

    def names(self) -> list[str]:
        """Return the names of those that are there."""
        return list(self._loaded)

    def began(self, name: str) -> None:
        """A request for ``name`` begins."""
        self._used[name] += 1

    def ended(self, name: str) -> None:
        """A request for ``name`` has ended."""
        self._used[name] -= 1
        self._freed.set()

    async def load(self, request: Request, connection: Connection) -> None:
        """Take an adapter in; one that is there is not loaded again."""
        wanted = decode(request.body, LoadAdapter)
        name = wanted.lora_name
        if self._options.fail_adapters and self._options.fail_adapters in name:
            raise Refused(400, f"The adapter `{name}` does not fit, as option fail_adapters asks.")
        if wanted.lora_path and not await asyncio.to_thread(Path(wanted.lora_path).exists):
            raise Refused(404, f"No adapter found at {wanted.lora_path}", "NotFoundError")
        if name not in self._loaded:
            if len(self._loaded.keys() | self._coming | {name}) > self._options.max_adapters:
                raise Refused(400, f"There are {self._options.max_adapters} adapters already.")
            self._coming.add(name)
            try:
                await asyncio.sleep(self._options.adapter_load_s)
                self._loaded[name] = wanted.lora_path
            finally:
                self._coming.discard(name)
            self._journal.write("", "adapter_loaded", model=name)
        connection.respond(200, b'"Success: the adapter was added."')

    async def unload(self, request: Request, connection: Connection) -> None:
        """Forget an adapter once nothing is computed for it."""
        name = decode(request.body, UnloadAdapter).lora_name
        if name not in self._loaded:
            raise Refused(404, f"The lora adapter `{name}` cannot be found.", "NotFoundError")
        self._going.add(name)
        try:
            async with asyncio.timeout(FINISH_S):
                while self._used[name] > 0:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise Refused(503, f"The adapter `{name}` is in use.", "ServiceUnavailableError") from None
        finally:
            self._going.discard(name)
        self._loaded.pop(name, None)
        self._used.pop(name, None)
        self._journal.write("", "adapter_unloaded", model=name)
        connection.respond(200, b'"Success: the adapter was removed."')
