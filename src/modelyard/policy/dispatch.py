"""Before one endpoint: who may start now and where, who waits, who is refused.

A state machine without I/O. Effects leave through ``deliver(waiter, replica)``,
which says whether the waiter was still there: a slot handed to somebody who
has gone goes to the next instead of leaking. Every request ends in exactly one
of: (1) starts at once, (2) waits and is delivered, (3) waits and leaves,
(4) waits and expires, (5) is refused or displaced because the line is full.
"""

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from modelyard.domain.routing_table import ReplicaRoute, ReplicaSnapshot
from modelyard.policy import breaker
from modelyard.policy.admission import can_ever_fit
from modelyard.policy.breaker import Failure, Tolerance
from modelyard.policy.fairness import cost_of
from modelyard.policy.job import NEVER_S, Job
from modelyard.policy.prefixes import PrefixHolders
from modelyard.policy.queueing import DrainRate, WaitingLine
from modelyard.policy.replica_load import ReplicaLoad
from modelyard.policy.retries import RetryBudget
from modelyard.policy.routing import (
    CROWD,
    EngineModel,
    choose,
    is_shadowed,
    learn,
    need_tokens,
    pick_release,
    release_point,
)

__all__ = ["DispatchRules", "Dispatcher", "ReplicaLoad", "Verdict"]

HOLDER_BLOCKS_MAX = 200_000


class Waiter(Protocol):
    """Whoever stands in line."""

    @property
    def job(self) -> Job:
        """What the request needs."""
        ...

    @property
    def failed_on(self) -> "Sequence[ReplicaLoad]":
        """The replicas that it should not be sent to again."""
        ...

    def turned_away(self, verdict: "Verdict") -> None:
        """Take the news that the place in line is lost: to somebody more urgent (``FULL``), or for good (``NEVER``)."""
        ...


W = TypeVar("W", bound=Waiter)


class Verdict(enum.Enum):
    """What ``arrive`` decided when there is no replica to give."""

    WAIT = enum.auto()
    FULL = enum.auto()
    NEVER = enum.auto()
    """No replica could hold it even if it were idle."""


class DispatchRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a dispatcher; ``gateway.*`` of the configuration has the reasons."""

    places: int = 256
    bytes_max: int = 256 * 1024 * 1024
    kv_share_max: float = 0.97
    retry_share_max: float = 0.1
    tolerance: Tolerance = Tolerance()


class _Release(msgspec.Struct):
    version_id: str
    weight: int
    shadow: int
    replicas: list[ReplicaLoad]


class Dispatcher(Generic[W]):
    """Slots and the waiting line of one endpoint.

    ``deliver`` is called with a waiter and its replica, whose slot is already
    taken; when it returns False the slot is given on.
    """

    __slots__ = (
        "_by_id",
        "_chance",
        "_deliver",
        "_dispatches",
        "_has_kv",
        "_holders",
        "_releases",
        "_rules",
        "drain",
        "endpoint_id",
        "has_shadow",
        "is_cold",
        "line",
        "model",
        "retries",
    )

    def __init__(
        self,
        endpoint_id: str,
        *,
        rules: DispatchRules,
        deliver: Callable[[W, ReplicaLoad], bool],
        chance: Callable[[], float],
    ) -> None:
        self.endpoint_id = endpoint_id
        self.line: WaitingLine[W] = WaitingLine(rules.places, rules.bytes_max)
        self.drain = DrainRate()
        self.retries = RetryBudget(rules.retry_share_max)
        self.model = EngineModel()
        self.is_cold = True
        """Whether no replica could take a request even if it were idle."""
        self.has_shadow = False
        self._rules = rules
        self._deliver = deliver
        self._chance = chance
        self._releases: list[_Release] = []
        self._by_id: dict[str, ReplicaLoad] = {}
        self._holders: PrefixHolders[ReplicaLoad] | None = None
        self._dispatches = 0
        self._has_kv = False

    def __repr__(self) -> str:
        slots = sum(replica.slots for replica in self._by_id.values())
        return f"<Dispatcher {self.endpoint_id}: {self.running}/{slots} slots, {len(self.line)} waiting>"

    @property
    def replicas(self) -> Collection[ReplicaLoad]:
        """Return every replica of the last table, and gone ones that still have requests."""
        return self._by_id.values()

    @property
    def is_crowd(self) -> bool:
        """Say whether there is a choice between replicas, so that prefixes matter."""
        return len(self._by_id) > 1

    @property
    def running(self) -> int:
        """Return how many requests are on replicas now."""
        return sum(replica.running for replica in self._by_id.values())

    # --- what there is ---

    def update(
        self, releases: Sequence[tuple[str, int, int, Sequence[tuple[ReplicaRoute, int]]]], *, now_s: float
    ) -> None:
        """Take over ``(version_id, weight, shadow, [(replica, slots)])`` of a new table; known replicas keep theirs."""
        seen: dict[str, ReplicaLoad] = {}
        self._releases = []
        for version_id, weight, shadow, routes in releases:
            release = _Release(version_id, weight, shadow, [])
            for route, slots in routes:
                load = self._by_id.get(route.id)
                if load is None or load.route.port != route.port:
                    load = ReplicaLoad(route, version_id, slots)
                load.take_route(route, slots)
                seen[route.id] = load
                release.replicas.append(load)
            self._releases.append(release)
        for replica_id, load in self._by_id.items():
            if replica_id not in seen and load.running:
                load.is_draining = load.is_gone = True
                seen[replica_id] = load
        self._by_id = seen
        self.is_cold = all(replica.is_draining for replica in seen.values())
        self.has_shadow = any(release.shadow and release.replicas for release in self._releases)
        self._has_kv = any(replica.kv.capacity for replica in seen.values())
        if len(seen) <= CROWD:
            self._holders = None
        elif self._holders is None:
            self._holders = PrefixHolders(HOLDER_BLOCKS_MAX)
        else:
            self._holders.keep(seen.values())
        breaker.reprieve(self._healths(), now_s=now_s)
        self._note_health()
        self.serve(now_s=now_s)

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot]) -> None:
        """Take over what engines themselves reported: the load that is not from here."""
        for replica in self._by_id.values():
            if (snapshot := snapshots.get(replica.route.id)) is not None:
                replica.observe(snapshot)

    # --- a request comes, moves and goes ---

    def arrive(self, waiter: W, *, now_s: float, deadline_s: float) -> ReplicaLoad | Verdict:
        """Return the replica to use now (its slot is taken), or that the waiter stands in line, or that it may not.

        Nobody overtakes within a band: while others wait, the newcomer waits behind them.
        """
        self.retries.requests += 1
        return self._arrive(waiter, now_s, deadline_s)

    def retry(self, waiter: W, *, now_s: float, deadline_s: float) -> ReplicaLoad | Verdict | None:
        """Move a request off the last replica it failed on, whose slot is given back, to another one or into the line.

        Returns None, and changes nothing, when no other replica could help or the budget of retries is spent.
        """
        failed_on = waiter.failed_on
        if not any(
            other not in failed_on and not other.is_draining and other.health.is_closed
            for other in self._by_id.values()
        ):
            return None
        if not self.retries.take(now_s):
            return None
        self._free(failed_on[-1], waiter.job)
        self.line.settled(waiter.job, 0, 0)
        verdict: ReplicaLoad | Verdict | None = self._take(waiter.job, now_s, failed_on)
        if verdict is not None:
            self.line.served(waiter.job)
        else:
            verdict = self._arrive(waiter, now_s, deadline_s)
        self.serve(now_s=now_s)
        return verdict

    def leave(self, waiter: W, *, now_s: float) -> bool:
        """Forget a waiter that went away; say whether it was waiting."""
        if not self.line.leave(waiter):
            return False
        # Whoever is next may be small enough for what was too little for the one who left.
        self.serve(now_s=now_s)
        return True

    def began(self, replica: ReplicaLoad, job: Job, *, now_s: float) -> None:
        """Note the first token of an answer: the prompt has been read."""
        if job.was_first:
            job.was_first = False
            self.model = learn(
                self.model,
                prompt_tokens=job.pending_tokens,
                cached_tokens=0,
                ttft_s=now_s - job.dispatched_s,
                running=max(0, replica.running - 1),
                slots=replica.slots,
            )
        self._read(replica, job)

    def grew(self, replica: ReplicaLoad, job: Job, tokens: int) -> None:
        """Note that an answer has ``tokens`` tokens by now."""
        if self._has_kv:
            replica.kv.grow(job, tokens)

    def finish(
        self, replica: ReplicaLoad, job: Job, *, now_s: float, prompt_tokens: int = 0, output_tokens: int = 0
    ) -> None:
        """Give a slot back and pass it on; the tokens are what the request really used."""
        self._free(replica, job)
        self.line.settled(job, prompt_tokens, output_tokens)
        if replica.is_gone and not replica.running and self._by_id.get(replica.route.id) is replica:
            del self._by_id[replica.route.id]
        if self.line:
            self.serve(now_s=now_s)

    def serve(self, *, now_s: float) -> None:
        """Hand free slots to those who wait, in order."""
        while (waiter := self.line.first()) is not None:
            replica = self._take(waiter.job, now_s, self._avoided(waiter))
            if replica is None:
                if not self._is_hopeless(waiter.job):
                    return
                self.line.leave(waiter)
                waiter.turned_away(Verdict.NEVER)
                continue
            self.line.leave(waiter)
            self.line.served(waiter.job)
            self.drain.note(now_s, cost_of(waiter.job))
            if not self._deliver(waiter, replica):
                self._free(replica, waiter.job)
                self.line.settled(waiter.job, 0, 0)

    def wait_s(self, waiter: W | None = None, *, now_s: float) -> float | None:
        """Return how long ``waiter`` (None: a newcomer behind all) will probably wait; None while nobody knows."""
        return self.drain.wait_s(self.line.tokens_ahead(waiter), now_s)

    # --- copies for other releases ---

    def shadows(self, job: Job, *, now_s: float) -> list[tuple[ReplicaLoad, Job]]:
        """Take a slot at each shadow release that wants a copy of this request and has room.

        Each comes with a job of its own, for ``drop_shadow``: copies count neither for fairness nor for the line.
        """
        taken = []
        for release in self._releases:
            if not release.shadow or not is_shadowed(release.shadow, self._chance):
                continue
            copy = Job(job.tenant_id, prompt_tokens=job.prompt_tokens, output_tokens=job.output_tokens)
            copy.output_max = job.output_max
            replica = choose(
                release.replicas, copy, now_s=now_s, model=self.model, chance=self._chance, fits=self._fits(copy)
            )
            if replica is not None:
                self._occupy(replica, copy, now_s)
                taken.append((replica, copy))
        return taken

    def drop_shadow(self, replica: ReplicaLoad, copy: Job) -> None:
        """Give back what a copy took."""
        self._free(replica, copy)

    # --- how replicas do ---

    def failed(self, replica: ReplicaLoad, kind: Failure, reason: str, *, now_s: float) -> None:
        """Note a failed request; the rules of ``breaker.py`` say whether that ejects its replica."""
        replica.failures += 1
        replica.failure_reason = reason
        is_out = breaker.failed(
            replica.health, self._healths(), kind, reason, now_s=now_s, tolerance=self._rules.tolerance
        )
        if is_out:
            if kind is Failure.UNREACHABLE:
                self.retries.grant(replica.running)
            self._note_health()

    def succeeded(self, replica: ReplicaLoad) -> None:
        """Note a good answer, or one that blames the request."""
        replica.failures = 0
        health = replica.health
        if health.is_closed and not health.bad_in_a_row:
            health.good += 1
        else:
            health.succeeded()

    def probes_due(self, now_s: float) -> list[ReplicaLoad]:
        """Return the ejected replicas that should be asked for a token now; called by the sweep."""
        self.retries.roll(now_s)
        due = []
        for replica in self._by_id.values():
            replica.health.roll(now_s)
            if replica.health.probe_due(now_s) and not replica.is_draining:
                due.append(replica)
        return due

    def probed(
        self,
        replica: ReplicaLoad,
        *,
        is_good: bool,
        kind: Failure = Failure.UNREACHABLE,
        reason: str = "",
        now_s: float,
    ) -> None:
        """Take the verdict of a probe, or of nobody where an endpoint cannot be probed (``is_good`` then)."""
        if replica.health.state is breaker.State.OPEN:
            replica.health.probe_began()
        replica.health.probe_ended(is_good=is_good, now_s=now_s, kind=kind, reason=reason)
        if is_good:
            replica.failures = 0
        self._note_health()
        self.serve(now_s=now_s)

    # --- inside ---

    def _arrive(self, waiter: W, now_s: float, deadline_s: float) -> ReplicaLoad | Verdict:
        job = waiter.job
        avoid = waiter.failed_on
        line = self.line
        if not line and (replica := self._take(job, now_s, avoid)) is not None:
            line.served(job)
            return replica
        if self._is_hopeless(job):
            return Verdict.NEVER
        if line and not self.is_cold:
            # Counted in tokens, and only those ahead of this one: another tenant's flood must not turn it away.
            wait_s = self.drain.wait_s(line.tokens_before(job), now_s)
            if wait_s is not None and now_s + wait_s > deadline_s:
                return Verdict.FULL
        if line.is_full_for(job) and not self._make_room(job):
            return Verdict.FULL
        if not line:
            self.drain.resume(now_s)
        line.join(waiter, job, deadline_s=deadline_s)
        if len(line) > 1 and line.first() is waiter and (replica := self._take(job, now_s, avoid)) is not None:
            # More urgent than all who wait, and small enough for what is free.
            line.leave(waiter)
            line.served(job)
            return replica
        return Verdict.WAIT

    def _avoided(self, waiter: W) -> Collection[ReplicaLoad]:
        """Return the replicas it should not be sent to again, none when there are no others."""
        avoid = waiter.failed_on
        if avoid and all(replica.is_draining or replica in avoid for replica in self._by_id.values()):
            return ()
        return avoid

    def _make_room(self, job: Job) -> bool:
        """Turn away who has less right to a place, until there is room; say whether there is."""
        while self.line.is_full_for(job):
            if (out := self.line.make_room(job)) is None:
                return False
            out.turned_away(Verdict.FULL)
        return True

    def _is_hopeless(self, job: Job) -> bool:
        """Say whether no replica could hold the request even if it were idle."""
        return (
            self._has_kv
            and not self.is_cold
            and not any(can_ever_fit(job, replica.kv.capacity) for replica in self._by_id.values())
        )

    def _take(self, job: Job, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        releases = self._releases
        if len(releases) == 1:
            replica = self._choose(releases[0], job, now_s, avoid)
        else:
            replica = self._take_by_weight(job, now_s, avoid)
        if replica is not None:
            self._occupy(replica, job, now_s)
        return replica

    def _take_by_weight(self, job: Job, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        left = [release for release in self._releases if release.replicas and release.weight]
        while left:
            point = release_point(job.session, self._chance)
            index = pick_release([release.weight for release in left], point)
            if (replica := self._choose(left[index], job, now_s, avoid)) is not None:
                return replica
            # A release without room must not make its share of requests wait beside idle replicas of another.
            del left[index]
        return None

    def _choose(self, release: _Release, job: Job, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        return choose(
            release.replicas,
            job,
            now_s=now_s,
            model=self.model,
            avoid=avoid,
            fits=self._fits(job) if self._has_kv else None,
            chance=self._chance,
            holders=self._holders,
        )

    def _fits(self, job: Job) -> Callable[[ReplicaLoad], bool]:
        share_max = self._rules.kv_share_max
        return lambda replica: replica.kv.fits(job, share_max)

    def _occupy(self, replica: ReplicaLoad, job: Job, now_s: float) -> None:
        self._dispatches += 1
        job.dispatched_s = now_s
        job.was_first = not replica.pending_tokens
        matched = 0
        if job.prefix:
            matched = replica.prefixes.add(job.prefix)
            if self._holders is not None:
                self._holders.add(job.prefix, replica)
        job.pending_tokens = need_tokens(job, matched, self.model)
        replica.running += 1
        replica.last_dispatch = self._dispatches
        replica.pending_tokens += job.pending_tokens
        replica.unanswered += 1
        replica.running_peak = max(replica.running_peak, replica.running)
        if self._has_kv:
            replica.kv.take(job)

    def _free(self, replica: ReplicaLoad, job: Job) -> None:
        replica.running -= 1
        assert replica.running >= 0, "finished more often than begun"
        self._read(replica, job)
        if job in replica.kv.held:
            replica.kv.give_back(job)

    @staticmethod
    def _read(replica: ReplicaLoad, job: Job) -> None:
        """Note that nothing of the prompt is left to read."""
        if job.pending_tokens:
            replica.pending_tokens -= job.pending_tokens
            replica.unanswered -= 1
            job.pending_tokens = 0

    def _healths(self) -> list[breaker.Health]:
        return [replica.health for replica in self._by_id.values() if not replica.is_draining]

    def _note_health(self) -> None:
        for replica in self._by_id.values():
            replica.ejected_until_s = 0.0 if replica.health.is_closed else NEVER_S
