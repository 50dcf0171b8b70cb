"""Shares of limits, as the controller's desk and the gateways tell each other.

An account is a key or tenant by its id, or one of its models: ``3kf8x2ma/smol``.
"""

import msgspec

Share = tuple[int | None, int | None, int | None]
"""Requests a minute, tokens a minute, requests at once; None where there is no limit."""
Wish = tuple[int, int, int, int]
"""The same as a gateway wants them: what it has in use, and what it had to refuse since its last report; then how many
requests run."""
NOBODY = -1
"""The worker of a report that says nothing of leases."""


class Leases(msgspec.Struct, frozen=True, tag="leases"):
    """What one gateway may apply until ``until_s`` of the machine's monotonic clock, which both ends share."""

    epoch: int
    until_s: float
    shares: dict[str, Share]


class LeaseReport(msgspec.Struct, frozen=True, array_like=True):
    """Which ``Leases`` a gateway had last, and what it wants of accounts that are in use."""

    worker: int = NOBODY
    epoch: int = 0
    wishes: dict[str, Wish] = {}
