"""The judge of canaries: stories with their verdicts, and what must hold for all of them."""

import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.rollouts import Rollout, RolloutKind, RolloutMode, RolloutState, Thresholds
from modelyard.domain.signals import Window
from modelyard.policy.canary import ALPHA, Cost, Decision, Evidence, Start, Verdict, cost_per_1m, fisher, judge

NOW = 10_000.0
LIMITS = Thresholds(min_step_s=60.0, min_requests=100)
ROLLOUT = Rollout("ver-1", "ver-2", NOW - 1000, asked_at=NOW - 500, step_began_at=NOW - 400, thresholds=LIMITS)
READY = Start(ready=1, ready_at=NOW - 450)


def window(requests: int = 1000, errors: int = 0, **fields: Any) -> Window:
    measured: dict[str, Any] = {
        "ttft_p50_s": 0.1,
        "ttft_p95_s": 0.2,
        "itl_p95_s": 0.02,
        "prompt_tokens": requests * 50,
        "completion_tokens": requests * 50,
        "service_s": requests * 1.0,
    }
    return Window(seconds=400.0, requests=requests, errors=errors, **{**measured, **fields})


def seen(
    stable: Window | None = None, candidate: Window | None = None, *, start: Start = READY, **fields: Any
) -> Evidence:
    return Evidence(
        weight=fields.pop("weight", 10),
        stable=window() if stable is None else stable,
        candidate=window(200) if candidate is None else candidate,
        start=start,
        **fields,
    )


def verdict_of(evidence: Evidence, rollout: Rollout = ROLLOUT) -> Decision:
    return judge(rollout, evidence, NOW)


def changed(rollout: Rollout = ROLLOUT, **fields: Any) -> Rollout:
    return msgspec.structs.replace(rollout, **fields)


# --- stories -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "evidence", "verdict", "says"),
    [
        ("as good", seen(), Verdict.PROMOTE, "0 of 200 requests failed (stable 0 of 1000)"),
        ("no traffic", seen(candidate=window(0)), Verdict.WAIT, "no request reached the candidate in 400 s"),
        ("few samples", seen(candidate=window(99)), Verdict.WAIT, "had 99 of 100 requests"),
        ("nothing to compare with", seen(stable=window(3)), Verdict.WAIT, "stable had only 3 requests"),
        ("half fail", seen(candidate=window(12, 6)), Verdict.ROLL_BACK, "failed 6 of 12 requests (50.0%), stable 0"),
        ("most fail", seen(window(0), window(10, 6)), Verdict.ROLL_BACK, "failed 6 of 10 requests"),
        ("most of very few fail", seen(window(0), window(9, 9)), Verdict.WAIT, "had 9 of 100"),
        ("one of many fails", seen(candidate=window(200, 1)), Verdict.PROMOTE, "1 of 200 requests failed"),
        ("a little worse", seen(candidate=window(200, 4)), Verdict.WAIT, "that may be chance"),
        ("surely worse", seen(candidate=window(2000, 80)), Verdict.ROLL_BACK, "(4.0%), stable 0 of 1000"),
        ("both fail", seen(window(1000, 300), window(200, 60)), Verdict.PROMOTE, "60 of 200"),
        ("slow", seen(candidate=window(200, ttft_p95_s=0.9)), Verdict.ROLL_BACK, "TTFT p95 of the candidate is 900 ms"),
        ("perhaps slow", seen(candidate=window(100, ttft_p95_s=0.31)), Verdict.WAIT, "that may be chance"),
        (
            "slow tokens",
            seen(candidate=window(400, itl_p95_s=0.06)),
            Verdict.ROLL_BACK,
            "ITL p95 of the candidate is 60",
        ),
        ("slow by nothing", seen(window(ttft_p95_s=0.001), window(200, ttft_p95_s=0.004)), Verdict.PROMOTE, "as good"),
        ("dear", seen(candidate=window(200, service_s=600.0)), Verdict.ROLL_BACK, "cost 3.00 times those of stable"),
        ("being sized", seen(weight=5), Verdict.WAIT, "its replicas for 10 % are not ready yet"),
    ],
)
def test_story(story: str, evidence: Evidence, verdict: Verdict, says: str) -> None:
    decision = verdict_of(evidence)
    assert (decision.verdict, says in decision.reason) == (verdict, True), decision
    assert decision.data["candidate_requests"] == evidence.candidate.requests


