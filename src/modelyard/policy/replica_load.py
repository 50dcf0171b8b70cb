"""One replica as its dispatcher sees it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelyard.domain.routing_table import ReplicaRoute, ReplicaSnapshot
from modelyard.policy.admission import KvAccount
from modelyard.policy.breaker import Failure, Health, State
from modelyard.policy.job import NEVER_S, Job
from modelyard.policy.prefixes import PrefixIndex
from modelyard.policy.routing import UNKNOWN_ENGINE, stable_hash

if TYPE_CHECKING:
    from modelyard.policy.occupancy import Occupancy

FULL_S = 0.5
"""After it said that it is full: the pause before it is tried with more than it had then."""
BLOCKS_UNKNOWN = 4000
"""Blocks of prompts that a replica is thought to keep while its cache's size is unknown: about a million tokens."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ReplicaLoad:
    """What runs there and how it does; only the dispatcher changes it.

    ``ejected_until_s`` is 0 or never: a probe says when an ejection ends, not the clock. Where guests have seats on it
    (``seats.py``), its counts are of everybody there.
    """

    route: ReplicaRoute
    version_id: str
    slots: int
    running: int = 0
    running_elsewhere: int = 0
    running_peak: int = 0
    """Most that was running from here since the last snapshot."""
    running_peak_before: int = 0
    """The same of the snapshot before: one was taken a while before it is told, so it may speak of that time."""
    pending_tokens: int = 0
    reading_since_s: float = NEVER_S
    """When it began with the oldest of those; never: not known, all of them count in full."""
    unanswered: int = 0
    """Requests without a token yet."""
    is_draining: bool = False
    is_gone: bool = False
    ejected_until_s: float = 0.0
    full_until_s: float = 0.0
    """Until then ``slots`` is what it bore when it last said that it is full; 0: it did not, or bears all again."""
    slots_given: int = 0
    """The slots of the table."""
    failures: int = 0
    failure_reason: str = ""
    last_dispatch: int = 0
    identity: int = 0
    seated: int = 0
    """Those of ``running`` that are on seats: requests of other endpoints, whose versions are guests here."""
    occupancy: "Occupancy | None" = None
    """Who else sends requests there; None: nobody."""
    seats: int = 0
    """Endpoints that have a seat on it."""
    is_owned: bool = True
    """Whether an endpoint has it as a replica of its own; a seat may be heard of first."""
    granted_s: float = 0.0
    """The ejection for which its own requests were granted retries, by the end of its first pause."""
    seen: ReplicaSnapshot | None = None
    """What its engine reported last."""
    health: Health = field(default_factory=Health)
    kv: KvAccount = field(default_factory=KvAccount)
    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(BLOCKS_UNKNOWN))

    def __post_init__(self) -> None:
        self.identity = stable_hash(self.route.id)
        self.slots_given = self.slots

    def __repr__(self) -> str:
        state = "gone" if self.is_gone else "draining" if self.is_draining else "ready"
        return f"<Replica {self.route.id}: {state}, {self.running}/{self.slots} slots, {self.health!r}>"

    @property
    def own(self) -> int:
        """Return how many of the requests that run there were sent by its own dispatcher."""
        return self.running - self.seated

    @property
    def replica_id(self) -> str:
        """Return the id of the engine's process: what a crash or an ejection is about."""
        return self.route.id

    @property
    def is_missing(self) -> bool:
        """Say whether the engine told that what is asked of it is not there."""
        return False

    @property
    def is_cut_off(self) -> bool:
        """Say whether it is out of reach for a reason that its own health does not tell."""
        return False

    def judged(self, kind: Failure) -> Health:
        """Return the health that a failure of this kind counts for."""
        return self.health

    def take_route(self, route: ReplicaRoute, slots: int) -> None:
        """Take over what a new table says."""
        self.route, self.slots_given = route, slots
        self.slots = min(self.slots, slots) if self.full_until_s else slots
        self.is_draining, self.is_gone = route.is_draining, False
        self.kv.capacity = route.kv_tokens
        if route.kv_tokens:
            self.prefixes.blocks_max = max(16, int(route.kv_tokens / UNKNOWN_ENGINE.block_tokens))

    def observe(self, snapshot: ReplicaSnapshot) -> None:
        """Take over what the engine reported: what is more than anything sent from here must come from elsewhere."""
        if snapshot is self.seen:
            return  # told by another dispatcher before
        self.seen = snapshot
        if snapshot.running is not None:
            ours = max(self.running_peak, self.running_peak_before)
            self.running_elsewhere = max(0, snapshot.running + (snapshot.waiting or 0) - ours)
        self.running_peak_before, self.running_peak = self.running_peak, self.running

    def blame(self, kind: Failure, reason: str) -> None:
        """Note a failure for whoever is told of failures in a row."""
        self.failures += 1
        self.failure_reason = reason

    def answered(self) -> None:
        """Note a good answer, or one that blames the request."""
        self.failures = 0
        health = self.health
        if health.is_closed and not health.bad_in_a_row:
            health.good += 1
        else:
            health.succeeded()

    def probe_due(self, now_s: float) -> bool:
        """Say whether it should be asked for a token now."""
        return self.health.probe_due(now_s)

    def probe_began(self) -> None:
        """Note that it was asked for a token; ``probe_ended`` must follow."""
        self.health.probe_began()

    def probe_ended(self, *, is_good: bool, now_s: float, kind: Failure, reason: str) -> None:
        """Take the answer to a probe into account, or that of nobody where there can be none (``is_good`` then)."""
        if self.health.state is State.OPEN:
            self.health.probe_began()
        self.health.probe_ended(is_good=is_good, now_s=now_s, kind=kind, reason=reason)
        if is_good:
            self.failures = 0

    def roll(self, now_s: float) -> None:
        """Move the window of answers on."""
        self.health.roll(now_s)

    def note_health(self) -> None:
        """Take over from the health whether it may be used."""
        self.ejected_until_s = 0.0 if self.health.is_closed else NEVER_S

    def would_hold(self, job: Job, other: Job, kv_share_max: float) -> bool:
        """Say whether ``job`` could start here if ``other``, which runs here, did not."""
        if self.running > self.slots or self.is_draining or self.ejected_until_s:
            return False
        return self.kv.fits_instead(job, other, kv_share_max)

    def filled(self, now_s: float) -> None:
        """Take its word that it has no room: what runs there now is all that it bears for a while."""
        self.slots = min(self.running, self.slots_given)
        self.full_until_s = now_s + FULL_S

    def relieved(self, now_s: float) -> bool:
        """Try it with a quarter more when it is time; say whether it was."""
        if not self.full_until_s or now_s < self.full_until_s:
            return False
        self.slots = min(self.slots_given, self.slots + max(1, self.slots // 4))
        self.full_until_s = 0.0 if self.slots == self.slots_given else now_s + FULL_S
        return True
