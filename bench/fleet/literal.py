"""The source's "Autoscaling Flow" to the letter: a loop every 30 s, one replica more or fewer, with the same triggers.

It wakes an endpoint for a request, and lets it sleep after its idle time, as the source has it. Triggers and their
times are the production's gates.
"""

import math

import msgspec

from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.policy import gates as gate
from modelyard.policy.scaling import Decision, Memory, Seen
from modelyard.policy.steadiness import Steady


class Literal:
    """One more, one fewer, or the same."""

    def decide(self, spec: Scaling, memory: Memory | None, seen: Seen, rules: Autoscale) -> Decision:
        """Return the size; everything but the wake-up waits for the loop."""
        memory = memory or Memory(max(seen.replicas, spec.floor), seen.now_s)
        now_s, replicas = seen.now_s, max(memory.replicas, spec.floor)
        if replicas == 0:
            woken = 1 if seen.demand else 0
            return self._keep(memory, woken, "a request" if woken else "no request")
        if spec.floor == 0 and not seen.demand and seen.idle_s >= spec.idle_s and seen.ready:
            return self._keep(memory, 0, "idle")
        if now_s - memory.checked_s < rules.check_s:
            return self._keep(memory, replicas, "between two loops")
        signals = gate.Signals(seen.queued, seen.busy, None, seen.ttft_p99_s)
        gates = gate.watch(memory.gates, rules, signals, now_s)
        memory = msgspec.structs.replace(memory, gates=gates, checked_s=now_s)
        if gate.reason_up(gates, rules, signals, now_s):
            return self._keep(memory, min(replicas + 1, spec.max_replicas), "one more")
        left_s = gate.calm_left_s(gates, rules, now_s)
        if left_s is not None and left_s < 0 and replicas > max(spec.floor, 1):
            return self._keep(memory, replicas - 1, "one fewer")
        return self._keep(memory, replicas, "the same")

    def steady(self, spec: Scaling, memory: Memory, seen: Seen, rules: Autoscale) -> Steady | None:
        """Until the next loop; an endpoint that sleeps, until a request."""
        sleeps = memory.replicas == 0
        return Steady(
            until_s=math.inf if sleeps else memory.checked_s + rules.check_s,
            demand_most=0 if sleeps else 1_000_000_000,
            busy_above=-math.inf,
            busy_below=math.inf,
        )

    def _keep(self, memory: Memory, replicas: int, reason: str) -> Decision:
        return Decision(replicas, reason, msgspec.structs.replace(memory, replicas=replicas))