def test_step_lasts_its_time_however_good_the_candidate_is() -> None:
    decision = verdict_of(seen(), changed(step_began_at=NOW - 59))
    assert (decision.verdict, "lasts at least 60 s" in decision.reason) == (Verdict.WAIT, True), decision
    late = msgspec.structs.replace(READY, ready_at=NOW - 59)
    assert verdict_of(seen(start=late)).verdict is Verdict.WAIT, "a restarted replica begins anew"


def test_accelerators_and_their_price_count_into_the_cost() -> None:
    twice = seen(stable_cost=Cost(4, 1, 1.0), candidate_cost=Cost(4, 2, 1.0))
    assert "cost 2.00 times" in verdict_of(twice).reason
    cheaper = seen(stable_cost=Cost(4, 1, 4.0), candidate_cost=Cost(4, 2, 1.0))
    assert verdict_of(cheaper).verdict is Verdict.PROMOTE
    unpriced = seen(stable_cost=Cost(4, 1, kind="h100"), candidate_cost=Cost(4, 8, kind="l4"))
    assert verdict_of(unpriced).verdict is Verdict.PROMOTE, "without prices different kinds cannot be compared"
    assert cost_per_1m(window(100, service_s=36.0), Cost(slots=10, accelerators=2, price=500.0)) == pytest.approx(100.0)
    assert cost_per_1m(Window(seconds=1.0), Cost()) is None


@pytest.mark.parametrize(
    ("start", "verdict", "says"),
    [
        (Start(ready=0), Verdict.WAIT, "no replica of the candidate is ready yet"),
        (Start(ready=0, trouble="no room: 3 GiB"), Verdict.WAIT, "is ready yet: no room: 3 GiB"),
        (Start(ready=0, attempts=1, trouble="exit 1"), Verdict.WAIT, "start 1 of 3 failed: exit 1"),
        (Start(ready=0, attempts=3, trouble="exit 1"), Verdict.ROLL_BACK, "cannot start: exit 1; 3 starts failed"),
        (Start(ready=0, trouble="no engine", is_hopeless=True), Verdict.ROLL_BACK, "cannot start: no engine"),
        (Start(ready=0, is_asleep=True), Verdict.WAIT, "sleeps"),
        (Start(ready=1, attempts=3, trouble="killed"), Verdict.ROLL_BACK, "ended 3 times in a row: killed"),
        (Start(ready=1, attempts=3, stable_attempts=3, trouble="killed"), Verdict.PROMOTE, "as good"),
    ],
)
@pytest.mark.parametrize("mode", list(RolloutMode))
def test_candidate_that_cannot_start_goes_back_in_every_mode(
    start: Start, verdict: Verdict, says: str, mode: RolloutMode
) -> None:
    decision = verdict_of(seen(start=start), changed(mode=mode))
    if verdict is Verdict.PROMOTE and mode is RolloutMode.MANUAL:
        verdict, says = Verdict.WAIT, "its mode is manual"
    assert (decision.verdict, says in decision.reason) == (verdict, True), decision


def test_load_may_take_its_time_but_not_for_ever() -> None:
    slow = changed(asked_at=NOW - 1801, step_began_at=0.0)
    decision = verdict_of(seen(start=Start(ready=0)), slow)
    assert (decision.verdict, "not ready within 1800 s" in decision.reason) == (Verdict.ROLL_BACK, True)
    assert verdict_of(seen(start=Start(ready=0, since=NOW - 5)), slow).verdict is Verdict.WAIT
    assert verdict_of(seen(start=Start(ready=0, is_asleep=True)), slow).verdict is Verdict.WAIT


