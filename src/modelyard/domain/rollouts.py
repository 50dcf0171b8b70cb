"""How an endpoint gets from one version to the next: a rollout, and what it can go back to.

The whole state of a rollout is this one value in the endpoint's row: a
controller that starts anew goes on from it.
"""

from enum import StrEnum

import msgspec

STEPS = (10, 25, 50, 100)
"""Percent of the requests that the candidate gets, step by step, unless asked otherwise."""
JUDGEMENTS_KEPT = 20


class RolloutKind(StrEnum):
    """How the candidate takes over."""

    CANARY = "canary"
    """By steps of traffic beside a stable version that keeps all its replicas."""
    ROLLING = "rolling"
    """Replica by replica: a new one is ready before an old one is drained."""


class RolloutMode(StrEnum):
    """Who decides on the next step."""

    AUTO = "auto"
    """The judge: it promotes and rolls back."""
    MANUAL = "manual"
    """Whoever manages the endpoint; only a candidate that cannot start is rolled back without being asked."""


class RolloutState(StrEnum):
    """How far a rollout is."""

    RUNNING = "running"
    PAUSED = "paused"
    """It stays at its step, and nobody judges it."""
    PROMOTED = "promoted"
    """The candidate has all traffic; the stable version is kept for a while."""
    ROLLED_BACK = "rolled_back"
    """The stable version has all traffic again."""


class Thresholds(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a candidate must hold, always against the stable version in the same time.

    Ratios are the candidate's value over the stable version's; 0 turns a comparison off.
    """

    min_step_s: float = 300.0
    """Shortest time of a step."""
    min_requests: int = 100
    """Fewest requests to the candidate in a step before it is promoted."""
    error_share_more: float = 0.01
    """How much larger the candidate's share of failed requests may be; 0.01 is one in a hundred."""
    ttft_ratio: float = 1.5
    itl_ratio: float = 1.5
    cost_ratio: float = 1.5
    ready_within_s: float = 1800.0
    """Longest time for the candidate to become ready at all."""


class Judgement(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the judge said once, and the numbers that it said so from."""

    at: float
    weight: int
    verdict: str
    reason: str
    data: dict[str, str | int | float | bool | None] = {}


class Rollout(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of an endpoint's releases under way, or the last one that ended. Times are unix seconds."""

    stable_id: str
    """The version that served before."""
    candidate_id: str
    """The version that is to serve."""
    began_at: float
    kind: RolloutKind = RolloutKind.CANARY
    mode: RolloutMode = RolloutMode.AUTO
    state: RolloutState = RolloutState.RUNNING
    reason: str = ""
    """Why it is in this state."""
    steps: tuple[int, ...] = STEPS
    step: int = 0
    """Index in ``steps``. While the candidate's release has less than this step's weight, it is sized for it."""
    asked_at: float = 0.0
    """When this step was asked for."""
    step_began_at: float = 0.0
    """When the candidate got the weight that it has; 0: it has none yet."""
    thresholds: Thresholds = Thresholds()
    keep_s: float = 600.0
    """How long the stable version keeps its replicas after the candidate took over."""
    ended_at: float = 0.0
    kept_until: float = 0.0
    """Until when the stable version keeps its replicas; 0: it is kept no longer, or not yet."""
    judgements: tuple[Judgement, ...] = ()
    """The newest, oldest first; one that only repeats the last verdict and reason takes its place."""

    @property
    def is_open(self) -> bool:
        """Whether it is under way: no other may begin."""
        return self.state in (RolloutState.RUNNING, RolloutState.PAUSED)

    @property
    def is_live(self) -> bool:
        """Whether there is still something to do for it, be it to let go of what is kept."""
        return self.is_open or self.kept_until > 0

    @property
    def target(self) -> int:
        """The candidate's weight at this step."""
        return self.steps[self.step]

    @property
    def is_last_step(self) -> bool:
        """Whether this step gives the candidate everything."""
        return self.step >= len(self.steps) - 1
