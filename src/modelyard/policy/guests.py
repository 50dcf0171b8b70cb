"""Which guests sit on which replicas of a host: who is taken in, who goes, and why.

A replica has a number of seats. While there is room every guest that may be
asked for sits somewhere, and one with much of the traffic on several replicas.
Beyond that the least recently used goes: whoever waits first takes the seat of
the one that has been idle longest, once it had time to be used. Where none is
idle, one that has sat for longest is drained after a while: nobody waits for
ever.

``plan`` is level-triggered and pure, as ``reconcile.plan`` is: it returns what
to do now, and whatever of that happens, calling it again converges.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from modelyard.domain.fleet import GuestSeat, SeatState

Key = tuple[str, str]
"""A guest: endpoint and version."""


class Rule(msgspec.Struct, frozen=True):
    """Paces, in seconds."""

    residency_s: float = 2.0
    """Time that a guest has before another one may take its seat."""
    patience_s: float = 4.0
    """After waiting for so long a guest takes the seat of one that is in use, too."""
    drain_timeout_s: float = 30.0
    """Longest that a seat is kept for what is under way there."""
    loads_at_once: int = 4
    """Loads that a replica does at the same time."""
    hot_share: float = 0.1
    """A guest with less of the traffic sits on one replica only, unless it is half of what a replica has of it."""


STANDARD = Rule()


class SeatSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A seat as recorded, with what is seen of it.

    ``in_flight`` of a draining one is None until every gateway knows that it drains. ``is_busy``: a call about it is
    under way. ``is_lost``: the engine says that it does not have it.
    """

    seat: GuestSeat
    in_flight: int | None = 0
    is_busy: bool = False
    is_lost: bool = False


class HostSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that answers, and takes in up to ``capacity`` guests; ``versions`` are the bases that it can serve.

    ``not_before_s``: until when a guest is not tried there again, by guest, after a failed load.
    """

    id: str
    capacity: int
    bases: frozenset[str]
    seats: Sequence[SeatSeen] = ()
    not_before_s: Mapping[Key, float] = {}


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A guest that may be asked for. ``base``: what it is loaded onto.

    ``waited_s``: how long somebody has waited for it without a seat, None: nobody does.
    """

    key: Key
    name: str
    base: str
    waited_s: float | None = None
    in_flight: int = 0
    idle_s: float = math.inf
    rate: float = 0.0
    is_supplied: bool = True
    """What is to be loaded is on this machine."""


class Load(msgspec.Struct, frozen=True):
    """Take a guest in; ``is_again``: it has its seat already."""

    replica_id: str
    key: Key
    reason: str
    is_again: bool = False


class Drain(msgspec.Struct, frozen=True):
    """Send nothing new to a seat."""

    replica_id: str
    key: Key
    reason: str


class Unload(msgspec.Struct, frozen=True):
    """Make the engine forget a guest, and give its seat up."""

    replica_id: str
    key: Key
    reason: str


Action = Load | Drain | Unload


class Plan(msgspec.Struct, frozen=True):
    """What to do, and why guests without a seat have none, by guest."""

    actions: tuple[Action, ...]
    waits: Mapping[Key, str] = {}


def plan(hosts: Sequence[HostSeen], wanted: Iterable[Wanted], now_s: float, rule: Rule = STANDARD) -> Plan:
    """Return what to do now; ``now_s`` is unix seconds, as the times of seats are."""
    table = _Table(hosts, {one.key: one for one in wanted}, now_s, rule)
    table.tend()
    table.seat_homeless()
    table.spread()
    return Plan(tuple(table.actions), table.waits)


