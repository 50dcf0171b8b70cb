"""Whatever comes, ends, fails, leaves and makes way: each ends once, no slot is filled twice, and shares hold."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.routing_table import ReplicaRoute
from modelyard.policy import making_way
from modelyard.policy.dispatch import Dispatcher, DispatchRules, ReplicaLoad, Verdict
from modelyard.policy.job import Job

TENANTS = {"flood": 1.0, "quiet": 1.0, "heavy": 4.0}


@dataclass(eq=False)
class Request:
    """A request of the world below."""

    job: Job
    replica: ReplicaLoad | None = None
    gave_way: int = 0
    ended: int = 0
    failed_on: list[ReplicaLoad] = field(default_factory=list)

    def turned_away(self, _verdict: Verdict) -> None:
        self.ended += 1


class World:
    """A few replicas, and everybody who ever came."""

    def __init__(self, seed: int, slots: list[int], kv_tokens: int, kept_share_max: float) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.all: list[Request] = []
        rules = DispatchRules(places=12, kv_share_max=1.0, kept_share_max=kept_share_max, retry_share_max=1.0)
        self.dispatcher: Dispatcher[Request] = Dispatcher("ep", rules=rules, deliver=self.start, chance=self.rng.random)
        routes = [
            (ReplicaRoute(f"r{n}", "h", n + 1, "s", count, kv_tokens=kv_tokens), count) for n, count in enumerate(slots)
        ]
        self.dispatcher.update([("v1", 100, 0, routes)], now_s=0.0)

    def start(self, request: Request, replica: ReplicaLoad) -> bool:
        assert not request.ended
        assert request.replica is None, "delivered twice"
        request.replica = replica
        return True

    def take(self, request: Request, verdict: ReplicaLoad | Verdict | None) -> None:
        if isinstance(verdict, ReplicaLoad):
            self.start(request, verdict)
        elif verdict is not Verdict.WAIT:
            request.ended += 1

    def ask(self, tenant_id: str) -> None:
        size, band = self.rng.choice([20, 100, 400]), self.rng.choice([0, 1, 1, 1, 2])
        job = Job(tenant_id, TENANTS[tenant_id], band, size, size, size, is_seen=self.rng.random() < 0.3)
        request = Request(job)
        self.all.append(request)
        verdict = self.dispatcher.arrive(request, now_s=self.now_s, deadline_s=self.now_s + 1e6)
        if verdict is not Verdict.WAIT or request.replica is None:
            self.take(request, verdict)
        if request in self.dispatcher.line.light:
            self.trade(request)

    def trade(self, request: Request) -> None:
        headroom = self.dispatcher.headroom
        running = [one for one in self.all if one.replica is not None]
        traded = making_way.trade(
            request,
            self.dispatcher,
            reversed(running),
            can_stop=lambda one: not one.job.is_seen,
            now_s=self.now_s,
            deadline_s=self.now_s + 1e6,
        )
        if traded is None:
            assert [one for one in self.all if one.replica is not None] == running
            return
        victim, replica = traded
        assert request.replica is replica
        victim.gave_way += 1
        victim.replica = None
        assert victim.gave_way <= making_way.TRADES_MAX
        own = sum(one.replica is not None and one.job.tenant_id == victim.job.tenant_id for one in self.all)
        weights = sum(TENANTS[name] for name in {one.job.tenant_id for one in self.all})
        total = sum(one.replica is not None for one in self.all)
        assert own >= 1
        assert own * weights >= victim.job.weight * total, "it ran no more than its share, and was put out"
        assert headroom.is_within_share(request.job) or own
        self.dispatcher.serve(now_s=self.now_s)

    def end(self, request: Request) -> None:
        replica, request.replica = request.replica, None
        assert replica is not None
        request.ended += 1
        size = request.job.prompt_tokens
        self.dispatcher.finish(replica, request.job, now_s=self.now_s, prompt_tokens=size, output_tokens=size)

    def fail(self, request: Request) -> None:
        replica, request.replica = request.replica, None
        assert replica is not None
        request.failed_on.append(replica)
        verdict = self.dispatcher.retry(request, now_s=self.now_s, deadline_s=self.now_s + 1e6)
        if verdict is None:
            request.replica = replica
            self.end(request)
        elif verdict is not Verdict.WAIT or request.replica is None:
            self.take(request, verdict)

    def leave(self, request: Request) -> None:
        request.ended += 1
        assert self.dispatcher.leave(request, now_s=self.now_s)

    def step(self, what: str) -> None:
        self.now_s += self.rng.choice([0.0, 0.1, 2.0, 30.0])
        running = [one for one in self.all if one.replica is not None]
        waiting = list(self.dispatcher.line)
        if what in TENANTS:
            self.ask(what)
        elif what == "end" and running:
            self.end(self.rng.choice(running))
        elif what == "fail" and running:
            self.fail(self.rng.choice(running))
        elif what == "leave" and waiting:
            self.leave(self.rng.choice(waiting))
        self.check()

    def check(self) -> None:
        for replica in self.dispatcher.replicas:
            on_it = [one for one in self.all if one.replica is replica]
            assert len(on_it) == replica.running <= replica.slots
            assert set(replica.kv.held) == ({one.job for one in on_it} if replica.kv.capacity else set())
        line = set(self.dispatcher.line)
        for one in self.all:
            assert one.ended + (one.replica is not None) + (one in line) == 1, "lost, or in two places"


@pytest.mark.parametrize("kept_share_max", [0.0, 1 / 16, 0.5])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    slots=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    kv_tokens=st.sampled_from([0, 1500]),
    steps=st.lists(st.sampled_from(["flood", "flood", "flood", "quiet", "heavy", "end", "fail", "leave"]), max_size=80),
)
def test_each_ends_once_and_nobody_within_its_share_makes_way(
    kept_share_max: float, seed: int, slots: list[int], kv_tokens: int, steps: list[str]
) -> None:
    world = World(seed, slots, kv_tokens, kept_share_max)
    for what in steps:
        world.step(what)
    while running := [one for one in world.all if one.replica is not None]:
        world.end(running[0])
        world.check()
    # Who failed everywhere it may go waits for a replica that it did not fail on.
    assert not [one for one in world.dispatcher.line if not one.failed_on], "somebody waits before idle replicas"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), slots=st.integers(1, 4), steps=st.integers(1, 60))
def test_few_slots_are_never_kept_and_a_tenant_alone_has_all(seed: int, slots: int, steps: int) -> None:
    world = World(seed, [slots], 0, DispatchRules().kept_share_max)
    for _ in range(steps):
        world.step(world.rng.choice(["flood", "flood", "quiet", "end"]))
        if world.dispatcher.line:
            assert world.dispatcher.running == slots, "a slot is idle while somebody waits"