@pytest.mark.parametrize("state", [RolloutState.PAUSED, RolloutState.PROMOTED, RolloutState.ROLLED_BACK])
def test_only_running_rollouts_are_judged(state: RolloutState) -> None:
    assert verdict_of(seen(candidate=window(100, 100)), changed(state=state)).verdict is Verdict.WAIT


def test_promotion_by_the_judge_is_taken_back_while_the_old_version_is_kept_if_it_fails_outright() -> None:
    bad, dead = seen(window(0), window(50, 30)), seen(start=Start(ready=0, attempts=3, trouble="killed"))
    kept = changed(state=RolloutState.PROMOTED, kept_until=NOW + 1)
    assert "with all traffic the candidate failed 30 of 50 requests" in verdict_of(bad, kept).reason
    assert [verdict_of(one, kept).verdict for one in (bad, dead)] == [Verdict.ROLL_BACK] * 2
    assert verdict_of(seen(window(0), window(50, 20)), kept).verdict is Verdict.WAIT
    for over in (changed(kept, kept_until=NOW - 1), changed(kept, mode=RolloutMode.MANUAL)):
        assert [verdict_of(one, over).verdict for one in (bad, dead)] == [Verdict.WAIT] * 2


def test_rolling_change_is_not_compared() -> None:
    rolling = changed(kind=RolloutKind.ROLLING)
    assert verdict_of(seen(candidate=window(100, 100)), rolling).verdict is Verdict.WAIT
    assert verdict_of(seen(start=Start(ready=0, attempts=3)), rolling).verdict is Verdict.ROLL_BACK


# --- the test of failures ------------------------------------------------------------


def exact(stable_errors: int, stable: int, candidate_errors: int, candidate: int) -> float:
    errors, whole = stable_errors + candidate_errors, stable + candidate
    ways = sum(
        math.comb(errors, count) * math.comb(whole - errors, candidate - count)
        for count in range(candidate_errors, min(errors, candidate) + 1)
    )
    return ways / math.comb(whole, candidate)


@given(st.integers(1, 60), st.integers(1, 60), st.data())
@settings(max_examples=100, deadline=None)
def test_chance_is_fishers(stable: int, candidate: int, data: st.DataObject) -> None:
    good, bad = data.draw(st.integers(0, stable)), data.draw(st.integers(0, candidate))
    found = fisher(good, stable, bad, candidate)
    if bad * stable > good * candidate:
        assert found == pytest.approx(exact(good, stable, bad, candidate), rel=1e-9)
    else:
        assert found == 1.0


def test_chance_of_a_million_requests_is_a_number() -> None:
    assert fisher(10_000, 1_000_000, 10_001, 1_000_000) > 0.4
    assert fisher(0, 1_000_000, 900_000, 1_000_000) < ALPHA


# --- what always holds ---------------------------------------------------------------

counts = st.integers(0, 400).flatmap(lambda requests: st.tuples(st.just(requests), st.integers(0, requests)))
latencies = st.one_of(st.none(), st.floats(0.001, 10.0))


@st.composite
def windows(draw: st.DrawFn) -> Window:
    requests, errors = draw(counts)
    return window(
        requests,
        errors,
        ttft_p50_s=draw(latencies),
        ttft_p95_s=draw(latencies),
        itl_p95_s=draw(latencies),
        service_s=draw(st.floats(0, 1000)),
    )


