"""The simulated accelerator: a batch of limited slots over limited KV blocks, and what a step costs.

Requests enter in the order of arrival, each when a slot and the blocks of its
prompt are free (one that does not fit holds up those behind it), and take more
blocks as they generate. When none is left, the request that entered last is
preempted as in vLLM: it gives back its blocks, goes to the head of the queue
and computes everything again. Blocks that requests share count for each of
them. A longer batch makes every step slower by ``slowdown`` of a step for each
other request.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager

from modelyard.clock import Clock
from modelyard.engines.simulated.tokens import BLOCK_TOKENS


class Place:
    """One request's slot and KV blocks."""

    __slots__ = ("_batch", "blocks", "ready", "wanted")

    def __init__(self, batch: "Batch", wanted: int) -> None:
        self._batch = batch
        self.blocks = 0
        self.wanted = wanted
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def hold(self, blocks: int) -> bool:
        """Hold ``blocks`` in all; return whether the place was lost and won again: all must be computed anew."""
        was_lost = False
        while not self.ready.done() or not self._batch.grow(self, blocks):
            was_lost = True
            await self.ready
        return was_lost


class Batch:
    """Slots and KV blocks, given out first come first served; who came last loses its place when blocks run out."""

    __slots__ = ("_running", "_waiting", "blocks", "blocks_free", "preemptions", "slots")

    def __init__(self, *, slots: int, blocks: int) -> None:
        self.slots = slots
        self.blocks = blocks
        self.blocks_free = blocks
        self.preemptions = 0
        self._running: list[Place] = []
        self._waiting: deque[Place] = deque()

    def __repr__(self) -> str:
        blocks = f"{self.blocks_free}/{self.blocks} blocks free"
        return f"<Batch {self.running}/{self.slots} slots, {self.waiting} waiting, {blocks}>"

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use."""
        return 1 - self.blocks_free / self.blocks

    @asynccontextmanager
    async def place(self, blocks: int) -> AsyncIterator[Place]:
        """Hold a slot and at first ``blocks``, waiting for them; given back whatever happens."""
        assert blocks <= self.blocks, "a request that can never fit must be refused before"
        place = Place(self, blocks)
        self._waiting.append(place)
        self._admit()
        try:
            await place.ready
            yield place
        finally:
            self._leave(place)

    def grow(self, place: Place, blocks: int) -> bool:
        """Give a running ``place`` what it lacks of ``blocks``; say whether it still runs."""
        assert blocks <= self.blocks, "a request that can never fit must be refused before"
        missing = max(0, blocks - place.blocks)
        while missing > self.blocks_free:
            last = self._running.pop()
            self.preemptions += 1
            self.blocks_free += last.blocks
            last.wanted, last.blocks = max(last.blocks, blocks if last is place else 0), 0
            last.ready = asyncio.get_running_loop().create_future()
            self._waiting.appendleft(last)
            if last is place:
                return False
        place.blocks += missing
        self.blocks_free -= missing
        return True

    def _admit(self) -> None:
        while self._waiting and self.running < self.slots and self._waiting[0].wanted <= self.blocks_free:
            place = self._waiting.popleft()
            self._running.append(place)
            place.blocks = place.wanted
            self.blocks_free -= place.blocks
            # A waiter that was cancelled in this very turn leaves by itself, in ``place``.
            if not place.ready.done():
                place.ready.set_result(None)

    def _leave(self, place: Place) -> None:
        if place in self._running:
            self._running.remove(place)
            self.blocks_free += place.blocks
        else:
            self._waiting.remove(place)
        assert self.blocks_free <= self.blocks, "blocks were given back twice"
        self._admit()


class PrefixCache:
    """Which prompt prefixes are in the KV cache: whole blocks, keyed by whose they are and everything before them."""

    __slots__ = ("_blocks", "_capacity", "hits", "queries")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.queries = 0
        self.hits = 0

    def use(self, owner: Hashable, prompt: Sequence[bytes]) -> int:
        """Return how many leading tokens of ``prompt`` were cached for ``owner``, and cache its whole blocks.

        At least one token is always computed: the answer needs its output.
        """
        chain = hash(owner)
        cached = 0
        is_prefix = True
        for start in range(0, len(prompt) - len(prompt) % BLOCK_TOKENS, BLOCK_TOKENS):
            chain = hash((chain, *prompt[start : start + BLOCK_TOKENS]))
            if chain in self._blocks:
                self._blocks.move_to_end(chain)
                cached += BLOCK_TOKENS if is_prefix else 0
            else:
                is_prefix = False
                self._blocks[chain] = None
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        cached = min(cached, max(0, len(prompt) - 1))
        self.queries += len(prompt)
        self.hits += cached
        return cached


class Pace:
    """Waits for the next token on a fixed schedule, so that slow writes and timers do not add up."""

    __slots__ = ("_at_s", "_clock")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_s = clock.monotonic_s()

    async def wait(self, pause_s: float) -> None:
        """Return ``pause_s`` after the last return was due; always lets others run."""
        self._at_s += pause_s
        left_s = self._at_s - self._clock.monotonic_s()
        if left_s < -1:  # Held up by a slow reader for long: do not catch up in a burst.
            self._at_s -= left_s
        await asyncio.sleep(max(0.0, left_s))
