"""What comes to a simulated world, and what becomes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec

from modelyard.policy.dispatch import Verdict
from modelyard.policy.job import Job
from modelyard.policy.replica_load import ReplicaLoad


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``at_s`` counts from the beginning of the world; tokens are the engine's true ones.

    ``output_tokens`` is what will be generated, which nobody in the world knows; ``output_max`` what the caller allows
    (0: exactly that). ``blocks`` are hashes of the leading blocks of its prompt (``hash_tokens`` of the engine each):
    equal hashes at equal places mean an equal beginning.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    output_max: int = 0
    tenant_id: str = "ten_sim"
    weight: float = 1.0
    band: int = 1
    """Index into ``policy.job.BANDS``: 0 priority, 1 standard, 2 batch."""
    blocks: tuple[int, ...] = ()
    session: int = 0
    """A hash of what keeps requests together; 0: nothing."""
    is_line: bool = False
    """Of a batch: it makes way for everybody else."""
    is_stream: bool = True
    """Whether its caller gets tokens as they come; else nobody has seen any of its answer until its end."""
    can_resume: bool = True
    """Whether its text alone holds the state of its answer, so that another engine could go on with it."""


@dataclass(slots=True, eq=False)
class Request:
    """An arrival on its way; seconds of the world, infinite until it happens. A dispatcher's waiter."""

    arrival: Arrival
    number: int
    job: Job = field(default_factory=lambda: Job(""))
    """What its gateway knows of it, from its arrival on."""
    gateway: int = 0
    replica_id: str = ""
    version_id: str = ""
    dispatched_s: float = inf
    first_s: float = inf
    done_s: float = inf
    refused_s: float = inf
    refusal: str = ""
    """Why it was refused: ``full``, ``never``, ``late`` (its time in line was over); or what its engine failed it by:
    ``unreachable``, ``lost``, ``silent``, ``long`` (all its time was over), ``deadly`` (it takes engines down). "": it
    was not."""
    until_s: float = inf
    """When all its time is over, counted from when it was first sent to an engine."""
    told: int = 0
    """Tokens that its caller had when it lost its engine: another one goes on behind them."""
    gave_way: int = 0
    """How often it gave up its slot, as a line of a batch does."""
    queued_s: float = 0.0
    """Seconds until it was first sent to an engine."""
    cached_tokens: int = 0
    preemptions: int = 0
    replica: ReplicaLoad | None = None
    failed_on: Sequence[ReplicaLoad] = ()
    on_turned: "Callable[[Request, Verdict], None] | None" = None
    """Told when its place in line is lost."""

    def __repr__(self) -> str:
        state = self.refusal or ("done" if self.done_s < inf else "running" if self.dispatched_s < inf else "waiting")
        return f"<Request {self.number} of {self.arrival.tenant_id}: {state}>"

    @property
    def is_done(self) -> bool:
        """Say whether it was answered."""
        return self.done_s < inf

    def turned_away(self, verdict: Verdict) -> None:
        """Take the news that the place in line is lost."""
        assert self.on_turned is not None, "it stands in nobody's line"
        self.on_turned(self, verdict)

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.first_s - self.arrival.at_s

    @property
    def waited_s(self) -> float:
        """Seconds from its arrival until an engine got it."""
        return self.dispatched_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Seconds for each token after the first; 0 where there is none."""
        more = self.arrival.output_tokens - 1
        return (self.done_s - self.first_s) / more if more > 0 else 0.0


def faster(arrivals: list[Arrival], load: float) -> list[Arrival]:
    """Return the same requests ``load`` times as fast as they came."""
    return [msgspec.structs.replace(one, at_s=one.at_s / load) for one in arrivals]
