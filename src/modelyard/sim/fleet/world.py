"""A fleet of endpoints in virtual time: ticks of some seconds, every decision by the production's policies.

A tick: what is due happens (loads end, nodes go and come back) → requests come → lines and replicas serve them
(``queue.py``) → what is seen of every deployment is compared with the bounds of its last decision
(``policy/steadiness.py``), and where they do not hold any more ``policy/scaling.py`` decides anew → replicas start
(``policy/packing.py``) and drain → batches fill what is idle → all is counted.
"""

import random
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from modelyard.domain.endpoints import Autoscale, IdleTime, Scaling
from modelyard.policy import scaling
from modelyard.policy.defragment import EVERY_S, PLACES
from modelyard.policy.engine_model import Capacity
from modelyard.policy.gates import latency_limit_s
from modelyard.policy.idleness import Gaps
from modelyard.policy.scaling import Decision, Memory, Seen
from modelyard.policy.steadiness import Steady, passed, steady
from modelyard.sim.fleet.arrivals import Arrivals
from modelyard.sim.fleet.backfill import Backfill
from modelyard.sim.fleet.columns import Columns
from modelyard.sim.fleet.events import Events
from modelyard.sim.fleet.habits import gaps_before
from modelyard.sim.fleet.lines import Lines
from modelyard.sim.fleet.moves import Moves
from modelyard.sim.fleet.pools import LOOK_S, Pools
from modelyard.sim.fleet.population import Floats, Population
from modelyard.sim.fleet.prewarm import LEARN_DAYS, Prewarm
from modelyard.sim.fleet.queue import Line, Replicas, first_token_s, step, wait_within
from modelyard.sim.fleet.recorder import Recorder
from modelyard.sim.fleet.room import Room
from modelyard.sim.fleet.scenario import DAY_S, Scenario
from modelyard.sim.fleet.stock import LIVE, Replica, State, Stock
from modelyard.sim.fleet.tally import Outcome
from modelyard.sim.fleet.turns import Turns

DRAIN_S = 60.0
"""Longest that a replica that must go finishes what it has."""
SHARING_S = 60.0
"""How much those who share accelerators slow one another down is worked out this often."""
SLOWED_MOST = 4.0
RETRY_S = 10.0
"""What found no room is tried again."""
_NONE = Gaps()


class Sizer(Protocol):
    """What decides sizes: the production's, or another one to compare it with."""

    def decide(self, spec: Scaling, memory: Memory | None, seen: Seen, rules: Autoscale) -> Decision:
        """Return the size to have."""
        ...

    def steady(self, spec: Scaling, memory: Memory, seen: Seen, rules: Autoscale) -> Steady | None:
        """Return for how long that holds."""
        ...


class Production:
    """``policy/scaling.py``."""

    decide = staticmethod(scaling.decide)
    steady = staticmethod(steady)


