"""One inference engine in virtual time, for the routing benchmark.

Steps take ``22 ms + 0.35 ms × batch + prompt tokens read / 9,000`` (Splitwise's
H100 measurements of Llama-2-70B on four GPUs: 28.4 + 0.35 × batch ms, and 8.7 to
10.2 K tokens/s). A step reads at most 2,048 prompt tokens, first come first
served, while everybody in the batch gets one token: reading a prompt slows
those who run, and they slow the reading. Between two events all rates are
constant, so the engine jumps from event to event instead of taking each step.

Its cache is a plain least-recently-used set of 512-token blocks, written here
anew on purpose: the policies must guess it, not share it.
"""

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from math import inf

BLOCK_TOKENS = 512
STEP_S = 0.022
STEP_S_PER_RUNNING = 0.00035
PREFILL_TOKENS_PER_S = 9_000.0
CHUNK_TOKENS = 2_048
BATCH_MAX = 256
"""vLLM's default for ``max_num_seqs`` on most cards."""
CACHE_BLOCKS = 4_000


@dataclass(slots=True, eq=False)
class Request:
    """A request of a trace and what became of it."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    cached_tokens: int = 0
    left_tokens: float = 0.0
    first_token_s: float = inf
    done_s: float = inf


@dataclass(slots=True)
class Gauges:
    """What an engine's metrics page says."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


@dataclass(slots=True, eq=False)
class Engine:
    """State at ``now_s``; ``advance`` moves it to its next event and says what happened."""

    index: int
    batch_max: int = BATCH_MAX
    now_s: float = 0.0
    waiting: deque[Request] = field(default_factory=deque)
    reading: Request | None = None
    decoding: list[tuple[float, int, Request]] = field(default_factory=list)
    steps: float = 0.0
    """Decode steps so far: whoever began at step n with m tokens to go is done at n + m."""
    tokens: int = 0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def gauges(self) -> Gauges:
        batch = len(self.decoding) + (self.reading is not None)
        return Gauges(batch, len(self.waiting), self.tokens / (CACHE_BLOCKS * BLOCK_TOKENS))

    def submit(self, request: Request, now_s: float) -> None:
        """Take a request that came now."""
        self.move(now_s)
        self.waiting.append(request)
        self.tokens += request.prompt_tokens + request.output_tokens
        self._next_prompt()

    def next_event_s(self) -> float:
        """Return when something happens next if nothing arrives."""
        step_s = self._step_s()
        soonest = inf
        if self.reading is not None:
            soonest = self.now_s + self.reading.left_tokens / CHUNK_TOKENS * step_s
        if self.decoding:
            soonest = min(soonest, self.now_s + (self.decoding[0][0] - self.steps) * step_s)
        return soonest

    def move(self, now_s: float) -> None:
        """Let time pass until ``now_s``, which is not after the next event."""
        steps = (now_s - self.now_s) / self._step_s()
        self.steps += steps
        if self.reading is not None:
            self.reading.left_tokens -= steps * CHUNK_TOKENS
        self.now_s = now_s

    def happen(self, now_s: float) -> tuple[list[Request], list[Request]]:
        """Carry out the events of ``now_s``; return who got a first token and who is done."""
        self.move(now_s)
        begun: list[Request] = []
        done: list[Request] = []
        while self.decoding and self.decoding[0][0] <= self.steps + 1e-9:
            done.append(self._end(heapq.heappop(self.decoding)[2]))
        request = self.reading
        if request is not None and request.left_tokens <= 1e-6:
            request.first_token_s = now_s
            begun.append(request)
            self._remember(request)
            self.reading = None
            if request.output_tokens <= 1:
                done.append(self._end(request))
            else:
                heapq.heappush(self.decoding, (self.steps + request.output_tokens - 1, request.number, request))
        self._next_prompt()
        return begun, done

    def _step_s(self) -> float:
        step_s = STEP_S + STEP_S_PER_RUNNING * len(self.decoding)
        return step_s + CHUNK_TOKENS / PREFILL_TOKENS_PER_S if self.reading is not None else step_s

    def _next_prompt(self) -> None:
        if self.reading is None and self.waiting and len(self.decoding) < self.batch_max:
            request = self.reading = self.waiting.popleft()
            held = 0
            for block in request.blocks:
                if block not in self.cache:
                    break
                held += 1
            # The last token is always computed, or there would be nothing to go on from.
            request.cached_tokens = min(held * BLOCK_TOKENS, request.prompt_tokens - 1)
            request.left_tokens = request.prompt_tokens - request.cached_tokens

    def _end(self, request: Request) -> Request:
        request.done_s = self.now_s
        self.tokens -= request.prompt_tokens + request.output_tokens
        return request

    def _remember(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHE_BLOCKS:
            self.cache.popitem(last=False)


def reading_s(tokens: int) -> float:
    """Return how long an engine with nothing else to do reads a prompt."""
    return tokens / CHUNK_TOKENS * (STEP_S + CHUNK_TOKENS / PREFILL_TOKENS_PER_S)
