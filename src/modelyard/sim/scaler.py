"""The sizes of a simulated endpoint: the production policy, shown what the controller would show it.

Gateways report, the production ``Signals`` keep windows of what they told,
engines' pages teach ``Speeds``, and ``scaling.decide`` decides: what
``control/sizing.py`` puts together of these is put together here, which
``tests/parity`` compares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import msgspec

from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.policy import scaling
from modelyard.policy.batch_demand import without_batches
from modelyard.policy.engine_model import Look, capacity_of, utilization_of
from modelyard.policy.signals import Signals
from modelyard.policy.speeds import Speeds
from modelyard.sim.engine import Engine
from modelyard.sim.events import Events
from modelyard.sim.gateway import ENDPOINT_ID, Gateway

WINDOW_S = 60.0
"""As ``control/sizing.py``: shorter than any gate."""
LOOK_S = 1.0
"""As ``control/observer.py``: pages of engines that are busy are read no more often."""


class Scaled(Protocol):
    """A replica, as sizes are decided."""

    @property
    def id(self) -> str:
        """Its id."""
        ...

    @property
    def engine(self) -> Engine:
        """Its engine."""
        ...

    def is_ready(self, now_s: float) -> bool:
        """Say whether it serves."""
        ...


class View(msgspec.Struct, frozen=True):
    """What there is now: gateways, and replicas that are not draining."""

    now_s: float
    gateways: Sequence[Gateway]
    replicas: Sequence[Scaled]
    slots: int
    version_id: str = "ver_sim"


@dataclass
class Time:
    """The calendar's, as a clock."""

    events: Events

    def monotonic_s(self) -> float:
        """Return the time of the world."""
        return self.events.now_s


class Scaler:
    """Decides how many replicas there should be; remembers what it saw."""

    def __init__(self, spec: Scaling, rules: Autoscale, events: Events, *, load_s: float) -> None:
        self.spec = spec
        self.rules = rules
        self.load_s = load_s
        self.signals = Signals(Time(events))
        self.speeds = Speeds()
        self.decisions: list[tuple[float, int, str]] = []
        """When sizes changed, to what and why."""
        self.memory: scaling.Memory | None = None
        self._looked_s = -inf

    def decide(self, view: View) -> int:
        """Return the size to have from now on."""
        for gateway in view.gateways:
            self.signals.hear(f"gw_{gateway.number}", gateway.report(view.now_s))
        seen = self.look(view)
        before = None if self.memory is None else self.memory.replicas
        decision = scaling.decide(self.spec, self.memory, seen, self.rules)
        self.memory = decision.memory
        if decision.replicas != before:
            self.decisions.append((view.now_s, decision.replicas, decision.reason))
        return decision.replicas

    def look(self, view: View) -> scaling.Seen:
        """Return what the policy sees."""
        now_s = view.now_s
        ready = [replica for replica in view.replicas if replica.is_ready(now_s)]
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            for replica in ready:
                self.speeds.take(replica.id, view.version_id, page_of(replica.engine, now_s))
        window = self.signals.window(ENDPOINT_ID, None, WINDOW_S)
        kv_tokens = view.replicas[0].engine.spec.kv_tokens if view.replicas else 0
        model = self.speeds.models.get(view.version_id)
        capacity = capacity_of(model, window, slots=view.slots, kv_tokens=kv_tokens)
        tokens_s = self.speeds.tokens_s(replica.id for replica in ready)
        demands = [gateway.report(now_s).endpoints[0] for gateway in view.gateways]
        queued = sum(demand.queued for demand in demands)
        seen = scaling.Seen(
            now_s=now_s,
            replicas=len(view.replicas),
            ready=len(ready),
            slots=view.slots,
            gateways=len(demands),
            queued=queued,
            in_flight=max(sum(demand.in_flight for demand in demands) - queued, 0),
            idle_s=min((demand.idle_s for demand in demands), default=inf),
            is_proven=True,
            wait_s=max((demand.wait_s for demand in demands), default=0.0),
            utilization=utilization_of(
                [replica.engine.running for replica in ready],
                slots=float(view.slots),
                ready=len(ready),
                capacity=capacity,
                tokens_s=tokens_s,
            ),
            kv_use=sum(replica.engine.kv_usage for replica in ready) / len(ready) if ready else None,
            ttft_p99_s=window.ttft_p99_s,
            latency_p99_s=window.latency_p99_s,
            requests_s=self.signals.arrival_rate(ENDPOINT_ID, WINDOW_S),
            tokens_s=tokens_s,
            capacity=capacity,
            load_s=self.load_s,
        )
        if self.rules.batch_scales:
            return seen
        return without_batches(
            seen,
            queued=sum(demand.batch_queued for demand in demands),
            running=sum(demand.batch_running for demand in demands),
        )


def page_of(engine: Engine, now_s: float) -> Look:
    """Return what an engine's metrics page says."""
    totals = engine.totals(now_s)
    return Look(
        at_s=now_s,
        running=engine.running,
        prompt_tokens=totals.prefill_tokens,
        generation_tokens=totals.generated,
        kv_tokens=engine.kv_usage * engine.spec.kv_tokens,
        iterations=totals.iterations,
    )
