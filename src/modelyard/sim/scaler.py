"""The sizes of a simulated endpoint: the production policy, shown what the controller would show it.

``control/sizing.py`` gathers the same from gateways' reports, engines' pages
and windows; here all of it is at hand, and no older than a pass.
"""

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Protocol

import msgspec

from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.domain.signals import ReleaseCounts, Window
from modelyard.policy import scaling
from modelyard.policy.engine_model import Look, capacity_of, utilization_of
from modelyard.policy.speeds import Speeds
from modelyard.policy.windows import increase, total, window_of
from modelyard.sim.engine import Engine, EngineSpec
from modelyard.sim.gateway import Gateway

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


class Scaler:
    """Decides how many replicas there should be; remembers what it saw."""

    def __init__(self, spec: Scaling, rules: Autoscale, *, load_s: float) -> None:
        self.spec = spec
        self.rules = rules
        self.load_s = load_s
        self.speeds = Speeds()
        self.decisions: list[tuple[float, int, str]] = []
        """When sizes changed, to what and why."""
        self._memory: scaling.Memory | None = None
        self._looks: deque[tuple[float, int, dict[tuple[int, str], ReleaseCounts]]] = deque()
        self._looked_s = -inf

    def decide(self, view: View) -> int:
        """Return the size to have from now on."""
        seen = self.look(view)
        before = None if self._memory is None else self._memory.replicas
        decision = scaling.decide(self.spec, self._memory, seen, self.rules)
        self._memory = decision.memory
        if decision.replicas != before:
            self.decisions.append((view.now_s, decision.replicas, decision.reason))
        return decision.replicas

    def look(self, view: View) -> scaling.Seen:
        """Return what the policy sees."""
        now_s, gateways = view.now_s, view.gateways
        ready = [replica for replica in view.replicas if replica.is_ready(now_s)]
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            for replica in ready:
                self.speeds.take(replica.id, view.version_id, page_of(replica.engine, now_s))
        window, requests_s = self._window(view)
        engine = view.replicas[0].engine.spec if view.replicas else None
        capacity = None
        if engine is not None:
            model = self.speeds.models.get(view.version_id)
            capacity = capacity_of(model, window, slots=view.slots, kv_tokens=engine.kv_tokens)
        tokens_s = self.speeds.tokens_s(replica.id for replica in ready)
        queued = sum(gateway.waiting for gateway in gateways)
        in_flight = sum(gateway.in_flight for gateway in gateways)
        return scaling.Seen(
            now_s=now_s,
            replicas=len(view.replicas),
            ready=len(ready),
            slots=view.slots,
            gateways=len(gateways),
            queued=queued,
            in_flight=max(in_flight - queued, 0),
            idle_s=min(
                (0.0 if gateway.in_flight else now_s - gateway.last_request_s for gateway in gateways if gateway.arrivals),
                default=inf,
            ),
            is_proven=True,
            wait_s=max((gateway.wait_s(now_s) for gateway in gateways), default=0.0),
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
            requests_s=requests_s,
            tokens_s=tokens_s,
            capacity=capacity,
            load_s=self.load_s,
        )

    def _window(self, view: View) -> tuple[Window, float | None]:
        """Return what ended in the last minute, and the rate at which requests came."""
        now_s = view.now_s
        counts = {
            (gateway.number, version_id): tally.counts("ep_sim", version_id)
            for gateway in view.gateways
            for version_id, tally in gateway.tallies.items()
        }
        arrivals = sum(gateway.arrivals for gateway in view.gateways)
        looks = self._looks
        looks.append((now_s, arrivals, counts))
        while len(looks) > 1 and looks[1][0] <= now_s - WINDOW_S:
            looks.popleft()
        began_s, before, counted = looks[0]
        if now_s <= began_s:
            return Window(seconds=WINDOW_S), None
        sums = total(increase(counted.get(key), after) for key, after in counts.items())
        return window_of(sums, now_s - began_s), (arrivals - before) / (now_s - began_s)


def page_of(engine: Engine, now_s: float) -> Look:
    """Return what an engine's metrics page says."""
    totals = engine.totals(now_s)
    spec: EngineSpec = engine.spec
    return Look(
        at_s=now_s,
        running=engine.running,
        prompt_tokens=totals.prefill_tokens,
        generation_tokens=totals.generated,
        kv_tokens=engine.kv_usage * spec.kv_tokens,
    )
