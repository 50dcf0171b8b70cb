"""A gateway of a simulated world: the production dispatcher, output predictor and tallies, driven as the live one does.

What ``gateway/flow.py`` does around its dispatcher is done here in the same
order; everything that decides is ``policy/``. What happens when engines fail
is in ``recovery.py``. Left out is what the request level has no use for: keys
and limits, and sockets.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Protocol

from modelyard.domain.demand import EndpointDemand, Report
from modelyard.domain.routing_table import ReplicaRoute, ReplicaSnapshot
from modelyard.policy import making_way, waits
from modelyard.policy.admission import OUTPUT_LEFT_MIN, OutputPredictor
from modelyard.policy.breaker import Failure
from modelyard.policy.dispatch import Dispatcher, DispatchRules, Verdict
from modelyard.policy.engine_model import Speed
from modelyard.policy.job import Job
from modelyard.policy.queueing import BATCH_BAND
from modelyard.policy.replica_load import ReplicaLoad
from modelyard.policy.routing import EngineModel
from modelyard.policy.suspects import Suspects
from modelyard.policy.tallies import ReleaseTally
from modelyard.sim import recovery
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.tasks import Aside

QUIET_S = 12.0
"""As ``gateway/catalog.py``: after so long without a request windows are moved on by the next."""
ENDPOINT_ID = "ep_sim"
PROBE_TOKENS = 1
"""Of a prompt that says hello."""
SWEEP_S = 0.25
"""As often as a gateway looks at deadlines."""
_MEAN_WEIGHT = 0.05
MARK_TOKENS = 64
_MARK_S = 1.0

Table = Sequence[tuple[str, int, int, Sequence[tuple[ReplicaRoute, int]]]]
"""``(version_id, weight, shadow, [(replica, slots)])``, as ``Dispatcher.update`` takes it."""


class Floor(Protocol):
    """What a gateway can do: send a request to an engine, take it off again, refuse it, or ask an engine for itself."""

    @property
    def now_s(self) -> float:
        """The time."""
        ...

    def start(self, request: Request, replica_id: str, version_id: str) -> None:
        """Send a request to a replica."""
        ...

    def refuse(self, request: Request, why: str) -> None:
        """Answer that it will not be served."""
        ...

    def stop(self, request: Request) -> None:
        """Take a request off its engine."""
        ...

    def on(self, replica_id: str) -> list[Request]:
        """Return the requests that are on a replica's engine."""
        ...

    def youngest(self, gateway: int) -> Iterator[Request]:
        """Yield a gateway's requests that are on engines, the last to come first."""
        ...

    def tokens(self, request: Request) -> int:
        """Return how many tokens its engine has generated for a request."""
        ...

    def ask(self, replica_id: str, prompt_tokens: int, output_tokens: int, aside: Aside) -> None:
        """Ask an engine something that answers no client; ``aside`` is told how it ends, later."""
        ...


class Front(Protocol):
    """Whoever stands before the replicas: the production gateway, or another that it is compared with."""

    @property
    def waiting(self) -> int:
        """How many wait in it."""
        ...

    def take(self, table: Table, now_s: float) -> None:
        """Take over which replicas there are."""
        ...

    def arrive(self, request: Request, now_s: float) -> None:
        """Take a request that comes now."""
        ...

    def began(self, request: Request, now_s: float) -> None:
        """Note a first token."""
        ...

    def grew(self, request: Request, tokens: int) -> None:
        """Note how long an answer is by now."""
        ...

    def done(self, request: Request, now_s: float) -> None:
        """Note the end of an answer."""
        ...

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot]) -> None:
        """Take what engines' metrics pages said."""
        ...

    def sweep(self, now_s: float) -> None:
        """Look at deadlines; called a few times a second while anybody waits."""
        ...


@dataclass(slots=True)
class Marks:
    """When the growth of a stream is noted: every ``gateway.mark_tokens`` and ``gateway.mark_s``, here by the sweep."""

    noted_s: float
    noted: int = 0
    next_tokens: int = 1 + MARK_TOKENS

    def due(self, tokens: int, now_s: float) -> Iterator[int]:
        """Yield the lengths to note of a stream of ``tokens``."""
        yield from self.passed(tokens, now_s)
        if tokens != self.noted and now_s - self.noted_s >= _MARK_S:
            yield self._note(tokens, now_s)

    def passed(self, tokens: int, now_s: float) -> Iterator[int]:
        """Yield those of them that are noted as soon as the token comes."""
        while tokens >= self.next_tokens:
            yield self._note(self.next_tokens, now_s)

    def _note(self, tokens: int, now_s: float) -> int:
        self.noted_s, self.noted, self.next_tokens = now_s, tokens, tokens + MARK_TOKENS
        return tokens


