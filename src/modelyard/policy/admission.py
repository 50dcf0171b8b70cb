"""Admission of a request to a replica by the memory of its KV cache.

Counting requests is blind: eight requests of 100 tokens and eight of 100,000
are not the same load. An engine whose KV cache is full throws a sequence out
and computes it again (preemption), so the gateway sends no more than fits:
tokens reserved + prompt + *predicted* output ≤ a share of the engine's own
number. Reserving ``max_tokens`` instead wastes most of the memory, reserving
the prompt alone preempts (measured on the Azure conversation trace at
saturation: 2,611 s and 2,164 s with 110 preemptions against 2,153 s with none).
"""

from array import array
from dataclasses import dataclass, field

from modelyard.policy.job import Job

OUTPUT_LEFT_MIN = 32
"""Tokens that a request is always expected to generate yet, however long it has been at it."""
OUTPUT_DEFAULT = 256
"""Predicted output before anything is known."""
SAMPLES = 500
SAMPLES_OF_TENANT_MIN = 20
"""Answers of a tenant from which on its own lengths are believed rather than everybody's."""
TENANTS_MAX = 256
SAMPLED_ONE_IN = 4
"""Of a tenant whose last ``SAMPLES`` answers are known, one in so many is noted: more would tell nothing new."""
_LENGTH_MAX = 2**32 - 1


def reservation(job: Job, generated: int = 0) -> int:
    """Return the tokens of KV cache that ``job`` will hold at its end, as far as one can tell after ``generated``.

    prompt + generated + max(predicted - generated, 32), and never more than the prompt and what it may generate.
    """
    left = job.output_tokens - generated
    left = max(left, OUTPUT_LEFT_MIN)
    output = generated + left
    if output > job.output_max:
        output = job.output_max if job.output_max > generated else generated
    return job.prompt_tokens + output


def can_ever_fit(job: Job, capacity: int) -> bool:
    """Say whether a replica of ``capacity`` tokens (0: unknown) could take ``job`` if it had nothing else to do.

    One that generates nothing may be hundreds of texts, which the engine reads by turns and forgets.
    """
    return capacity == 0 or job.prompt_tokens <= capacity or not job.output_max


@dataclass(slots=True, eq=False)
class KvAccount:
    """The KV cache of one replica: ``capacity`` tokens (0: unknown, then only slots count), ``reserved`` of them.

    Each job is taken once and given back once, with exactly what is held for it then.
    """

    capacity: int = 0
    reserved: int = 0
    held: dict[Job, int] = field(default_factory=dict)
    """Tokens reserved for each job on the replica; read only."""

    def __repr__(self) -> str:
        return f"<KvAccount {self.reserved}/{self.capacity or '?'} tokens, {len(self.held)} jobs>"

    def fits(self, job: Job, share_max: float) -> bool:
        """Say whether ``job`` may start here now.

        An idle replica takes any job whose prompt alone fits: it will never have more room than now.
        """
        capacity = self.capacity
        if not capacity:
            return True
        if not self.held:
            return can_ever_fit(job, capacity)
        return self.reserved + reservation(job) <= share_max * capacity

    def fits_instead(self, job: Job, other: Job, share_max: float) -> bool:
        """Say whether ``job`` could start here if ``other`` gave back what is held for it."""
        if not self.capacity:
            return True
        if len(self.held) == (other in self.held):
            return can_ever_fit(job, self.capacity)
        return self.reserved - self.held.get(other, 0) + reservation(job) <= share_max * self.capacity

    def take(self, job: Job) -> None:
        """Reserve for ``job``, which starts."""
        assert job not in self.held, "a job was taken twice"
        tokens = reservation(job)
        self.held[job] = tokens
        self.reserved += tokens

    def grow(self, job: Job, generated: int) -> None:
        """Note that ``job`` has ``generated`` tokens; its reservation grows when they pass what was predicted."""
        held = self.held.get(job)
        if held is None:
            return
        tokens = reservation(job, generated)
        if tokens > held:
            self.held[job] = tokens
            self.reserved += tokens - held

    def give_back(self, job: Job) -> None:
        """Free what is held for ``job``, which ended or moved."""
        self.reserved -= self.held.pop(job)
        assert self.reserved >= 0, "gave back more than was reserved"


class _Lengths:
    """The last ``SAMPLES`` output lengths and their P90. 2 KB when full.

    The P90 is found anew when a tenth of the samples are new: to sort 500 numbers for every answer would cost ten
    times as much as everything else here, and to keep them sorted three times.
    """

    __slots__ = ("_due", "_next", "_ring", "count", "p90", "skipped")

    def __init__(self) -> None:
        self.skipped = 0
        self._ring = array("I")
        self._next = 0
        self._due = 1
        self.count = 0
        self.p90 = 0

    def add(self, length: int) -> None:
        index = self._next
        if self.count < SAMPLES:
            self._ring.append(length)
            self.count += 1
        else:
            self._ring[index] = length
        self._next = index + 1 if index + 1 < SAMPLES else 0
        self._due -= 1
        if not self._due:
            self._due = max(1, self.count // 10)
            self.p90 = sorted(self._ring)[(self.count * 9 - 1) // 10]


class OutputPredictor:
    """How long the answers of one endpoint get: the P90 of the last 500 noted, of the tenant's own if it has 20.

    Feed it complete answers only: one that its client broke off says little. Lengths are of whole answers, in tokens.
    """

    __slots__ = ("_all", "_tenants")

    def __init__(self) -> None:
        self._all = _Lengths()
        self._tenants: dict[str, _Lengths] = {}

    def __repr__(self) -> str:
        return f"<OutputPredictor: P90 {self._all.p90} of {self._all.count}, {len(self._tenants)} tenants>"

    def observe(self, tenant_id: str, length: int) -> None:
        """Note an answer's length, unless enough are known of its tenant (``SAMPLED_ONE_IN``)."""
        tenants = self._tenants
        own = tenants.get(tenant_id)
        if own is None:
            if len(tenants) >= TENANTS_MAX:
                # The one that came first: the price of being wrong is a prediction from everybody's answers.
                del tenants[next(iter(tenants))]
            own = tenants[tenant_id] = _Lengths()
        elif own.count == SAMPLES:
            # Counted for each tenant, or two that take turns would be sampled unevenly.
            own.skipped += 1
            if own.skipped < SAMPLED_ONE_IN:
                return
            own.skipped = 0
        length = min(length, _LENGTH_MAX)
        self._all.add(length)
        own.add(length)

    def predict(self, tenant_id: str, output_max: int) -> int:
        """Return how many tokens an answer that may have ``output_max`` will probably have at most."""
        lengths = self._tenants.get(tenant_id)
        if lengths is None or lengths.count < SAMPLES_OF_TENANT_MIN:
            lengths = self._all
        predicted = lengths.p90 if lengths.count else OUTPUT_DEFAULT
        return predicted if predicted < output_max else output_max