class _Table:
    """The seats as they will be once the actions so far are done."""

    def __init__(self, hosts: Sequence[HostSeen], wanted: Mapping[Key, Wanted], now_s: float, rule: Rule) -> None:
        self.hosts = hosts
        self.wanted = wanted
        self.now_s = now_s
        self.rule = rule
        self.actions: list[Action] = []
        self.waits: dict[Key, str] = {}
        self.free = {host.id: host.capacity - len(host.seats) for host in hosts}
        self.coming = {host.id: 0 for host in hosts}
        """Seats that are being given up."""
        self.loading = {host.id: sum(one.seat.state is SeatState.LOADING for one in host.seats) for host in hosts}
        self.at: dict[Key, set[str]] = {}
        """Where each guest sits, or will: what drains sits nowhere."""
        self.ready: dict[Key, int] = {}
        self.draining: set[tuple[str, Key]] = set()
        for host in hosts:
            for one in host.seats:
                if one.seat.state is SeatState.DRAINING:
                    self.coming[host.id] += 1
                    self.draining.add((host.id, one.seat.key))
                else:
                    self.at.setdefault(one.seat.key, set()).add(host.id)
                    self.ready[one.seat.key] = self.ready.get(one.seat.key, 0) + (one.seat.state is SeatState.READY)

    # --- what is there ---

    def tend(self) -> None:
        """Go on with what was begun, and let go of what nobody wants."""
        for host in self.hosts:
            for one in host.seats:
                if not one.is_busy:
                    self._tend(host, one)

    def _tend(self, host: HostSeen, one: SeatSeen) -> None:
        seat, age_s = one.seat, max(0.0, self.now_s - one.seat.since)
        guest = self.wanted.get(seat.key)
        match seat.state:
            case SeatState.DRAINING:
                if one.in_flight == 0:
                    self.actions.append(Unload(host.id, seat.key, "nothing of it is under way any more"))
                elif age_s >= self.rule.drain_timeout_s:
                    reason = f"not drained within {self.rule.drain_timeout_s:g} s"
                    self.actions.append(Unload(host.id, seat.key, reason))
            case _ if guest is None:
                if self._may_go(seat.key):
                    self._drain(host.id, seat.key, "its version is not served any more")
            case SeatState.LOADING if guest.is_supplied:
                self.actions.append(Load(host.id, seat.key, "its load was begun", is_again=True))
            case SeatState.READY if one.is_lost and guest.is_supplied:
                self.actions.append(Load(host.id, seat.key, "the engine does not have it any more", is_again=True))
            case _:
                return

    def _may_go(self, key: Key) -> bool:
        """Say whether a version that was replaced may go: those that take over must be there first."""
        return all(self.ready.get(other) for other in self.wanted if other[0] == key[0])

    def _drain(self, replica_id: str, key: Key, reason: str) -> None:
        self.actions.append(Drain(replica_id, key, reason))
        self.coming[replica_id] += 1
        self.draining.add((replica_id, key))
        self.at.get(key, set()).discard(replica_id)

    # --- who has no seat ---

    def seat_homeless(self) -> None:
        """Give each guest without a seat one: who is waited for first, for longest; then who was used last."""
        homeless = [one for one in self.wanted.values() if not self.at.get(one.key)]
        homeless.sort(key=lambda one: (one.waited_s is None, -(one.waited_s or 0.0), one.idle_s, one.key))
        promised = dict(self.coming)
        for guest in homeless:
            self._seat(guest, promised)

    def _seat(self, guest: Wanted, promised: dict[str, int]) -> None:
        able = [host for host in self.hosts if guest.base in host.bases and host.capacity > 0]
        tried = [host for host in able if host.not_before_s.get(guest.key, 0.0) <= self.now_s]
        if not tried:
            self.waits[guest.key] = (
                "its last load failed; it is tried again in a moment"
                if able
                else "no replica of its host has seats for it"
                if self.hosts
                else "no replica is ready"
            )
            return
        there = [host for host in tried if (host.id, guest.key) not in self.draining]
        reason = "somebody asks for it" if guest.waited_s is not None else "there is room"
        if guest.is_supplied and self._load(guest, there, reason):
            return
        has_room = any(self.free[host.id] > 0 for host in there)
        if guest.waited_s is None and not has_room:
            self.waits[guest.key] = "all seats are taken by guests that were used later; the next request loads it"
            return
        if not guest.is_supplied:
            self.waits[guest.key] = "its files are on their way"
            return
        for host in tried:
            if promised[host.id] > 0:
                promised[host.id] -= 1
                self.waits[guest.key] = "a seat is being given up for it"
                return
        if has_room:
            self.waits[guest.key] = "other guests are being loaded"
            return
        self._evict(guest, there)

    def _load(self, guest: Wanted, hosts: Iterable[HostSeen], reason: str) -> bool:
        """Load onto the emptiest of ``hosts`` with room; say whether there is one."""
        sitting = self.at.get(guest.key, set())
        roomy = [
            host
            for host in hosts
            if self.free[host.id] > 0 and self.loading[host.id] < self.rule.loads_at_once and host.id not in sitting
        ]
        if not roomy:
            return False
        # The share that is free, so that a large replica takes more of them; ids only for order.
        best = max(roomy, key=lambda host: (self.free[host.id] / host.capacity, host.id))
        self.free[best.id] -= 1
        self.loading[best.id] += 1
        self.at.setdefault(guest.key, set()).add(best.id)
        self.actions.append(Load(best.id, guest.key, reason))
        return True

    def _evict(self, guest: Wanted, hosts: Collection[HostSeen]) -> None:
        """Let the guest that will be missed least go."""
        is_patient = (guest.waited_s or 0.0) < self.rule.patience_s
        found: list[tuple[tuple[bool, bool, float, float], HostSeen, GuestSeat]] = []
        for host in hosts:
            for one in host.seats:
                seat = one.seat
                victim = self.wanted.get(seat.key)
                if victim is None or seat.state is not SeatState.READY or (host.id, seat.key) in self.draining:
                    continue
                sat_s = self.now_s - seat.since
                is_used = victim.in_flight > 0 or victim.waited_s is not None
                has_more = len(self.at.get(seat.key, ())) > 1
                if sat_s < self.rule.residency_s or (is_used and not has_more and is_patient):
                    continue
                last_s = min(victim.idle_s, self.now_s - max(seat.used_at, seat.since))
                found.append(((is_used and not has_more, not has_more, -last_s, -sat_s), host, seat))
        if not found:
            self.waits[guest.key] = "all seats are taken by guests that are in use"
            return
        _, host, seat = min(found, key=lambda one: (one[0], one[1].id, one[2].key))
        self._drain(host.id, seat.key, "another guest is waited for, and it was not used for longest")
        self.waits[guest.key] = "a seat is being given up for it"

    # --- who sits on several ---

    def spread(self) -> None:
        """Give guests with much of the traffic further seats, where there is room."""
        traffic = sum(one.rate for one in self.wanted.values())
        if len(self.hosts) < 2 or traffic <= 0:
            return
        # On many replicas a small share of the traffic is more than one of them bears.
        hot_share = min(self.rule.hot_share, 0.5 / len(self.hosts))
        hot = [one for one in self.wanted.values() if one.rate / traffic >= hot_share and one.is_supplied]
        for guest in sorted(hot, key=lambda one: (-one.rate, one.key)):
            able = [
                host
                for host in self.hosts
                if guest.base in host.bases
                and host.not_before_s.get(guest.key, 0.0) <= self.now_s
                and (host.id, guest.key) not in self.draining
            ]
            # Twice its share: where all its replicas were as busy as the others, none could take a burst of it.
            copies = min(len(able), math.ceil(2 * len(able) * guest.rate / traffic))
            while len(self.at.get(guest.key, ())) < copies:
                share = round(100 * guest.rate / traffic)
                if not self._load(guest, able, f"it has {share} % of the traffic"):
                    break
