"""From requests to batches to threads and back: the only place where items move.

A worker takes a batch whenever it is free, so that what comes meanwhile makes
the next one. The loop never computes; threads never touch the queues.
"""

import asyncio
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from modelyard.clock import Clock
from modelyard.engines.onnx.batching import Batch, Batcher, BatchRule, Item, QueueFullError
from modelyard.engines.onnx.metrics import Metrics
from modelyard.engines.onnx.model import Model, run_options
from modelyard.engines.onnx.refusals import Refused


class _Asked:
    """A request that is in the queue: its results so far."""

    __slots__ = ("ended", "has_begun", "left", "results")

    def __init__(self, count: int, ended: asyncio.Future[None]) -> None:
        self.results: list[Any] = [None] * count
        self.left = count
        self.ended = ended
        self.has_begun = False


class Scheduler:
    """Computes items of several models with ``workers`` threads."""

    def __init__(self, workers: int, metrics: Metrics, clock: Clock) -> None:
        self._workers = workers
        self._metrics = metrics
        self._clock = clock
        self._batcher = Batcher()
        self._models: dict[str, Model] = {}
        self._asked: set[_Asked] = set()
        self._running: list[tuple[Batch, Any]] = []
        """Batches that are computed, with what ends them."""
        self._has_news = asyncio.Event()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="onnx")
        metrics.show(lambda: self._count(has_begun=True), lambda: self._count(has_begun=False))

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._models)} models, {len(self._asked)} requests, {self._batcher!r}>"

    def enter(self, model: Model) -> None:
        """Take requests for a model from now on."""
        options = model.options
        is_joined = model.task != "tensors" or options.batch_tensors
        most = min(options.batch_max, model.batch_fixed or options.batch_max) if is_joined else 1
        rule = BatchRule(most, options.batch_tokens_max, options.delay_ms / 1000, options.queue_max)
        self._models[model.name] = model
        self._batcher.set_rule(model.name, rule)

    def leave(self, model: Model) -> bool:
        """Forget a model, unless another one of its name was entered since; say whether it was. Nothing must wait for
        it."""
        name = model.name
        if self._models.get(name) is not model:
            return False
        for item in self._batcher.forget(name):
            self._give(item, Refused(503, "model_unloaded", f"The model '{name}' was unloaded. Try again."))
        del self._models[name]
        return True

    async def compute(self, name: str, payloads: Sequence[tuple[Any, int]], key: Hashable = None) -> list[Any]:
        """Return the results of one request's items, given with their lengths, in their order.

        Raises:
            Refused: 429 when the queue is full, or what an item met.
        """
        asked = _Asked(len(payloads), asyncio.get_running_loop().create_future())
        items = [Item(name, length, (place, one), key, asked) for place, (one, length) in enumerate(payloads)]
        try:
            self._batcher.add(items, self._clock.monotonic_s())
        except QueueFullError:
            message = f"The model '{name}' has {self._batcher.waiting(name)} items waiting. Try again in a second."
            raise Refused(429, "queue_full", message) from None
        self._asked.add(asked)
        self._has_news.set()
        try:
            await asked.ended  # its worker ends it; a caller that leaves cancels this
        finally:
            self._asked.discard(asked)
            self._batcher.drop(asked)
            self._end_unwanted()
        failed = next((one for one in asked.results if isinstance(one, Refused)), None)
        if failed is not None:
            raise failed
        return asked.results

    async def run(self) -> None:
        """Compute until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._work())

    def close(self) -> None:
        """Stop what is computed, and the threads with it."""
        for model in self._models.values():
            model.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = self._batcher.take(self._clock.monotonic_s())
            if batch is None:
                await self._news()
                continue
            if self._batcher.waiting():
                self._has_news.set()  # another worker may be waiting
            model = self._models[batch.model]
            begun_s = self._begin(batch)
            running = (batch, run_options())
            self._running.append(running)
            try:
                payloads = [item.payload[1] for item in batch.items]
                results = await loop.run_in_executor(self._pool, model.run, payloads, running[1])
            finally:
                self._running.remove(running)
                took_s = self._clock.monotonic_s() - begun_s
                self._batcher.done(batch.model, took_s)
            self._metrics.batch_s.labels(batch.model).observe(took_s)
            for item, result in zip(batch.items, results, strict=True):
                self._give(item, result)

    async def _news(self) -> None:
        self._has_news.clear()
        due_s = self._batcher.due_at_s()
        pause_s = None if due_s is None else max(0.0, due_s - self._clock.monotonic_s())
        try:
            async with asyncio.timeout(pause_s):
                await self._has_news.wait()
        except TimeoutError:
            pass

    def _begin(self, batch: Batch) -> float:
        now_s = self._clock.monotonic_s()
        self._metrics.batch_size.labels(batch.model).observe(len(batch.items))
        self._metrics.items.labels(batch.model).inc(len(batch.items))
        waits = self._metrics.queue_s.labels(batch.model)
        for item in batch.items:
            waits.observe(now_s - item.arrived_s)
            item.owner.has_begun = True
        return now_s

    def _give(self, item: Item, result: Any) -> None:
        asked: _Asked = item.owner
        asked.results[item.payload[0]] = result
        asked.left -= 1
        # A request that failed in one item fails as a whole, at once.
        if (not asked.left or isinstance(result, Refused)) and not asked.ended.done():
            asked.ended.set_result(None)

    def _end_unwanted(self) -> None:
        """End what is computed for nobody any more: it would keep the cores from the others for as long as it likes."""
        for batch, options in self._running:
            if not any(item.owner in self._asked for item in batch.items):
                options.terminate = True

    def _count(self, *, has_begun: bool) -> int:
        return sum(1 for asked in self._asked if asked.has_begun == has_begun)
