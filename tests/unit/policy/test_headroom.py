"""Room that is kept free beside a flood: for whom, how much, and that it costs nothing where nobody else comes."""

from math import exp, factorial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy.test_dispatch import Waiter

from modelyard.domain.routing_table import ReplicaRoute
from modelyard.policy.dispatch import Dispatcher, DispatchRules, ReplicaLoad, Verdict
from modelyard.policy.headroom import LATE_SHARE, wanted
from modelyard.policy.job import Job

PRIORITY, STANDARD, BATCH = range(3)


class Endpoint:
    """One replica of ``slots`` slots, with who runs on it in order of their start."""

    def __init__(self, slots: int = 16, *, kept_share_max: float = 1 / 16, kv_tokens: int = 0) -> None:
        self.now_s = 0.0
        self.running: list[tuple[Waiter, ReplicaLoad]] = []
        rules = DispatchRules(places=10_000, kept_share_max=kept_share_max, kv_share_max=1.0)
        self.dispatcher: Dispatcher[Waiter] = Dispatcher("ep", rules=rules, deliver=self._start, chance=lambda: 0.5)
        route = ReplicaRoute("r", "127.0.0.1", 1, "s", slots, kv_tokens=kv_tokens)
        self.dispatcher.update([("v1", 100, 0, [(route, slots)])], now_s=0.0)

    def _start(self, waiter: Waiter, replica: ReplicaLoad) -> bool:
        self.running.append((waiter, replica))
        return True

    def ask(self, tenant_id: str, *, band: int = STANDARD, tokens: int = 100) -> bool:
        """Let a request come; say whether it starts at once."""
        waiter = Waiter(tenant_id, Job(tenant_id, 1.0, band, tokens, tokens, tokens))
        verdict = self.dispatcher.arrive(waiter, now_s=self.now_s, deadline_s=1e9)
        if isinstance(verdict, ReplicaLoad):
            self._start(waiter, verdict)
            return True
        assert verdict is Verdict.WAIT
        return False

    def end(self, tenant_id: str) -> None:
        """Let the oldest answer of a tenant end."""
        found = next(one for one in self.running if one[0].name == tenant_id)
        self.running.remove(found)
        job = found[0].job
        tokens = {"prompt_tokens": job.prompt_tokens, "output_tokens": job.output_tokens}
        self.dispatcher.finish(found[1], job, now_s=self.now_s, **tokens)

    def count(self, tenant_id: str) -> int:
        return sum(waiter.name == tenant_id for waiter, _ in self.running)

    def flood(self, seconds: int = 10, **asks: int) -> None:
        """Let a tenant ask for much more than there is, two of whose answers end each second."""
        for _ in range(60):
            self.ask("flood", **asks)
        for _ in range(seconds):
            self.now_s += 1.0
            for _ in range(2):
                self.ask("flood", **asks)
                self.end("flood")


@pytest.mark.parametrize("rate", [0.001, 0.04, 0.5, 3.0])
def test_so_many_are_kept_that_few_find_them_taken(rate: float) -> None:
    def at_least(count: int) -> float:
        return 1.0 - sum(exp(-rate) * rate**n / factorial(n) for n in range(count))

    kept = wanted(rate)
    assert at_least(kept) <= LATE_SHARE + 1e-12
    assert at_least(kept - 1) > LATE_SHARE


def test_who_asks_for_little_starts_at_once_beside_a_flood_that_waits() -> None:
    endpoint = Endpoint()
    endpoint.flood()
    assert not endpoint.ask("quiet"), "nobody knew of it yet"
    endpoint.flood()
    assert endpoint.count("quiet") == 1
    assert endpoint.count("flood") == 14, "the flood keeps off the last slot"
    assert endpoint.ask("quiet")
    assert endpoint.dispatcher.line.depths[STANDARD] > 50


def test_without_others_a_flood_has_all_slots() -> None:
    endpoint = Endpoint()
    endpoint.flood(200)
    assert endpoint.count("flood") == 16


