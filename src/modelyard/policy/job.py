"""What policies may know of a request: the one thing that the line, the admission and the routing share."""

from dataclasses import dataclass, field
from typing import NamedTuple

from modelyard.domain.tenants import Plan

NEVER_S = float("inf")
FIRST_S = -NEVER_S
"""Due before all others of its tenant."""

BANDS = (Plan.PRIORITY, Plan.STANDARD, Plan.BATCH)
"""Priority bands, the most urgent first; a job's ``band`` is an index into it."""

Looks = list[tuple[int, int, int, int, float, float, float]]
"""What ``choose`` saw of each replica it looked at, as ``Look`` has it: raw, because nearly nobody ever asks."""


class Look(NamedTuple):
    """One of ``Looks``. ``total_s`` is infinite for a replica without room, or to be left alone."""

    identity: int
    running: int
    slots: int
    matched: int
    """Leading blocks of the prompt that it has cached."""
    wait_s: float
    prefill_s: float
    total_s: float


@dataclass(slots=True, eq=False)
class Job:
    """A request before and on a replica. Tokens are estimates until the engine tells; seconds are monotonic.

    ``output_tokens`` is what it will probably generate, ``output_max`` what it may. ``prefix`` are chained hashes of
    the blocks of its prompt, salted per tenant (``policy/prefixes.py``); ``session`` is a hash of what keeps requests
    together, 0 for nothing. ``due_s`` orders jobs of one tenant (earliest first; ties: arrival).
    """

    tenant_id: str
    weight: float = 1.0
    band: int = 1
    prompt_tokens: int = 1
    output_tokens: int = 1
    output_max: int = 1
    size_bytes: int = 0
    prefix: tuple[int, ...] = field(default=())
    session: int = 0
    release_session: int = 0
    """The same for releases: only of an endpoint that is sticky, or one user would never meet a canary."""
    due_s: float = NEVER_S
    pending_tokens: int = 0
    """Prompt tokens it adds to the replica it was sent to, until its first token comes."""
    dispatched_s: float = 0.0
    passed: int = 0
    """How often others of its tenant were served before it."""
    looks: Looks | None = None
    """What was seen of the replicas when it got one of several; for whoever asks why."""
    beside: int = 0
    """Requests that ran on its replica when it came."""
    fallback_s: float = 0.0
    """From when on it may go to a release that is there for what the others have no room for; never: not at all."""
    spilled: tuple[int, int, int] | None = None
    """Why it went to a fallback: replicas of releases with weight, those of them that were full, and those that
    were left alone after failures. None: it did not."""
    is_seen: bool = True
    """Whether its caller gets tokens as they come, or it cannot begin anew for another reason; else it may until its
    end."""
    was_first: bool = False
    """Whether nothing was pending on its replica when it came: then its first token tells how fast that is."""
