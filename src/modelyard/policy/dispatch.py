"""Before one endpoint: who may start now and where, who waits, who is refused.

A state machine without I/O. Effects leave through ``deliver(waiter, replica)``,
which says whether the waiter was still there: a slot handed to somebody who
has gone goes to the next instead of leaking. Every request ends in exactly one
of: (1) starts at once, (2) waits and is delivered, (3) waits and leaves,
(4) waits and expires, (5) is refused or displaced because the line is full.
"""

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from modelyard.domain.routing_table import ReplicaRoute
from modelyard.policy.breaker import Failure, Tolerance
from modelyard.policy.fairness import cost_of
from modelyard.policy.job import Job
from modelyard.policy.queueing import DrainRate, WaitingLine
from modelyard.policy.replica_load import ReplicaLoad
from modelyard.policy.replica_set import ReplicaSet

__all__ = ["DispatchRules", "Dispatcher", "ReplicaLoad", "Verdict"]

LOOK_AHEAD = 32
"""How far back in line a request may be and still get a slot where its prompt is cached."""


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
        """Take the news that the place in line is lost: to somebody more urgent (``FULL``), or for good."""
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


class Dispatcher(ReplicaSet, Generic[W]):
    """The replicas of one endpoint with their waiting line.

    ``deliver`` is called with a waiter and its replica, whose slot is already
    taken; when it returns False the slot is given on.
    """

    __slots__ = ("_deliver", "drain", "endpoint_id", "has_full", "line")

    def __init__(
        self,
        endpoint_id: str,
        *,
        rules: DispatchRules,
        deliver: Callable[[W, ReplicaLoad], bool],
        chance: Callable[[], float],
    ) -> None:
        super().__init__(
            kv_share_max=rules.kv_share_max,
            retry_share_max=rules.retry_share_max,
            tolerance=rules.tolerance,
            chance=chance,
        )
        self.endpoint_id = endpoint_id
        self.line: WaitingLine[W] = WaitingLine(rules.places, rules.bytes_max)
        self.drain = DrainRate()
        self.has_full = False
        """A replica said so and does not bear all its slots yet."""
        self._deliver = deliver

    def __repr__(self) -> str:
        slots = sum(replica.slots for replica in self._by_id.values())
        return f"<Dispatcher {self.endpoint_id}: {self.running}/{slots} slots, {len(self.line)} waiting>"

    def update(
        self, releases: Sequence[tuple[str, int, int, Sequence[tuple[ReplicaRoute, int]]]], *, now_s: float
    ) -> None:
        """Take over ``(version_id, weight, shadow, [(replica, slots)])`` of a new table; known replicas keep theirs."""
        self.take_releases(releases, now_s=now_s)
        self.serve(now_s=now_s)

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
        self.take_verdict(replica, is_good=is_good, kind=kind, reason=reason, now_s=now_s)
        self.serve(now_s=now_s)

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
            other not in failed_on and not other.is_draining and other.health.is_closed for other in self._serving
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

    def put_back(self, waiter: W, replica: ReplicaLoad, *, now_s: float, deadline_s: float) -> ReplicaLoad | Verdict:
        """Take a request off a replica that said it is full, to another one or into the line.

        It did not fail, so this is no retry and costs nothing of their budget; and it makes no storm, since the
        replica gets no more than it has until some of that is done or it has had time to.
        """
        self._free(replica, waiter.job)
        self.line.settled(waiter.job, 0, 0)
        replica.filled(now_s)
        self.has_full = True
        verdict = self._arrive(waiter, now_s, deadline_s)
        self.serve(now_s=now_s)
        return verdict

    def relieve(self, *, now_s: float) -> None:
        """Try replicas that were full with more; called a few times a second."""
        if not self.has_full:
            return
        relieved = [replica.relieved(now_s) for replica in self._by_id.values()]
        self.has_full = any(replica.full_until_s for replica in self._by_id.values())
        if any(relieved):
            self.serve(now_s=now_s)

    def leave(self, waiter: W, *, now_s: float) -> bool:
        """Forget a waiter that went away; say whether it was waiting."""
        if not self.line.leave(waiter):
            return False
        # Whoever is next may be small enough for what was too little for the one who left.
        self.serve(now_s=now_s)
        return True

    def finish(
        self, replica: ReplicaLoad, job: Job, *, now_s: float, prompt_tokens: int = 0, output_tokens: int = 0
    ) -> None:
        """Give a slot back and pass it on; the tokens are what the request really used."""
        self._free(replica, job)
        self.line.settled(job, prompt_tokens, output_tokens)
        if replica.is_gone and not replica.running and self._by_id.get(replica.route.id) is replica:
            del self._by_id[replica.route.id]
        if self.line.waiters:
            self.serve(now_s=now_s)

    def serve(self, *, now_s: float) -> None:
        """Hand free slots to those who wait, in order."""
        while (waiter := self.line.first()) is not None:
            replica = self._find(waiter.job, now_s, self._avoided(waiter))
            if replica is None and self._is_hopeless(waiter.job):
                self.line.leave(waiter)
                waiter.turned_away(Verdict.NEVER)
                continue
            if replica is None:
                if not waiter.failed_on or (found := self._behind(waiter, now_s)) is None:
                    return
                waiter, replica = found
            elif waiter.job.prefix and len(self._releases) == 1 and len(self.line) > 1:
                waiter = self._best_for(replica, waiter)
            self._occupy(replica, waiter.job, now_s)
            self.line.leave(waiter)
            self.line.served(waiter.job)
            self.drain.note(now_s, cost_of(waiter.job))
            if not self._deliver(waiter, replica):
                self._free(replica, waiter.job)
                self.line.settled(waiter.job, 0, 0)

    def wait_s(self, waiter: W | None = None, *, now_s: float) -> float | None:
        """Return how long ``waiter`` (None: a newcomer behind all) will probably wait; None while nobody knows."""
        return self.drain.wait_s(self.line.tokens_ahead(waiter), now_s)

    # --- inside ---

    def _arrive(self, waiter: W, now_s: float, deadline_s: float) -> ReplicaLoad | Verdict:
        job = waiter.job
        avoid = waiter.failed_on
        line = self.line
        if not line.waiters and (replica := self._take(job, now_s, avoid)) is not None:
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
        if len(line) > 1 and (replica := self._overtaking(waiter, now_s)) is not None:
            self._occupy(replica, job, now_s)
            line.leave(waiter)
            line.served(job)
            return replica
        return Verdict.WAIT

    def _avoided(self, waiter: W) -> Collection[ReplicaLoad]:
        """Return the replicas it should not be sent to again, none when there are no others."""
        avoid = waiter.failed_on
        if avoid and all(replica.is_draining or replica in avoid for replica in self._serving):
            return ()
        return avoid

    def _behind(self, first: W, now_s: float) -> tuple[W, ReplicaLoad] | None:
        """Return who may have the slots that the first in line cannot use only because it failed there, and which."""
        if self._find(first.job, now_s, ()) is None:
            return None
        for waiter in self.line.order()[1:LOOK_AHEAD]:
            if (replica := self._find(waiter.job, now_s, self._avoided(waiter))) is not None:
                return waiter, replica
            if not waiter.failed_on:
                # Too big for what is free: nobody behind it may overtake.
                return None
        return None

    def _overtaking(self, newcomer: W, now_s: float) -> ReplicaLoad | None:
        """Return the replica for one who has just joined: more urgent than all who wait, and small enough for it."""
        first = self.line.first()
        if first is newcomer:
            return self._find(newcomer.job, now_s, newcomer.failed_on)
        if first is None or not first.failed_on or (found := self._behind(first, now_s)) is None:
            return None
        return found[1] if found[0] is newcomer else None

    def _make_room(self, job: Job) -> bool:
        """Turn away who has less right to a place, until there is room; say whether there is."""
        while self.line.is_full_for(job):
            if (out := self.line.make_room(job)) is None:
                return False
            out.turned_away(Verdict.FULL)
        return True

    def _best_for(self, replica: ReplicaLoad, first: W) -> W:
        """Return who should have a slot at ``replica``: the first in line, or one like it that has more cached there.

        In a saturated endpoint whichever slot falls free would go to whoever is first, and prefixes would be read again
        and again on other replicas: the load feeds itself. Nobody is passed over more than ``LOOK_AHEAD`` times.
        """
        if first.job.passed >= LOOK_AHEAD:
            return first
        best, most = first, replica.prefixes.matched(first.job.prefix)
        for waiter in self.line.alike(LOOK_AHEAD):
            matched = replica.prefixes.matched(waiter.job.prefix)
            if matched > most and replica not in waiter.failed_on and self._is_held(replica, waiter.job):
                best, most = waiter, matched
        if best is not first:
            first.job.passed += 1
        return best

    def _take(self, job: Job, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        replica = self._find(job, now_s, avoid)
        if replica is not None:
            self._occupy(replica, job, now_s)
        return replica
