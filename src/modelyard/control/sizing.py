"""What the scaling policy is shown of an endpoint, from everyone who knows something.

Gateways say what is wanted (``views.size_of``), engines' own pages how busy
they are and how fast, signals how long callers waited, forecasts what will be
wanted. Each but the first may be missing: then it is unknown, never zero.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from modelyard.control.forecasts import Forecasts
from modelyard.control.observer import Observer
from modelyard.control.views import size_of
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.signals import Window
from modelyard.engines import EngineLoad, Settings
from modelyard.policy import prewarming, scaling
from modelyard.policy.batch_demand import without_batches
from modelyard.policy.engine_model import Capacity, Look, capacity_of, utilization_of
from modelyard.policy.releases import main_release
from modelyard.policy.rollouts import beside
from modelyard.policy.signals import Signals
from modelyard.policy.speeds import Speeds

WINDOW_S = 60.0
"""Time over which rates and quantiles are taken: shorter than any gate."""
_NOTHING = Window(seconds=WINDOW_S)


@dataclass(slots=True)
class Sizing:
    """Gathers what is known; ``decisions`` are the last of each endpoint, for whoever asks why."""

    observer: Observer
    signals: Signals | None = None
    forecasts: Forecasts | None = None
    speeds: Speeds = field(default_factory=Speeds)
    decisions: dict[str, tuple[scaling.Seen, scaling.Decision]] = field(default_factory=dict)

    def look(
        self, endpoint: Endpoint, world: World, settings: Settings | None, load_s: float, memory: scaling.Memory | None
    ) -> scaling.Seen:
        """Return what the policy sees of ``endpoint``."""
        seen = size_of(endpoint, world, slots=settings.slots if settings else 1)
        ready = _ready(endpoint, world)
        looked = [(one, *found) for one in ready if (found := self.observer.latest(one.id)) is not None]
        for replica, at_s, load in looked:
            if (page := _look(at_s, load, settings.kv_tokens if settings else 0)) is not None:
                self.speeds.take(replica.id, replica.version_id, page)
        guests = [guest.id for guest in world.guests.get(endpoint.id, ())]
        window = self.signals.window(endpoint.id, None, WINDOW_S, guests=guests) if self.signals else _NOTHING
        loads = [load for _, _, load in looked]
        capacity = self._capacity(endpoint, settings, window)
        tokens_s = self.speeds.tokens_s(replica.id for replica in ready)
        # Those that sleep are there, too, and have nothing to do.
        awake = len(ready) / seen.ready if seen.ready else 1.0
        seen = msgspec.structs.replace(
            seen,
            utilization=_part(_utilization(loads, ready, capacity, tokens_s), awake),
            kv_use=_part(_mean(load.kv_usage for load in loads if load.kv_usage is not None), awake),
            ttft_p99_s=window.ttft_p99_s,
            latency_p99_s=window.latency_p99_s,
            requests_s=self._rate(endpoint.id, guests),
            tokens_s=tokens_s,
            capacity=capacity,
            load_s=load_s,
            accelerators=_accelerators(endpoint, world),
        )
        if not endpoint.autoscale.batch_scales:
            demand = world.demand(endpoint.id)
            seen = without_batches(seen, queued=demand.batch_queued, running=demand.batch_running)
        return self._with_forecast(endpoint, world, seen, memory)

    def note(self, endpoint_id: str, seen: scaling.Seen, decision: scaling.Decision) -> None:
        """Keep what was decided, and from what."""
        self.decisions[endpoint_id] = (seen, decision)
        if self.forecasts is not None:
            self.forecasts.keep_gaps(endpoint_id, decision.memory.gaps)

    def keep(self, world: World) -> None:
        """Forget what is gone."""
        for endpoint_id in self.decisions.keys() - world.endpoints.keys():
            del self.decisions[endpoint_id]
        replicas = [replica for replicas in world.replicas.values() for replica in replicas]
        versions = {release.version_id for endpoint in world.endpoints.values() for release in endpoint.releases}
        self.speeds.keep(
            (replica.id for replica in replicas), versions.union(replica.version_id for replica in replicas)
        )
        if self.forecasts is not None:
            self.forecasts.keep(world.endpoints)

    def _rate(self, endpoint_id: str, guests: Sequence[str]) -> float | None:
        """Return the requests a second that come for an endpoint and its guests."""
        if self.signals is not None and guests:
            return sum(self.signals.arrival_rate(one, WINDOW_S) for one in (endpoint_id, *guests))
        rate = self.signals.arrival_rate(endpoint_id, WINDOW_S) if self.signals else None
        return self.forecasts.rate(endpoint_id, WINDOW_S) if rate is None and self.forecasts else rate

    def _capacity(self, endpoint: Endpoint, settings: Settings | None, window: Window) -> Capacity | None:
        """Return what one replica serves, from the requests of the last minute; None when there were none."""
        if settings is None:
            return None
        model = self.speeds.models.get(main_release(endpoint).version_id)
        return capacity_of(model, window, slots=settings.slots, kv_tokens=settings.kv_tokens)

    def _with_forecast(
        self, endpoint: Endpoint, world: World, seen: scaling.Seen, memory: scaling.Memory | None
    ) -> scaling.Seen:
        if self.forecasts is None:
            return seen
        profile = self.forecasts.profile(endpoint.id)
        if profile is None or endpoint.is_deleted:
            return seen
        # By requests alone: a replica that was started for expected ones waits for them from its first moment.
        is_awake = scaling.is_kept_awake(memory, endpoint.scaling, endpoint.autoscale, seen.idle_s, seen.accelerators)
        situation = prewarming.Situation(
            now_s=world.unix_s,
            ready=seen.ready,
            demand=seen.demand,
            needed=max(endpoint.scaling.floor, int(is_awake), math.ceil(seen.load)),
            load_s=seen.load_s,
            accelerators=seen.accelerators,
            capacity=seen.capacity.requests_s if seen.capacity else None,
        )
        expected, reason = self.forecasts.expect(endpoint.id, endpoint.autoscale, situation)
        return msgspec.structs.replace(seen, expected=expected, expected_reason=reason, gaps=profile.gaps)


def _accelerators(endpoint: Endpoint, world: World) -> int:
    """Return how many one replica has."""
    version = world.versions.get(main_release(endpoint).version_id) if endpoint.releases else None
    return version.gpu_count if version else 1


def _ready(endpoint: Endpoint, world: World) -> list[Replica]:
    """Return the replicas that answer."""
    others = beside(endpoint)
    return [
        replica
        for replica in world.replicas.get(endpoint.id, ())
        if replica.state is ReplicaState.READY and replica.version_id not in others
    ]


def _utilization(
    loads: list[EngineLoad], ready: list[Replica], capacity: Capacity | None, tokens_s: float | None
) -> float | None:
    """Return how busy engines are: by the slots that they use, or by the tokens they write of those they could."""
    running = [load.running for load in loads if load.running is not None]
    slots = sum(replica.slots for replica in ready) / max(1, len(ready))
    return utilization_of(running, slots=slots, ready=len(ready), capacity=capacity, tokens_s=tokens_s)


def _look(at_s: float, load: EngineLoad, kv_tokens: int) -> Look | None:
    """Return what a page said, and when; ``kv_tokens`` is how many the cache holds, 0 for unknown."""
    if load.running is None or load.generation_tokens_total is None:
        return None
    return Look(
        at_s=at_s,
        running=load.running,
        # Those that were cached were not read.
        prompt_tokens=(load.prompt_tokens_total or 0.0) - (load.prefix_hits_total or 0.0),
        generation_tokens=load.generation_tokens_total,
        kv_tokens=(load.kv_usage or 0.0) * kv_tokens,
        iterations=load.iterations_total,
    )


def _part(share: float | None, part: float) -> float | None:
    return share if share is None else share * min(part, 1.0)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
