"""How credit is drawn: what expires first, first; of two alike the older.

What was used is set against credit in the order in which the ledger has it.
What there is no credit for stays for the invoice. What is left of a grant when
it expires is lost, after everything that the ledger had by then was drawn.

Pure.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from modelyard.domain.billing import CreditKind, Grant

NEVER = float("inf")
LOW_PERCENT = 10
"""Of the grants of which anything is left: less than that is nearly nothing. A prepaid tenant never comes to nothing
quite, since a request is refused that could cost more than is left."""


class Move(NamedTuple):
    """A change of one grant."""

    grant_id: str
    kind: CreditKind
    amount_nanousd: int


def draw_order(grant: Grant) -> tuple[float, int, str]:
    """Return the turn of a grant."""
    return NEVER if grant.expires_at is None else grant.expires_at, grant.granted_at, grant.id


def booked(grants: Iterable[Grant], used_nanousd: int, now_unix_s: float) -> tuple[list[Grant], list[Move]]:
    """Return the grants after ``used_nanousd`` more was used, and after what expired by now; and what changed."""
    after: list[Grant] = []
    moves: list[Move] = []
    for grant in sorted(grants, key=draw_order):
        drawn = min(grant.left_nanousd, used_nanousd)
        if drawn > 0:
            used_nanousd -= drawn
            grant = msgspec.structs.replace(grant, drawn_nanousd=grant.drawn_nanousd + drawn)  # noqa: PLW2901
            moves.append(Move(grant.id, CreditKind.DRAW, drawn))
        left = grant.left_nanousd
        if left > 0 and grant.expires_at is not None and grant.expires_at <= now_unix_s:
            grant = msgspec.structs.replace(grant, expired_nanousd=grant.expired_nanousd + left)  # noqa: PLW2901
            moves.append(Move(grant.id, CreditKind.EXPIRY, left))
        after.append(grant)
    return after, moves


def left(grants: Sequence[Grant], now_unix_s: float) -> int:
    """Return what can be drawn now."""
    return sum(one.left_nanousd for one in grants if one.expires_at is None or now_unix_s < one.expires_at)


def is_low(grants: Sequence[Grant], now_unix_s: float) -> bool:
    """Say whether little is left of what can be drawn now."""
    open_ = [one for one in grants if one.left_nanousd and (one.expires_at is None or now_unix_s < one.expires_at)]
    given = sum(one.amount_nanousd for one in open_)
    return left(grants, now_unix_s) * 100 <= given * LOW_PERCENT
