"""Which items are computed together, and whose turn it is: no clock, no thread, no model.

Three rules, each for what was measured or must not happen:

* **Batches are of like length.** Padding costs a CPU as much as text does, and a batch gains it little
  (``reference/engines.md`` section 4), so a batch is the next item and those nearest to it in length, as long as
  padding stays a small part.
* **No request holds up another.** Items of one request are tagged one after the other from where the queue is, so
  a request of one text comes right after the first text of a request of a thousand (start-time fair queueing).
* **No model holds up another.** The model that has had the least time of the cores is next; one that was idle
  begins where the others are, so it cannot save up.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

PADDING_MAX = 0.15
"""Most of a batch that may be padding."""
LOOK_AHEAD = 8
"""How many batches far neighbours are looked for: it bounds the work, and how early an item may be taken."""


@dataclass(frozen=True, slots=True)
class BatchRule:
    """How items of one model are put together."""

    items_max: int = 16
    tokens_max: int = 1024
    delay_s: float = 0.0
    queue_max: int = 2048


@dataclass(slots=True, eq=False)
class Item:
    """One text, picture or set of tensors. Only items of the same ``key`` can be computed together."""

    model: str
    length: int
    payload: Any
    key: Hashable = None
    owner: Any = None
    """Of whose request it is; nothing here looks at it."""
    arrived_s: float = 0.0
    tag: float = 0.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Items to compute together, shortest first."""

    model: str
    items: tuple[Item, ...]


@dataclass(slots=True)
class _Queue:
    rule: BatchRule
    items: list[Item] = field(default_factory=list)
    """By tag, then arrival."""
    turn: float = 0.0
    """Tag of the last item that was taken."""
    used_s: float = 0.0
    """Virtual time of the cores that the model has had."""
    is_busy: bool = False


class QueueFullError(Exception):
    """The model's queue has no room for the request."""


class Batcher:
    """The queues of all models of a process."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._now_used_s = 0.0

    def __repr__(self) -> str:
        waiting = ", ".join(f"{name}: {len(queue.items)}" for name, queue in self._queues.items() if queue.items)
        return f"<Batcher {waiting or 'empty'}>"

    def set_rule(self, model: str, rule: BatchRule) -> None:
        """Set how ``model`` is batched; also makes its queue."""
        if (queue := self._queues.get(model)) is None:
            self._queues[model] = _Queue(rule)
        else:
            queue.rule = rule

    def forget(self, model: str) -> list[Item]:
        """Forget a model; return what waited for it."""
        queue = self._queues.pop(model, None)
        return queue.items if queue is not None else []

    def waiting(self, model: str = "") -> int:
        """Return the items that wait, of one model or of all."""
        if model:
            return len(self._queues[model].items) if model in self._queues else 0
        return sum(len(queue.items) for queue in self._queues.values())

    def add(self, items: list[Item], now_s: float) -> None:
        """Let the items of one request wait; all are of one model.

        Raises:
            QueueFullError: others wait and they do not fit beside them. A request that finds the queue empty is taken
                whatever its size, since nothing would ever make room for it.
        """
        queue = self._queues[items[0].model]
        if queue.items and len(queue.items) + len(items) > queue.rule.queue_max:
            raise QueueFullError
        if not queue.items and not queue.is_busy:
            queue.used_s = max(queue.used_s, self._now_used_s)
        for place, item in enumerate(items, 1):
            item.arrived_s = now_s
            item.tag = queue.turn + place
        queue.items += items
        queue.items.sort(key=lambda item: item.tag)  # stable, and nearly sorted: of equals the earlier stays first

    def drop(self, owner: object) -> None:
        """Forget what waits for a request whose caller has left."""
        for queue in self._queues.values():
            queue.items = [item for item in queue.items if item.owner is not owner]

    def take(self, now_s: float) -> Batch | None:
        """Return what is to be computed next, None when nothing is due."""
        due = [name for name, queue in self._queues.items() if queue.items and self._is_due(queue, now_s)]
        if not due:
            return None
        name = min(due, key=lambda one: self._queues[one].used_s)
        queue = self._queues[name]
        taken = _alike(queue.items, queue.rule)
        chosen = set(map(id, taken))
        queue.items = [item for item in queue.items if id(item) not in chosen]
        # The first is always taken, so the turn moves on by it; neighbours that were taken early cost their owner
        # nothing and gain it nothing.
        queue.turn = max(queue.turn, min(item.tag for item in taken))
        queue.is_busy = True
        self._now_used_s = max(self._now_used_s, queue.used_s)
        return Batch(name, tuple(sorted(taken, key=lambda item: item.length)))

    def due_at_s(self) -> float | None:
        """Return when the next batch is due though nothing more comes, None without items that wait."""
        times = [
            min(item.arrived_s for item in queue.items) + queue.rule.delay_s
            for queue in self._queues.values()
            if queue.items
        ]
        return min(times, default=None)

    def done(self, model: str, took_s: float) -> None:
        """Note that a batch of ``model`` took the cores for so long."""
        queue = self._queues.get(model)
        if queue is not None:
            queue.used_s += took_s
            queue.is_busy = False

    @staticmethod
    def _is_due(queue: _Queue, now_s: float) -> bool:
        rule = queue.rule
        if not rule.delay_s or len(queue.items) >= rule.items_max:
            return True
        return min(item.arrived_s for item in queue.items) + rule.delay_s <= now_s


def _alike(items: list[Item], rule: BatchRule) -> list[Item]:
    """Return the first of ``items`` and those nearest to it in length that a batch holds beside it."""
    first = items[0]
    near = items[1 : LOOK_AHEAD * rule.items_max]
    others = sorted((item for item in near if item.key == first.key), key=lambda item: abs(item.length - first.length))
    taken, longest, total = [first], first.length, first.length
    for item in others:
        if len(taken) >= rule.items_max:
            break
        padded = max(longest, item.length) * (len(taken) + 1)
        if padded > rule.tokens_max or (total + item.length) < (1 - PADDING_MAX) * padded:
            continue
        taken.append(item)
        longest, total = max(longest, item.length), total + item.length
    return taken
