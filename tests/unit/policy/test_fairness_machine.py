"""The theorem of the Virtual Token Counter, checked for whatever order things happen in.

For any two tenants, over any time in which both wait all the time, what they
got differs by at most twice the cost of the largest request (theorem 4.4 of
"Fairness in Serving Large Language Models"), and with wrong predictions by
four times what the requests in flight can be wrong by in addition.
"""

from itertools import combinations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelyard.policy.fairness import OUTPUT_WEIGHT, FairShares
from modelyard.policy.job import Job

TENANTS = ("a", "b", "c", "d")
PROMPT_MAX = 300
OUTPUT_MAX = 100
COST_MAX = PROMPT_MAX + OUTPUT_WEIGHT * OUTPUT_MAX
SLOTS = 4


class FairMachine(RuleBasedStateMachine):
    """Right predictions: requests may run for ever, in any number."""

    error_max = 0
    slots = 1000

    def __init__(self) -> None:
        super().__init__()
        self.shares = FairShares()
        self.waiting: dict[str, list[tuple[Job, int]]] = {tenant: [] for tenant in TENANTS}
        self.running: list[tuple[Job, int]] = []
        self.service = dict.fromkeys(TENANTS, 0)
        # For every two tenants that both wait: the least and the most by which the first was ahead since then.
        self.spans: dict[tuple[str, str], tuple[int, int]] = {}

    def true_cost(self, job: Job, output_tokens: int) -> int:
        return job.prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def start(self, job: Job, output_tokens: int) -> None:
        self.shares.charge(job)
        self.running.append((job, output_tokens))
        self.service[job.tenant_id] += self.true_cost(job, output_tokens)

    @rule(
        tenant=st.sampled_from(TENANTS),
        prompt_tokens=st.integers(0, PROMPT_MAX),
        output_tokens=st.integers(0, OUTPUT_MAX),
        error=st.integers(-20, 20),
        copies=st.integers(1, 4),
    )
    def arrive(self, tenant: str, prompt_tokens: int, output_tokens: int, error: int, copies: int) -> None:
        predicted = output_tokens + max(-self.error_max, min(error, self.error_max))
        for _ in range(copies):
            job = Job(tenant, prompt_tokens=prompt_tokens, output_tokens=max(0, predicted))
            if not any(self.waiting.values()) and len(self.running) < self.slots:
                self.start(job, output_tokens)
            else:
                self.waiting[tenant].append((job, output_tokens))
                self.shares.join(tenant)

    @rule(tenant=st.sampled_from(TENANTS), copies=st.integers(1, 9), cost=st.integers(1, PROMPT_MAX))
    def flood(self, tenant: str, copies: int, cost: int) -> None:
        for _ in range(copies):
            self.waiting[tenant].append((Job(tenant, prompt_tokens=cost, output_tokens=1), 1))
            self.shares.join(tenant)

    @precondition(lambda self: len(self.running) < self.slots and any(self.waiting.values()))
    @rule(times=st.integers(1, 6))
    def dispatch(self, times: int) -> None:
        for _ in range(times):
            tenant = self.shares.first()
            if tenant is None or len(self.running) >= self.slots:
                return
            job, output_tokens = self.waiting[tenant].pop(0)
            self.shares.leave(tenant)
            self.start(job, output_tokens)
            self.measure()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        job, output_tokens = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.shares.settle(job, job.prompt_tokens, output_tokens)

    @rule(tenant=st.sampled_from(TENANTS))
    def give_up(self, tenant: str) -> None:
        if self.waiting[tenant]:
            self.waiting[tenant].pop()
            self.shares.leave(tenant)

    @rule()
    def forget(self) -> None:
        self.shares._forget()

    def measure(self) -> None:
        for pair in combinations(TENANTS, 2):
            if self.waiting[pair[0]] and self.waiting[pair[1]]:
                lead = self.service[pair[0]] - self.service[pair[1]]
                least, most = self.spans.get(pair, (lead, lead))
                self.spans[pair] = (min(least, lead), max(most, lead))
            else:
                self.spans.pop(pair, None)

    @invariant()
    def two_that_wait_get_the_same(self) -> None:
        self.measure()
        error = OUTPUT_WEIGHT * self.error_max * min(self.slots, SLOTS)
        for pair, (least, most) in self.spans.items():
            assert most - least <= 2 * COST_MAX + 4 * error, pair

    @invariant()
    def somebody_is_first_exactly_when_somebody_waits(self) -> None:
        first = self.shares.first()
        assert (first is not None) == any(self.waiting.values())
        assert first is None or self.waiting[first]

    @invariant()
    def the_smallest_counter_is_first(self) -> None:
        active = [self.shares.counter(tenant) for tenant in TENANTS if self.waiting[tenant]]
        first = self.shares.first()
        assert first is None or self.shares.counter(first) == min(active)


class MispredictingMachine(FairMachine):
    """Wrong predictions, of at most ``SLOTS`` requests at once."""

    error_max = 20
    slots = SLOTS


FairMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=50)
MispredictingMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=50)
TestFairMachine = FairMachine.TestCase
TestMispredictingMachine = MispredictingMachine.TestCase