@given(windows(), windows(), st.integers(1, 300), st.floats(0, 300))
@settings(max_examples=100, deadline=None)
def test_never_promotes_with_fewer_than_the_minimum_samples_or_time(
    stable: Window, candidate: Window, least: int, age_s: float
) -> None:
    limits = Thresholds(min_step_s=100.0, min_requests=least)
    decision = verdict_of(seen(stable, candidate), changed(thresholds=limits, step_began_at=NOW - age_s))
    if decision.verdict is Verdict.PROMOTE:
        assert candidate.requests >= least
        assert age_s >= 100.0
        assert candidate.error_share <= max(0.5, stable.error_share)
    assert decision.reason


RANK = {Verdict.PROMOTE: 0, Verdict.WAIT: 1, Verdict.ROLL_BACK: 2}


@given(windows(), windows())
@settings(max_examples=100, deadline=None)
def test_more_failures_never_make_it_better(stable: Window, candidate: Window) -> None:
    ranks = [
        RANK[verdict_of(seen(stable, msgspec.structs.replace(candidate, errors=errors))).verdict]
        for errors in range(candidate.requests + 1)
    ]
    assert ranks == sorted(ranks)


@given(windows(), windows(), st.floats(1.0, 10.0))
@settings(max_examples=100, deadline=None)
def test_slower_tokens_never_make_it_better(stable: Window, candidate: Window, factor: float) -> None:
    slower = msgspec.structs.replace(candidate, itl_p95_s=(candidate.itl_p95_s or 0.01) * factor)
    candidate = msgspec.structs.replace(candidate, itl_p95_s=candidate.itl_p95_s or 0.01)
    before, after = verdict_of(seen(stable, candidate)), verdict_of(seen(stable, slower))
    assert RANK[before.verdict] <= RANK[after.verdict], (before, after)


def replay(seed: int, *, error_shares: tuple[float, float], slow: float = 1.0) -> tuple[Decision, int]:
    """Let a canary at 10 % live through a step, with a look at every tenth request of it; return how it ends."""
    chance = random.Random(seed)
    errors = [0, 0]
    ttfts: list[list[float]] = [[], []]

    def counted(side: int) -> Window:
        ordered = sorted(ttfts[side])
        quantile = lambda share: ordered[int(share * len(ordered))] if ordered else None  # noqa: E731 - two lines of use
        return window(len(ordered), errors[side], ttft_p50_s=quantile(0.5), ttft_p95_s=quantile(0.95))

    decision = Decision(Verdict.WAIT, "")
    for request in range(1, 4001):
        side = int(chance.random() < 0.1)
        errors[side] += chance.random() < error_shares[side]
        ttfts[side].append(chance.lognormvariate(-2.0, 0.8) * (slow if side else 1.0))
        if request % 100 == 0:
            rollout = changed(step_began_at=NOW - request / 10, thresholds=Thresholds(min_step_s=300, min_requests=100))
            early = msgspec.structs.replace(READY, ready_at=0.0)
            decision = judge(rollout, seen(counted(0), counted(1), start=early), NOW)
            if decision.verdict is not Verdict.WAIT:
                return decision, len(ttfts[1])
    return decision, len(ttfts[1])


def test_equal_versions_are_rarely_rolled_back() -> None:
    ends = [replay(seed, error_shares=(0.02, 0.02))[0].verdict for seed in range(120)]
    assert ends.count(Verdict.ROLL_BACK) < 0.05 * len(ends), ends.count(Verdict.ROLL_BACK)
    assert ends.count(Verdict.PROMOTE) > 0.7 * len(ends), ends.count(Verdict.PROMOTE)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_candidate_that_fails_half_is_always_rolled_back_within_the_step(seed: int) -> None:
    decision, requests = replay(seed, error_shares=(0.01, 0.5))
    assert decision.verdict is Verdict.ROLL_BACK
    assert requests < 60, "long before it had its 100 requests"


def test_candidate_that_is_three_times_as_slow_is_rolled_back() -> None:
    ends = [replay(seed, error_shares=(0.01, 0.01), slow=3.0)[0].verdict for seed in range(30)]
    assert ends.count(Verdict.ROLL_BACK) >= 29, ends
