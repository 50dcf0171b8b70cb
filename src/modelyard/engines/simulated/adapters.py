"""The adapters of a simulated engine: taken in and forgotten while it runs, with vLLM's calls.

An adapter changes nothing of an answer but the model that it names and its
logprobs: whoever asks for a name that was not loaded gets 404, as at a real
engine, and the journal has the name of each request, so that a ledger can be
checked by it. Files are looked at as the engines that compute do; only where
there are none is there nothing to look at.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec

from modelyard.engines.http import Connection, Request
from modelyard.engines.peft_folder import read_folder
from modelyard.engines.simulated.journal import TokenJournal
from modelyard.engines.simulated.options import SimulatedOptions
from modelyard.engines.simulated.requests import Refused, decode
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.folder import facts_of

FINISH_S = 30.0
"""Longest that an adapter that is to go is kept for what is computed for it."""


_READS_HIDDEN = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"})
_WRITES_HIDDEN = frozenset({"o_proj", "down_proj"})


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
        if self._loaded.get(name, wanted.lora_path) != wanted.lora_path:
            raise Refused(400, f"`{name}` stands for another adapter already; a name stands for one content.")
        if name not in self._loaded:
            if len(self._loaded.keys() | self._coming | {name}) > self._options.max_adapters:
                raise Refused(400, f"There are {self._options.max_adapters} adapters already.")
            self._coming.add(name)
            try:
                if wanted.lora_path:
                    await self._check(Path(wanted.lora_path))
                await asyncio.sleep(self._options.adapter_load_s)
                self._loaded[name] = wanted.lora_path
            finally:
                self._coming.discard(name)
            self._journal.write("", "adapter_loaded", model=name)
        connection.respond(200, b'"Success: the adapter was added."')

    async def _check(self, place: Path) -> None:
        try:
            await asyncio.to_thread(check_adapter, place, self._options.hidden_size)
        except FileNotFoundError:
            raise Refused(404, f"No adapter found at {place}", "NotFoundError") from None
        except (ArtifactInvalidError, OSError) as error:
            raise Refused(400, str(error)) from error

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


def check_adapter(place: Path, hidden_size: int) -> None:
    """Accept a PEFT folder or a GGUF file that is whole, for a base whose layers are ``hidden_size`` wide. Blocks.

    Raises:
        FileNotFoundError: there is nothing.
        ArtifactInvalidError: it is no adapter, a broken one, or one for another base.
        OSError: it cannot be read.
    """
    if not place.exists():
        raise FileNotFoundError(place)
    if not place.is_dir():
        facts = facts_of({place.name: place})
        if not facts.is_adapter or facts.format != "gguf":
            what = f"an adapter as one {facts.format} file" if facts.is_adapter else "a whole model"
            raise ArtifactInvalidError(f"The file is {what}. Give a PEFT folder, or an adapter in GGUF.")
        return
    for name, pair in read_folder(place, engine="the engine 'simulated'").pairs.items():
        module = name.rpartition(".")[2]
        width = pair.a.shape[1] if module in _READS_HIDDEN else pair.b.shape[0] if module in _WRITES_HIDDEN else 0
        if hidden_size and width and width != hidden_size:
            raise ArtifactInvalidError(
                f"The adapter is {width} wide at '{name[:200]}'; its base is {hidden_size}: it is for another base."
            )