class World:
    """One run of a scenario; ``run`` returns what it came to."""

    def __init__(
        self,
        scenario: Scenario,
        population: Population,
        chance: random.Random,
        *,
        sizer: Sizer | None = None,
        prewarm: Prewarm | None = None,
    ) -> None:
        measures = scenario.measures
        self.scenario = scenario
        self.population = population
        self.sizer: Sizer = sizer or Production()
        self.rules = scenario.rules
        self.spec = Scaling(
            min_replicas=1,
            max_replicas=scenario.replicas_most,
            scale_to_zero=measures.scale_to_zero,
            idle_s=scenario.idle_s,
        )
        asleep = msgspec.structs.replace(self.spec, idle_s=scenario.asleep_s)
        self.specs = [
            asleep if measures.sleeping and one.profile.is_llm else self.spec for one in population.deployments
        ]
        self.begin_s = scenario.start_day * DAY_S - scenario.warmup_s
        self.columns = Columns(population, scenario.tick_s)
        self.lines = Lines()
        seeds = [chance.getrandbits(63) for _ in range(4)]
        self._luck = np.random.Generator(np.random.PCG64(seeds[3]))
        self.arrivals = Arrivals(population, seed=seeds[0], begin_s=self.begin_s, tick_s=scenario.tick_s)
        profiles = [one.profile for one in population.deployments]
        self.stock = Stock.of(scenario.nodes, scenario.loading, profiles, random.Random(seeds[1]))
        self.events = Events(scenario.faults, self.stock, random.Random(seeds[2]), self.begin_s)
        self.backfill = Backfill(scenario, population)
        self.prewarm = prewarm
        self.turns = Turns(self.columns.number) if measures.sleeping else None
        self.pools = Pools(population) if measures.warm_pools else None
        self.moves: Moves | None = None
        if measures.consolidating:
            self.moves, self.stock.places = Moves(), PLACES
        self.recorder = Recorder(scenario, population)
        self.memories: list[Memory | None] = [None] * self.columns.number
        self.targets = [0] * self.columns.number
        self.kinds = {at: one.profile.kind for at, one in enumerate(population.deployments)}
        self.room = Room()
        self.short: set[int] = set()
        """Deployments with fewer replicas than they should have."""
        self.expected = [0] * self.columns.number
        self.reasons = [""] * self.columns.number
        self.gaps: list[Gaps] | None = None
        if measures.scale_to_zero and scenario.rules.idle is not IdleTime.FIXED:
            self.gaps = gaps_before(population, begin_s=self.begin_s, days=LEARN_DAYS, seed=chance.getrandbits(63))
        # An adapter's line is its own, so that a host has as many places as guests.
        self._places = [scenario.queue_most * scenario.gateways * max(one.guests, 1) for one in population.deployments]

    def run(self, watch: Callable[[float], None] | None = None) -> Outcome:
        """Let the time of the scenario pass; ``watch`` is told the hours now and then."""
        scenario = self.scenario
        ticks = round((scenario.hours * 3600 + scenario.warmup_s) / scenario.tick_s)
        for tick in range(ticks):
            self.tick(tick)
            if watch is not None and tick % 1800 == 0:
                watch(tick * scenario.tick_s / 3600)
        return self.recorder.outcome(self)

    def tick(self, tick: int) -> None:
        """Let one tick pass."""
        now_s = self.begin_s + (tick + 1) * self.scenario.tick_s
        columns = self.columns
        self.recorder.is_counting = tick * self.scenario.tick_s >= self.scenario.warmup_s
        self._happen(now_s)
        arrived = self._arrive(tick, now_s)
        self._serve(arrived, now_s)
        if self.prewarm is not None:
            self.prewarm.look(self, now_s)
        asked = columns.to_ask(now_s, latency_limit_s(self.rules))
        self.recorder.asked(len(asked), columns.number)
        for at in asked.tolist():
            self._decide(at, now_s)
        if self.turns is not None:
            self.turns.look(self, now_s)
        if self.pools is not None and self._is_due(tick, LOOK_S):
            self.pools.look(self, now_s)
        if self.moves is not None and self._is_due(tick, EVERY_S):
            self.moves.look(self, now_s)
        if self.short and self._is_due(tick, RETRY_S):
            for at in sorted(self.short):
                self.fill(at, now_s)
        if self._is_due(tick, SHARING_S):
            self._share()
        self.backfill.fill(columns, self.recorder)
        self.recorder.count(self, now_s)

    def _is_due(self, tick: int, every_s: float) -> bool:
        """Say whether what is done every so often is done in this tick."""
        return tick % max(1, round(every_s / self.scenario.tick_s)) == 0

    # --- requests ------------------------------------------------------------------------

    def _arrive(self, tick: int, now_s: float) -> Floats:
        """Return the requests of each deployment in this tick."""
        counts = self.arrivals.at(tick)
        where = self.population.deployment[self.arrivals.active]
        arrived: Floats = np.bincount(where, weights=counts, minlength=self.columns.number).astype(np.float64)
        cold = (self.columns.ready == 0) & (self.columns.waiting == 0) & (arrived > 0)
        if cold.any():
            came = np.bincount(where, weights=counts > 0, minlength=self.columns.number)
            self.recorder.activated(float(came[cold & (self.columns.there == 0)].sum()))
            self.recorder.woken(float(came[cold & (self.columns.there > 0)].sum()))
        if self.prewarm is not None:
            self.prewarm.count(self, arrived, now_s)
        return arrived

    def _serve(self, arrived: Floats, now_s: float) -> None:
        columns, tick_s = self.columns, self.scenario.tick_s
        columns.arrive(arrived)
        had_line = columns.waiting > 0
        done = step(
            Line(columns.running, columns.waiting, arrived),
            Replicas(columns.ready, columns.slots, columns.fixed_s, columns.shared_s),
            tick_s,
            luck=self._luck.standard_normal(columns.number),
            beside=self.backfill.beside,
        )
        columns.running, columns.waiting = done.running, done.waiting
        has_line = (done.waiting > 1e-6) | had_line
        pace = done.admitted / tick_s
        first_s = first_token_s(pace + self.backfill.pace, columns.ready, columns.prompt_s, columns.step_s)
        self._serve_lines(np.flatnonzero(has_line).tolist(), arrived, done.admitted, first_s, now_s)
        smooth = np.flatnonzero(~has_line & (done.admitted > 0))
        burst = np.ones(len(smooth))
        share, mean_s = wait_within(
            columns.rate[smooth], (columns.ready * columns.slots)[smooth], done.service_s[smooth], burst
        )
        # Whoever meets a batch that starts and ends together waits for its end, half of it on average.
        held = columns.is_static[smooth] & (columns.running[smooth] >= 1.0)
        held_s = np.where(held, done.service_s[smooth] / 2, 0.0)
        self.recorder.served(smooth, done.admitted[smooth], share, mean_s, held_s, first_s[smooth])
        worst_s = 4.0 * columns.prompt_s[smooth] + first_s[smooth] + held_s + np.where(share > 0.01, mean_s, 0.0)
        columns.ttft99_s *= np.exp(-tick_s / 60.0)
        columns.ttft99_s[smooth] = np.maximum(columns.ttft99_s[smooth], worst_s)
        columns.settle(now_s)

    def _serve_lines(
        self, waiting: list[int], arrived: Floats, admitted: Floats, first_s: Floats, now_s: float
    ) -> None:
        """Move the lines on: who came stands at the end, who is admitted leaves from the front."""
        scenario, columns, lines = self.scenario, self.columns, self.lines
        came_s = now_s - scenario.tick_s / 2
        for at in waiting:
            if arrived[at] > 0:
                lines.join(at, came_s, float(arrived[at]))
            served = lines.serve(at, float(admitted[at]))
            if served:
                waits = [(max(came_s - then_s, 0.0), number) for then_s, number in served]
                self.recorder.waited(at, waits, float(first_s[at]))
                columns.ttft99_s[at] = max(columns.ttft99_s[at], waits[0][0])
            limit_s = scenario.queue_wait_s if columns.ready[at] > 0 else scenario.load_wait_s
            gone = lines.give_up(at, now_s - limit_s) + lines.turn_away(at, self._places[at])
            if gone:
                self.recorder.turned_away(gone)
                columns.waiting[at] = max(columns.waiting[at] - gone, 0.0)

    def _share(self) -> None:
        """Let those on one accelerator share its time: each has what the others leave.

        A deployment is as slow as it is on average over its replicas.
        """
        columns, stock = self.columns, self.stock
        load = columns.rate / (np.maximum(columns.ready, 1.0) * columns.alone_requests_s)
        by_place: dict[tuple[str, int], float] = {}
        mine: list[tuple[int, tuple[str, int]]] = []
        for replica in stock.replicas.values():
            if replica.state is State.READY and replica.deployment >= 0 and columns.is_shared[replica.deployment]:
                part = replica.placement.parts[0]
                place = part.node_id, part.accelerators[0]
                by_place[place] = by_place.get(place, 0.0) + float(load[replica.deployment])
                mine.append((replica.deployment, place))
        times, number = np.zeros(columns.number), np.zeros(columns.number)
        for at, place in mine:
            others = by_place[place] - float(load[at])
            times[at] += min(1.0 / max(1.0 - others, 1e-3), SLOWED_MOST)
            number[at] += 1
        columns.slow(np.where(number > 0, times / np.maximum(number, 1.0), 1.0))
        self.recorder.shared(list(by_place.values()))

    # --- replicas ------------------------------------------------------------------------

    def _happen(self, now_s: float) -> None:
        """Let everything happen that is due."""
        for replica in self.events.loaded(now_s):
            is_moved = replica.state is State.MOVING
            replica.state, replica.since_s = State.READY, now_s
            if replica.deployment < 0:
                continue  # it waits in a warm pool
            if is_moved and self.moves is not None:
                self.moves.arrived(self, replica, now_s)
            self.changed(replica.deployment)
        for replica in self.events.drained(now_s):
            if replica.state is State.DRAINING:
                self.stock.stop(replica)
        for replica, is_warned in self.events.broken(now_s, self.columns.tick_s):
            self._lose(replica, now_s, is_warned=is_warned)

    def _lose(self, replica: Replica, now_s: float, *, is_warned: bool) -> None:
        at = replica.deployment
        if at < 0:
            self.stock.stop(replica)
            return
        if replica.state is State.READY:
            ready = self.columns.ready[at]
            if is_warned:
                self.drain(replica, now_s)
            else:
                self.recorder.cut(float(self.columns.running[at] / max(ready, 1.0)), has_others=ready > 1)
        if replica.state is not State.GONE and (not is_warned or replica.state is not State.DRAINING):
            self.stock.stop(replica)
        self.changed(at)
        self._refill(at)

    def changed(self, at: int) -> None:
        """Count the replicas of a deployment anew, and ask about it."""
        mine = self.stock.of_deployment.get(at, ())
        self.columns.ready[at] = sum(one.state is State.READY for one in mine)
        self.columns.asleep[at] = sum(one.state is State.ASLEEP for one in mine)
        self.columns.waking[at] = sum(one.state is State.WAKING for one in mine)
        self.columns.live[at] = sum(one.state in LIVE for one in mine)
        self.columns.must[at] = True

    def _refill(self, at: int) -> None:
        if self.columns.live[at] < self.targets[at]:
            self.short.add(at)

    def _decide(self, at: int, now_s: float) -> None:
        """Ask the policy about one deployment, and do what it says."""
        columns, rules = self.columns, self.rules
        seen = self.seen(at, now_s)
        memory = self.memories[at]
        if memory is not None:
            memory = passed(
                memory, rules, asked_s=float(columns.before_s[at]), now_s=now_s, every_s=self.scenario.tick_s
            )
        decision = self.sizer.decide(self.specs[at], memory, seen, rules)
        self.memories[at] = decision.memory
        self.reasons[at] = decision.reason
        columns.bound(at, self.sizer.steady(self.specs[at], decision.memory, seen, rules))
        self.targets[at] = decision.replicas
        if decision.replicas != int(columns.live[at]):
            self.fill(at, now_s)

    def seen(self, at: int, now_s: float) -> Seen:
        """Return what the policy is shown, as ``control/sizing.py`` gathers it."""
        columns = self.columns
        rate, capacity = float(columns.rate[at]), float(columns.capacity[at])
        # Who sleeps is there within seconds: it is neither missing nor loading.
        ready = int(columns.ready[at] + columns.asleep[at] + columns.waking[at])
        queued, flying = int(np.ceil(columns.waiting[at])), int(columns.flying[at])
        if not queued and not flying and columns.arrived[at] > 0:
            flying = 1  # it came and went within the tick
        is_known = rate > 1e-12
        return Seen(
            now_s=now_s,
            replicas=int(columns.live[at]),
            ready=ready,
            slots=int(columns.slots[at]),
            gateways=self.scenario.gateways,
            queued=queued,
            in_flight=flying,
            idle_s=0.0 if queued or flying else now_s - float(columns.asked_s[at]),
            is_proven=True,
            wait_s=queued / (capacity * ready) if ready else 0.0,
            utilization=min(rate / (capacity * ready), 1.0) if ready else None,
            ttft_p99_s=float(columns.ttft99_s[at]) if is_known else None,
            requests_s=rate,
            tokens_s=rate * float(columns.completion[at]),
            capacity=Capacity(capacity, capacity * float(columns.completion[at]), "its profile") if is_known else None,
            load_s=self.events.expected_load_s(self.population.deployments[at].profile),
            accelerators=int(columns.accelerators[at]),
            expected=self.expected[at],
            expected_reason="the forecast",
            gaps=_NONE if self.gaps is None else self.gaps[at],
        )

    def fill(self, at: int, now_s: float) -> None:
        """Start or drain until a deployment has as many replicas as it should."""
        target = self.targets[at]
        self.short.discard(at)
        while self.columns.live[at] < target:
            if not self._start(at, now_s):
                self.short.add(at)
                self.recorder.no_room()
                break
        for replica in list(self.stock.surplus(at, target)) if self.columns.live[at] > target else ():
            self.drain(replica, now_s)

    def _start(self, at: int, now_s: float) -> bool:
        """Start one replica, or take back one that drains; say whether there was room."""
        for one in self.stock.of_deployment.get(at, ()):
            if (
                one.state is State.DRAINING
                and self.stock.nodes[one.placement.node_id].id not in self.stock.cluster.closed
            ):
                one.state, one.since_s = State.READY, now_s
                self.changed(at)
                return True
        if self.pools is not None and self.pools.take(self, at, now_s):
            self.changed(at)
            return True
        profile, digest = self.population.deployments[at].profile, self.digest(at)
        replica = self.stock.start(at, profile, digest, now_s)
        if replica is None and not (self.moves is not None and self.moves.open(self, at, now_s)):
            for victim in self.room.make(self, at, now_s):
                self.evict(victim)
                replica = self.stock.start(at, profile, digest, now_s)
        if replica is None:
            return False
        self.room.found(at)
        self.events.load(replica, now_s)
        self.changed(at)
        self.recorder.started()
        return True

    def digest(self, at: int) -> str:
        """Return the name of a deployment's weights."""
        if self.pools is not None and at in self.pools.digests:
            return self.pools.digests[at]
        return self.population.deployments[at].name

    def evict(self, replica: Replica) -> None:
        """Stop an idle replica for somebody who waits; its deployment has one less, as ``control/flow.py`` has it."""
        at = replica.deployment
        self.stock.stop(replica)
        self.changed(at)
        self.targets[at] = int(self.columns.live[at])
        if (memory := self.memories[at]) is not None:
            self.memories[at] = msgspec.structs.replace(memory, replicas=self.targets[at])

    def drain(self, replica: Replica, now_s: float) -> None:
        at = replica.deployment
        if replica.state is not State.READY:
            self.stock.stop(replica)
        else:
            replica.state, replica.since_s = State.DRAINING, now_s
            self.events.drain(replica, now_s + self.left_s(at))
        self.changed(at)

    def left_s(self, at: int) -> float:
        """Return how long a replica that gets nothing new finishes what it has."""
        service_s = float(self.columns.fixed_s[at] + self.columns.slots[at] * self.columns.shared_s[at])
        return min(3.0 * service_s, DRAIN_S) if self.columns.flying[at] > 0 else 0.0
