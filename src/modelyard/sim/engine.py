"""A continuous-batching engine in virtual time, iteration by iteration, as vLLM 0.19 schedules.

Every iteration each running request gets a token, and what is left of the
token budget reads prompts, in chunks, oldest first. A request is let in when
its whole prompt fits the KV cache; one that grows where nothing is left makes
the youngest give its blocks up and compute them again later. How long an
iteration takes is a formula of its batch, the tokens read and the tokens
held (``policy/engine_model.py``), fitted to real engines (``fitting.py``).

While nothing is read and nobody can come in, iterations differ only by the
tokens held, so the engine leaps over all of them at once; a test holds leaps to
single steps. Costs O(log requests) for each request that begins or ends, and
O(1) for a leap: of those who run only sums are kept, by the place of each in
its last block.
"""

import heapq
from math import ceil, inf, sqrt

from modelyard.sim.kv_cache import Key, KvCache
from modelyard.sim.tasks import BLOCK_TOKENS, NEVER, EngineSpec, Task, Totals

_ALMOST = 1e-9


class Engine:
    """One engine. Whoever owns it calls ``advance`` at ``next_s``, which changes with every call."""

    __slots__ = (
        "_aborted", "_begin_s", "_chunks", "_decoding", "_ends", "_first_s", "_is_closed", "_more_s", "_needs",
        "_number", "_plan_kv", "_plan_read", "_planned", "_reading", "_running", "_steps", "_sums", "_tokens",
        "_waiting", "busy_s", "cache", "next_s", "preemptions", "spec",
    )  # fmt: skip

    def __init__(self, spec: EngineSpec) -> None:
        assert spec.chunk_tokens >= spec.max_num_seqs, "each running request needs a token of every iteration"
        self.spec = spec
        self.cache = KvCache(spec.kv_blocks, spec.hash_tokens // BLOCK_TOKENS)
        self.next_s = inf
        """When something happens next; infinite while there is nothing to do."""
        self.busy_s = 0.0
        self.preemptions = 0
        self._running: dict[Task, None] = {}
        """In the order in which they were let in."""
        self._reading: dict[Task, None] = {}
        self._decoding = 0
        self._waiting: list[tuple[int, int, Task]] = []
        self._aborted: list[Task] = []
        self._ends: list[tuple[int, int, Task]] = []
        self._needs = [0] * BLOCK_TOKENS
        """How many need a new block at each step, by the step's rest."""
        self._steps = 0
        self._tokens = 0
        """Tokens held by those who run."""
        self._number = 0
        # What runs now: ``_planned`` iterations since ``_begin_s``, which read ``_chunks``.
        self._begin_s = 0.0
        self._planned = 0
        self._plan_kv = self._plan_read = 0
        self._first_s = self._more_s = 0.0
        self._chunks: list[tuple[Task, int]] = []
        self._is_closed = False
        """Whether nobody who comes now could come in before the plan ends."""
        self._sums = [0.0] * len(Totals.__struct_fields__)

    def __repr__(self) -> str:
        return f"<Engine: {self.running} running, {self.waiting} waiting, {self.cache!r}>"

    # --- what its metrics page says ---

    @property
    def running(self) -> int:
        """Return how many requests it runs."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Return how many requests wait in it."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Return the share of its KV cache that is held."""
        return self.cache.held / self.cache.blocks

    def totals(self, now_s: float) -> Totals:
        """Return what it has done by ``now_s``."""
        done = self._iterations_by(now_s) if self._planned else 0.0
        return Totals(*(past + more for past, more in zip(self._sums, self._done_by(done), strict=True)))

    def busy_by(self, now_s: float) -> float:
        """Return the seconds in which it computed, by ``now_s``."""
        return self.busy_s + (max(0.0, min(now_s, self.next_s) - self._begin_s) if self._planned else 0.0)

    def generated(self, task: Task) -> int:
        """Return how many tokens of an answer there are."""
        if task._finish != NEVER:
            return task._base + self._steps - task.prompt_tokens + 1
        return task.generated_before

    def generated_by(self, task: Task, now_s: float) -> int:
        """Return the same by ``now_s``, of the iterations that run now those that have ended."""
        if task._finish != NEVER:
            return self.generated(task) + int(self._iterations_by(now_s) + _ALMOST)
        return task.generated_before

    # --- what comes and goes ---

    def submit(self, task: Task, now_s: float) -> None:
        """Take a request that comes now."""
        assert ceil((task.prompt_tokens + task.output_tokens) / BLOCK_TOKENS) <= self.cache.blocks, "can never fit"
        task.come_s = now_s
        heapq.heappush(self._waiting, (task.band if self.spec.by_band else 0, task.number, task))
        if not self._planned:
            self._plan(now_s)
        elif not self._is_closed or self.spec.by_band:
            self._cut(now_s)
            task._from = self._number + self._planned + self.spec.ahead

    def abort(self, task: Task, now_s: float) -> None:
        """Let a request go whose caller has left, at the end of the iteration that runs."""
        if task not in self._running:
            self._waiting = [entry for entry in self._waiting if entry[2] is not task]
            heapq.heapify(self._waiting)
            return
        self._aborted.append(task)
        self._cut(now_s)

    def advance(self, now_s: float) -> tuple[list[Task], list[Task]]:
        """Carry out what ends at ``now_s``, which is ``next_s``; return who has a first token, and who is done."""
        steps = self._planned
        self._count(steps, now_s)
        if self._decoding:
            self.cache.take(self._blocks_for(steps))
            self._tokens += self._decoding * steps
        self._steps += steps
        self._number += steps
        begun: list[Task] = []
        done: list[Task] = []
        for task, tokens in self._chunks:
            self._read(task, tokens, now_s, begun, done)
        self._chunks = []
        while self._ends and self._ends[0][0] <= self._steps:
            finish, _, task = heapq.heappop(self._ends)
            if task._finish == finish:
                self._end(task, now_s)
                done.append(task)
        for task in self._aborted:
            if task in self._running:
                self._remove(task)
        self._aborted.clear()
        self._plan(now_s)
        return begun, done

    def halt(self, now_s: float) -> None:
        """Stop for good, in the middle of what runs; only its totals are of use then."""
        if self._planned:
            for index, more in enumerate(self._done_by(self._iterations_by(now_s))):
                self._sums[index] += more
            self.busy_s += now_s - self._begin_s
        self._planned, self.next_s = 0, inf

    # --- what runs next ---

    def _plan(self, now_s: float) -> None:
        has_preempted = False
        while self._decoding and self._needs[(self._steps + 1) % BLOCK_TOKENS] > self.cache.available:
            self._preempt()
            has_preempted = True
        budget = self.spec.chunk_tokens - self._decoding
        chunks = self._chunks
        for task in self._reading:
            tokens = min(budget, task._target - task._computed)
            if tokens > 0:
                chunks.append((task, tokens))
                budget -= tokens
        # Blocks that this iteration's tokens need are not for newcomers.
        spare = self._needs[(self._steps + 1) % BLOCK_TOKENS]
        if self._waiting and not has_preempted:
            self._let_in(budget, spare)
        self._begin_s = now_s
        read = 0
        for _, tokens in chunks:
            read += tokens
        decoding = self._decoding
        self._plan_read = read
        self._plan_kv = kv = self._tokens + decoding + read
        # All iterations of a plan are alike but for the tokens held, of which each has so many more.
        speed = self.spec.speed
        self._first_s = speed.iteration_s(decoding + len(chunks), read, kv)
        self._more_s = speed.kv_token_s * decoding
        # Whoever gave up its blocks may come in again with the next.
        self._planned = min(self._length(), 1) if has_preempted else self._length()
        self.next_s = now_s + self._span_s(self._planned) if self._planned else inf
        self._is_closed = bool(self._waiting) and self._waiting[0][2]._from <= self._number

    def _let_in(self, budget: int, spare: int) -> None:
        waiting, running = self._waiting, self._running
        while waiting and budget > 0 and len(running) < self.spec.max_num_seqs:
            task = waiting[0][2]
            # With nobody on it there is nothing to wait for.
            if (task._from > self._number and running) or not self._admit(task, spare):
                return
            heapq.heappop(waiting)
            tokens = min(budget, task._target - task._computed)
            self._chunks.append((task, tokens))
            budget -= tokens

    def _admit(self, task: Task, spare: int) -> bool:
        cache = self.cache
        hashes = task.blocks
        matched = cache.matched(hashes)
        own = ceil(task._target / BLOCK_TOKENS) - matched * cache.hash_blocks
        hashes = hashes[:matched]
        if own + cache.idle_in(hashes) + spare > cache.available:
            return False
        cache.share(hashes)
        kept = 0
        if task._left is not None and task._left[0] == matched:
            kept = cache.take_back(task._left[1])
        cache.take(own - kept)
        task._left = None
        # The last token is always computed, or there would be nothing to go on from.
        task._computed = min(matched * self.spec.hash_tokens + kept * BLOCK_TOKENS, task._target - 1)
        task._shared, task._blocks = matched, own
        if not task.preemptions:
            task.cached_tokens = task._computed
        self._tokens += task._computed
        self._running[task] = self._reading[task] = None
        return True

    def _length(self) -> int:
        """Return how many iterations can be taken at once: one that reads, or as many as change nothing but tokens."""
        if self._chunks:
            return 1
        if not self._decoding:
            return 0
        while self._ends[0][2]._finish != self._ends[0][0]:
            heapq.heappop(self._ends)
        steps = min(self._ends[0][0] - self._steps, self._until_full())
        if self._waiting and self._waiting[0][2]._from > self._number:
            steps = min(steps, self._waiting[0][2]._from - self._number)
        return steps

    def _cut(self, now_s: float) -> None:
        """End the plan with the iteration that runs now."""
        if self._planned > 1:
            self._planned = min(self._planned, max(1, ceil(self._iterations_by(now_s) - _ALMOST)))
            # Rounding must not put it into the past.
            self.next_s = max(now_s, self._begin_s + self._span_s(self._planned))

    # --- time ---

    def _span_s(self, iterations: int) -> float:
        """Return how long that many iterations of the plan take."""
        return iterations * (self._first_s + self._more_s * (iterations - 1) / 2)

    def _iterations_by(self, now_s: float) -> float:
        """Return how many iterations of the plan have passed; the one that runs counts in part."""
        first_s, more_s = self._first_s, self._more_s
        span_s = max(0.0, now_s - self._begin_s)
        if more_s * self._planned < 1e-9 * first_s:
            return min(span_s / first_s, float(self._planned))
        half = first_s - more_s / 2
        return min((sqrt(half * half + 2 * more_s * span_s) - half) / more_s, float(self._planned))

    def _done_by(self, iterations: float) -> tuple[float, ...]:
        """Return the terms of ``Totals`` for so many iterations of what runs now."""
        decoding = self._decoding
        return (
            iterations,
            iterations * (decoding + len(self._chunks)),
            iterations * self._plan_read,
            iterations * (self._plan_kv + decoding * (iterations - 1) / 2),
            iterations * decoding,
        )

    def _count(self, steps: int, now_s: float) -> None:
        self.busy_s += now_s - self._begin_s
        sums = self._sums
        for index, more in enumerate(self._done_by(float(steps))):
            sums[index] += more

    # --- blocks ---

    def _blocks_for(self, steps: int) -> int:
        cycles, rest = divmod(steps, BLOCK_TOKENS)
        needs, begin = self._needs, self._steps
        return cycles * self._decoding + sum(needs[(begin + step) % BLOCK_TOKENS] for step in range(1, rest + 1))

    def _until_full(self) -> int:
        """Return after how many steps those who run will have taken all blocks."""
        available = self.cache.available
        cycles, left = divmod(available, self._decoding)
        steps = cycles * BLOCK_TOKENS
        for step in range(1, BLOCK_TOKENS + 1):
            left -= self._needs[(self._steps + step) % BLOCK_TOKENS]
            if left < 0:
                break
            steps += 1
        return steps

    def _read(self, task: Task, tokens: int, now_s: float, begun: list[Task], done: list[Task]) -> None:
        task._computed += tokens
        self._tokens += tokens
        cache = self.cache
        while cache.hash_blocks and task._shared < len(task.blocks):
            if (task._shared + 1) * self.spec.hash_tokens > task._computed or not cache.adopt(
                task.blocks[task._shared]
            ):
                break
            task._shared += 1
            task._blocks -= cache.hash_blocks
        if task._computed < task._target:
            return
        generated = task.generated_before + 1
        task.generated_before = generated
        self._sums[-1] += 1
        if task.first_s == inf:
            task.first_s = now_s
            begun.append(task)
        del self._reading[task]
        task._base = task._target - self._steps
        if generated >= task.output_tokens:
            self._release(task, task._target)
            task.done_s = now_s
            done.append(task)
            return
        task._finish = self._steps + task.output_tokens - generated
        self._decoding += 1
        self._needs[(1 - task._base) % BLOCK_TOKENS] += 1
        heapq.heappush(self._ends, (task._finish, task.number, task))

    def _end(self, task: Task, now_s: float) -> None:
        self._remove(task)
        task.generated_before = task.output_tokens
        task.done_s = now_s

    def _remove(self, task: Task) -> Key:
        """Take a request off the engine and let go of its blocks; return where they are kept for a while."""
        if task._finish == NEVER:
            del self._reading[task]
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not task]
            return self._release(task, task._computed)
        task.generated_before = self.generated(task)
        self._decoding -= 1
        self._needs[(1 - task._base) % BLOCK_TOKENS] -= 1
        task._finish = NEVER
        held = task._base + self._steps
        task._blocks = ceil(held / BLOCK_TOKENS) - task._shared * self.cache.hash_blocks
        return self._release(task, held)

    def _release(self, task: Task, tokens: int) -> Key:
        self._tokens -= tokens
        del self._running[task]
        key = self.cache.leave(task.blocks[: task._shared], task._blocks)
        task._blocks = 0
        return key

    def _preempt(self) -> None:
        """Take the blocks of the youngest, or of the least urgent, which computes them again later."""
        task = next(reversed(self._running))
        if self.spec.by_band:
            task = max(self._running, key=lambda one: (one.band, one.number))
        shared = task._shared
        key = self._remove(task)
        task._left = (shared, key)
        task._target = task.prompt_tokens + task.generated_before
        task._computed = task._shared = 0
        task.preemptions += 1
        task._from = 0
        self.preemptions += 1
        heapq.heappush(self._waiting, (task.band if self.spec.by_band else 0, task.number, task))
