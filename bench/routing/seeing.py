"""Ours, if it saw into the engines: what each has yet to read at this very moment, in place of what is predicted.

No gateway can; it says how much better predictions of the wait could be worth.
"""

import random

from modelyard.policy.dispatch import DispatchRules
from modelyard.sim.engine import Engine
from modelyard.sim.gateway import Floor, Front, Gateway
from modelyard.sim.requests import Request
from modelyard.sim.world import World


class Seeing(Gateway):
    """The production gateway, told the truth before each choice."""

    __slots__ = ()

    def arrive(self, request: Request, now_s: float) -> None:
        assert isinstance(self.floor, World), "only a world can be looked at"
        for replica in self.dispatcher.replicas:
            replica.pending_tokens = unread(self.floor.replicas[replica.route.id].engine, now_s)
            replica.reading_since_s = now_s
        Gateway.arrive(self, request, now_s)


def unread(engine: Engine, now_s: float) -> int:
    """Return the tokens of prompts that an engine has yet to read."""
    left = sum(task._target - task._computed for task in engine._reading)
    for _, _, task in engine._waiting:
        left += task._target - engine.cache.matched(task.blocks) * engine.spec.hash_tokens
    if engine._planned and engine._chunks:
        left -= int(engine._iterations_by(now_s) * engine._plan_read)
    return max(0, left)


def seeing(number: int, floor: Floor, chance: random.Random, rules: DispatchRules, hash_tokens: int) -> Front:
    """Return such a gateway."""
    return Seeing(number, floor, rules, chance, queue_wait_s=1e9, hash_tokens=hash_tokens)
