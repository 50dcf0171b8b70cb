"""Whether the gateway process itself keeps up, and what it refuses when it does not.

Work that is taken on and then not finished in time is worse than work refused
at once: it is paid for and useless. So a gateway that falls behind sheds, the
least urgent first, early and cheaply, and says when to come back. Health,
metrics and administration are never shed. (Google SRE book, "Handling
Overload"; Zhou et al., "Overload Control for Scaling WeChat Microservices".)

It is a fold: the sweep measures, ``decide`` turns the measurement and the last
state into the next one. A level is entered at once and left one at a time,
after a calm while well below its threshold, so that it does not flap.
"""

import enum

import msgspec


class Level(enum.IntEnum):
    """What is refused; each level includes those below."""

    NORMAL = 0
    SHED_BATCH = 1
    """Requests of the batch band."""
    SHED_STANDARD = 2
    """All but the priority band."""
    REFUSE = 3
    """All inference; health, metrics and administration still answer."""


LAG_S = (0.2, 0.6, 2.0)
"""How late the event loop runs. Healthy is below 0.01 s; 0.2 s is felt in the time to a first token and between tokens,
and more than a busy neighbour on the same cores causes twice in a row; at 2 s peers begin to think that we are dead."""
SHARES = (0.7, 0.85, 0.95)
"""Shares of a limit (open connections, requests in flight, bytes buffered, memory): there must be room for what is
already under way to grow, and at 1 the system refuses in its own, worse way (EMFILE, the OOM killer)."""
CALM_S = 2.0
"""How long a level stays after everything has been calm."""
CALM_SHARE = 0.7
"""Share of a level's threshold below which a measure is calm."""
RETRY_AFTER_S = (0.0, 2.0, 5.0, 10.0)
"""What callers are told, per level: longer when it takes longer to recover."""
SHED_BANDS = (3, 2, 1, 0)
"""First band of ``policy.job.BANDS`` that is shed, per level."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the gateway process. A limit of 0 is unknown, and its measure does not count.

    ``lag_s``: how much later than asked the sweep woke. ``connections``: open sockets of clients and engines, against
    the files the process may open. ``journal_bytes``: settlements not yet written. ``body_bytes``: request bodies
    held. ``memory_bytes``: resident set.
    """

    lag_s: float = 0.0
    connections: int = 0
    connections_max: int = 0
    in_flight: int = 0
    in_flight_max: int = 0
    journal_bytes: int = 0
    journal_bytes_max: int = 0
    body_bytes: int = 0
    body_bytes_max: int = 0
    memory_bytes: int = 0
    memory_bytes_max: int = 0


class OverloadState(msgspec.Struct, frozen=True, kw_only=True):
    """What is shed now, and why. ``calm_since_s``: since when a milder level would do (None: it would not)."""

    level: Level = Level.NORMAL
    reason: str = ""
    retry_after_s: float = 0.0
    lag_s: float = 0.0
    calm_since_s: float | None = None


def sheds(level: Level, band: int) -> bool:
    """Say whether a new request of ``band`` (an index into ``policy.job.BANDS``) is refused at ``level``."""
    return band >= SHED_BANDS[level]


def decide(seen: Seen, state: OverloadState, *, now_s: float) -> OverloadState:
    """Return the state after ``seen``, measured at ``now_s`` (monotonic seconds).

    One late wake-up is no overload (a big routing table, a garbage collection): the lag that counts is the smaller of
    the last two.
    """
    lag_s = min(seen.lag_s, state.lag_s)
    level, reason = _pressure(seen, lag_s, 1.0)
    if level >= state.level:
        return _state(level, reason, seen.lag_s, None)
    # Lower, but only if it is so with a margin too, and for a while.
    kept, kept_reason = _pressure(seen, lag_s, CALM_SHARE)
    if kept >= state.level:
        return _state(state.level, kept_reason, seen.lag_s, None)
    since_s = now_s if state.calm_since_s is None else state.calm_since_s
    if now_s - since_s < CALM_S:
        return _state(state.level, state.reason, seen.lag_s, since_s)
    milder = Level(state.level - 1)
    return _state(milder, (reason or "recovering") if milder else "", seen.lag_s, now_s if milder else None)


def _state(level: Level, reason: str, lag_s: float, calm_since_s: float | None) -> OverloadState:
    return OverloadState(
        level=level, reason=reason, retry_after_s=RETRY_AFTER_S[level], lag_s=lag_s, calm_since_s=calm_since_s
    )


def _pressure(seen: Seen, lag_s: float, margin: float) -> tuple[Level, str]:
    """Return the worst level of all measures and the measure that says so; ``margin`` scales the thresholds."""
    measures = (
        (lag_s, 1.0, LAG_S, "the event loop is late"),
        (seen.connections, seen.connections_max, SHARES, "open connections"),
        (seen.in_flight, seen.in_flight_max, SHARES, "requests in flight"),
        (seen.journal_bytes, seen.journal_bytes_max, SHARES, "the journal is behind"),
        (seen.body_bytes, seen.body_bytes_max, SHARES, "bytes of request bodies"),
        (seen.memory_bytes, seen.memory_bytes_max, SHARES, "memory"),
    )
    worst, why = 0, ""
    for value, limit, thresholds, name in measures:
        if limit > 0:
            level = sum(value >= threshold * margin * limit for threshold in thresholds)
            if level > worst:
                worst, why = level, name
    return Level(worst), why
