"""The adapters of a replica, and the llama.cpp process that has them.

llama.cpp takes adapters at its start only. So a load starts the next process
beside the current one (their weights are one mapping of one file), waits until
it is ready, sends new requests there and lets the old one finish. Loads that
come while one is under way make the next generation together. An unload only
stops naming the adapter; its memory goes with the next generation.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import aiohttp

from modelyard.clock import Clock
from modelyard.engines.llamacpp.adapters import Adapter
from modelyard.engines.llamacpp.children import Child, ChildError, die_as
from modelyard.engines.llamacpp.desk import Desk
from modelyard.engines.llamacpp.page import added, counters, joined

GATHER_S = 0.05
"""How long the first of several loads waits for the others."""
GATHER_S_MAX = 2.0
"""How long it waits for those that are already being read."""

Launch = Callable[[Sequence[Adapter]], Awaitable[Child]]


class FullError(Exception):
    """The replica holds as many adapters as it may."""


class Generations:
    """Owns the processes; ``run`` is its one loop. Tasks live in ``group``."""

    def __init__(self, launch: Launch, desk: Desk, *, most: int, clock: Clock, group: asyncio.TaskGroup) -> None:
        self._launch = launch
        self._desk = desk
        self._most = most
        self._clock = clock
        self._group = group
        self._wanted: dict[str, Adapter] = {}
        self._known: dict[str, Adapter] = {}
        """What the current process was started with, and the next one, if it is starting: what is wanted, and what was
        unloaded since."""
        self._made: dict[str, Adapter] = {}
        """Adapters whose files were made here, and are there."""
        self._asked: dict[str, tuple[Adapter, asyncio.Future[None]]] = {}
        self._has_asked = asyncio.Event()
        self._expected = 0
        self._none_expected = asyncio.Event()
        self._none_expected.set()
        self._leaving: list[Child] = []
        self._has_left = asyncio.Event()
        self._ended: dict[str, float] = {}
        self.swaps = 0
        self.swap_s = 0.0

    def __repr__(self) -> str:
        return f"<Generations {self.swaps} swaps: {', '.join(self._wanted) or 'no adapters'}; {len(self._asked)} asked>"

    @property
    def names(self) -> list[str]:
        """Return the adapters that requests may name."""
        return list(self._wanted)

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of that name, as it is or as it is being loaded."""
        asked = self._asked.get(name)
        return self._wanted.get(name) or (asked[0] if asked else None)

    async def start(self) -> None:
        """Start the first process, without adapters.

        Raises:
            ChildError: it did not come up.
        """
        self._serve_with(await self._launch(()))

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Tell that a load is about to come: the next generation waits for it."""
        self._expected += 1
        self._none_expected.clear()
        try:
            yield
        finally:
            self._expected -= 1
            if not self._expected:
                self._none_expected.set()

    async def load(self, adapter: Adapter) -> None:
        """Return when requests may name ``adapter``.

        Raises:
            FullError: there is no room for another.
            ChildError: llama.cpp did not take it.
        """
        if adapter.name in self._wanted:
            return
        if adapter.file != adapter.source:
            self._made[adapter.name] = adapter
        if adapter.name not in self._asked:
            if len(self._wanted) + len(self._asked) >= self._most:
                raise FullError
            if self._known.get(adapter.name) == adapter:
                self._wanted[adapter.name] = adapter
                return
            self._asked[adapter.name] = adapter, asyncio.get_running_loop().create_future()
            self._has_asked.set()
        # Others may wait for the same, and who asked may leave: the load goes on.
        await asyncio.shield(self._asked[adapter.name][1])

    def unload(self, name: str) -> bool:
        """Stop naming an adapter; say whether it was there. Requests that have their place are finished."""
        return self._wanted.pop(name, None) is not None

    async def run(self) -> NoReturn:
        """Make the next generation whenever somebody asks."""
        while True:
            await self._has_asked.wait()
            await asyncio.sleep(GATHER_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S_MAX):
                    await self._none_expected.wait()
            self._has_asked.clear()
            asked = list(self._asked)
            if not await self._replace(asked):
                # One of them is bad: starting with each alone finds it.
                for name in asked:
                    await self._replace([name])

    async def page(self, session: aiohttp.ClientSession) -> str:
        """Return the metrics of all processes that are and were."""
        current = self._desk.current
        alive = [*self._leaving, *([current] if current is not None else [])]
        pages = await asyncio.gather(*(child.page(session) for child in alive))
        more = {
            "modelyard:adapters": len(self._wanted),
            "modelyard:swaps": self.swaps,
            "modelyard:swap_seconds": round(self.swap_s, 3),
            "modelyard:slot_takeovers": current.slots.takeovers if current is not None else 0,
        }
        return joined([page for page in pages if page], self._ended, waiting=self._desk.waiting, more=more)

    async def _replace(self, names: Sequence[str]) -> bool:
        """Start the next process with ``names`` beside what is there, and switch; False: it did not come up."""
        await self._only_one_lives()
        adapters = [*self._wanted.values(), *(self._asked[name][0] for name in names)]
        begun_s, before = self._clock.monotonic_s(), self._known
        # What was unloaded is not in the next process: if it comes back now, it is for the one after that.
        self._known = dict(self._wanted)
        try:
            child = await self._launch(adapters)
        except ChildError as error:
            self._known = before
            if len(names) == 1:
                _, answer = self._asked.pop(names[0])
                _fail(answer, error)
            return len(names) == 1
        self._known = {adapter.name: adapter for adapter in adapters}
        for name in names:
            self._wanted[name], answer = self._asked.pop(name)
            answer.set_result(None)
        self.swaps += 1
        self.swap_s = self._clock.monotonic_s() - begun_s
        self._serve_with(child)
        self._tidy()
        return True

    def _tidy(self) -> None:
        """Remove files of adapters that nobody wants any more: a disk holds fewer than come by in a replica's life.

        The process that serves may want its own again, also of those that were unloaded: it reads them when it wakes.
        """
        if self._expected:
            return  # one of them may be read anew just now
        for name in self._made.keys() - self._known.keys() - self._asked.keys():
            self._made.pop(name).file.unlink(missing_ok=True)

    def _serve_with(self, child: Child) -> None:
        before = self._desk.switch(child)
        self._group.create_task(self._watch(child))
        if before is not None:
            self._leaving.append(before)
            self._has_left.clear()
            self._group.create_task(self._retire(before))

    async def _only_one_lives(self) -> None:
        """Wait for the generation before: memory was promised for two, not for three."""
        while self._leaving:
            await self._has_left.wait()

    async def _watch(self, child: Child) -> None:
        """End with the process that serves: what to do then is the fleet's to decide."""
        code = await child.wait()
        if child is self._desk.current:
            die_as(code)

    async def _retire(self, child: Child) -> None:
        await self._desk.finished(child)
        async with aiohttp.ClientSession() as session:
            page = await child.page(session)
        self._leaving.remove(child)
        self._ended = added(self._ended, counters(page))
        await child.end()
        self._has_left.set()


def _fail(answer: asyncio.Future[None], error: ChildError) -> None:
    answer.set_exception(error)
    # Who asked may have left; then nobody else looks at it, and that is no fault.
    answer.exception()
