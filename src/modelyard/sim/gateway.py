"""A gateway of a simulated world: the production dispatcher, output predictor and tallies, driven as the live one does.

What ``gateway/flow.py`` does around its dispatcher is done here in the same
order; everything that decides is ``policy/``. Left out is what the request
level has no use for: keys and limits, sockets, failures of engines.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from modelyard.domain.demand import EndpointDemand, Report
from modelyard.domain.routing_table import ReplicaRoute, ReplicaSnapshot
from modelyard.policy import waits
from modelyard.policy.admission import OUTPUT_LEFT_MIN, OutputPredictor
from modelyard.policy.dispatch import Dispatcher, DispatchRules, Verdict
from modelyard.policy.engine_model import Speed
from modelyard.policy.job import Job
from modelyard.policy.replica_load import ReplicaLoad
from modelyard.policy.routing import EngineModel
from modelyard.policy.tallies import ReleaseTally
from modelyard.sim.requests import Arrival, Request

QUIET_S = 12.0
"""As ``gateway/catalog.py``: after so long without a request windows are moved on by the next."""
ENDPOINT_ID = "ep_sim"
_MEAN_WEIGHT = 0.05
_MARK_TOKENS = 64
_MARK_S = 1.0

Table = Sequence[tuple[str, int, int, Sequence[tuple[ReplicaRoute, int]]]]
"""``(version_id, weight, shadow, [(replica, slots)])``, as ``Dispatcher.update`` takes it."""


class Floor(Protocol):
    """What a gateway can do: send a request to an engine, or refuse it."""

    def start(self, request: Request, replica_id: str, version_id: str) -> None:
        """Send a request to a replica."""
        ...

    def refuse(self, request: Request, why: str) -> None:
        """Answer that it will not be served."""
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
    next_tokens: int = 1 + _MARK_TOKENS

    def due(self, tokens: int, now_s: float) -> Iterator[int]:
        """Yield the lengths to note of a stream of ``tokens``."""
        while tokens >= self.next_tokens:
            yield self._note(self.next_tokens, now_s)
        if tokens != self.noted and now_s - self.noted_s >= _MARK_S:
            yield self._note(tokens, now_s)

    def _note(self, tokens: int, now_s: float) -> int:
        self.noted_s, self.noted, self.next_tokens = now_s, tokens, tokens + _MARK_TOKENS
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
    outputs: OutputPredictor = field(default_factory=OutputPredictor)
    tallies: dict[str, ReleaseTally] = field(default_factory=dict)
    in_flight: int = 0
    arrivals: int = 0
    last_request_s: float = 0.0
    mean_s: float = waits.ANSWER_S
    has_answered: bool = False
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
        if self.hash_tokens and self.dispatcher.is_crowd:
            job.prefix = arrival.blocks
        return job

    def arrive(self, request: Request, now_s: float) -> None:
        """Take a request that comes now."""
        request.job = self.job_of(request.arrival)
        request.on_turned = self._turned_away
        self.in_flight += 1
        self.arrivals += 1
        if now_s - self.last_request_s > QUIET_S:
            self.dispatcher.wake(now_s)
        self.last_request_s = now_s
        is_cold = self.dispatcher.is_cold_for(request.job)
        wait_s = self.load_wait_s if is_cold else self.queue_wait_s
        verdict = self.dispatcher.arrive(request, now_s=now_s, deadline_s=now_s + wait_s)
        if isinstance(verdict, ReplicaLoad):
            self._start(request, verdict)
        elif verdict is not Verdict.WAIT:
            self._refuse(request, verdict.name.lower())

    def began(self, request: Request, now_s: float) -> None:
        """Note a first token."""
        assert request.replica is not None, "an answer of nobody's"
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
        seconds = now_s - arrival.at_s
        tally = self.tallies.get(request.version_id)
        if tally is None:
            tally = self.tallies[request.version_id] = ReleaseTally()
        tally.ended(
            200,
            seconds,
            request.ttft_s,
            now_s - request.dispatched_s,
            arrival.prompt_tokens,
            arrival.output_tokens,
            now_s,
        )
        self.mean_s += _MEAN_WEIGHT * (seconds - self.mean_s)
        self.has_answered = True
        self.outputs.observe(arrival.tenant_id, arrival.output_tokens)
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
        if not dispatcher.line:
            return
        for request in dispatcher.line.expired(now_s):
            # The one before it may have been all that it waited for.
            if request in dispatcher.line:
                self.in_flight -= 1
                self.floor.refuse(request, "late")
                dispatcher.leave(request, now_s=now_s)
        dispatcher.spill(now_s=now_s)

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
        demand = EndpointDemand(ENDPOINT_ID, queued, self.in_flight, idle_s, self.arrivals, self.wait_s(now_s))
        counts = [tally.counts(ENDPOINT_ID, version_id) for version_id, tally in self.tallies.items()]
        return Report([demand], [], "sim", 1, releases=counts)

    def needs_marks(self, request: Request) -> bool:
        """Say whether its memory will be counted anew as its answer grows beyond what was predicted."""
        return request.arrival.output_tokens > request.job.output_tokens - OUTPUT_LEFT_MIN

    def _start(self, request: Request, replica: ReplicaLoad) -> None:
        request.replica = replica
        self.floor.start(request, replica.route.id, replica.version_id)

    def _refuse(self, request: Request, why: str) -> None:
        self.in_flight -= 1
        self.floor.refuse(request, why)

    def _turned_away(self, request: Request, verdict: Verdict) -> None:
        self._refuse(request, verdict.name.lower())

    def _deliver(self, request: Request, replica: ReplicaLoad) -> bool:
        self._start(request, replica)
        return True
