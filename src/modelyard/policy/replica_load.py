"""One replica as its dispatcher sees it."""

from dataclasses import dataclass, field

from modelyard.domain.routing_table import ReplicaRoute, ReplicaSnapshot
from modelyard.policy.admission import KvAccount
from modelyard.policy.breaker import Health
from modelyard.policy.job import NEVER_S
from modelyard.policy.prefixes import PrefixIndex
from modelyard.policy.routing import UNKNOWN_ENGINE, stable_hash

FULL_S = 0.5
"""After it said that it is full: the pause before it is tried with more than it had then."""
BLOCKS_UNKNOWN = 4000
"""Blocks of prompts that a replica is thought to keep while its cache's size is unknown: about a million tokens."""


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """What runs there and how it does; only the dispatcher changes it.

    ``ejected_until_s`` is 0 or never: a probe says when an ejection ends, not the clock.
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
    health: Health = field(default_factory=Health)
    kv: KvAccount = field(default_factory=KvAccount)
    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(BLOCKS_UNKNOWN))

    def __post_init__(self) -> None:
        self.identity = stable_hash(self.route.id)
        self.slots_given = self.slots

    def __repr__(self) -> str:
        state = "gone" if self.is_gone else "draining" if self.is_draining else "ready"
        return f"<Replica {self.route.id}: {state}, {self.running}/{self.slots} slots, {self.health!r}>"

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
        if snapshot.running is not None:
            ours = max(self.running_peak, self.running_peak_before)
            self.running_elsewhere = max(0, snapshot.running + (snapshot.waiting or 0) - ours)
        self.running_peak_before, self.running_peak = self.running_peak, self.running

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

    def adapter_s(self, adapter: str) -> float:
        """Return the seconds until ``adapter`` could be used: every adapter of a release is loaded with it."""
        return 0.0