@dataclass(slots=True, eq=False)
class Gateway:
    """One gateway, or worker of one. ``eta_s`` is what a load still takes, None unknown."""

    number: int
    floor: Floor
    rules: DispatchRules
    chance: random.Random
    queue_wait_s: float = 30.0
    load_wait_s: float = 600.0
    hash_tokens: int = 0
    """Tokens that a hash of a request's ``blocks`` stands for; 0: prefixes are not looked at."""
    eta_s: float | None = None
    first_token_s: float = 120.0
    """From the dispatch to the first token, at most: as ``gateway.first_token_timeout_s``."""
    token_s: float = 30.0
    """Between two tokens, at most: as ``gateway.token_timeout_s``."""
    total_s: float = 120.0
    """All of a request that an engine fails, as ``gateway.total_timeout_s``; nothing is cut off that goes on."""
    outputs: OutputPredictor = field(default_factory=OutputPredictor)
    tallies: dict[str, ReleaseTally] = field(default_factory=dict)
    in_flight: int = 0
    arrivals: int = 0
    batch_arrivals: int = 0
    last_request_s: float = 0.0
    mean_s: float = waits.ANSWER_S
    has_answered: bool = False
    suspects: Suspects = field(default_factory=Suspects)
    lines: dict[Request, None] = field(default_factory=dict)
    """Lines of batches that are on a replica, the youngest last."""
    retried: int = 0
    """Attempts that failed and went on elsewhere."""
    made_way: int = 0
    """Times that a line gave up its slot."""
    shadowed: int = 0
    """Copies that a shadow release answered."""
    dispatcher: Dispatcher[Request] = field(init=False)

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(ENDPOINT_ID, rules=self.rules, deliver=self._deliver, chance=self.chance.random)
        if self.hash_tokens:
            self.dispatcher.model = EngineModel(block_tokens=self.hash_tokens)

    @property
    def waiting(self) -> int:
        """How many wait in its line."""
        return len(self.dispatcher.line)

    def take(self, table: Table, now_s: float) -> None:
        """Take over which replicas there are."""
        self.dispatcher.update(table, now_s=now_s)

    def job_of(self, arrival: Arrival) -> Job:
        """Return what policies may know of a request: all but how long its answer will be."""
        output_max = arrival.output_max or arrival.output_tokens
        job = Job(arrival.tenant_id, arrival.weight, arrival.band, arrival.prompt_tokens, output_max, output_max)
        job.output_tokens = self.outputs.predict(arrival.tenant_id, output_max)
        job.session = arrival.session
        job.is_seen = arrival.is_stream
        if self.hash_tokens and self.dispatcher.is_crowd:
            job.prefix = arrival.blocks
        return job

    def arrive(self, request: Request, now_s: float) -> None:
        """Take a request that comes now."""
        request.job = self.job_of(request.arrival)
        request.on_turned = self._turned_away
        self.in_flight += 1
        self.arrivals += 1
        self.batch_arrivals += request.arrival.is_line
        if now_s - self.last_request_s > QUIET_S:
            self.dispatcher.wake(now_s)
        self.last_request_s = now_s
        is_cold = self.dispatcher.is_cold_for(request.job)
        wait_s = self.load_wait_s if is_cold else self.queue_wait_s
        verdict = self.dispatcher.arrive(request, now_s=now_s, deadline_s=now_s + wait_s)
        if isinstance(verdict, ReplicaLoad):
            self.send(request, verdict)
        elif verdict is not Verdict.WAIT:
            self._refuse(request, verdict.name.lower())
        else:
            self._make_way(request, now_s)

    def began(self, request: Request, now_s: float) -> None:
        """Note a first token."""
        assert request.replica is not None, "an answer of nobody's"
        if not request.arrival.is_stream:
            return  # it comes whole
        self.dispatcher.began(request.replica, request.job, now_s=now_s)
        self.dispatcher.succeeded(request.replica)

    def grew(self, request: Request, tokens: int) -> None:
        """Note how long an answer is by now."""
        if request.replica is not None:
            self.dispatcher.grew(request.replica, request.job, tokens)

    def done(self, request: Request, now_s: float) -> None:
        """Note the end of an answer."""
        replica, request.replica = request.replica, None
        assert replica is not None, "ended twice"
        arrival = request.arrival
        seconds, service_s = now_s - arrival.at_s, now_s - request.dispatched_s
        lost_s = request.waited_s - request.queued_s if request.gave_way else 0.0
        self.tally(request.version_id).ended(
            200,
            service_s if arrival.is_line else seconds - lost_s,
            request.ttft_s - lost_s if arrival.is_stream else None,
            service_s,
            arrival.prompt_tokens,
            arrival.output_tokens,
            now_s,
        )
        if not request.told:
            # Of an answer in two parts nobody knows exactly what it used.
            self.mean_s += _MEAN_WEIGHT * (seconds - self.mean_s)
            self.has_answered = True
            self.outputs.observe(arrival.tenant_id, arrival.output_tokens)
            if self.suspects.has_any:
                self.suspects.answered(request.number)
        self.lines.pop(request, None)
        self.in_flight -= 1
        self.last_request_s = now_s
        self.dispatcher.finish(
            replica,
            request.job,
            now_s=now_s,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
        )

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot]) -> None:
        """Take what engines' metrics pages said."""
        self.dispatcher.observe(snapshots)

    def sweep(self, now_s: float) -> None:
        """Look at deadlines, and at replicas that were full."""
        dispatcher = self.dispatcher
        dispatcher.relieve(now_s=now_s)
        if dispatcher.line:
            for request in dispatcher.line.expired(now_s):
                # The one before it may have been all that it waited for.
                if request in dispatcher.line:
                    self.in_flight -= 1
                    self.floor.refuse(request, "late")
                    dispatcher.leave(request, now_s=now_s)
            dispatcher.spill(now_s=now_s)
        if self.suspects.has_any:
            self.suspects.forget_old(now_s)

    # --- when engines fail ---

    def roll(self, now_s: float) -> None:
        """Move windows on, and ask those who pause after a failure for a token; called by each sweep where any fail."""
        for replica in self.dispatcher.probes_due(now_s):
            replica.probe_began()
            self.floor.ask(replica.route.id, PROBE_TOKENS, 1, Aside(partial(self._probed, replica)))

    def lost(self, request: Request, now_s: float) -> None:
        """Note that a request's engine is gone."""
        recovery.lost(self, request, now_s)

    def unreachable(self, request: Request, now_s: float) -> None:
        """Note that a request's engine takes no connection."""
        recovery.not_reached(self, request, now_s)

    def silent(self, request: Request, now_s: float) -> None:
        """Note that a request's engine said nothing in time."""
        if now_s >= request.until_s:
            recovery.fail(self, request, "long", now_s)
        else:
            recovery.silent(self, request, now_s)

    def silent_from_s(self, request: Request, heard_s: float) -> float:
        """Return when an engine has been silent for too long that was last heard at ``heard_s``; infinite: never."""
        if not request.arrival.is_stream:
            return request.until_s
        silent_s = heard_s + self.token_s if heard_s < inf else request.dispatched_s + self.first_token_s
        return min(silent_s, request.until_s)

    def _probed(self, replica: ReplicaLoad, failure: Failure | None) -> None:
        self.dispatcher.probed(
            replica,
            is_good=failure is None,
            kind=failure or Failure.UNREACHABLE,
            reason="" if failure is None else failure.name.lower(),
            now_s=self.floor.now_s,
        )

    # --- what it tells ---

    def wait_s(self, now_s: float) -> float:
        """Predict how long a request that came now would wait, as it is reported to the controller."""
        return waits.wait_s(
            self.dispatcher, now_s=now_s, in_flight=self.in_flight, mean_s=self.mean_s, eta_s=self.eta_s
        )

    def expect(self, speed: Speed, slots: int) -> None:
        """Take what the controller learned of the engines, until they have answered here."""
        self.dispatcher.expect(speed)
        if not self.has_answered:
            self.mean_s = waits.answer_s(speed, slots)

    def report(self, now_s: float) -> Report:
        """Return what the controller is told, as ``gateway/catalog.py`` does."""
        queued = self.waiting
        idle_s = 0.0 if queued or self.in_flight else now_s - self.last_request_s
        demand = EndpointDemand(
            ENDPOINT_ID,
            queued,
            self.in_flight,
            idle_s,
            self.arrivals,
            self.wait_s(now_s),
            self.dispatcher.line.depths[BATCH_BAND],
            len(self.lines),
            self.batch_arrivals,
        )
        counts = [tally.counts(ENDPOINT_ID, version_id) for version_id, tally in self.tallies.items()]
        return Report([demand], [], "sim", 1, releases=counts)

    def needs_marks(self, request: Request) -> bool:
        """Say whether its memory will be counted anew as its answer grows beyond what was predicted."""
        if not request.arrival.is_stream:
            return False
        return request.arrival.output_tokens > request.job.output_tokens - OUTPUT_LEFT_MIN

    def tally(self, version_id: str) -> ReleaseTally:
        """Return what was counted of a release."""
        tally = self.tallies.get(version_id)
        if tally is None:
            tally = self.tallies[version_id] = ReleaseTally()
        return tally

    def send(self, request: Request, replica: ReplicaLoad) -> None:
        """Send a request to a replica, whose slot is taken."""
        request.replica = replica
        if request.until_s == inf:
            request.until_s = self.floor.now_s + self.total_s
            request.queued_s = self.floor.now_s - request.arrival.at_s
        if request.arrival.is_line:
            self.lines[request] = None
        if self.dispatcher.has_shadow and request.dispatched_s == inf:
            self._shadow(request)
        self.floor.start(request, replica.route.id, replica.version_id)

    def _refuse(self, request: Request, why: str) -> None:
        self.in_flight -= 1
        self.floor.refuse(request, why)

    def _shadow(self, request: Request) -> None:
        """Send a copy to each shadow release that wants this one and has room."""
        arrival, dispatcher = request.arrival, self.dispatcher
        for replica, copy in dispatcher.shadows(request.job, now_s=self.floor.now_s):

            def ended(failure: Failure | None, replica: ReplicaLoad = replica, copy: Job = copy) -> None:
                self.shadowed += failure is None
                dispatcher.drop_shadow(replica, copy, now_s=self.floor.now_s)

            self.floor.ask(replica.route.id, arrival.prompt_tokens, arrival.output_tokens, Aside(ended))

    def _make_way(self, request: Request, now_s: float) -> None:
        """Let a line of a batch, or whoever has more than its share, give up a slot for one who has just joined."""
        if self.lines and request.job.band < BATCH_BAND:
            making_way.make_way(
                lambda: reversed(self.lines),
                waits=lambda: request in self.dispatcher.line,
                can_stop=lambda line: line.replica is not None and not line.replica.is_draining,
                cut=self._step_aside,
            )
        if request not in self.dispatcher.line.light:
            return
        deadline_s = now_s + max(self.queue_wait_s, self.total_s)
        traded = making_way.trade(
            request,
            self.dispatcher,
            self.floor.youngest(self.number),
            can_stop=lambda one: now_s - one.arrival.at_s < self.queue_wait_s and self._can_stop(one),
            now_s=now_s,
            deadline_s=deadline_s,
        )
        if traded is not None:
            self._begin_anew(traded[0], deadline_s)
            # It may have held more than who came needs.
            self.dispatcher.serve(now_s=now_s)

    def _can_stop(self, request: Request) -> bool:
        """Say whether nobody has seen any of an answer."""
        if request.replica is None or request.replica.is_draining or request.told:
            return False
        return not request.arrival.is_stream or not self.floor.tokens(request)

    def _begin_anew(self, request: Request, deadline_s: float) -> None:
        """Take a request off its engine, to begin anew by ``deadline_s`` with all of its time."""
        self.lines.pop(request, None)
        request.gave_way += 1
        self.made_way += 1
        self.floor.stop(request)
        request.replica = None
        request.until_s = deadline_s + self.total_s

    def _step_aside(self, line: Request) -> None:
        """Take a line of a batch off its replica; it stands in line again, to begin anew."""
        replica, now_s = line.replica, self.floor.now_s
        assert replica is not None, "it was on one"
        deadline_s = now_s + self.queue_wait_s
        self._begin_anew(line, deadline_s)
        verdict = self.dispatcher.step_aside(line, replica, now_s=now_s, deadline_s=deadline_s)
        if isinstance(verdict, ReplicaLoad):
            self.send(line, verdict)
        elif verdict is not Verdict.WAIT:
            self._refuse(line, verdict.name.lower())

    def _turned_away(self, request: Request, verdict: Verdict) -> None:
        self._refuse(request, verdict.name.lower())

    def _deliver(self, request: Request, replica: ReplicaLoad) -> bool:
        self.send(request, replica)
        return True
