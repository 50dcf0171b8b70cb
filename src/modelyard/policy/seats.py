"""A guest's seat on a replica of its host, and who shares which replica.

A seat is to its endpoint's dispatcher what a replica is: it has an id of its
own, drains on its own and has its own cached prefixes, because an engine keeps
the prompts of each adapter apart. What is one for everybody on the replica is
the replica's: its slots and what runs in them, its KV cache, what it has yet
to read, and whether it can be reached.

Health has two levels. A replica that cannot be *reached* is lost to everybody,
whoever noticed. What a guest answers badly, or not in time, counts for its own
seat only: adapters and time-outs are set by tenants, and nobody may take the
host and all other guests down with them. The host's own failures count for
all, since guests run on its weights.
"""

from collections.abc import Iterable
from weakref import WeakValueDictionary

import msgspec

from modelyard.domain.routing_table import ReplicaRoute, ReplicaSnapshot
from modelyard.policy.breaker import Failure, Health, State
from modelyard.policy.job import NEVER_S
from modelyard.policy.occupancy import Occupancy
from modelyard.policy.prefixes import PrefixIndex
from modelyard.policy.replica_load import BLOCKS_UNKNOWN, ReplicaLoad
from modelyard.policy.routing import stable_hash


class Seat(ReplicaLoad):
    """A ``ReplicaLoad`` whose counts are those of ``base``, the replica itself; ``own`` are its own requests.

    ``failures`` are more than 0 while the engine does not have the guest.
    """

    __slots__ = ("_own", "base")

    def __init__(self, route: ReplicaRoute, version_id: str, base: ReplicaLoad) -> None:
        # Not the other's: it would set what is the replica's back to nothing.
        self.base = base
        self.route = route
        self.version_id = version_id
        self.identity = stable_hash(route.id)
        self.occupancy = base.occupancy
        self.kv = base.kv
        self.health = Health()
        self.prefixes = PrefixIndex(BLOCKS_UNKNOWN)
        self.is_draining = self.is_gone = False
        self.last_dispatch = self.failures = 0
        self.failure_reason = ""
        self.granted_s = 0.0
        self._own = 0

    def __repr__(self) -> str:
        state = "gone" if self.is_gone else "draining" if self.is_draining else "ready"
        return f"<Seat {self.route.id}: {state}, {self._own} of {self.running}/{self.slots} slots, {self.health!r}>"

    @property
    def own(self) -> int:
        """Return how many of the requests that run there are this guest's."""
        return self._own

    @property
    def replica_id(self) -> str:
        """Return the id of the engine's process."""
        return self.base.route.id

    # --- what is the replica's ---

    @property
    def running(self) -> int:
        """Everybody's requests there."""
        return self.base.running

    @running.setter
    def running(self, count: int) -> None:
        base = self.base
        more = count - base.running
        base.running = count
        base.seated += more
        self._own += more

    @property
    def slots(self) -> int:
        """Requests that the replica takes at once."""
        return self.base.slots

    @slots.setter
    def slots(self, slots: int) -> None:
        self.base.slots = slots

    @property
    def slots_given(self) -> int:
        """The slots of the table."""
        return self.base.slots_given

    @slots_given.setter
    def slots_given(self, slots: int) -> None:
        self.base.slots_given = slots

    @property
    def full_until_s(self) -> float:
        """Until when the replica is not tried with more than it had when it said that it is full."""
        return self.base.full_until_s

    @full_until_s.setter
    def full_until_s(self, until_s: float) -> None:
        self.base.full_until_s = until_s

    def filled(self, now_s: float) -> None:
        """Take the replica's word that it has no room."""
        self.base.filled(now_s)

    def relieved(self, now_s: float) -> bool:
        """Try the replica with more when it is time; say whether it was."""
        return self.base.relieved(now_s)

    @property
    def running_elsewhere(self) -> int:
        """Requests that come from other gateways."""
        return self.base.running_elsewhere

    @running_elsewhere.setter
    def running_elsewhere(self, count: int) -> None:
        self.base.running_elsewhere = count

    @property
    def running_peak(self) -> int:
        """Most that was running from here since the last snapshot."""
        return self.base.running_peak

    @running_peak.setter
    def running_peak(self, count: int) -> None:
        self.base.running_peak = count

    @property
    def pending_tokens(self) -> int:
        """What the replica has yet to read."""
        return self.base.pending_tokens

    @pending_tokens.setter
    def pending_tokens(self, tokens: int) -> None:
        self.base.pending_tokens = tokens

    @property
    def reading_since_s(self) -> float:
        """When it began with the oldest of it."""
        return self.base.reading_since_s

    @reading_since_s.setter
    def reading_since_s(self, now_s: float) -> None:
        self.base.reading_since_s = now_s

    @property
    def unanswered(self) -> int:
        """Requests there without a token yet."""
        return self.base.unanswered

    @unanswered.setter
    def unanswered(self, count: int) -> None:
        self.base.unanswered = count

    def observe(self, snapshot: ReplicaSnapshot) -> None:
        """Take over what the engine reported."""
        self.base.observe(snapshot)

    # --- how it does ---

    @property
    def ejected_until_s(self) -> float:
        """0, or never: while the replica cannot be used, or this guest on it."""
        return self.base.ejected_until_s if self.health.is_closed else NEVER_S

    @ejected_until_s.setter
    def ejected_until_s(self, until_s: float) -> None:
        raise AssertionError("follows from two healths")

    @property
    def is_missing(self) -> bool:
        """Say whether the engine told that it does not have the guest, and has not been seen to have it again."""
        return self.health.kind is Failure.MISSING

    @property
    def is_cut_off(self) -> bool:
        """Say whether the replica cannot be used, whatever the guest does."""
        return not self.base.health.is_closed

    def judged(self, kind: Failure) -> Health:
        """Return the health that a failure of this kind counts for: the replica's only if it is gone."""
        return self.base.health if kind is Failure.UNREACHABLE else self.health

    def blame(self, kind: Failure, reason: str) -> None:
        """Note a failure: of the replica itself, or that the guest is missing."""
        if kind is Failure.UNREACHABLE:
            self.base.blame(kind, reason)
        elif kind is Failure.MISSING:
            self.failures += 1
            self.failure_reason = reason

    def answered(self) -> None:
        """Note a good answer: the replica can be reached, and the guest does its work."""
        self.health.succeeded()
        self.base.failures = 0
        if self.health.is_closed:
            self.failures = 0
        if self.base.health.kind is Failure.UNREACHABLE:
            self.base.health.succeeded()

    def probe_due(self, now_s: float) -> bool:
        """Say whether guest or replica should be tried; a replica that answers badly is its host's to try."""
        base = self.base.health
        if base.is_closed:
            return self.health.probe_due(now_s)
        return base.kind is Failure.UNREACHABLE and base.probe_due(now_s)

    def probe_began(self) -> None:
        """Note that the guest was asked for a token, which tries both."""
        for health in (self.health, self.base.health):
            if health.state is State.OPEN:
                health.probe_began()

    def probe_ended(self, *, is_good: bool, now_s: float, kind: Failure, reason: str) -> None:
        """Take the answer into account: of a replica that answers badly, what is bad is the guest's."""
        self.probe_began()
        own, base = self.health, self.base.health
        is_there = is_good or kind is not Failure.UNREACHABLE
        if base.kind is Failure.UNREACHABLE:
            base.probe_ended(is_good=is_there, now_s=now_s, kind=kind, reason=reason)
        else:
            base.probe_dropped()
        if is_there:
            own.probe_ended(is_good=is_good, now_s=now_s, kind=kind, reason=reason)
        else:
            own.probe_dropped()
        if is_good:
            self.failures = self.base.failures = 0

    def roll(self, now_s: float) -> None:
        """Move the windows of answers on."""
        self.health.roll(now_s)
        self.base.health.roll(now_s)

    def note_health(self) -> None:
        """Take over from the replica's health whether it may be used."""
        self.base.note_health()

    def take_route(self, route: ReplicaRoute, slots: int) -> None:
        """Take over what a new table says, and try a guest again that was missing: it may be there by now."""
        if route != self.route and self.is_missing:
            self.health.open_until_s = 0.0
        super().take_route(route, slots)


