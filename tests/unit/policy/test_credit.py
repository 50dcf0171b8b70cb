"""Credit: what expires first is drawn first, nothing is drawn twice, nothing of what is given gets lost."""

from hypothesis import given
from hypothesis import strategies as st

from modelyard.domain.billing import CreditKind, Grant
from modelyard.policy.credit import booked, is_low, left

NOW = 1_800_000_000


def a_grant(number: int, amount: int, *, expires_in: int | None = None, granted: int = 0) -> Grant:
    expires_at = None if expires_in is None else NOW + expires_in
    return Grant(f"grant-{number}", "ten-a", amount, NOW - 100 + granted, expires_at)


def test_what_expires_first_goes_first_and_of_two_alike_the_older() -> None:
    grants = [a_grant(1, 10, granted=1), a_grant(2, 10), a_grant(3, 10, expires_in=50), a_grant(4, 10, expires_in=20)]
    _, moves = booked(grants, 35, NOW)
    assert [(move.grant_id, move.amount_nanousd) for move in moves] == [
        ("grant-4", 10),
        ("grant-3", 10),
        ("grant-2", 10),
        ("grant-1", 5),
    ]


def test_what_was_used_before_a_grant_expires_is_drawn_from_it_and_the_rest_is_lost() -> None:
    after, moves = booked([a_grant(1, 10, expires_in=0), a_grant(2, 10)], 4, NOW)
    assert [(move.grant_id, move.kind, move.amount_nanousd) for move in moves] == [
        ("grant-1", CreditKind.DRAW, 4),
        ("grant-1", CreditKind.EXPIRY, 6),
    ]
    assert left(after, NOW) == 10
    assert booked(after, 0, NOW) == (after, []), "it expires once"


def test_an_expired_grant_counts_for_nothing_before_anybody_books_it() -> None:
    assert left([a_grant(1, 10, expires_in=0), a_grant(2, 3, expires_in=1)], NOW) == 3


@given(
    grants=st.lists(st.tuples(st.integers(0, 1000), st.none() | st.integers(-50, 50)), max_size=6),
    steps=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 20)), max_size=8),
)
def test_every_nano_given_is_left_drawn_or_expired_and_no_more_is_drawn_than_was_used(
    grants: list[tuple[int, int | None]], steps: list[tuple[int, int]]
) -> None:
    held = [a_grant(number, amount, expires_in=expires) for number, (amount, expires) in enumerate(grants)]
    given_ = sum(grant.amount_nanousd for grant in held)
    now, used = float(NOW), 0
    for amount, seconds in steps:
        now, used = now + seconds, used + amount
        before = left(held, now)
        held, moves = booked(held, amount, now)
        drawn = sum(move.amount_nanousd for move in moves if move.kind is CreditKind.DRAW)
        assert drawn >= min(amount, before), "what is there is drawn"
        assert drawn <= amount
    assert all(grant.left_nanousd >= 0 for grant in held)
    assert sum(grant.drawn_nanousd + grant.expired_nanousd + grant.left_nanousd for grant in held) == given_
    assert sum(grant.drawn_nanousd for grant in held) <= used


def test_credit_is_low_when_a_tenth_of_what_is_still_drawn_from_is_left() -> None:
    grants, _ = booked([a_grant(1, 100), a_grant(2, 50, granted=1)], 89, NOW)
    assert not is_low(grants, NOW)
    grants, _ = booked(grants, 50, NOW)
    assert left(grants, NOW) == 11
    assert not is_low(grants, NOW), "of the second one, a fifth is left"
    grants, _ = booked(grants, 6, NOW)
    assert is_low(grants, NOW)
    assert not is_low([*grants, a_grant(3, 100)], NOW), "new credit is given"
    assert is_low([*grants, a_grant(3, 100, expires_in=0)], NOW), "of what has expired nothing counts"
