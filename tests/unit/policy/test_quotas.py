"""Quotas: never more than the limit, nothing counted twice for good, nothing refilled by a clock."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.domain.routing_table import Spent
from modelyard.domain.tenants import Limits
from modelyard.policy.quotas import Quota, QuotaBook, equal_part, worker_of
from modelyard.policy.utc import DAY_S, day_name, day_number, month_name, next_month

NOV_29 = day_number("2026-11-29") * DAY_S
NOW = NOV_29 + 12 * 3600.0
START = ("0000000001.journal", 0)


def a_row(
    subject: str = "k", *, tokens: int = 0, nanousd: int = 0, at: float = NOW, source: str = "gateway-0"
) -> Spent:
    day = int(at // DAY_S)
    return Spent(subject, day_name(day), month_name(day), tokens, tokens, nanousd, nanousd, source)


def a_book(*rows: Spent, worker: int = 0, workers: int = 1, **limits: int) -> tuple[QuotaBook, Quota]:
    book = QuotaBook(worker=worker, workers=workers)
    book.required = ("", 0)
    book.advance(NOW)
    book.hear(rows or (a_row(),), {})
    quota = book.quota("k", Limits(**limits), is_tenants=False)
    assert quota is not None
    return book, quota


def take(book: QuotaBook, quota: Quota, tokens: int, nanousd: int = 0, *, now: float = NOW) -> Any:
    refusal = book.refusal((quota,), tokens, nanousd, now_unix_s=now)
    return refusal if refusal is not None else book.hold((quota,), tokens, nanousd)


def test_the_worst_case_is_taken_and_the_rest_comes_back() -> None:
    book, quota = a_book(tokens_per_day=100)
    hold = take(book, quota, 90)
    assert take(book, quota, 20).kind == "tokens"
    book.settle(hold, 10, 0)
    assert quota.left() == (90, None, None, None, None)
    assert take(book, quota, 90).tokens == 90


def test_a_refusal_says_whether_only_what_runs_is_in_the_way() -> None:
    book, quota = a_book(tokens_per_day=100, nanousd_per_month=10)
    first, second = take(book, quota, 40, 4), take(book, quota, 40, 4)
    assert (take(book, quota, 30).is_reserved, take(book, quota, 100).is_reserved) == (True, True)
    assert not take(book, quota, 101).is_reserved, "it never fits"
    refusal = take(book, quota, 30, 11)
    assert (refusal.kind, refusal.is_reserved) == ("money", False), "what time does not mend is said first"
    book.settle(first, 30, 0)
    assert (take(book, quota, 70).is_reserved, take(book, quota, 71).is_reserved) == (True, False)
    book.settle(second, 30, 0)
    assert not take(book, quota, 41).is_reserved
    assert quota.reserved == [0] * 5


def test_what_a_second_quota_never_has_room_for_is_said_before_what_the_first_one_has_later() -> None:
    book, own = a_book(tokens_per_day=100)
    tenants = book.quota("t", Limits(tokens_per_day=50), is_tenants=True)
    assert tenants is not None
    book.hear((a_row(), a_row("t", tokens=30)), {})
    book.hold((own,), 90, 0)
    refused = book.refusal((own, tenants), 20, 0, now_unix_s=NOW)
    assert refused is not None
    assert (refused.is_tenants, refused.is_reserved) == (False, True)
    refused = book.refusal((own, tenants), 21, 0, now_unix_s=NOW)
    assert refused is not None
    assert (refused.is_tenants, refused.is_reserved) == (True, False)


def test_what_was_reserved_before_midnight_is_in_nobodys_way_after_it() -> None:
    book, quota = a_book(tokens_per_day=100, tokens_per_month=150)
    hold = take(book, quota, 90)
    book.advance(NOV_29 + DAY_S)
    later = take(book, quota, 60, now=NOV_29 + DAY_S)
    assert quota.reserved == [60, 150, 0, 0, 0]
    assert take(book, quota, 41, now=NOV_29 + DAY_S).period == "day"
    book.settle(hold, 1, 0)
    book.settle(later, 2, 0)
    assert quota.reserved == [0] * 5


def test_prepaid_credit_is_renewed_by_no_month_and_not_known_before_it_is_told() -> None:
    book, quota = a_book(a_row(nanousd=70), nanousd_total=100)
    assert not quota.is_known, "the row does not say what was ever spent"
    assert take(book, quota, 1, 1).kind == ""
    told = msgspec.structs.replace(a_row(nanousd=70), total_nanousd=90)
    book.hear([told], {})
    assert take(book, quota, 1, 11).needed == 11
    hold = take(book, quota, 1, 10)
    refusal = take(book, quota, 1, 1, now=next_month(int(NOW // DAY_S)) * DAY_S)
    assert (refusal.kind, refusal.period, refusal.retry_after_s) == ("money", "total", None)
    book.settle(hold, 1, 4)
    assert quota.left()[4] == 6


def test_a_quota_that_gets_credit_waits_for_what_was_ever_spent() -> None:
    book, quota = a_book(a_row(nanousd=70), nanousd_per_month=100)
    assert book.quota("k", Limits(nanousd_per_month=100, nanousd_total=1000), is_tenants=False) is quota
    assert take(book, quota, 1, 1).kind == ""
    book.hear([msgspec.structs.replace(a_row(nanousd=70), total_nanousd=999)], {})
    assert take(book, quota, 1, 2).period == "total"
    assert take(book, quota, 1, 1).nanousd == 1


def test_a_quota_that_gets_credit_after_it_was_told_goes_on_at_once() -> None:
    told = msgspec.structs.replace(a_row(nanousd=70), total_nanousd=990)
    book, quota = a_book(told, nanousd_per_month=100)
    assert book.quota("k", Limits(nanousd_total=1000), is_tenants=False) is quota
    assert take(book, quota, 1, 11).period == "total"
    assert take(book, quota, 1, 10).nanousd == 10


def test_all_four_bounds_hold_and_the_refusal_says_which() -> None:
    for name, kind, period in [
        ("tokens_per_day", "tokens", "day"),
        ("tokens_per_month", "tokens", "month"),
        ("nanousd_per_day", "money", "day"),
        ("nanousd_per_month", "money", "month"),
    ]:
        book, quota = a_book(**{name: 10})
        refusal = take(book, quota, 11, 11)
        assert (refusal.kind, refusal.period, refusal.is_tenants) == (kind, period, False)


def test_the_time_to_renewal_is_to_midnight_or_to_the_end_of_the_month_in_utc() -> None:
    book, quota = a_book(tokens_per_day=1)
    assert take(book, quota, 2).retry_after_s == 12 * 3600
    book, quota = a_book(tokens_per_month=1)
    assert take(book, quota, 2).retry_after_s == 36 * 3600


def test_a_quota_of_zero_stops_even_what_costs_nothing() -> None:
    book, quota = a_book(nanousd_per_day=0)
    assert take(book, quota, 10, 0).kind == "money"


def test_nothing_passes_before_the_sums_reach_the_end_of_the_earlier_life() -> None:
    book = QuotaBook(worker=0, workers=1)
    quota = book.quota("k", Limits(tokens_per_day=100), is_tenants=False)
    assert quota is not None
    book.hear([a_row(tokens=5)], {"gateway-0": ("0000000009.journal", 10**9)})
    assert take(book, quota, 1).kind == ""  # nobody knows yet what this gateway wrote before it began
    book.required = ("0000000009.journal", 100)
    book.hear([a_row(tokens=5)], {"gateway-0": ("0000000009.journal", 99)})
    assert take(book, quota, 1).kind == ""
    book.hear([a_row(tokens=5)], {"gateway-0": ("0000000009.journal", 100)})
    assert take(book, quota, 96).kind == "tokens"
    assert take(book, quota, 95).tokens == 95


def test_what_settled_counts_until_the_sums_that_hold_it() -> None:
    book, quota = a_book(tokens_per_day=100)
    book.settle(take(book, quota, 60), 50, 0)
    book.placed(("0000000001.journal", 500))
    book.hear([a_row(tokens=0)], {"gateway-0": ("0000000001.journal", 499)})
    assert quota.used[0] == 50
    book.hear([a_row(tokens=50)], {"gateway-0": ("0000000001.journal", 500)})
    assert quota.used[0] == 50
    book.hear([a_row(tokens=0)], {"gateway-0": ("0000000001.journal", 499)})  # late news are no news
    assert quota.used[0] == 50


def test_a_new_day_renews_the_days_numbers_only_and_a_new_month_all() -> None:
    book, quota = a_book(a_row(tokens=90, nanousd=9), tokens_per_day=100, nanousd_per_month=10)
    hold = take(book, quota, 5, 1)
    book.advance(NOV_29 + DAY_S)
    assert quota.left() == (100, None, None, 0, None)
    book.settle(hold, 5, 1)  # of the day before: this day is not charged
    assert quota.left() == (100, None, None, 0, None)
    book.advance(next_month(int(NOW // DAY_S)) * DAY_S)
    assert quota.left() == (100, None, None, 10, None)


def test_a_clock_that_goes_back_refills_nothing_and_bills_to_the_present_day() -> None:
    book, quota = a_book(tokens_per_day=100)
    assert take(book, quota, 100).tokens == 100
    assert take(book, quota, 1, now=NOW - DAY_S).kind == "tokens"
    assert book.arrival(NOW - DAY_S) == NOV_29
    assert book.arrival(NOW) == NOW


def test_sums_of_the_day_before_do_not_clear_what_settled_today() -> None:
    book, quota = a_book(a_row(tokens=70), tokens_per_day=100, tokens_per_month=1000)
    tomorrow = NOW + DAY_S
    book.settle(take(book, quota, 40, now=tomorrow), 40, 0)
    book.placed(("1", 10))
    book.hear([a_row(tokens=70)], {"gateway-0": ("1", 10)})
    assert quota.used[:2] == [40, 110]


def test_many_settlements_are_remembered_in_bounded_space_and_all_leave_in_the_end() -> None:
    book, quota = a_book(tokens_per_day=10**9)
    for place in range(1, 5001):
        book.settle(take(book, quota, 2), 1, 0)
        book.placed(("1", place))
    assert len(quota.entries) <= 512
    assert quota.used[0] == 5000
    book.hear([a_row(tokens=2500)], {"gateway-0": ("1", 2500)})
    assert 5000 <= quota.used[0] <= 5100
    book.hear([a_row(tokens=5000)], {"gateway-0": ("1", 5000)})
    assert quota.used[0] == 5000
    assert not quota.entries


def test_new_limits_keep_what_was_used() -> None:
    book, quota = a_book(a_row(tokens=30), tokens_per_day=100)
    take(book, quota, 10)
    assert book.quota("k", Limits(tokens_per_day=50), is_tenants=False) is quota
    assert quota.left()[0] == 10
    assert book.quota("k", Limits(), is_tenants=False) is None


def test_each_worker_has_its_part_by_its_own_journals_whatever_they_are_called() -> None:
    rows = [
        a_row(tokens=30, source="gateway-0"),
        a_row(tokens=5, source="gateway-1-later"),
        a_row(tokens=10, source=""),
    ]
    first, quota = a_book(*rows, worker=0, workers=2, tokens_per_day=110)
    assert quota.left()[0] == 50 - 30
    _, quota = a_book(*rows, worker=1, workers=2, tokens_per_day=110)
    assert quota.left()[0] == 50 - 5
    first.advance(NOW + DAY_S)
    assert [worker_of(name) for name in ("gateway-12", "gateway-3.1", "batch-1", "")] == [12, 3, None, None]


@given(st.integers(0, 1000), st.lists(st.integers(0, 1500), min_size=1, max_size=6))
def test_parts_never_exceed_the_limit_unless_it_is_used_up(limit: int, used: list[int]) -> None:
    parts = [equal_part(limit, used, index) for index in range(len(used))]
    beyond = sum(max(0, part - have) for part, have in zip(parts, used, strict=True))
    assert beyond <= max(0, limit - sum(used))
    assert all(part >= 0 for part in parts)


@given(
    st.lists(st.integers(0, 300), min_size=2, max_size=4),
    st.integers(0, 60),
    st.lists(
        st.tuples(st.sampled_from(["spend", "limit", "sums", "grow"]), st.integers(0, 3), st.integers(1, 40)),
        max_size=60,
    ),
)
def test_workers_that_hear_late_and_differently_never_spend_more_than_the_limit_together(
    used: list[int], credit: int, steps: list[tuple[str, int, int]]
) -> None:
    """Each counts its own at once, and of the others knows what it heard last; credit is only ever added."""
    count, limit = len(used), sum(used) + credit
    limits, heard = [limit] * count, [list(used) for _ in used]
    for what, worker, amount in steps:
        at = worker % count
        if what == "limit":
            limits[at] = limit
        elif what == "sums":
            heard[at] = list(used)
        elif what == "grow":
            limit += amount
        elif used[at] + amount <= equal_part(limits[at], heard[at], at):
            used[at] += amount
        assert sum(used) <= limit
    left = [equal_part(limit, used, at) - used[at] for at in range(count)]
    assert max(left) >= (limit - sum(used)) // count, "once all have heard, somebody has room for an equal part of it"


def test_parts_are_all_of_the_limit_when_nothing_is_used() -> None:
    assert [equal_part(100, [0, 0, 0, 0], index) for index in range(4)] == [25] * 4
    assert [equal_part(100, [80, 0], index) for index in range(2)] == [80, 20]


@pytest.mark.parametrize(("name", "following"), [("2026-12-31", "2027-01-01"), ("2028-02-10", "2028-03-01")])
def test_months_end_where_the_calendar_says(name: str, following: str) -> None:
    assert day_name(next_month(day_number(name))) == following


def test_a_worker_whose_part_is_used_says_whether_another_one_has_room() -> None:
    rows = [a_row(tokens=50), a_row(tokens=20, source="gateway-1")]
    book, quota = a_book(*rows, workers=2, tokens_per_day=100)
    assert [take(book, quota, needed).is_elsewhere for needed in (1, 30, 31)] == [True, True, False]
    book.hear([a_row(tokens=50), a_row(tokens=50, source="gateway-1")], {"gateway-0": ("1", 1)})
    assert not take(book, quota, 1).is_elsewhere
    alone, quota = a_book(*rows, tokens_per_day=70)
    assert not take(alone, quota, 1).is_elsewhere
    stopped, quota = a_book(workers=2, nanousd_per_month=0)
    assert not take(stopped, quota, 0, 0).is_elsewhere, "a limit of nothing is nobody's to use"
    told = [msgspec.structs.replace(one, total_nanousd=have) for one, have in zip(rows, (5, 2), strict=True)]
    ahead, quota = a_book(*told, workers=2, nanousd_total=10)
    assert [take(ahead, quota, 1, needed).is_elsewhere for needed in (1, 3, 4)] == [True, True, False]
