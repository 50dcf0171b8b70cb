"""A world of requests: engines in virtual time behind the production dispatcher.

What comes is a list of arrivals, what decides is ``policy/`` (``gateway.py``
here drives it as the live gateway does; ``scaler.py`` as the controller), and
what takes time is ``engine.py``. Every request ends in exactly one of done and
refused. Nothing but the seed and the arrivals decides what happens, so that
equal worlds are equal to the last digit.

Right for some dozens of replicas; ``fleet/`` has thousands of endpoints.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import msgspec

from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.domain.routing_table import ReplicaRoute, ReplicaSnapshot
from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.scaling import divide
from modelyard.sim.engine import Engine
from modelyard.sim.events import Event, Events
from modelyard.sim.gateway import Floor, Front, Gateway, Marks, Table
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.scaler import Scaler, View
from modelyard.sim.tasks import EngineSpec, Task

QUIET_S = 200.0
"""Longer than any window of the autoscaler, and than any of its gates but those that shrink."""
SWEEP_S = 0.25
"""As often as a gateway looks at deadlines."""


class ReleaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A version with its share of traffic, its engine and how many replicas it has at first."""

    engine: EngineSpec
    version_id: str = "ver_sim"
    weight: int = 100
    replicas: int = 1


class WorldSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What there is. ``slots``: what gateways send a replica at once (0: what its engine runs at once).

    ``knows_kv``: whether gateways know the size of KV caches, and so admit by it. ``snapshot_s``: how often engines'
    own pages are told to gateways, each ``snapshot_age_s`` later (0: never). ``scaling``: None leaves sizes alone.
    """

    releases: tuple[ReleaseSpec, ...]
    slots: int = 0
    knows_kv: bool = True
    uses_prefixes: bool = True
    gateways: int = 1
    rules: DispatchRules = DispatchRules()
    queue_wait_s: float = 30.0
    load_wait_s: float = 600.0
    snapshot_s: float = 0.0
    snapshot_age_s: float = 0.0
    scaling: Scaling | None = None
    autoscale: Autoscale = Autoscale()
    load_s: float = 60.0
    """From the start of a replica until it is ready."""
    pass_s: float = 2.0
    """As often as the controller decides."""
    idle_pass_s: float = 0.0
    """The same while nobody came for minutes, to get over nights; whoever comes wakes it at once. 0: as ever."""


@dataclass(slots=True, eq=False)
class Replica:
    """A replica of the world with its engine."""

    id: str
    number: int
    release: ReleaseSpec
    engine: Engine
    began_s: float
    ready_s: float
    gone_s: float = inf
    is_draining: bool = False
    event: Event | None = None

    def __repr__(self) -> str:
        return f"<Replica {self.id}: {self.engine!r}>"

    def is_ready(self, now_s: float) -> bool:
        """Say whether it serves."""
        return self.ready_s <= now_s and not self.is_draining


FrontFactory = Callable[[int, Floor, random.Random], Front]


class Watch(Protocol):
    """Who looks at a world now and then, and changes nothing in it."""

    @property
    def next_s(self) -> float:
        """When it wants to look; each look moves it on."""
        ...

    def look(self, world: "World") -> None:
        """See the world as it is at ``next_s``."""
        ...


@dataclass(eq=False)
class World:
    """Replicas, gateways and requests. ``front`` makes another gateway than the production one."""

    spec: WorldSpec
    chance: random.Random
    front: FrontFactory | None = None
    watch: Watch | None = None
    events: Events = field(default_factory=Events)
    replicas: dict[str, Replica] = field(default_factory=dict)
    gone: list[Replica] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    fronts: list[Front] = field(default_factory=list)
    scaler: Scaler | None = None
    left: int = 0
    """Requests that have come, or are to come, and not ended."""
    _growing: dict[Request, Marks] = field(default_factory=dict)
    """Answers whose length matters as they grow."""
    _tasks: dict[Request, Task] = field(default_factory=dict)
    _pass: Event | None = None
    """When the controller decides next."""
    _sweeps: bool = False
    _started: int = 0

    def __post_init__(self) -> None:
        spec = self.spec
        for number in range(spec.gateways):
            chance = random.Random(self.chance.random())
            self.fronts.append(self.front(number, self, chance) if self.front else self._gateway(number, chance))
        for release in spec.releases:
            for _ in range(release.replicas):
                self._begin(release, load_s=0.0)
        self._tell()
        if spec.scaling is not None:
            self.scaler = Scaler(spec.scaling, spec.autoscale, self.events, load_s=spec.load_s)
            self._pass = self.events.after(0.0, self._decide)
        if spec.snapshot_s:
            self.events.after(spec.snapshot_s, self._look)

    def run(self, arrivals: Sequence[Arrival]) -> list[Request]:
        """Let ``arrivals`` (in order) come and everything end; return what became of each, in the same order."""
        base = len(self.requests)
        self.left += len(arrivals)
        spread = random.Random(self.chance.random())
        for number, arrival in enumerate(arrivals, base):
            self.requests.append(Request(arrival, number))
        self._next(base, spread)
        step = self.events.step if self.watch is None else self._watched_step
        while self.left and step():
            pass
        assert not self.left, f"{self.left} requests were forgotten"
        return self.requests[base:]

    def stay(self, until_s: float) -> None:
        """Let the world go on until then, though all requests have ended: replicas that wait are there, too."""
        self.left += 1
        self.events.at(until_s, self._leave)

    def _leave(self) -> None:
        self.left -= 1

    # --- what gateways do ---

    def start(self, request: Request, replica_id: str, version_id: str) -> None:
        """Send a request to a replica's engine."""
        now_s = self.events.now_s
        replica = self.replicas[replica_id]
        arrival = request.arrival
        request.dispatched_s, request.replica_id, request.version_id = now_s, replica_id, version_id
        task = Task(
            request,
            number=self._started,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            blocks=arrival.blocks if replica.release.engine.hash_tokens else (),
            band=arrival.band,
        )
        self._started += 1
        self._tasks[request] = task
        replica.engine.submit(task, now_s)
        self._schedule(replica)
        front = self.fronts[request.gateway]
        if self.spec.knows_kv and isinstance(front, Gateway) and front.needs_marks(request):
            self._growing[request] = Marks(arrival.at_s)
            self._sweep_soon()

    def refuse(self, request: Request, why: str) -> None:
        """Answer that a request will not be served."""
        assert not request.refusal, "refused twice"
        request.refused_s, request.refusal = self.events.now_s, why
        self.left -= 1

    def pages(self) -> dict[str, ReplicaSnapshot]:
        """Return what the pages of replicas that serve say now, and will be as old as when gateways hear of it."""
        now_s, age_s = self.events.now_s, self.spec.snapshot_age_s
        return {
            replica.id: ReplicaSnapshot(
                replica.id, age_s, replica.engine.running, replica.engine.waiting, replica.engine.kv_usage
            )
            for replica in self.replicas.values()
            if replica.is_ready(now_s)
        }

    # --- what happens ---

    def _watched_step(self) -> bool:
        """Let the next event happen, once all was seen that is due before it: looks are not in the calendar."""
        next_s = self.events.next_s
        if self.watch is not None and next_s < inf:
            while self.watch.next_s < next_s:
                self.watch.look(self)
        return self.events.step()

    def _next(self, number: int, spread: random.Random) -> None:
        # One event for the arrival that is next, so that the calendar stays small.
        if number >= len(self.requests):
            return
        request = self.requests[number]
        at_s = max(request.arrival.at_s, self.events.now_s)

        def come() -> None:
            if len(self.fronts) > 1:
                request.gateway = spread.randrange(len(self.fronts))
            front = self.fronts[request.gateway]
            front.arrive(request, self.events.now_s)
            if front.waiting:
                self._sweep_soon()
            if self._pass is not None and self._pass.at_s > self.events.now_s + self.spec.pass_s:
                self._pass.call_off()
                self._pass = self.events.after(0.0, self._decide)
            self._next(number + 1, spread)

        self.events.at(at_s, come)

    def _schedule(self, replica: Replica) -> None:
        event, next_s = replica.event, replica.engine.next_s
        if event is not None and event.act is not None:
            if event.at_s == next_s:
                return
            event.call_off()
        replica.event = self.events.at(next_s, lambda: self._advance(replica)) if next_s < inf else None

    def _advance(self, replica: Replica) -> None:
        now_s = self.events.now_s
        begun, done = replica.engine.advance(now_s)
        for task in begun:
            request = task.what
            assert isinstance(request, Request), "a task of somebody else"
            request.first_s, request.cached_tokens = now_s, task.cached_tokens
            self.fronts[request.gateway].began(request, now_s)
        for task in done:
            request = task.what
            assert isinstance(request, Request), "a task of somebody else"
            request.done_s, request.preemptions = now_s, task.preemptions
            del self._tasks[request]
            self._growing.pop(request, None)
            self.left -= 1
            self.fronts[request.gateway].done(request, now_s)
        self._schedule(replica)
        if replica.is_draining and not replica.engine.running and not replica.engine.waiting:
            self._forget(replica)

    def _sweep_soon(self) -> None:
        if not self._sweeps:
            self._sweeps = True
            self.events.at((self.events.now_s // SWEEP_S + 1) * SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeps = False
        now_s = self.events.now_s
        for request, marks in self._growing.items():
            tokens = self.replicas[request.replica_id].engine.generated_by(self._tasks[request], now_s)
            for length in marks.due(tokens, now_s):
                self.fronts[request.gateway].grew(request, length)
        for front in self.fronts:
            front.sweep(now_s)
        if self._growing or any(front.waiting for front in self.fronts):
            self._sweep_soon()

    def _look(self) -> None:
        """Read engines' own pages; gateways hear of them later."""
        pages = self.pages()
        self.events.after(self.spec.snapshot_age_s, lambda: self._hear(pages))
        if self.left:
            self.events.after(self.spec.snapshot_s, self._look)

    def _hear(self, pages: dict[str, ReplicaSnapshot]) -> None:
        for front in self.fronts:
            front.observe(pages)

    # --- what the controller does ---

    def _decide(self) -> None:
        assert self.scaler is not None, "nobody decides sizes here"
        now_s = self.events.now_s
        live = [replica for replica in self.replicas.values() if not replica.is_draining]
        gateways = [front for front in self.fronts if isinstance(front, Gateway)]
        wanted = self.scaler.decide(View(now_s, gateways, live, slots=self._slots(live)))
        for _, speed in self.scaler.speeds.known():
            for gateway in gateways:
                gateway.expect(speed, self._slots(live))
        shares = divide(wanted, {release.version_id: release.weight for release in self.spec.releases})
        for release in self.spec.releases:
            self._resize(release, shares[release.version_id], now_s)
        if self.left:
            pause_s = self.spec.idle_pass_s if self.spec.idle_pass_s and self._is_quiet(gateways) else self.spec.pass_s
            self._pass = self.events.after(pause_s, self._decide)

    def _is_quiet(self, gateways: Sequence[Gateway]) -> bool:
        """Say whether nothing will change by itself but what takes minutes: windows and gates have forgotten all."""
        now_s = self.events.now_s
        is_still = all(not one.in_flight and now_s - one.last_request_s > QUIET_S for one in gateways)
        return is_still and all(one.ready_s <= now_s for one in self.replicas.values())

    def _slots(self, live: Sequence[Replica]) -> int:
        # Of one that sleeps its version says them, as the controller has it.
        releases = [replica.release for replica in live] or self.spec.releases
        return self.spec.slots or max(release.engine.max_num_seqs for release in releases)

    def _resize(self, release: ReleaseSpec, wanted: int, now_s: float) -> None:
        live = [one for one in self.replicas.values() if one.release is release and not one.is_draining]
        for _ in range(wanted - len(live)):
            self._begin(release, load_s=self.spec.load_s)
        if wanted >= len(live):
            return
        # Those with the least to do go, the youngest of them first; none that still loads.
        ready = [one for one in live if one.is_ready(now_s)]
        ready.sort(key=lambda one: (one.engine.running + one.engine.waiting, -one.number))
        for replica in ready[: len(live) - wanted]:
            replica.is_draining = True
        self._tell()
        for replica in ready[: len(live) - wanted]:
            if not replica.engine.running and not replica.engine.waiting:
                self._forget(replica)

    def _begin(self, release: ReleaseSpec, *, load_s: float) -> None:
        now_s, number = self.events.now_s, len(self.replicas) + len(self.gone)
        replica = Replica(
            f"rep_{number:03d}", number, release, Engine(release.engine), began_s=now_s, ready_s=now_s + load_s
        )
        self.replicas[replica.id] = replica
        if load_s:
            self.events.after(load_s, self._tell)

    def _forget(self, replica: Replica) -> None:
        replica.gone_s = self.events.now_s
        self.gone.append(self.replicas.pop(replica.id))
        self._tell()

    def _tell(self) -> None:
        """Tell gateways which replicas there are."""
        now_s = self.events.now_s
        for number, front in enumerate(self.fronts):
            front.take(self._table(number, now_s), now_s)
            if front.waiting:
                self._sweep_soon()

    def _table(self, gateway: int, now_s: float) -> Table:
        table = []
        for release in self.spec.releases:
            engine = release.engine
            slots = self.spec.slots or engine.max_num_seqs
            workers = self.spec.gateways
            # As ``gateway/catalog.py`` divides them.
            share = slots if workers == 1 else max(1, slots // workers + (gateway < slots % workers))
            routes = [
                (
                    ReplicaRoute(
                        replica.id,
                        "127.0.0.1",
                        1 + replica.number,
                        "",
                        slots,
                        is_draining=replica.is_draining,
                        kv_tokens=engine.kv_tokens if self.spec.knows_kv else 0,
                    ),
                    share,
                )
                for replica in self.replicas.values()
                if replica.release is release and replica.ready_s <= now_s
            ]
            table.append((release.version_id, release.weight, 0, routes))
        return table

    def _gateway(self, number: int, chance: random.Random) -> Gateway:
        spec = self.spec
        return Gateway(
            number,
            self,
            # As ``gateway/catalog.py`` divides memory among its workers.
            msgspec.structs.replace(spec.rules, kv_share_max=spec.rules.kv_share_max / spec.gateways),
            chance,
            queue_wait_s=spec.queue_wait_s,
            load_wait_s=spec.load_wait_s,
            hash_tokens=spec.releases[0].engine.hash_tokens if spec.uses_prefixes else 0,
        )
