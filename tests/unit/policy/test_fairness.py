"""Fair shares of tokens between tenants, and the reserved shares of less urgent bands."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.fairness import RESERVED_ONE_IN, BandShares, FairShares, cost_of
from modelyard.policy.job import Job

COST_MAX = 1000


def job(tenant: str, cost: int = 100, *, weight: float = 1.0) -> Job:
    return Job(tenant, weight=weight, prompt_tokens=cost, output_tokens=0)


def serve(shares: FairShares, cost: int = 100, weights: dict[str, float] | None = None) -> str:
    """Serve one of whoever is first; somebody else of that tenant joins at once."""
    tenant = shares.first()
    assert tenant is not None
    shares.charge(job(tenant, cost, weight=(weights or {}).get(tenant, 1.0)))
    return tenant


def test_generated_tokens_cost_double() -> None:
    assert cost_of(Job("t", prompt_tokens=10, output_tokens=7)) == 24


def test_tenant_with_the_least_service_is_first() -> None:
    shares = FairShares()
    shares.join("a")
    shares.join("b")
    assert [serve(shares, cost) for cost in (300, 100, 100, 100, 100)] == ["a", "b", "b", "b", "a"]


def test_who_became_active_first_is_first_of_equals() -> None:
    shares = FairShares()
    for tenant in ("z", "m", "a"):
        shares.join(tenant)
    assert [serve(shares) for _ in range(3)] == ["z", "m", "a"]


def test_nobody_is_first_where_nobody_waits() -> None:
    shares = FairShares()
    assert shares.first() is None
    shares.join("a")
    shares.join("a")
    assert (shares.leave("a"), shares.first(), shares.leave("a"), shares.first()) == (1, "a", 0, None)


def test_tenant_that_was_away_has_no_credit() -> None:
    shares = FairShares()
    shares.join("here")
    for _ in range(50):
        serve(shares)
    shares.join("late")
    assert shares.counter("late") == shares.counter("here") == 5000


def test_first_to_wait_starts_where_the_last_one_was_served() -> None:
    shares = FairShares()
    for _ in range(1000):
        shares.charge(job("busy"))
    shares.charge(job("rare"))
    shares.join("new")
    shares.join("busy")
    counters = [shares.counter(tenant) for tenant in ("new", "busy", "rare")]
    assert max(counters) - min(counters) <= 100, "somebody is far ahead for what it got when nobody waited"


def test_who_is_served_at_once_starts_at_the_floor() -> None:
    shares = FairShares()
    shares.charge(job("rare", 1))
    shares.charge(job("busy", 900))
    shares.charge(job("rare", 50))
    assert shares.counter("rare") == 951


def test_refund_of_one_that_waits_is_not_lost_at_its_next_charge() -> None:
    shares = FairShares()
    failed = job("a", 500)
    shares.charge(failed)
    shares.join("a")
    shares.join("b")
    shares.settle(failed, 0, 0)
    shares.charge(job("a", 30))
    assert shares.counter("a") == 30


def test_under_predicting_while_nobody_waits_saves_nothing() -> None:
    shares = FairShares()
    for _ in range(10):
        shares.charge(job("sly", 1))
    for _ in range(10):
        shares.settle(job("sly", 1), 1000, 0)
    shares.join("honest")
    shares.join("sly")
    assert shares.counter("honest") == shares.counter("sly")


def test_tenant_ahead_of_the_others_stays_ahead_when_it_comes_back() -> None:
    shares = FairShares()
    shares.join("a")
    shares.join("b")
    assert serve(shares, 900) == "a"
    shares.leave("a")
    shares.join("a")
    assert shares.counter("a") == 900
    assert shares.first() == "b"


def test_last_waiter_of_a_tenant_is_charged_from_its_own_counter() -> None:
    shares = FairShares()
    shares.join("b")
    serve(shares, 40)
    shares.leave("b")
    shares.join("a")
    shares.join("b")
    serve(shares, 500)
    before = {tenant: shares.counter(tenant) for tenant in ("a", "b")}
    first = shares.first()
    assert first == min(before, key=before.__getitem__)
    shares.leave(first)
    shares.charge(job(first, 10))
    assert shares.counter(first) == before[first] + 10, "lifted to those it left waiting"


def test_failure_gives_the_whole_charge_back() -> None:
    shares = FairShares()
    shares.join("a")
    shares.join("b")
    failed = Job("a", weight=4.0, prompt_tokens=600, output_tokens=200)
    shares.charge(failed)
    assert shares.counter("a") == 250
    assert shares.first() == "b"
    shares.settle(failed, 0, 0)
    assert shares.counter("a") == 0
    assert shares.first() == "a"


def test_what_was_really_used_counts() -> None:
    shares = FairShares()
    shares.join("a")
    short, long = Job("a", prompt_tokens=10, output_tokens=100), Job("a", prompt_tokens=10, output_tokens=100)
    shares.charge(short)
    shares.charge(long)
    shares.settle(short, 12, 5)
    shares.settle(long, 10, 300)
    assert shares.counter("a") == 12 + 10 + 610


def test_weights_divide_the_service() -> None:
    shares = FairShares()
    weights = {"gold": 3.0, "iron": 1.0}
    for tenant in weights:
        shares.join(tenant)
    served = [serve(shares, weights=weights) for _ in range(400)]
    assert served.count("gold") == 300


def test_ten_thousand_tenants_that_never_wait_are_forgotten() -> None:
    shares = FairShares()
    shares.join("waits")
    for _ in range(2):
        serve(shares, 1)
    for number in range(10_000):
        before = shares.counter(f"t_{number}")
        shares.charge(job(f"t_{number}", 10))
        assert shares.counter(f"t_{number}") >= before + 10, "forgot what it has just charged"
    shares.leave("waits")
    for number in range(10_000, 30_000):
        shares.charge(job(f"t_{number}", 1))
    assert len(shares) <= 12_000
    for number in range(20_000):
        shares.charge(job(f"t_{number}", 1))
    assert len(shares) <= 2100


def test_forgetting_keeps_those_who_wait_and_those_who_are_ahead() -> None:
    shares = FairShares()
    shares.join("waits")
    shares.join("ahead")
    shares.charge(job("ahead", 10**9))
    shares.leave("ahead")
    serve(shares, 7)
    for number in range(5000):
        shares.join(f"t_{number}")
        shares.leave(f"t_{number}")
        shares.charge(job(f"t_{number}", 0))
    assert len(shares) <= 1100
    assert shares.counter("ahead") == 10**9
    assert shares.counter("waits") == 7
    assert shares.counter("t_0") == 7, "the unknown are at the floor"


def test_many_refunds_do_not_fill_the_memory() -> None:
    shares = FairShares()
    for tenant in ("a", "b", "c"):
        shares.join(tenant)
    for _ in range(5000):
        first = shares.first()
        assert first is not None
        shares.charge(job(first))
        shares.first()
        shares.settle(job(first), 0, 0)
    assert len(shares._heap) < 100


def test_repr_tells_the_state() -> None:
    shares = FairShares()
    shares.charge(job("a"))
    shares.join("b")
    assert repr(shares) == "<FairShares: 1 of 2 tenants wait, floor 100>"
    assert repr(BandShares([0, 5, -40])) == "<BandShares: +0, +5, -40>"


@settings(deadline=None, max_examples=40)
@given(
    flood=st.lists(st.integers(1, COST_MAX), min_size=1, max_size=12),
    light=st.lists(st.tuples(st.integers(1, COST_MAX), st.integers(0, COST_MAX)), min_size=5, max_size=60),
)
def test_tenant_under_its_share_is_not_delayed_by_a_flood(flood: list[int], light: list[tuple[int, int]]) -> None:
    """One server; the flooding tenant always waits, the light one asks for at most half, with pauses in between."""
    shares = FairShares()
    shares.join("flood")
    now, nth = 0, 0
    arrivals: list[tuple[int, int]] = []
    at = 0
    for cost, pause in light:
        arrivals.append((at, cost))
        at += 2 * cost + 2 * pause
    pending: list[tuple[int, int]] = []
    worst = 0
    while arrivals or pending:
        while arrivals and arrivals[0][0] <= now:
            pending.append(arrivals.pop(0))
            shares.join("light")
        tenant = shares.first()
        assert tenant is not None, "idle although somebody waits"
        if tenant == "light":
            since, cost = pending.pop(0)
            shares.leave("light")
            worst = max(worst, now - since)
        else:
            cost = flood[nth % len(flood)]
            nth += 1
        shares.charge(job(tenant, cost))
        now += cost
    # The one that runs, and what the flood may be ahead or behind by: one job each (the bound of the theorem). A line
    # that serves in order of arrival would make it wait for all that the flood has sent.
    assert worst <= 4 * COST_MAX


BACKLOGS = st.sets(st.sampled_from([0, 1, 2]), min_size=1)


@settings(deadline=None, max_examples=60)
@given(phases=st.lists(st.tuples(BACKLOGS, st.lists(st.integers(1, COST_MAX), min_size=1, max_size=80)), min_size=1))
def test_band_with_waiters_gets_its_share_within_a_bounded_lag(phases: list[tuple[set[int], list[int]]]) -> None:
    bands = BandShares()
    for backlog, costs in phases:
        waiting = [5 if band in backlog else 0 for band in range(3)]
        total, got = 0, [0, 0, 0]
        # Since when a band could have had the largest lag: the share of any sub-interval is bounded, not only from 0.
        lead = [0.0, 0.0, 0.0]
        for cost in costs:
            served = bands.first(waiting)
            assert served in backlog
            bands.charge(served, cost, waiting)
            total += cost
            got[served] += cost
            for band in backlog:
                balance = got[band] - total / RESERVED_ONE_IN
                lead[band] = max(lead[band], balance)
                if band == min(backlog):
                    continue
                assert balance >= -1.25 * COST_MAX, "less than its share since it began to wait"
        urgent = min(backlog)
        for band in backlog - {urgent}:
            assert got[band] <= total / RESERVED_ONE_IN + 1.25 * COST_MAX, "more than its share"


def test_less_urgent_bands_get_one_token_in_twenty_each() -> None:
    bands = BandShares()
    served = []
    for _ in range(2000):
        band = bands.first([1, 1, 1])
        bands.charge(band, 100, [1, 1, 1])
        served.append(band)
    assert served.count(1) == pytest.approx(100, abs=1)
    assert served.count(2) == pytest.approx(100, abs=1)


def test_band_saves_nothing_while_nobody_waits_in_it_and_owes_nothing_for_idle_time() -> None:
    bands = BandShares()
    for _ in range(1000):
        bands.charge(0, 100, [1, 0, 0])
    assert repr(bands) == "<BandShares: +0, +0, +0>"
    for _ in range(1000):
        bands.charge(2, 100, [0, 0, 1])
    assert repr(bands) == "<BandShares: +0, +0, +100>"
    assert not bands.is_even
    assert bands.first([1, 0, 1]) == 2, "what it earned with its last job"
    bands.charge(2, 100, [1, 0, 1])
    assert repr(bands) == "<BandShares: +0, +0, -1800>"
    assert not bands.is_even


def test_band_pays_with_its_credit_also_while_nobody_more_urgent_waits() -> None:
    bands = BandShares([0, 500, 500])
    bands.charge(1, 10, [0, 1, 1])
    assert repr(bands) == "<BandShares: +0, +310, +510>"
    bands.charge(1, 100, [0, 1, 1])
    assert repr(bands) == "<BandShares: +0, +100, +610>", "but does not go into debt for it"


def test_debt_outlasts_a_moment_without_waiters_but_not_the_work_of_others() -> None:
    bands = BandShares()
    bands.charge(0, 100, [1, 0, 1])
    assert bands.first([1, 0, 1]) == 2
    bands.charge(2, 100, [1, 0, 0])
    assert bands.first([1, 0, 1]) == 0, "came back, and would go first again and again"
    for _ in range(18):
        bands.charge(0, 100, [0, 0, 0])
    assert bands.is_even
