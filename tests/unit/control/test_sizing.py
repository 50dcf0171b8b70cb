"""The scaling policy is shown what gateways, engines, signals and forecasts know, and unknown is never zero."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs

from modelyard.clock import ManualClock
from modelyard.control.forecasts import Forecasts
from modelyard.control.sizing import Sizing
from modelyard.control.world import World, demands_of
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.demand import EndpointDemand, Report
from modelyard.domain.endpoints import Autoscale, Endpoint, EndpointStatus, Release, Scaling
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.signals import Window
from modelyard.domain.tenants import Tenant
from modelyard.engines import EngineLoad, Settings
from modelyard.fleet import Observed
from modelyard.policy import scaling
from modelyard.policy.engine_model import EngineModel
from modelyard.policy.forecast import WEEK, Profile, encode, observe, slot_of
from modelyard.stores.sql import SqlControlStore, open_database

ENDPOINT = Endpoint("ep-1", "t", "m", (Release("ver-1"),), Scaling(1, 4), created_at=1, status=EndpointStatus.RUNNING)
VERSION = ModelVersion("ver-1", "t", "m", "v1", "simulated", Artifact(""), {}, 1)
SETTINGS = Settings(slots=4, context_length=1000, memory_bytes=0, load_s=2.0, kv_tokens=1000)


@dataclass
class Pages:
    """What an observer read last."""

    loads: dict[str, tuple[float, EngineLoad]] = field(default_factory=dict)

    def latest(self, replica_id: str) -> tuple[float, EngineLoad] | None:
        return self.loads.get(replica_id)


@dataclass
class Counted:
    """Signals of a minute."""

    seen: Window

    def window(self, endpoint_id: str, version_id: str | None, seconds: float, *, guests: Iterable[str] = ()) -> Window:
        return self.seen

    def arrival_rate(self, endpoint_id: str, seconds: float) -> float:
        return self.seen.requests / seconds


def replica(name: str, state: ReplicaState = ReplicaState.READY) -> Replica:
    return Replica(name, "ep-1", "ver-1", 0, 1, state, 0.0, slots=4)


def world(
    *replicas: Replica, demand: EndpointDemand | None = None, versions: Mapping[str, ModelVersion] | None = None
) -> World:
    return World(
        unix_s=1e9,
        monotonic_s=100.0,
        endpoints={"ep-1": ENDPOINT},
        versions=versions or {"ver-1": VERSION},
        replicas={"ep-1": list(replicas)},
        processes={"ep-1": [Observed(one.id, "ep-1", "", 0, "", is_running=True, started_at=0.0) for one in replicas]},
        busy=frozenset(),
        reports={"g": Report([demand] if demand else [], [])},
        known_to_drain=frozenset(),
        are_gateways_known=True,
        demands=demands_of([Report([demand], [])] if demand else []),
    )


def test_engines_say_how_busy_they_are() -> None:
    pages = Pages({"a": (99.0, EngineLoad(4, 0, 0.5)), "b": (99.0, EngineLoad(2, 0, 0.3))})
    seen = Sizing(pages).look(ENDPOINT, world(replica("a"), replica("b")), SETTINGS, 2.0, None)  # type: ignore[arg-type]
    assert (seen.utilization, seen.kv_use, seen.ready, seen.load_s) == (0.75, 0.4, 2, 2.0)


def test_what_nobody_says_is_unknown() -> None:
    pages = Pages({"a": (99.0, EngineLoad())})
    seen = Sizing(pages).look(ENDPOINT, world(replica("a")), SETTINGS, 2.0, None)  # type: ignore[arg-type]
    unknown = (seen.utilization, seen.kv_use, seen.requests_s, seen.tokens_s, seen.capacity, seen.ttft_p99_s)
    assert unknown == (None,) * 6


def test_gateways_predict_the_wait_and_signals_tell_the_rest() -> None:
    window = Window(
        seconds=60, requests=120, ttft_p99_s=3.0, latency_p99_s=9.0, completion_tokens=2400, service_s=240.0
    )
    sizing = Sizing(Pages(), Counted(window))  # type: ignore[arg-type]
    demand = EndpointDemand("ep-1", 3, 4, 0.0, 9, wait_s=6.5)
    seen = sizing.look(ENDPOINT, world(replica("a"), demand=demand), SETTINGS, 2.0, None)
    assert (seen.wait_s, seen.ttft_p99_s, seen.latency_p99_s, seen.requests_s) == (6.5, 3.0, 9.0, 2.0)
    assert seen.capacity is not None
    assert seen.capacity.requests_s == 2.0  # four slots, two seconds a request
    assert seen.capacity.tokens_s == 40.0


def test_lines_of_batches_are_no_demand_where_they_run_on_what_is_idle() -> None:
    pages = Pages({"a": (99.0, EngineLoad(4, 0, 0.5))})
    demand = EndpointDemand("ep-1", 5, 9, 0.0, 9, batch_queued=5, batch_running=3)
    idle = structs.replace(ENDPOINT, autoscale=Autoscale(batch_scales=False))
    counted, not_counted = (
        Sizing(pages).look(endpoint, world(replica("a"), demand=demand), SETTINGS, 2.0, None)  # type: ignore[arg-type]
        for endpoint in (ENDPOINT, idle)
    )
    assert (counted.queued, counted.in_flight, counted.utilization) == (5, 4, 1.0)
    assert (not_counted.queued, not_counted.in_flight, not_counted.utilization) == (0, 1, 0.25)


def test_a_busy_engine_teaches_its_speed() -> None:
    pages, sizing = Pages(), Sizing(Pages())  # type: ignore[arg-type]
    window = Window(seconds=60, requests=60, prompt_tokens=600, completion_tokens=1200, service_s=120.0)
    sizing.signals = Counted(window)
    sizing.observer = pages  # type: ignore[assignment]
    prompt = generated = 0.0
    for step in range(60):
        batch = 1 + step % 4
        iterations = 1.0 / (0.02 + 0.01 * batch)
        prompt, generated = prompt + 5 * (step % 3), generated + batch * iterations
        for at, running in ((step * 10.0, batch), (step * 10.0 + 1.0, batch)):
            total = generated if at % 10 else generated - batch * iterations
            pages.loads["a"] = (at + 1.0, EngineLoad(running, 0, 0.1, prompt, total))
            seen = sizing.look(ENDPOINT, world(replica("a")), SETTINGS, 2.0, None)
    assert seen.capacity is not None
    assert "measured speed" in seen.capacity.source
    assert seen.capacity.tokens_s == pytest.approx(4 / 0.06, rel=0.1)
    assert seen.tokens_s is not None


def test_what_is_gone_is_forgotten() -> None:
    sizing = Sizing(Pages({"a": (99.0, EngineLoad(1, 0, 0.1, 5, 5))}))  # type: ignore[arg-type]
    present = world(replica("a"))
    seen = sizing.look(ENDPOINT, present, SETTINGS, 2.0, None)
    sizing.note("ep-1", seen, scaling.decide(ENDPOINT.scaling, None, seen))
    sizing.speeds.models |= {"ver-1": EngineModel(), "ver-removed": EngineModel()}
    sizing.keep(present)
    assert "ep-1" in sizing.decisions
    assert repr(sizing.speeds) == "<Speeds of 1 versions, 1 replicas>"
    sizing.keep(World(1e9, 100.0, {}, {}, {}, {}, frozenset(), {}, frozenset(), are_gateways_known=True, demands={}))
    assert not sizing.decisions
    assert repr(sizing.speeds) == "<Speeds of 0 versions, 0 replicas>"


async def test_a_replica_that_waits_for_expected_requests_is_a_hit_when_they_come(tmp_path: Path) -> None:
    store = SqlControlStore(open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5))
    await store.add_tenant(Tenant("t", "t", 1))
    sleepy = structs.replace(ENDPOINT, scaling=Scaling(0, 4, scale_to_zero=True, idle_s=300))
    await store.add_deployment(VERSION, sleepy)
    now, profile = slot_of(1e9), Profile()
    for slot in range(now - 2 * WEEK, now):
        profile = observe(profile, slot, 60 if slot % 144 == now % 144 else 0)
    await store.put_forecasts({"ep-1": encode(profile)}, at=1.0)
    forecasts = Forecasts(store=store, reports=dict, clock=ManualClock(start_s=1e9))
    await forecasts.look()
    sizing, memory = Sizing(Pages(), forecasts=forecasts), None  # type: ignore[arg-type]
    asleep = world(demand=EndpointDemand("ep-1", 0, 0, 9000.0, 1))
    waiting = world(replica("a"), demand=EndpointDemand("ep-1", 0, 0, 9010.0, 1))
    asked = world(replica("a"), demand=EndpointDemand("ep-1", 0, 1, 0.0, 2))
    reasons = []
    for present in (asleep, waiting, waiting, asked):
        seen = sizing.look(sleepy, present, SETTINGS, 2.0, memory)
        decision = scaling.decide(sleepy.scaling, memory, seen, sleepy.autoscale)
        memory = decision.memory
        reasons.append((decision.replicas, decision.reason.split(":")[0]))
    assert reasons[:3] == [(1, "expected")] * 3
    score = forecasts.profile("ep-1").score  # type: ignore[union-attr]
    assert (score.hits, score.misses, score.wasted) == (1, 0, 0)
    await store.close()