def test_a_flood_has_all_slots_again_when_the_others_have_not_come_for_long() -> None:
    endpoint = Endpoint()
    endpoint.flood()
    endpoint.ask("quiet")
    endpoint.flood(30)
    endpoint.end("quiet")
    assert endpoint.count("flood") == 15
    endpoint.flood(75)
    assert endpoint.count("flood") == 16


def test_two_floods_leave_nothing_idle() -> None:
    endpoint = Endpoint()
    for _ in range(300):
        endpoint.now_s += 1.0
        for tenant_id in ("flood", "other"):
            for _ in range(3):
                endpoint.ask(tenant_id)
            if endpoint.count(tenant_id):
                endpoint.end(tenant_id)
    assert len(endpoint.running) == 16


def test_one_that_always_waits_never_passes_the_next_in_line() -> None:
    endpoint = Endpoint(kept_share_max=0.25)
    endpoint.flood()
    endpoint.ask("quiet")
    endpoint.flood(30)
    for _ in range(20):
        endpoint.ask("quiet", tokens=5000)
    # It ran ahead of the flood by a few requests, and then waits for its turn.
    assert 1 < endpoint.count("quiet") < 8
    before = endpoint.count("quiet")
    for _ in range(10):
        endpoint.end("flood")
    assert endpoint.count("quiet") == before


def test_one_that_is_ahead_by_a_few_requests_waits_for_its_turn() -> None:
    endpoint = Endpoint()
    endpoint.flood()
    endpoint.ask("quiet")
    endpoint.flood(30)
    endpoint.end("quiet")
    started = 0
    for _ in range(20):
        if not endpoint.ask("quiet"):
            break
        started += 1
        endpoint.end("quiet")
    assert 3 <= started <= 6


def test_the_most_urgent_are_not_held_up_for_others() -> None:
    endpoint = Endpoint()
    endpoint.flood(band=PRIORITY)
    endpoint.ask("quiet", band=STANDARD)
    endpoint.flood(30, band=PRIORITY)
    assert len(endpoint.running) == 16


def test_batches_keep_nobody_off() -> None:
    endpoint = Endpoint()
    endpoint.flood()
    endpoint.ask("quiet", band=BATCH)
    endpoint.flood(30)
    assert len(endpoint.running) == 16


def test_where_memory_is_what_is_short_memory_is_kept() -> None:
    endpoint = Endpoint(256, kept_share_max=0.1, kv_tokens=4000)  # twenty requests of 200 tokens
    endpoint.flood()
    assert endpoint.count("flood") == 20
    endpoint.ask("quiet")
    endpoint.flood(30)
    endpoint.end("quiet")
    assert endpoint.count("flood") < 20
    assert endpoint.ask("quiet")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "end"]), st.integers(0, 5)), max_size=200))
def test_nobody_waits_beside_more_than_what_is_kept(steps: list[tuple[str, int]]) -> None:
    endpoint = Endpoint(8, kept_share_max=0.25)
    for what, seconds in steps:
        endpoint.now_s += seconds
        if what != "end":
            endpoint.ask(what, tokens=50 + 10 * seconds)
        elif endpoint.running:
            endpoint.end(endpoint.running[seconds % len(endpoint.running)][0].name)
        dispatcher = endpoint.dispatcher
        assert dispatcher.running == len(endpoint.running)
        if dispatcher.line:
            # ``kept`` may have become less with the last to come; the next that ends tells who waits.
            assert 8 - dispatcher.running <= 2
    while endpoint.running:
        endpoint.end(endpoint.running[0][0].name)
    assert not endpoint.dispatcher.line, "somebody waits before an idle replica"


def test_a_flood_that_only_waits_has_all_slots_again_when_nobody_comes_any_more() -> None:
    endpoint = Endpoint()
    endpoint.flood()
    endpoint.ask("quiet")
    endpoint.flood(30)
    endpoint.end("quiet")
    assert endpoint.count("flood") == 15
    endpoint.now_s += 100.0
    endpoint.end("flood")
    assert endpoint.count("flood") == 16
