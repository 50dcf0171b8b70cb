"""When a webhook is tried again.

The first retries come fast, since most failures are a restart; then every few
hours, for three days, since a receiver may be down over a weekend
(``reference/faults.md`` F38). Jitter keeps what failed together from coming
back together.
"""

from collections.abc import Iterable

PAUSES_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14_400.0)
"""Pauses before the first retries; the last one is that before every further one."""
GIVE_UP_S = 3 * 24 * 3600.0
"""No retry begins later than this after the first attempt."""
JITTER = 0.25


def next_try(tries: int, *, since: float, now: float, chance: float) -> float | None:
    """Return when to try again after ``tries`` failures (unix seconds), None to give up.

    ``since`` is the time of the first attempt; ``chance`` is uniform in [0, 1).
    """
    assert tries >= 1, "asked after a failure"
    pause_s = PAUSES_S[min(tries, len(PAUSES_S)) - 1]
    at = now + pause_s * (1 - JITTER + 2 * JITTER * chance)
    return at if at - since <= GIVE_UP_S else None


def wants(types: Iterable[str], kind: str) -> bool:
    """Say whether a webhook with these ``types`` is told of an event: by its name, ``batch.*`` or ``*``."""
    family = kind.partition(".")[0] + ".*"
    return any(one in ("*", kind, family) for one in types)
