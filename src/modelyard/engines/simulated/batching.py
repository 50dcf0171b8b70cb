"""The simulated accelerator: a batch of limited slots over limited KV blocks, and what a step costs.

Requests enter in the order of arrival, each when a slot and all its blocks are
free (a request that does not fit holds up those behind it, as in vLLM without
preemption). A longer batch makes every step slower by ``slowdown`` of a step
for each other request.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from modelyard.clock import Clock
from modelyard.engines.simulated.tokens import BLOCK_TOKENS


class Batch:
    """Slots and KV blocks, given out first come first served."""

    __slots__ = ("_waiting", "blocks", "blocks_free", "running", "slots")

    def __init__(self, *, slots: int, blocks: int) -> None:
        self.slots = slots
        self.blocks = blocks
        self.blocks_free = blocks
        self.running = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __repr__(self) -> str:
        blocks = f"{self.blocks_free}/{self.blocks} blocks free"
        return f"<Batch {self.running}/{self.slots} slots, {self.waiting} waiting, {blocks}>"

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use."""
        return 1 - self.blocks_free / self.blocks

    @asynccontextmanager
    async def place(self, blocks: int) -> AsyncIterator[None]:
        """Hold a slot and ``blocks``, waiting for them; given back whatever happens."""
        assert blocks <= self.blocks, "a request that can never fit must be refused before"
        ticket = (blocks, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        self._admit()
        try:
            await ticket[1]
        except asyncio.CancelledError:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self._admit()
            else:
                self._give_back(blocks)
            raise
        try:
            yield
        finally:
            self._give_back(blocks)

    def _admit(self) -> None:
        while self._waiting and self.running < self.slots and self._waiting[0][0] <= self.blocks_free:
            blocks, ready = self._waiting.popleft()
            self.running += 1
            self.blocks_free -= blocks
            # A waiter that was cancelled in this very turn gives its place back itself, in ``place``.
            if not ready.done():
                ready.set_result(None)

    def _give_back(self, blocks: int) -> None:
        self.running -= 1
        self.blocks_free += blocks
        assert self.running >= 0, "a slot was given back twice"
        self._admit()


class PrefixCache:
    """Which prompt prefixes are in the KV cache: whole blocks, keyed by salt and everything before them."""

    __slots__ = ("_blocks", "_capacity", "hits", "queries")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.queries = 0
        self.hits = 0

    def use(self, salt: str, prompt: Sequence[bytes]) -> int:
        """Return how many leading tokens of ``prompt`` were cached, and cache its whole blocks.

        At least one token is always computed: the answer needs its output.
        """
        chain = hash(salt)
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
