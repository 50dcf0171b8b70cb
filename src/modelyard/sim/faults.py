"""What fails in a simulated world, and when: engines that crash, and engines that hang.

A crash takes the process: connections break at once, and later ones are
refused. A hang is worse: connections stay, health pages are answered, and no
token comes any more. What follows is the production's: ``recovery.py`` for
requests, ``keeper.py`` for replicas.
"""

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from math import inf
from random import Random
from typing import TYPE_CHECKING

import msgspec

from modelyard.policy.breaker import Failure
from modelyard.sim.engine import Engine
from modelyard.sim.gateway import SWEEP_S, Gateway
from modelyard.sim.requests import Request
from modelyard.sim.tasks import Aside

if TYPE_CHECKING:
    from modelyard.sim.world import Replica, World

HOUR_S = 3600.0
PROBE_TIMEOUT_S = 10.0
"""As ``gateway/side_requests.py``: what a replica that pauses may take for the token it is asked for."""


class Kind(StrEnum):
    """How an engine fails."""

    CRASH = "crash"
    HANG = "hang"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An engine fails at ``at_s``: of the replicas that serve then, in order of their start, the ``place``-th (counted
    round).

    ``back_s``: after so long a crashed one answers again at its old address, as under a supervisor of its own;
    infinite: it does not.
    """

    at_s: float
    kind: Kind = Kind.CRASH
    place: int = 0
    back_s: float = inf


class FaultRates(msgspec.Struct, frozen=True, kw_only=True):
    """How often an engine fails, per hour of one that serves."""

    crashes_h: float = 0.0
    hangs_h: float = 0.0


def draw(rates: FaultRates, *, replicas: int, seconds: float, chance: Random) -> tuple[Fault, ...]:
    """Return what fails within ``seconds`` where some ``replicas`` serve, at moments by chance (Poisson)."""
    faults = []
    for kind, rate_h in ((Kind.CRASH, rates.crashes_h), (Kind.HANG, rates.hangs_h)):
        each_s = HOUR_S / (rate_h * replicas) if rate_h else inf
        at_s = chance.expovariate(1.0) * each_s
        while at_s < seconds:
            faults.append(Fault(at_s=at_s, kind=kind, place=chance.randrange(1_000_000)))
            at_s += chance.expovariate(1.0) * each_s
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


class Breakage:
    """Carries faults out in a world, and says what is silent because of them."""

    def __init__(self, world: "World", faults: Sequence[Fault]) -> None:
        self._world = world
        self.happened: list[Fault] = []
        self.dead: list[Engine] = []
        """Engines whose process is gone, for their totals."""
        for fault in faults:
            world.events.at(fault.at_s, partial(self._happen, fault))

    def _happen(self, fault: Fault) -> None:
        now_s = self._world.events.now_s
        serving = [one for one in self._world.replicas.values() if one.ready_s <= now_s and one.works]
        if not serving:
            return
        self.happened.append(fault)
        replica = serving[fault.place % len(serving)]
        if fault.kind is Kind.HANG:
            self.hang(replica)
            return
        self.crash(replica)
        if fault.back_s < inf:
            self._world.events.after(fault.back_s, lambda: self._back(replica))

    def hang(self, replica: "Replica") -> None:
        """Let an engine compute nothing any more."""
        replica.hung_s = self._world.events.now_s
        self._world.schedule(replica)

    def crash(self, replica: "Replica") -> None:
        """Take an engine's process, with all that is on it."""
        world = self._world
        now_s = world.events.now_s
        tasks = [task for task in world.tasks.values() if task.replica_id == replica.id]
        reached = [(task, world.generated(task)) for task in tasks]
        replica.is_down = True
        replica.engine.halt(min(now_s, replica.hung_s))
        self.dead.append(replica.engine)
        replica.engine = Engine(replica.release.engine)
        world.schedule(replica)
        for task, tokens in reached:
            world.drop(task, tokens)
            if isinstance(task.what, Aside):
                task.what.ended(Failure.UNREACHABLE)
        for task, _ in reached:
            if isinstance(task.what, Request):
                self._gateway(task.what).lost(task.what, now_s)

    def _back(self, replica: "Replica") -> None:
        if self._world.replicas.get(replica.id) is replica:
            replica.is_down = False

    def refused(self, request: Request) -> None:
        """Tell a gateway, in a moment, that a request's replica takes no connection."""
        events = self._world.events
        events.after(0.0, lambda: self._gateway(request).unreachable(request, events.now_s))

    def sweep(self, now_s: float) -> None:
        """Give up, for their gateways, what got nothing from a hung engine for too long."""
        world = self._world
        for replica in [one for one in world.replicas.values() if one.hung_s < inf]:
            for task in [task for task in world.tasks.values() if task.replica_id == replica.id]:
                if world.tasks.get(task.what) is not task:
                    continue  # it left with another
                if isinstance(task.what, Aside):
                    if now_s - task.come_s >= PROBE_TIMEOUT_S:
                        world.drop(task, 0)
                        task.what.ended(Failure.SILENT)
                    continue
                request = task.what
                assert isinstance(request, Request), "a task of somebody else"
                gateway = self._gateway(request)
                # The sweep after the last token saw that it went on.
                heard_s = (replica.hung_s // SWEEP_S + 1) * SWEEP_S if task.first_s < inf else inf
                if now_s >= gateway.silent_from_s(request, heard_s):
                    world.drop(task, world.generated(task))
                    gateway.silent(request, now_s)

    def _gateway(self, request: Request) -> Gateway:
        front = self._world.fronts[request.gateway]
        assert isinstance(front, Gateway), "only the production gateway knows what to do when engines fail"
        return front