class Seats:
    """The replicas of one gateway by who shares them. All dispatchers of a gateway have the same one."""

    __slots__ = ("_bases", "_due", "_is_serving", "has_any", "news")

    def __init__(self) -> None:
        self.has_any = False
        """Whether any replica is shared at all."""
        self.news = False
        """Whether one came to be shared since somebody looked: lines that wait for it must be told."""
        self._bases: WeakValueDictionary[tuple[str, int], ReplicaLoad] = WeakValueDictionary()
        self._due: dict[Occupancy, None] = {}
        self._is_serving = False

    def __repr__(self) -> str:
        return f"<Seats: {len(self._bases)} replicas{', some shared' if self.has_any else ''}>"

    def load_of(self, route: ReplicaRoute, version_id: str, slots: int) -> ReplicaLoad:
        """Return the load for a route that a dispatcher has not had before."""
        if route.seat_of:
            return self._seat(route, version_id, slots)
        key = route.id, route.port
        found = self._known(key)
        if found is None or found.is_owned:
            # Owned: it moves from one endpoint to another, which what runs there for the first must not disturb.
            found = self._bases[key] = ReplicaLoad(route, version_id, slots)
        found.version_id = version_id
        found.is_owned = True
        return found

    def let_go(self, load: ReplicaLoad) -> None:
        """Take note that a dispatcher has a replica, or its seat on one, no more."""
        if isinstance(load, Seat):
            load.base.seats -= 1
        else:
            load.is_owned = False

    def mark(self, occupancies: Iterable[Occupancy]) -> None:
        """Have what is free on these handed out by the next ``serve``, which must be near."""
        self._due.update(dict.fromkeys(occupancies))

    def serve(self, occupancies: Iterable[Occupancy], *, now_s: float) -> None:
        """Hand out what is free on these; what happens meanwhile only adds to what is to be done."""
        self.mark(occupancies)
        if self._is_serving:
            return
        self._is_serving = True
        try:
            while self._due:
                occupancy = next(iter(self._due))
                del self._due[occupancy]
                occupancy.serve(now_s=now_s)
        finally:
            self._is_serving = False

    def _seat(self, route: ReplicaRoute, version_id: str, slots: int) -> Seat:
        key = route.seat_of, route.port
        base = self._known(key)
        if base is None:
            whole = msgspec.structs.replace(route, id=route.seat_of, seat_of="", model_name="", is_draining=False)
            base = self._bases[key] = ReplicaLoad(whole, "", slots)
            base.take_route(whole, slots)
            base.is_owned = False
        if base.occupancy is None:
            # An occupancy stays when the last guest has gone; the next one comes soon.
            base.occupancy = Occupancy(base)
            self.has_any = self.news = True
        base.seats += 1
        return Seat(route, version_id, base)

    def _known(self, key: tuple[str, int]) -> ReplicaLoad | None:
        """Return the record of a replica that somebody has; one that all have let go may live on in what is over."""
        found = self._bases.get(key)
        return found if found is not None and (found.is_owned or found.seats) else None
