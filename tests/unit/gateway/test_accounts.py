"""One admission for all limits of key, tenant and model: everything is taken together or nothing at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelyard.clock import ManualClock
from modelyard.domain.leases import Leases
from modelyard.domain.routing_table import Spent, Tidings
from modelyard.domain.tenants import ApiKey, Limits, Rates, Scope, Tenant
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.errors import ApiError
from modelyard.gateway.accounts import Accounts, KeyState, Reservation
from modelyard.ids import hash_secret, new_api_key
from modelyard.metering.journal import Journal

PEPPER = b"p" * 32
TOKEN, PARSED = new_api_key()
PRICE = Price(input=1_000_000, cached_input=500_000, output=2_000_000)
NOON = 1_795_953_600.0  # 2026-11-29T12:00:00Z
NONE = Limits()
TODAY = ("2026-11-29", "2026-11")


class Bench:
    """Accounts with one key, on a journal whose turns end when the test says so."""

    def __init__(
        self, folder: Path, *, key: Limits = NONE, tenant: Limits = NONE, workers: int = 1, currency: str = "USD"
    ) -> None:
        self.clock = ManualClock()
        self.turn: list[Callable[[], None]] = []
        self.journal = Journal(folder / "gateway-0", sync_s=0.01, clock=self.clock, soon=self.turn.append)
        self.accounts = Accounts(worker=0, workers=workers, currency=currency)
        self.accounts.attach(self.journal)
        self.limit(key, tenant)

    def limit(self, key: Limits = NONE, tenant: Limits = NONE, *, now_s: float = 0.0) -> None:
        record = ApiKey(PARSED.key_id, "t", "k", hash_secret(PEPPER, PARSED.secret), (Scope.INFERENCE,), 0, limits=key)
        self.accounts.take([Tenant("t", "t", 0, tenant)], [record], now_s=now_s)

    @property
    def key(self) -> KeyState:
        state, _ = self.accounts.key(TOKEN.encode(), PEPPER, now_unix_s=NOON)
        assert state is not None
        return state

    def reserve(self, prompt: int = 10, output: int = 10, *, model: str = "m", **more: Any) -> Reservation:
        given: dict[str, Any] = {"price": PRICE, "now_s": 0.0, "now_unix_s": NOON, **more}
        return self.accounts.reserve(self.key, model=model, prompt_tokens=prompt, output_tokens=output, **given)

    def refused(self, **given: Any) -> ApiError:
        with pytest.raises(ApiError) as found:
            self.reserve(**given)
        return found.value

    def end_turn(self) -> None:
        turn, self.turn[:] = list(self.turn), []
        for work in turn:
            work()

    def hear(self, tokens: int, nanousd: int = 0, *, subject: str = PARSED.key_id) -> None:
        """Tell what the ledger has now that all of the journal is delivered."""
        position = self.journal.position
        assert position is not None
        row = Spent(subject, *TODAY, tokens, tokens, nanousd, nanousd, "gateway-0")
        self.accounts.hear(Tidings(spent=(row,), delivered={"gateway-0": position}), now_unix_s=NOON)


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    benches: list[Bench] = []

    def make(**limits: Any) -> Bench:
        benches.append(Bench(tmp_path, **limits))
        return benches[-1]

    yield make
    for one in benches:
        one.journal.close()


@pytest.mark.parametrize("whose", ["key", "tenant"])
@pytest.mark.parametrize("kind", ["requests_per_minute", "tokens_per_minute", "concurrency"])
@pytest.mark.parametrize("is_for_model", [False, True])
def test_each_limit_of_key_and_tenant_holds_in_all_and_for_a_model(
    bench: Callable[..., Bench], whose: str, kind: str, is_for_model: bool
) -> None:
    rates: dict[str, Any] = {kind: 20 if kind == "tokens_per_minute" else 1}
    limits = Limits(models={"m": Rates(**rates)}) if is_for_model else Limits(**rates)
    yard = bench(**{whose: limits})
    yard.reserve()
    error = yard.refused()
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    if kind != "concurrency":
        assert b"x-ratelimit-remaining-" in error.limits
    facts = error.facts or {}
    assert facts["kind"] == kind.removesuffix("_per_minute")
    assert facts["limit"] == rates[kind]
    assert facts["used"] == pytest.approx(rates[kind])
    assert facts["whose"] == ("this model" if is_for_model else "this key" if whose == "key" else "the tenant")
    if is_for_model:
        yard.reserve(model="another")
    else:
        yard.refused(model="another")


def test_what_is_refused_takes_nothing_from_anybody(bench: Callable[..., Bench]) -> None:
    yard = bench(
        key=Limits(requests_per_minute=10, tokens_per_day=1000, models={"m": Rates(concurrency=1)}),
        tenant=Limits(tokens_per_minute=1000),
    )
    yard.hear(0)
    yard.reserve()
    quota = yard.key.quotas[0]
    before = [(one.requests_left, one.tokens_left, one.running) for one in yard.key.by_model["m"]], list(quota.used)
    yard.refused()
    assert ([(one.requests_left, one.tokens_left, one.running) for one in yard.key.by_model["m"]], quota.used) == before


def test_a_quota_takes_the_worst_case_and_a_settlement_its_price(bench: Callable[..., Bench]) -> None:
    yard = bench(key=Limits(nanousd_per_day=1000))
    yard.hear(0)
    held = yard.reserve(10, 100, prompt_max=50)
    assert yard.key.quotas[0].used[2] == 50 + 200
    held.settle(10, 4, 20, now_s=1.0)
    assert yard.key.quotas[0].used[2] == 6 + 2 + 40
    refused = yard.refused(output=500)
    assert (refused.status, refused.code, refused.should_retry) == (429, "insufficient_quota", False)
    assert refused.retry_after_s == 12 * 3600
    assert refused.facts == {
        "whose": "this key", "kind": "money_per_day", "limit": 1000, "used": 48, "needed": 1010,
    }  # fmt: skip


def test_tenant_and_key_quotas_hold_together(bench: Callable[..., Bench]) -> None:
    yard = bench(key=Limits(tokens_per_day=1000), tenant=Limits(tokens_per_month=30))
    yard.hear(0)
    assert yard.refused().code == "quota_unavailable"
    yard.hear(0, subject="t")
    yard.reserve(10, 10)
    assert "tenant's" in yard.refused(prompt=10, output=10).message
    assert yard.key.quotas[0].used[0] == 20


def test_before_the_first_news_a_quota_refuses_for_a_moment_and_no_quota_does_not(bench: Callable[..., Bench]) -> None:
    yard = bench(key=Limits(tokens_per_day=1000))
    error = yard.refused()
    assert (error.status, error.code, error.headers()[0]) == (503, "quota_unavailable", ("retry-after", "1"))
    yard.hear(0)
    yard.reserve()
    yard.limit()
    yard.reserve()


def test_what_settled_leaves_the_gateways_own_sum_with_the_news_that_hold_it(bench: Callable[..., Bench]) -> None:
    yard = bench(key=Limits(tokens_per_day=1000))
    yard.hear(0)
    start = yard.journal.position
    held = yard.reserve(10, 10)
    intent = Intent("r", NOON, "t", PARSED.key_id, "ep", "m", "v", "/x", False, 10, 20, PRICE)
    yard.journal.begin(intent, lambda is_written: None)
    yard.end_turn()
    held.settle(10, 0, 5, now_s=1.0)
    yard.journal.settle(
        Settle("r", NOON, 10, 0, 5, UsageStatus.SUCCESS, 200, "", 1.0, 2.0, "rep", 1, False), lambda: None
    )
    yard.end_turn()
    assert yard.journal.on_written is None
    quota = yard.key.quotas[0]
    assert (quota.used[0], len(quota.entries)) == (15, 1)
    assert start is not None
    row = Spent(PARSED.key_id, *TODAY, 0, 0, 0, 0, "gateway-0")
    yard.accounts.hear(Tidings(spent=(row,), delivered={"gateway-0": start}), now_unix_s=NOON)
    assert (quota.used[0], len(quota.entries)) == (15, 1)
    yard.hear(15)
    assert (quota.used[0], len(quota.entries)) == (15, 0)


def test_a_request_is_billed_in_the_day_that_its_quota_was_taken_from(bench: Callable[..., Bench]) -> None:
    yard = bench(key=Limits(tokens_per_day=1000))
    yard.hear(0)
    assert yard.reserve().at_unix_s == NOON
    assert yard.reserve(now_unix_s=NOON - 86_400).at_unix_s == NOON - 12 * 3600
    yard.limit()
    assert yard.reserve(now_unix_s=NOON - 86_400).at_unix_s == NOON - 86_400


def test_new_limits_keep_what_was_used_of_the_old(bench: Callable[..., Bench]) -> None:
    limits = Limits(tokens_per_day=1000, models={"m": Rates(requests_per_minute=5)})
    yard = bench(key=limits)
    yard.hear(300)
    yard.reserve(10, 10)
    yard.limit(Limits(tokens_per_day=500, models={"m": Rates(requests_per_minute=2), "o": Rates(concurrency=1)}))
    assert yard.key.quotas[0].left()[0] == 180
    yard.reserve()
    assert yard.refused().code == "rate_limit_exceeded"
    yard.limit(Limits(tokens_per_day=500))
    yard.reserve()


def test_the_time_to_wait_for_a_place_follows_how_long_requests_take(bench: Callable[..., Bench]) -> None:
    yard = bench(key=Limits(concurrency=2))
    yard.reserve(now_s=0.0).settle(1, 0, 1, now_s=20.0)
    yard.reserve(now_s=20.0)
    yard.reserve(now_s=20.0)
    assert yard.refused(now_s=20.0).retry_after_s == 10.0


def test_workers_divide_every_limit(bench: Callable[..., Bench]) -> None:
    limits = Limits(requests_per_minute=4, tokens_per_day=400, models={"m": Rates(concurrency=2)})
    yard = bench(key=limits, workers=2)
    yard.hear(100)
    soon = yard.refused(now_s=1.0)  # whoever had its part before it began may still have it
    assert (soon.code, soon.retry_after_s) == ("rate_limit_exceeded", 1.0)
    assert "4 requests" in soon.message
    yard.reserve(10, 90, now_s=2.0)
    assert yard.refused(output=1, now_s=2.0).code == "insufficient_quota"
    yard.limit(Limits(models={"m": Rates(concurrency=4)}), now_s=2.0)
    yard.reserve(now_s=2.0)
    assert yard.refused(now_s=2.0).code == "rate_limit_exceeded"


def test_an_allowance_follows_its_lease_and_falls_back_when_it_ends(bench: Callable[..., Bench]) -> None:
    yard = bench(key=Limits(requests_per_minute=60), workers=2)
    shares, allowance = yard.accounts.shares, yard.key.allowance
    shares.recheck(1.5)
    assert (allowance.requests_limit, allowance.requests_left) == (30, 30)
    shares.take(Leases(7, 3.0, {PARSED.key_id: (50, None, None)}), now_s=1.5)
    assert (allowance.requests_limit, allowance.requests_left) == (50, 30), "what others may have used is not given"
    for _ in range(20):
        yard.reserve(now_s=1.5)
    report = shares.report(1.5)
    assert report is not None
    assert (report.worker, report.epoch, report.wishes) == (0, 7, {PARSED.key_id: (40, 0, 20, 20)})
    yard.reserve(now_s=3.0)
    assert allowance.requests_limit == 30
    shares.take(Leases(8, 5.0, {PARSED.key_id: (1, None, None)}), now_s=4.0)
    yard.reserve(now_s=4.0)
    assert yard.refused(now_s=4.0).retry_after_s == 60.0
    report = shares.report(4.0)
    assert report is not None
    assert report.wishes[PARSED.key_id][0] == 1 + 1, "what is used and what was refused"


def test_one_worker_asks_no_desk(bench: Callable[..., Bench]) -> None:
    yard = bench(key=Limits(requests_per_minute=2))
    assert yard.accounts.shares.report(0.0) is None
    yard.accounts.shares.take(Leases(1, 9.0, {PARSED.key_id: (1, None, None)}), now_s=0.0)
    assert yard.key.allowance.requests_limit == 2


def test_a_budget_of_a_model_bounds_that_model_alone_beside_all_others(bench: Callable[..., Bench]) -> None:
    yard = bench(key=Limits(model_budgets={"m": 100}), tenant=Limits(model_budgets={"m": 50, "o": 0}))
    assert yard.refused().code == "quota_unavailable", "nothing was heard of them yet"
    yard.reserve(model="another")
    rows = tuple(
        Spent(subject, *TODAY, 0, 0, 0, spent, "gateway-0")
        for subject, spent in ((f"{PARSED.key_id}/m", 30), ("t/m", 20), ("t/o", 0))
    )
    position = yard.journal.position
    assert position is not None
    yard.accounts.hear(Tidings(spent=rows, delivered={"gateway-0": position}), now_unix_s=NOON)
    held = yard.reserve(10, 10)
    error = yard.refused(prompt=1, output=0)
    assert (error.status, error.code) == (429, "insufficient_quota")
    assert "the tenant's budget for 'm' of this month" in error.message
    assert (error.facts or {})["whose"] == "the tenant for 'm'"
    held.settle(1, 0, 1, now_s=1.0)
    yard.reserve(10, 8)
    assert yard.refused(model="o").code == "insufficient_quota"
    yard.limit()
    yard.reserve(500, 500)
    assert yard.key.quotas_by_model == {}


def test_a_worker_whose_part_is_used_sends_to_another_that_has_room(bench: Callable[..., Bench]) -> None:
    yard = bench(key=Limits(nanousd_per_day=100), workers=2)
    yard.hear(1, 50)
    error = yard.refused(prompt=10, output=0, now_s=2.0)
    assert (error.code, error.should_retry, error.retry_after_s, error.is_of_worker) == (
        "insufficient_quota",
        True,
        1.0,
        True,
    )
    assert "new connection" in error.message
    never = yard.refused(prompt=51, output=0, now_s=2.0)
    assert (never.should_retry, never.is_of_worker) == (False, False)


def test_a_refusal_names_the_whole_budget_where_workers_divide_it(bench: Callable[..., Bench]) -> None:
    yard = bench(key=Limits(nanousd_per_month=100), workers=2)
    yard.hear(0)
    error = yard.refused(prompt=60, output=0, now_s=2.0)
    assert "$0.0000001 of $0.0000001 are left" in error.message, "it told of half the budget"
    assert "which the gateway's workers divide; $0.00000005 of it is this one's" in error.message
    assert "It never fits a part; " in error.message
    facts = error.facts or {}
    assert (facts["limit"], facts["used"], facts["share"], facts["needed"]) == (100, 0, 50, 60)
    error = yard.refused(prompt=101, output=0, now_s=2.0)
    assert "this month. It never fits; " in error.message
    yard.reserve(20, 0, now_s=2.0)
    error = yard.refused(prompt=40, output=0, now_s=2.0)
    assert "$0.00000008 of $0.0000001 are left" in error.message
    assert "It is renewed in " in error.message


@pytest.mark.parametrize(("workers", "part"), [(1, ""), (2, ", which the gateway's workers divide; 0.00000005 EUR")])
def test_refusals_name_amounts_in_the_configured_currency(bench: Callable[..., Bench], workers: int, part: str) -> None:
    yard = bench(tenant=Limits(nanousd_total=100), key=Limits(nanousd_per_day=50), workers=workers, currency="EUR")
    yard.hear(0)
    position = yard.journal.position
    assert position is not None
    rows = [Spent(one, *TODAY, 0, 0, 0, 0, "gateway-0", 0) for one in ("t", PARSED.key_id)]
    yard.accounts.hear(Tidings(spent=tuple(rows), delivered={"gateway-0": position}), now_unix_s=NOON)
    assert "0.00000005 EUR of 0.00000005 EUR are left of this key's" in yard.refused(prompt=60, output=0).message
    yard.limit(tenant=Limits(nanousd_total=100), now_s=1.0)
    yard.reserve(0, 0, now_s=2.0)
    error = yard.refused(prompt=60 if workers > 1 else 110, output=0, now_s=2.0)
    assert f"0.0000001 EUR of the prepaid credit is left{part}" in error.message
    assert "$" not in error.message


# --- a clock that is set back --------------------------------------------------------


def expiring(bench: Bench, end: float, **more: Any) -> None:
    record = ApiKey(
        PARSED.key_id, "t", "k", hash_secret(PEPPER, PARSED.secret), (Scope.INFERENCE,), 0, expires_at=int(end), **more
    )
    bench.accounts.take([Tenant("t", "t", 0)], [record], now_s=0.0)


def is_over(bench: Bench, now_unix_s: float) -> bool:
    seen = bench.accounts.seen(now_unix_s)
    return bench.accounts.is_over(bench.key.record, seen)


def test_a_key_that_expired_stays_so_when_the_clock_is_set_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    expiring(bench, NOON + 100)
    assert [is_over(bench, NOON + at) for at in (0, 99, -3600, 99.5, 100, 86_400)] == [False] * 4 + [True] * 2
    assert [is_over(bench, NOON + at) for at in (0, -3600, 99, 50)] == [True] * 4
    bench.limit()  # without an end
    expiring(bench, NOON + 200)
    assert not is_over(bench, NOON + 50), "it was prolonged"
    bench.journal.close()


def test_a_key_that_is_made_behind_a_clock_that_was_ahead_goes_by_the_clock(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.accounts.seen(NOON + 40 * 86_400)
    bench.accounts.seen(NOON)
    expiring(bench, NOON + 100)
    assert [is_over(bench, NOON + at) for at in (1, 99, 98.5, 100)] == [False, False, False, True]
    bench.journal.close()


def test_a_secret_before_a_rotation_that_expired_stays_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    _, parsed = new_api_key()
    record = ApiKey(
        PARSED.key_id,
        "t",
        "k",
        hash_secret(PEPPER, parsed.secret),
        (Scope.INFERENCE,),
        0,
        previous_hash=hash_secret(PEPPER, PARSED.secret),
        previous_expires_at=int(NOON) + 100,
    )
    bench.accounts.take([Tenant("t", "t", 0)], [record], now_s=0.0)

    def proves(now_unix_s: float) -> bool:
        seen = bench.accounts.seen(now_unix_s)
        return bench.accounts.key(TOKEN.encode(), PEPPER, now_unix_s=seen)[0] is not None

    assert [proves(NOON + at) for at in (0, 99, 100, 50, -3600)] == [True, True, False, False, False]
    bench.journal.close()
