"""The production policy, and the source's "Autoscaling Flow" read literally."""

import math

import msgspec

from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.policy import scaling
from modelyard.policy.gates import SHUT, Gates, Signals, watch
from modelyard.policy.scaling import Memory, Seen


class Ours:
    """``policy/scaling.py``, as the controller calls it."""

    name = "ours, with the source's numbers"

    def __init__(self, spec: Scaling, rules: Autoscale) -> None:
        self._spec, self._rules = spec, rules
        self._memory: Memory | None = None

    def size(self, seen: Seen) -> int:
        """Return what the policy decides."""
        decision = scaling.decide(self._spec, self._memory, seen, self._rules)
        self._memory = decision.memory
        return decision.replicas


class Eager(Ours):
    """The production policy with another setting: replicas go as soon as the others would be 60 % busy."""

    name = "ours, down_utilization = 60"

    def __init__(self, spec: Scaling, rules: Autoscale) -> None:
        super().__init__(spec, msgspec.structs.replace(rules, down_utilization=60.0))


class Shipped(Ours):
    """The production policy with the settings that are shipped, whatever the others have."""

    name = "ours, as shipped"

    def __init__(self, spec: Scaling, rules: Autoscale) -> None:
        super().__init__(spec, Autoscale())


class Literal:
    """The source to the letter: a loop every 30 s, one replica more or fewer, zero after idle, one for a request."""

    name = "+1 a loop"

    def __init__(self, spec: Scaling, rules: Autoscale) -> None:
        self._spec, self._rules = spec, rules
        self._gates: Gates = SHUT
        self._looped_s = -math.inf
        self._replicas: int | None = None

    def size(self, seen: Seen) -> int:
        """Return one more, one fewer or the same; triggers and times are the production gates' own."""
        rules, now_s = self._rules, seen.now_s
        replicas = seen.replicas if self._replicas is None else self._replicas
        self._gates = watch(self._gates, rules, Signals(seen.queued, seen.busy, None, seen.ttft_p99_s), now_s)
        if replicas == 0 and seen.demand:
            replicas = 1
        elif self._spec.floor == 0 and not seen.demand and seen.idle_s >= self._spec.idle_s and seen.ready:
            replicas = 0
        elif now_s - self._looped_s >= rules.check_s:
            self._looped_s = now_s
            if self._is_up(now_s):
                replicas += 1
            elif self._is_calm(now_s) and replicas > max(self._spec.floor, 1):
                replicas -= 1
        self._replicas = min(replicas, self._spec.max_replicas)
        return self._replicas

    def _is_up(self, now_s: float) -> bool:
        gates, rules = self._gates, self._rules
        held = (
            (gates.queue_s, rules.up_queue_s),
            (gates.utilization_s, rules.up_utilization_s),
            (gates.latency_s, rules.up_latency_s),
        )
        return any(since_s is not None and now_s - since_s > least_s for since_s, least_s in held)

    def _is_calm(self, now_s: float) -> bool:
        gates, rules = self._gates, self._rules
        held = ((gates.empty_s, rules.down_queue_s), (gates.unused_s, rules.down_utilization_s))
        return all(since_s is not None and now_s - since_s > least_s for since_s, least_s in held)


class Always:
    """As many as the busiest moment needs, always: the floor of waiting and the ceiling of cost."""

    name = "always the most"

    def __init__(self, spec: Scaling, rules: Autoscale) -> None:
        self._most = spec.max_replicas

    def size(self, seen: Seen) -> int:
        """Return the most."""
        return self._most


SIZERS = (Literal, Ours, Eager, Shipped, Always)
