"""Before one endpoint: who may start now and where, who waits, who is refused.

A state machine without I/O. Effects leave through ``deliver(waiter, replica)``,
which says whether the waiter was still there: a slot handed to somebody who
has gone goes to the next instead of leaking. Every request ends in exactly one
of: (1) starts at once, (2) waits and is delivered, (3) waits and leaves,
(4) waits and expires, (5) is refused or displaced because the line is full.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

from modelyard.domain.routing_table import ReplicaRoute
from modelyard.policy.admission import can_ever_fit
from modelyard.policy.breaker import Failure
from modelyard.policy.fairness import cost_of
from modelyard.policy.headroom import Headroom
from modelyard.policy.job import FIRST_S, Job
from modelyard.policy.occupancy import Occupancy
from modelyard.policy.queueing import DrainRate, WaitingLine
from modelyard.policy.replica_load import ReplicaLoad
from modelyard.policy.replica_set import ReplicaSet
from modelyard.policy.seats import Seats
from modelyard.policy.terms import DispatchRules, Verdict, Waiter

__all__ = ["DispatchRules", "Dispatcher", "ReplicaLoad", "Verdict", "Waiter"]

LOOK_AHEAD = 32
"""How far back in line a request may be and still get a slot where its prompt is cached."""


W = TypeVar("W", bound=Waiter)


class Dispatcher(ReplicaSet, Generic[W]):
    """The replicas of one endpoint with their waiting line.

    ``deliver`` is called with a waiter and its replica, whose slot is already
    taken; when it returns False the slot is given on.
    """

    __slots__ = ("_deliver", "_stands", "_was_kept", "drain", "endpoint_id", "has_full", "headroom", "line")

    def __init__(
        self,
        endpoint_id: str,
        *,
        rules: DispatchRules,
        deliver: Callable[[W, ReplicaLoad], bool],
        chance: Callable[[], float],
        seats: Seats | None = None,
    ) -> None:
        super().__init__(
            kv_share_max=rules.kv_share_max,
            retry_share_max=rules.retry_share_max,
            tolerance=rules.tolerance,
            chance=chance,
            seats=seats,
        )
        self.endpoint_id = endpoint_id
        self.line: WaitingLine[W] = WaitingLine(rules.places, rules.bytes_max)
        self.drain = DrainRate()
        self.headroom = Headroom(rules.kept_share_max)
        self._was_kept = False
        self.has_full = False
        """A replica said so and does not bear all its slots yet."""
        self._deliver = deliver
        self._stands: dict[Occupancy, None] = {}
        """Shared replicas that somebody here waits for."""

    def __repr__(self) -> str:
        slots = sum(replica.slots for replica in self._by_id.values())
        return f"<Dispatcher {self.endpoint_id}: {self.running}/{slots} slots, {len(self.line)} waiting>"

    def update(
        self,
        releases: Sequence[tuple[str, int, int, Sequence[tuple[ReplicaRoute, int]]]],
        *,
        now_s: float,
        fallbacks: Mapping[str, int] | None = None,
    ) -> None:
        """Take over a new table, as ``take_releases`` does, and serve from it."""
        self.take_releases(releases, now_s=now_s, fallbacks=fallbacks or {})
        self.stand_anew()
        self._serve_all(now_s)

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
        self.stand_anew()
        self._serve_all(now_s, replica.occupancy)

    def drop_shadow(self, replica: ReplicaLoad, copy: Job, *, now_s: float) -> None:
        """Give back what a copy took."""
        self._free(replica, copy)
        if replica.occupancy is not None:
            self._seats.serve((replica.occupancy,), now_s=now_s)

    # --- a request comes, moves and goes ---

    def arrive(self, waiter: W, *, now_s: float, deadline_s: float) -> ReplicaLoad | Verdict:
        """Return the replica to use now (its slot is taken), or that the waiter stands in line, or that it may not.

        Nobody overtakes within a band: while others wait, the newcomer waits behind them. One that stands in line may
        have been delivered meanwhile: who was displaced by it may have held up the line.
        """
        self.retries.requests += 1
        headroom, job = self.headroom, waiter.job
        if headroom.share_max:
            headroom.came(job, now_s, waits=bool(self.line.waiters) and self.line.waits(job))
        return self._arrive(waiter, now_s, deadline_s)

    def retry(self, waiter: W, *, now_s: float, deadline_s: float) -> ReplicaLoad | Verdict | None:
        """Move a request off the last replica it failed on, whose slot is given back, to another one or into the line.

        Returns None, and changes nothing, when no other replica could help or the budget of retries is spent.
        """
        failed_on = waiter.failed_on
        if not self.may_retry(waiter.job, failed_on, now_s) or not self.retries.take(now_s):
            return None
        self._give_up(failed_on[-1], waiter.job)
        verdict: ReplicaLoad | Verdict | None = self._take(waiter.job, now_s, failed_on)
        if verdict is None:
            verdict = self._arrive(waiter, now_s, deadline_s)
        self._serve_all(now_s, failed_on[-1].occupancy)
        return verdict

    def unseat(self, waiter: W, seat: ReplicaLoad, *, now_s: float, deadline_s: float) -> ReplicaLoad | Verdict:
        """Move a request off a seat whose guest is not there, to another one or into the line until there is one.

        The engine lost nothing by it, and who is sent there next is the probe: no budget is asked.
        """
        self._give_up(seat, waiter.job)
        self.stand_anew()
        verdict = self._arrive(waiter, now_s, deadline_s)
        self._serve_all(now_s, seat.occupancy)
        return verdict

    def put_back(self, waiter: W, replica: ReplicaLoad, *, now_s: float, deadline_s: float) -> ReplicaLoad | Verdict:
        """Take a request off a replica that said it is full, to another one or into the line.

        It did not fail, so this is no retry and costs nothing of their budget; and it makes no storm, since the
        replica gets no more than it has until some of that is done or it has had time to.
        """
        self._give_up(replica, waiter.job)
        replica.filled(now_s)
        self.has_full = True
        verdict = self._arrive(waiter, now_s, deadline_s)
        self._serve_all(now_s, replica.occupancy)
        return verdict

    def step_aside(self, waiter: W, replica: ReplicaLoad, *, now_s: float, deadline_s: float) -> ReplicaLoad | Verdict:
        """Take a request off its replica for whoever is next, and let it stand in line behind them."""
        self._give_up(replica, waiter.job)
        self._serve_all(now_s, replica.occupancy)
        return self._arrive(waiter, now_s, deadline_s)

    def trade(self, waiter: W, victim: W, replica: ReplicaLoad, *, now_s: float, deadline_s: float) -> bool:
        """Hand the place of ``victim`` to one who waits, if it suffices; then it is the first of its tenant in line."""
        is_open = replica in self._own and replica not in self._avoided(waiter)
        if not is_open or not replica.would_hold(waiter.job, victim.job, self._kv_share_max):
            return False
        self._give_up(replica, victim.job)
        self._hand(waiter, replica, now_s)
        victim.job.due_s = FIRST_S
        self.line.join(victim, victim.job, deadline_s=deadline_s)
        return True

    def relieve(self, *, now_s: float) -> None:
        """Try replicas that were full with more; called a few times a second."""
        if not self.has_full and not self._seats.has_any:
            # Where replicas are shared, another endpoint may have been told, and have left since.
            return
        relieved = [replica for replica in self._by_id.values() if replica.relieved(now_s)]
        self.has_full = any(replica.full_until_s for replica in self._by_id.values())
        if relieved:
            self._seats.mark(replica.occupancy for replica in relieved if replica.occupancy is not None)
            self._serve_all(now_s)

    def leave(self, waiter: W, *, now_s: float) -> bool:
        """Forget a waiter that went away; say whether it was waiting."""
        if not self.line.leave(waiter):
            return False
        if self._stands:
            self.stand()
        # Whoever is next may be small enough for what was too little for the one who left.
        self._serve_all(now_s)
        return True

    def finish(
        self, replica: ReplicaLoad, job: Job, *, now_s: float, prompt_tokens: int = 0, output_tokens: int = 0
    ) -> None:
        """Give a slot back and pass it on; the tokens are what the request really used."""
        self._free(replica, job)
        self.headroom.ended(job)
        self.line.settled(job, prompt_tokens, output_tokens)
        if replica.is_gone and not replica.own and self._by_id.get(replica.route.id) is replica:
            del self._by_id[replica.route.id]
            self._seats.let_go(replica)
        if replica.occupancy is not None:
            replica.occupancy.settle(job, prompt_tokens, output_tokens)
        if replica.occupancy is not None and not self._has_changed:
            # Not to the own line first: others wait for this replica, too.
            self._seats.serve((replica.occupancy,), now_s=now_s)
        elif self.line.waiters or self._has_changed:
            self._serve_all(now_s, replica.occupancy)

    def serve(self, *, now_s: float, at_most: int = 0) -> bool:
        """Hand free slots to those who wait, in order; say whether anybody left the line.

        ``at_most``: how many of them, 0 for all.
        """
        count = 0
        while (waiter := self.line.first()) is not None and (not at_most or count < at_most):
            replica = self._find(waiter.job, now_s, self._avoided(waiter))
            if replica is None and self._is_hopeless(waiter.job):
                self.line.leave(waiter)
                waiter.turned_away(Verdict.NEVER)
                count += 1
                continue
            if replica is None:
                if (found := self._behind(waiter, now_s) or self._light_behind(waiter, now_s)) is None:
                    count += self.spill(now_s=now_s)
                    break
                waiter, replica = found
            elif waiter.job.prefix and len(self._releases) == 1 and len(self.line) > 1:
                waiter = self._best_for(replica, waiter)
            self._hand(waiter, replica, now_s)
            count += 1
            if self._has_kv and self._seats.has_any:
                # What was kept for this one elsewhere may be free for others now.
                self._seats.mark(self._shared())
        if count and self._stands:
            self.stand()
        return count > 0

    def spill(self, *, now_s: float) -> int:
        """Hand the room of fallbacks to those whose time for one has come; return how many. The sweep calls it, too.

        Whoever waits before them waits for a release with weight, so they overtake nobody.
        """
        count = 0
        for waiter in self.line.order()[:LOOK_AHEAD] if self.has_fallback and self.line else ():
            replica = self._find_fallback(waiter.job, now_s, self._avoided(waiter))
            if replica is not None and waiter in self.line:
                self._hand(waiter, replica, now_s)
                count += 1
        if count and self._stands:
            self.stand()
        return count

    def _hand(self, waiter: W, replica: ReplicaLoad, now_s: float) -> None:
        """Take a slot of ``replica`` for one who waits, and deliver it."""
        self._occupy(replica, waiter.job, now_s)
        self.line.leave(waiter)
        self._served(replica, waiter.job)
        self.drain.note(now_s, cost_of(waiter.job))
        if not self._deliver(waiter, replica):
            self._give_up(replica, waiter.job)

    def wait_s(self, waiter: W | None = None, *, now_s: float) -> float | None:
        """Return how long ``waiter`` (None: a newcomer behind all) will probably wait; None while nobody knows."""
        return self.drain.wait_s(self.line.tokens_ahead(waiter), now_s)

    # --- replicas that others send requests to as well ---

    def claim(self) -> tuple[int, str] | None:
        """Return the most urgent band in which somebody waits, and the tenant of the next in line; None: nobody."""
        first = self.line.first()
        return None if first is None else (self.line.urgency, first.job.tenant_id)

    def serve_one(self, *, now_s: float) -> bool:
        """Hand a slot to the next in line if there is one for it; say whether anything changed."""
        return self.serve(now_s=now_s, at_most=1)

    def waits_for_memory(self, occupancy: Occupancy) -> bool:
        """Say whether all that keeps the next in line from this replica is its KV cache."""
        first = self.line.first()
        if first is None or not self._has_kv:
            return False
        avoid, job = self._avoided(first), first.job
        return any(
            replica.occupancy is occupancy
            and not replica.is_draining
            and not replica.ejected_until_s
            and replica not in avoid
            and not replica.kv.fits(job, self._kv_share_max)
            and can_ever_fit(job, replica.kv.capacity)
            for replica in self._serving
        )

    def stand(self) -> None:
        """Say at each shared replica that somebody here waits for it, where that is so."""
        stands = self._stands
        if not self.line.waiters:
            for occupancy in stands:
                occupancy.lines.pop(self, None)
            stands.clear()
            return
        for replica in self._serving:
            # One that lacks the guest is stood before again when it has it: there may be hundreds after a restart.
            if replica.occupancy is not None and not replica.is_draining and not replica.is_missing:
                stands[replica.occupancy] = None
                replica.occupancy.lines.setdefault(self)

    def stand_anew(self) -> None:
        """The same where replicas came or went, or may be used again."""
        for occupancy in self._stands:
            occupancy.lines.pop(self, None)
        self._stands.clear()
        self.stand()

    def _serve_all(self, now_s: float, freed: Occupancy | None = None) -> None:
        """Serve who waits here and, where replicas are shared (``freed`` among them), whoever is next by right."""
        self._has_changed = False
        if not self._seats.has_any:
            self.serve(now_s=now_s)
            return
        shared = self._shared()
        if freed is not None:
            shared[freed] = None
        self._seats.serve(shared, now_s=now_s)
        self.serve(now_s=now_s)
        self._seats.serve(shared, now_s=now_s)

    def _shared(self) -> dict[Occupancy, None]:
        return dict.fromkeys(one.occupancy for one in self._serving if one.occupancy is not None)

    # --- inside ---

    def _is_kept(self, occupancy: Occupancy, job: Job) -> bool:
        return occupancy.keeps_from(self, job)

    def _arrive(self, waiter: W, now_s: float, deadline_s: float) -> ReplicaLoad | Verdict:
        job = waiter.job
        avoid = waiter.failed_on
        line = self.line
        if not line.waiters and (replica := self._take(job, now_s, avoid)) is not None:
            return replica
        if self._is_hopeless(job):
            return Verdict.NEVER
        if self._fallbacks and line.waiters and (replica := self._past_line(job, now_s, avoid)) is not None:
            return replica
        if line and self._is_too_long(job, now_s, deadline_s):
            return Verdict.FULL
        has_displaced = line.is_full_for(job)
        if has_displaced and not self._make_room(job):
            return Verdict.FULL
        if not line:
            self.drain.resume(now_s)
        line.join(waiter, job, deadline_s=deadline_s, is_light=self.headroom.is_light(job))
        if self._seats.has_any:
            self.stand()
        replica = self._overtake(waiter, now_s) if len(line) > 1 else None
        if has_displaced:
            # Whoever lost its place may have been too big for what is free, and held up those behind it.
            self._serve_all(now_s)
        return Verdict.WAIT if replica is None else replica

    def _is_too_long(self, job: Job, now_s: float, deadline_s: float) -> bool:
        """Say whether a newcomer would wait beyond its deadline, as far as anybody knows."""
        if self.is_cold or now_s < job.fallback_s < deadline_s or self.headroom.may_help(job, self.line):
            return False
        # Counted in tokens, and only those ahead of this one: another tenant's flood must not turn it away.
        ahead = self.line.tokens_before(job)
        if (wait_s := self.drain.wait_s(ahead, now_s)) is None:
            wait_s = self.guess_s(ahead, self.line.jobs(LOOK_AHEAD))
        return wait_s is not None and now_s + wait_s > deadline_s

    def _past_line(self, job: Job, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        """Take a slot of a fallback: whoever waits and may go there has been given what is free there (``spill``)."""
        replica = self._find_fallback(job, now_s, avoid)
        if replica is not None:
            self._occupy(replica, job, now_s)
            self._served(replica, job)
        return replica

    def _avoided(self, waiter: W) -> Collection[ReplicaLoad]:
        """Return the replicas it should not be sent to again, none when there are no others."""
        avoid = waiter.failed_on
        if avoid and all(replica.is_draining or replica in avoid for replica in self._may_get(waiter.job)):
            return ()
        return avoid

    def _find(self, job: Job, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        """Return the replica for a request, None also where what is left is kept, unless it failed elsewhere."""
        replica = ReplicaSet._find(self, job, now_s, avoid)
        self._was_kept = False
        if not self.headroom.kept[job.band] or replica is None or avoid or replica.occupancy is not None:
            return replica  # of a shared one, too: another endpoint would take what is kept here
        self.headroom.look(now_s)  # Nobody may come any more who would.
        self._was_kept = not self.headroom.leaves_room(job, replica, self._serving, self._kv_share_max)
        return None if self._was_kept else replica

    def _light_behind(self, first: W, now_s: float) -> tuple[W, ReplicaLoad] | None:
        """Return who may have the room that is kept from the first in line, and where."""
        if not self.line.light or not self.headroom.kept[first.job.band]:
            return None
        if self._find(first.job, now_s, self._avoided(first)) is not None or not self._was_kept:
            return None
        for waiter in self.line.light:
            if self.headroom.may_pass(waiter.job, first.job, self.line):
                replica = self._find(waiter.job, now_s, self._avoided(waiter))
                if replica is not None:
                    return waiter, replica
        return None

    def _behind(self, first: W, now_s: float) -> tuple[W, ReplicaLoad] | None:
        """Return who may have the slots that the first in line cannot use only because it failed there, and which."""
        if not first.failed_on or self._find(first.job, now_s, ()) is None:
            return None
        for waiter in self.line.order()[1:LOOK_AHEAD]:
            if (replica := self._find(waiter.job, now_s, self._avoided(waiter))) is not None:
                return waiter, replica
            if not waiter.failed_on:
                # Too big for what is free: nobody behind it may overtake.
                return None
        return None

    def _overtake(self, newcomer: W, now_s: float) -> ReplicaLoad | None:
        """Take the slot for one who has just joined and need not wait behind the others."""
        replica = self._overtaking(newcomer, now_s)
        if replica is not None:
            self._occupy(replica, newcomer.job, now_s)
            self.line.leave(newcomer)
            if self._stands:
                self.stand()
            self._served(replica, newcomer.job)
        return replica

    def _overtaking(self, newcomer: W, now_s: float) -> ReplicaLoad | None:
        """Return the replica for one who has just joined: more urgent than all who wait, and small enough for it."""
        first = self.line.first()
        if first is newcomer:
            return self._find(newcomer.job, now_s, newcomer.failed_on)
        if first is None or (found := self._behind(first, now_s) or self._light_behind(first, now_s)) is None:
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
        is_any = not self.headroom.kept[job.band]
        replica = ReplicaSet._find(self, job, now_s, avoid) if is_any else self._find(job, now_s, avoid)
        if replica is not None:
            self._occupy(replica, job, now_s)
            # ``_served`` written out: every request comes by here.
            self.line.served(job)
            self.headroom.started(job)
            if replica.occupancy is not None:
                replica.occupancy.charge(job)
        return replica

    def _served(self, replica: ReplicaLoad, job: Job) -> None:
        """Charge a request that starts on a replica, in its line and among all who share that replica."""
        self.line.served(job)
        self.headroom.started(job)
        if replica.occupancy is not None:
            replica.occupancy.charge(job)

    def _give_up(self, replica: ReplicaLoad, job: Job) -> None:
        """Take back a slot that was of no use, with what it was charged."""
        self._free(replica, job)
        self.headroom.ended(job)
        self.line.settled(job, 0, 0)
        if replica.occupancy is not None:
            replica.occupancy.settle(job, 0, 0)
