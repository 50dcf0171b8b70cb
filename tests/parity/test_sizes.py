"""The controller and the simulated scaler decide alike: the same sizes, at the same moments, for the same reasons.

Beside the scaler of a simulated world stands the controller's own chain: what gateways report is heard, summed up and
looked at by the code of ``control/``, and the policy decides from that. The difference is 0.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from modelyard.control.sizing import Sizing
from modelyard.control.world import World as Look
from modelyard.control.world import demands_of
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.demand import Report
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Release, Scaling
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.engines import EngineLoad, Settings
from modelyard.fleet import Observed
from modelyard.policy import scaling
from modelyard.policy.engine_model import Speed
from modelyard.policy.signals import Signals
from modelyard.sim.requests import Arrival
from modelyard.sim.scaler import Time, View
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

ENGINE = EngineSpec(speed=Speed(0.03, 0.0005, 0.0001, 1e-7), max_num_seqs=8, kv_blocks=2000)
SLEEPY = Scaling(min_replicas=0, max_replicas=6, scale_to_zero=True, idle_s=90.0)


def bursts(seed: int) -> list[Arrival]:
    """Return calm, a storm, calm and a long silence, twice."""
    chance, arrivals, at_s = Random(seed), [], 5.0
    for rate, seconds in ((0.2, 120), (4.0, 150), (0.3, 300), (0.001, 200)) * 2:
        end_s = at_s + seconds
        while (at_s := at_s + chance.expovariate(rate)) < end_s:
            size = chance.randrange(50, 1200)
            arrivals.append(Arrival(at_s=at_s, prompt_tokens=size, output_tokens=chance.randrange(20, 250)))
        at_s = end_s
    return arrivals


@dataclass
class Controller:
    """The controller's chain, shown the same world; ``sizes`` is what it would have decided at each pass."""

    world: World
    spec: Scaling
    load_s: float
    pages: dict[str, tuple[float, EngineLoad]] = field(default_factory=dict)
    sizes: list[tuple[float, int, str]] = field(default_factory=list)
    seen: list[tuple[scaling.Seen, scaling.Seen]] = field(default_factory=list)

    def __post_init__(self) -> None:
        pages: Any = self
        self.sizing = Sizing(pages, Signals(Time(self.world.events)))
        self.memory: scaling.Memory | None = None
        release = Release("ver_sim")
        self.endpoint = Endpoint("ep_sim", "t", "m", (release,), self.spec, created_at=1, status=EndpointStatus.RUNNING)

    def latest(self, replica_id: str) -> tuple[float, EngineLoad] | None:
        """Return what the observer read last."""
        return self.pages.get(replica_id)

    def decide(self, view: View) -> int:
        """Decide as ``control/flow.py`` does."""
        now_s = view.now_s
        reports = {f"gw_{one.number}": one.report(now_s) for one in view.gateways}
        for gateway_id, report in reports.items():
            assert self.sizing.signals is not None
            self.sizing.signals.hear(gateway_id, report)
        for one in view.replicas:
            if one.is_ready(now_s):
                totals, engine = one.engine.totals(now_s), one.engine
                load = EngineLoad(
                    running=engine.running,
                    waiting=engine.waiting,
                    kv_usage=engine.kv_usage,
                    prompt_tokens_total=totals.prefill_tokens,
                    generation_tokens_total=totals.generated,
                    iterations_total=totals.iterations,
                )
                self.pages[one.id] = (now_s, load)
        settings = Settings(slots=view.slots, context_length=1, memory_bytes=0, load_s=1.0, kv_tokens=ENGINE.kv_tokens)
        seen = self.sizing.look(self.endpoint, self.look(view, reports), settings, self.load_s, self.memory)
        decision = scaling.decide(self.spec, self.memory, seen)
        self.memory = decision.memory
        self.sizes.append((now_s, decision.replicas, decision.reason))
        return decision.replicas

    def look(self, view: View, reports: dict[str, Report]) -> Look:
        """Return the controller's look at the world."""
        replicas = [
            Replica(
                one.id, "ep_sim", "ver_sim", number, 1,
                ReplicaState.READY if one.is_ready(view.now_s) else ReplicaState.LOADING, 0.0, slots=view.slots,
            )
            for number, one in enumerate(view.replicas)
        ]  # fmt: skip
        processes = [Observed(one.id, "ep_sim", "", 0, "", is_running=True, started_at=0.0) for one in replicas]
        return Look(
            unix_s=view.now_s,
            monotonic_s=view.now_s,
            endpoints={"ep_sim": self.endpoint},
            versions={"ver_sim": ModelVersion("ver_sim", "t", "m", "v1", "simulated", Artifact(""), {}, 1)},
            replicas={"ep_sim": replicas},
            processes={"ep_sim": processes},
            busy=frozenset(),
            reports=reports,
            known_to_drain=frozenset(),
            are_gateways_known=True,
            demands=demands_of(reports.values()),
        )


@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_controller_decides_what_the_simulated_scaler_decides(gateways: int, seed: int) -> None:
    spec = WorldSpec(
        releases=(ReleaseSpec(engine=ENGINE, replicas=1),), gateways=gateways, scaling=SLEEPY, load_s=20.0, pass_s=2.0
    )
    world = World(spec, Random(seed))
    scaler = world.scaler
    assert scaler is not None
    controller = Controller(world, SLEEPY, 20.0)
    sizes: list[tuple[float, int, str]] = []
    decide = scaler.decide

    def both(view: View) -> int:
        controller.decide(view)
        replicas = decide(view)
        sizes.append((view.now_s, replicas, scaler.decisions[-1][2] if scaler.decisions else ""))
        return replicas

    scaler.decide = both  # type: ignore[method-assign]
    world.run(bursts(seed))
    assert [size[:2] for size in controller.sizes] == [size[:2] for size in sizes]
    reasons = {at_s: reason for at_s, _, reason in controller.sizes}
    assert all(reasons[at_s] == reason for at_s, _, reason in scaler.decisions)
    counts = {replicas for _, replicas, _ in sizes}
    assert 0 in counts, "it never slept"
    assert max(counts) > 2, "it never grew"
