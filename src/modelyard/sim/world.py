"""A world of requests: engines in virtual time behind the production dispatcher.

What comes is a list of arrivals, what decides is ``policy/`` (``gateway.py``
here drives it as the live gateway does; ``scaler.py`` as the controller), and
what takes time is ``engine.py``. Every request ends in exactly one of done and
refused. Nothing but the seed and the arrivals decides what happens, so that
equal worlds are equal to the last digit.

Right for some dozens of replicas; ``fleet/`` has thousands of endpoints.
"""

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from modelyard.domain.routing_table import ReplicaSnapshot
from modelyard.policy.scaling import divide
from modelyard.sim.batches import Batch
from modelyard.sim.engine import Engine
from modelyard.sim.events import Event, Events
from modelyard.sim.faults import Breakage
from modelyard.sim.gateway import MARK_TOKENS, SWEEP_S, Floor, Front, Gateway, Marks
from modelyard.sim.keeper import Keeper
from modelyard.sim.on_engines import OnEngines
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.scaler import Scaler, View
from modelyard.sim.tables import gateway_of, table_of
from modelyard.sim.tasks import Aside, Task
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

QUIET_S = 200.0
"""Longer than any window of the autoscaler, and than any of its gates but those that shrink."""


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
    is_down: bool = False
    """Its process is gone."""
    hung_s: float = inf
    """Since when it computes nothing."""

    def __repr__(self) -> str:
        return f"<Replica {self.id}: {self.engine!r}>"

    def is_ready(self, now_s: float) -> bool:
        """Say whether it serves."""
        return self.ready_s <= now_s and not self.is_draining

    @property
    def works(self) -> bool:
        """Say whether its engine computes."""
        return not self.is_down and self.hung_s == inf


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
class World(OnEngines):
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
    keeper: Keeper | None = None
    breakage: Breakage | None = None
    batch: Batch | None = None
    tasks: dict[Hashable, Task] = field(default_factory=dict)
    """What is on engines, by the request or whatever else it is for, in order of its start."""
    left: int = 0
    """Requests that have come, or are to come, and not ended."""
    growing: dict[Request, Marks] = field(default_factory=dict)
    """Answers whose length matters as they grow."""
    started: int = 0
    """How often anything was sent to an engine."""
    asides: int = 0
    """Probes and copies that engines were asked."""
    _pass: Event | None = None
    """When the controller decides next."""
    _sweeps: bool = False

    def __post_init__(self) -> None:
        spec = self.spec
        for number in range(spec.gateways):
            chance = random.Random(self.chance.random())
            self.fronts.append(
                self.front(number, self, chance) if self.front else gateway_of(spec, number, self, chance)
            )
        for release in spec.releases:
            for _ in range(release.replicas):
                self.begin(release, load_s=0.0)
        self.tell()
        if spec.scaling is not None:
            self.scaler = Scaler(spec.scaling, spec.autoscale, self.events, load_s=spec.load_s)
            self._pass = self.events.after(0.0, self._decide)
        elif spec.keeps:
            self._pass = self.events.after(spec.pass_s, self._decide)
        if spec.keeps:
            self.keeper = Keeper(self)
        if spec.faults:
            self.breakage = Breakage(self, spec.faults)
            self._sweep_soon()
        if spec.snapshot_s:
            self.events.after(spec.snapshot_s, self._look)

    @property
    def now_s(self) -> float:
        """The time of the world."""
        return self.events.now_s

    def run(self, arrivals: Sequence[Arrival], *, lines: Sequence[Arrival] = ()) -> list[Request]:
        """Let ``arrivals`` (in order) come and everything end; return what became of each, in the same order.

        ``lines`` of a batch fill what is idle meanwhile (``batch``); those left when all others have ended stay.
        """
        base = len(self.requests)
        self.left += len(arrivals)
        spread = random.Random(self.chance.random())
        for number, arrival in enumerate(arrivals, base):
            self.requests.append(Request(arrival, number))
        self._next(base, spread)
        if lines:
            self.batch = Batch(lines, self.events, self._arrive)
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
        if replica.is_down and self.breakage is not None:
            self.breakage.refused(request)
            return
        request.dispatched_s, request.replica_id, request.version_id = now_s, replica_id, version_id
        self.submit(
            replica,
            request,
            prompt_tokens=arrival.prompt_tokens + request.told,
            output_tokens=arrival.output_tokens - request.told,
            blocks=arrival.blocks if replica.release.engine.hash_tokens else (),
            band=arrival.band,
        )
        front = self.fronts[request.gateway]
        if self.spec.knows_kv and isinstance(front, Gateway) and front.needs_marks(request):
            marks = self.growing.setdefault(request, Marks(arrival.at_s))
            marks.next_tokens = 1 + (request.told or MARK_TOKENS)
            self._sweep_soon()

    def refuse(self, request: Request, why: str) -> None:
        """Answer that a request will not be served."""
        assert not request.refusal, "refused twice"
        request.refused_s, request.refusal = self.events.now_s, why
        self.growing.pop(request, None)
        self._ended(request)

    def pages(self) -> dict[str, ReplicaSnapshot]:
        """Return what the pages of replicas that serve say now, and will be as old as when gateways hear of it."""
        now_s, age_s = self.events.now_s, self.spec.snapshot_age_s
        return {
            replica.id: ReplicaSnapshot(
                replica.id, age_s, replica.engine.running, replica.engine.waiting, replica.engine.kv_usage
            )
            for replica in self.replicas.values()
            if replica.is_ready(now_s) and not replica.is_down
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
            self._arrive(request)
            self._next(number + 1, spread)

        self.events.at(at_s, come)

    def _arrive(self, request: Request) -> None:
        front = self.fronts[request.gateway]
        front.arrive(request, self.events.now_s)
        if front.waiting:
            self._sweep_soon()
        if self._pass is not None and self._pass.at_s > self.events.now_s + self.spec.pass_s:
            self._pass.call_off()
            self._pass = self.events.after(0.0, self._decide)

    def _ended(self, request: Request) -> None:
        if request.arrival.is_line and self.batch is not None:
            self.batch.ended(request)
        else:
            self.left -= 1

    def schedule(self, replica: Replica) -> None:
        """Let an engine go on when it is time."""
        event, next_s = replica.event, replica.engine.next_s if replica.works else inf
        if event is not None and event.act is not None:
            if event.at_s == next_s:
                return
            event.call_off()
        replica.event = self.events.at(next_s, lambda: self._advance(replica)) if next_s < inf else None

    def _advance(self, replica: Replica) -> None:
        now_s = self.events.now_s
        begun, done = replica.engine.advance(now_s)
        for task in begun:
            if isinstance(task.what, Request) and self.tasks.get(task.what) is task:
                self._began(task.what, task, now_s)
        for task in done:
            # One that was taken off in its last iteration is nobody's.
            if self.tasks.get(task.what) is not task:
                continue
            del self.tasks[task.what]
            if isinstance(task.what, Aside):
                task.what.ended(None)
            elif isinstance(task.what, Request):
                self._done(task.what, task, now_s)
        self.schedule(replica)
        if replica.is_draining and not replica.engine.running and not replica.engine.waiting:
            self.forget(replica)

    def _began(self, request: Request, task: Task, now_s: float) -> None:
        front = self.fronts[request.gateway]
        if request.told:
            if (marks := self.growing.get(request)) is not None:
                for length in marks.passed(request.told + 1, now_s):
                    front.grew(request, length)
        else:
            request.first_s, request.cached_tokens = now_s, task.cached_tokens
        front.began(request, now_s)

    def _done(self, request: Request, task: Task, now_s: float) -> None:
        request.done_s = now_s
        request.preemptions += task.preemptions
        self.growing.pop(request, None)
        self.fronts[request.gateway].done(request, now_s)
        self._ended(request)

    def _sweep_soon(self) -> None:
        if not self._sweeps:
            self._sweeps = True
            self.events.at((self.events.now_s // SWEEP_S + 1) * SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeps = False
        now_s = self.events.now_s
        for request, marks in self.growing.items():
            if (task := self.tasks.get(request)) is not None:
                for length in marks.due(request.told + self.generated(task), now_s):
                    self.fronts[request.gateway].grew(request, length)
        if self.breakage is not None:
            self.breakage.sweep(now_s)
        for front in self.fronts:
            front.sweep(now_s)
            if self.breakage is not None and isinstance(front, Gateway):
                front.roll(now_s)
        has_more = self.growing or any(front.waiting for front in self.fronts)
        if has_more or (self.breakage is not None and self.left):
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
        now_s = self.events.now_s
        shares = {release.version_id: release.replicas for release in self.spec.releases}
        if self.scaler is not None:
            shares = self._sizes(self.scaler, now_s)
        if self.keeper is not None:
            self.keeper.tend(now_s, shares)
        else:
            for release in self.spec.releases:
                self._resize(release, shares[release.version_id], now_s)
        if self.left:
            pause_s = self.spec.idle_pass_s if self.spec.idle_pass_s and self._is_quiet() else self.spec.pass_s
            self._pass = self.events.after(pause_s, self._decide)

    def _is_quiet(self) -> bool:
        """Say whether nothing will change by itself but what takes minutes: windows and gates have forgotten all."""
        now_s = self.events.now_s
        gateways = [front for front in self.fronts if isinstance(front, Gateway)]
        is_still = all(not one.in_flight and now_s - one.last_request_s > QUIET_S for one in gateways)
        return is_still and all(one.ready_s <= now_s for one in self.replicas.values())

    def _sizes(self, scaler: Scaler, now_s: float) -> dict[str, int]:
        live = [replica for replica in self.replicas.values() if not replica.is_draining]
        gateways = [front for front in self.fronts if isinstance(front, Gateway)]
        wanted = scaler.decide(View(now_s, gateways, live, slots=self._slots(live)))
        for _, speed in scaler.speeds.known():
            for gateway in gateways:
                gateway.expect(speed, self._slots(live))
        return dict(divide(wanted, {release.version_id: release.weight for release in self.spec.releases}))

    def _slots(self, live: Sequence[Replica]) -> int:
        # Of one that sleeps its version says them, as the controller has it.
        releases = [replica.release for replica in live] or self.spec.releases
        return self.spec.slots or max(release.engine.max_num_seqs for release in releases)

    def _resize(self, release: ReleaseSpec, wanted: int, now_s: float) -> None:
        live = [one for one in self.replicas.values() if one.release is release and not one.is_draining]
        for _ in range(wanted - len(live)):
            self.begin(release, load_s=self.spec.load_s)
        if wanted >= len(live):
            return
        # Those with the least to do go, the youngest of them first; none that still loads.
        ready = [one for one in live if one.is_ready(now_s)]
        ready.sort(key=lambda one: (one.engine.running + one.engine.waiting, -one.number))
        for replica in ready[: len(live) - wanted]:
            replica.is_draining = True
        self.tell()
        for replica in ready[: len(live) - wanted]:
            if not replica.engine.running and not replica.engine.waiting:
                self.forget(replica)

    def begin(self, release: ReleaseSpec, *, load_s: float, replica_id: str = "") -> Replica:
        """Start a replica; it serves when it has loaded, or, of one with an id, when somebody says so."""
        now_s, number = self.events.now_s, len(self.replicas) + len(self.gone)
        ready_s = inf if replica_id else now_s + load_s
        replica = Replica(
            replica_id or f"rep_{number:03d}", number, release, Engine(release.engine), began_s=now_s, ready_s=ready_s
        )
        self.replicas[replica.id] = replica
        if load_s and not replica_id:
            self.events.after(load_s, self.tell)
        return replica

    def forget(self, replica: Replica) -> None:
        """Take a replica away that nothing runs on."""
        replica.gone_s = self.events.now_s
        self.gone.append(self.replicas.pop(replica.id))
        self.tell()

    def tell(self) -> None:
        """Tell gateways which replicas there are."""
        now_s = self.events.now_s
        for number, front in enumerate(self.fronts):
            front.take(table_of(self.spec, self.replicas.values(), gateway=number, now_s=now_s), now_s)
            if front.waiting:
                self._sweep_soon()
