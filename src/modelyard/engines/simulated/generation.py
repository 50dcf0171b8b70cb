"""The life of one generation: wait for a slot, read the prompt, make and write down each token, fail on demand."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from modelyard.clock import Clock
from modelyard.engines.simulated.answers import Choice, Token
from modelyard.engines.simulated.batching import Batch, Pace
from modelyard.engines.simulated.faults import Faults
from modelyard.engines.simulated.journal import TokenJournal
from modelyard.engines.simulated.options import SimulatedOptions
from modelyard.engines.simulated.tokens import blocks_for

Emit = Callable[[int, Token, bool], Awaitable[None]]
"""Takes a token: the index of its choice, the token, whether it is that choice's last."""


class Interrupted(Exception):
    """A fault ends the answer here; ``how`` is ``cut``, ``clean_end`` or ``error``."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


@dataclass(slots=True)
class Totals:
    """What the metrics page counts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Accelerator:
    """What all generations of the process share."""

    options: SimulatedOptions
    batch: Batch
    journal: TokenJournal
    totals: Totals
    clock: Clock
    moves: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear while the engine's control thread hangs: no request gets a token."""
    crash: Callable[[int | None], None] = field(default_factory=lambda: crash_process)
    """Ends the engine as a fault asks."""

    def __post_init__(self) -> None:
        self.moves.set()


@dataclass(slots=True)
class Generation:
    """One request's tokens. ``made`` counts those that exist, over all choices; ``held_tokens`` are those of the prompt
    that must be in the KV cache at once, where that is not all of it.
    """

    rid: str
    prompt_tokens: int
    cached_tokens: int
    choices: list[Choice]
    faults: Faults
    made: int = 0
    held_tokens: int | None = None
    model: str = ""
    """What the request asked for: the engine's own model, or an adapter."""

    async def run(self, on: Accelerator, emit: Emit) -> None:
        """Make all tokens.

        Raises:
            Interrupted: a fault ends the answer.
        """
        planned = sum(len(choice.tokens) for choice in self.choices)
        held = self.prompt_tokens if self.held_tokens is None else self.held_tokens
        at_first = min(on.batch.blocks, blocks_for(held + bool(planned)))
        async with on.batch.place(at_first) as place:
            pace = Pace(on.clock)
            await self._fail_first(on)
            await pace.wait(self._first_token_s(on.options))
            await on.moves.wait()
            on.totals.prompt_tokens += self.prompt_tokens
            on.totals.cached_tokens += self.cached_tokens
            for step in range(max((len(choice.tokens) for choice in self.choices), default=0)):
                if step:
                    await pace.wait(self._step_s(on))
                for index, choice in enumerate(self.choices):
                    if step < len(choice.tokens):
                        if await place.hold(blocks_for(self.prompt_tokens + self.made + 1)):
                            await pace.wait(self._prefill_s(on.options, self.prompt_tokens + self.made))
                        await on.moves.wait()
                        await self._make(on, emit, index, choice.tokens[step], is_last=step == len(choice.tokens) - 1)
            await self._fail_at(on)

    async def _make(self, on: Accelerator, emit: Emit, index: int, token: Token, *, is_last: bool) -> None:
        await self._fail_at(on)
        self.made += 1
        on.totals.generation_tokens += 1
        on.journal.write(self.rid, "token", i=index, n=self.made)
        await emit(index, token, is_last)

    def _first_token_s(self, options: SimulatedOptions) -> float:
        first_ms = options.ttft_ms if self.faults.ttft is None else self.faults.ttft
        return first_ms / 1000 + self._prefill_s(options, self.prompt_tokens - self.cached_tokens)

    def _prefill_s(self, options: SimulatedOptions, tokens: int) -> float:
        speed = options.prefill_tokens_per_s
        return tokens / speed if speed else 0.0

    def _step_s(self, on: Accelerator) -> float:
        step_ms = on.options.itl_ms if self.faults.slow is None else self.faults.slow
        return step_ms / 1000 * (1 + on.options.batch_slowdown * (on.batch.running - 1))

    async def _fail_first(self, on: Accelerator) -> None:
        if self.faults.crash_before_first or (self.faults.crash_always and self.faults.crash_after is None):
            await self._crash(on)
        if self.faults.hang_before_first:
            await _forever()

    async def _fail_at(self, on: Accelerator) -> None:
        """Do what is due after ``made`` tokens."""
        faults = self.faults
        if faults.stall_after == self.made:
            on.moves.clear()
            await on.moves.wait()
        if faults.crash_after == self.made:
            await self._crash(on)
        if faults.hang_after == self.made:
            await _forever()
        for how, after in (
            ("cut", faults.cut_after),
            ("clean_end", faults.clean_end_after),
            ("error", faults.error_after),
        ):
            if after == self.made:
                raise Interrupted(how)

    async def _crash(self, on: Accelerator) -> None:
        on.crash(self.faults.crash_code)
        await _forever()  # a hosted engine ends by itself in the next turn, and this with it


def crash_process(code: int | None) -> None:
    """End this process at once: with exit code ``code``, or by ``SIGKILL``."""
    if code is not None:
        os._exit(code)
    os.kill(os.getpid(), signal.SIGKILL)


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()
