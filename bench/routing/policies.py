"""Other routers' rules, written down from their sources, for the routing benchmark.

Each sees what its original sees: the gauges of the last poll, its own counts,
and a least-recently-used index of what it sent where.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from statistics import mean, pstdev

BLOCK_TOKENS = 512
"""Tokens of a prompt that a hash of Mooncake's traces stands for."""
CACHE_BLOCKS = 4_000
"""Such blocks that an engine's KV cache holds."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a router knows of a request."""

    number: int
    prompt_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gauges:
    """What an engine's metrics page says."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


@dataclass
class Known:
    """What a router keeps of one replica."""

    gauges: Gauges = Gauges()
    sent_since_poll: int = 0
    running: int = 0
    pending_tokens: int = 0
    kv_tokens: int = 0
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def match(self, request: Asked) -> int:
        held = 0
        for block in request.blocks:
            if block not in self.blocks:
                break
            held += 1
        return held

    def remember(self, request: Asked) -> None:
        for block in reversed(request.blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > CACHE_BLOCKS:
            self.blocks.popitem(last=False)


class Base:
    """Book-keeping that the rules share."""

    name = ""

    def __init__(self, replicas: int, chance: random.Random) -> None:
        self.known = [Known() for _ in range(replicas)]
        self.chance = chance
        self.needs: dict[int, int] = {}

    def rule(self, request: Asked) -> list[int]:
        """Return the equally good replicas."""
        raise NotImplementedError

    def pick(self, request: Asked) -> int:
        """Return the engine for a request that has come."""
        index = self.chance.choice(self.rule(request))
        known = self.known[index]
        self.needs[request.number] = need = request.prompt_tokens - known.match(request) * BLOCK_TOKENS
        known.pending_tokens += need
        known.running += 1
        known.sent_since_poll += 1
        known.kv_tokens += request.prompt_tokens
        known.remember(request)
        return index

    def begun(self, request: Asked, index: int) -> None:
        """Note a first token."""
        self.known[index].pending_tokens -= self.needs.pop(request.number)

    def done(self, request: Asked, index: int) -> None:
        """Note the end of an answer."""
        self.known[index].running -= 1
        self.known[index].kv_tokens -= request.prompt_tokens

    def polled(self, gauges: list[Gauges]) -> None:
        """Note what the engines' metrics pages say."""
        for known, gauge in zip(self.known, gauges, strict=True):
            known.gauges = gauge
            known.sent_since_poll = 0

    def lowest(self, costs: list[float]) -> list[int]:
        low = min(costs)
        return [index for index, cost in enumerate(costs) if cost == low]


class RoundRobin(Base):
    name = "round robin"
    turn = -1

    def rule(self, request: Asked) -> list[int]:
        self.turn = (self.turn + 1) % len(self.known)
        return [self.turn]


class LeastRequests(Base):
    """Own count of requests in flight, as nginx and Envoy keep it."""

    name = "least requests"

    def rule(self, request: Asked) -> list[int]:
        return self.lowest([known.running for known in self.known])


class AIBrix(Base):
    """prefix_cache.go: off balance by more than 8, only the least loaded; else the best match of load ≤ mean + 1 σ."""

    name = "AIBrix rule"

    def rule(self, request: Asked) -> list[int]:
        loads = [known.running for known in self.known]
        if max(loads) - min(loads) > 8:
            return self.lowest([float(load) for load in loads])
        limit = mean(loads) + pstdev(loads)
        matches = [known.match(request) if known.running <= limit else 0 for known in self.known]
        if max(matches) == 0:
            return self.lowest([float(load) for load in loads])
        best = [index for index, match in enumerate(matches) if match == max(matches)]
        least = min(loads[index] for index in best)
        return [index for index in best if loads[index] == least]


class SGLang(Base):
    """cache_aware: off balance (by more than 32 and 1.0001 times) the least loaded; else a match over one half."""

    name = "SGLang two tiers"

    def rule(self, request: Asked) -> list[int]:
        loads = [known.gauges.running + known.gauges.waiting + known.sent_since_poll for known in self.known]
        if not (max(loads) - min(loads) > 32 and max(loads) > 1.0001 * min(loads)):
            matches = [known.match(request) for known in self.known]
            if max(matches) > 0.5 * len(request.blocks):
                return [index for index, match in enumerate(matches) if match == max(matches)]
        return self.lowest([float(load) for load in loads])


class LlmD(Base):
    """config/loader/defaults.go: queue 2 + KV 2 + prefix 3, scores between 0 and 1, the highest sum; polled gauges."""

    name = "llm-d weights"
    adds_own = False

    def rule(self, request: Asked) -> list[int]:
        own = [known.sent_since_poll if self.adds_own else 0 for known in self.known]
        queues = [known.gauges.waiting + more for known, more in zip(self.known, own, strict=True)]
        low, high = min(queues), max(queues)
        scores = []
        for known, queue in zip(self.known, queues, strict=True):
            score = 2.0 * ((high - queue) / (high - low) if high > low else 1.0)
            score += 2.0 * (1.0 - known.gauges.kv_usage)
            score += 3.0 * known.match(request) / max(1, len(request.blocks))
            scores.append(-score)
        return self.lowest(scores)


class LlmDCounting(LlmD):
    """The same with what was sent since the poll added to the queue: better than the original."""

    name = "llm-d weights, own count added"
    adds_own = True


class Dynamo(Base):
    """Cost in blocks: what must be read there with this prompt, plus what is held by those who run; no temperature."""

    name = "Dynamo cost"

    def rule(self, request: Asked) -> list[int]:
        costs = []
        for known in self.known:
            reading = known.pending_tokens + request.prompt_tokens - known.match(request) * BLOCK_TOKENS
            costs.append((reading + known.kv_tokens) / BLOCK_TOKENS)
        return self.lowest(costs)


PEERS: tuple[type[Base], ...] = (RoundRobin, LeastRequests, AIBrix, SGLang, Dynamo, LlmD, LlmDCounting)
