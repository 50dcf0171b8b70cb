"""When a replica gets no requests because it failed: ejection, circuit, half-open.

The first connection-level failure ejects: with least-requests routing a
replica that fails fast has the shortest queue and would draw *more* traffic
(measured: 1 % of requests lost at one bad replica in four). A replica that
does answer, but badly, is ejected when more than a share of its answers of the
last ten seconds were bad, or several in a row. Answers below 500 never count:
a client's bad request is not the replica's fault.

An ejected replica pauses, twice as long each time it relapses, and is then
half-open: it gets a probe, and only the probe's success lets requests in
again. (Nygard, "Release It!", circuit breaker; Envoy's outlier detection.)
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

EJECTION_S = 1.0
EJECTION_S_MAX = 30.0
RELAPSE_S = 30.0
"""A replica that is ejected again within this time after it came back pauses twice as long as the last time."""
WINDOW_BUCKETS = 10
"""Seconds, one bucket each, whose answers are judged."""
SAMPLES_MIN = 10
"""Answers in the window below which their share says nothing."""
BAD_IN_A_ROW_MAX = 5
"""Bad answers without a good one between that eject whatever their number: a quiet replica has no window to speak of
(Envoy's ``consecutive_5xx`` is 5 too)."""


def ejection_s(ejections: int) -> float:
    """Return how long a replica pauses at its ``ejections``-th ejection in a row (1 or more)."""
    assert ejections >= 1, "a replica without failures is not ejected"
    return float(min(EJECTION_S * 2 ** min(ejections - 1, 10), EJECTION_S_MAX))


class Failure(enum.Enum):
    """What went wrong with a request on a replica."""

    UNREACHABLE = enum.auto()
    """Refused, reset, no connection in time, or lost in the middle of an answer: there is nothing to send to."""
    SILENT = enum.auto()
    """Connected, but a time-out passed without a token."""
    BAD_ANSWER = enum.auto()
    """An answer of 500 or more, or one that is no answer."""
    MISSING = enum.auto()
    """The engine does not have the guest that this seat is for (``seats.py``): evicted, or the replica began anew."""


_NOTHING_THERE = (Failure.UNREACHABLE, Failure.MISSING)


class State(enum.Enum):
    """Where the circuit of a replica stands."""

    CLOSED = enum.auto()
    """It takes requests."""
    OPEN = enum.auto()
    """It pauses; when the pause is over, a probe is due."""
    HALF_OPEN = enum.auto()
    """A probe is on it, and nothing else is sent."""


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """How much an endpoint bears. Shares from 0 to 1, see ``error_share_max`` and ``ejection_share_max``."""

    error_share_max: float = 0.1
    ejection_share_max: float = 0.5


@dataclass(slots=True, eq=False)
class Health:
    """The health of one replica as one gateway sees it. Seconds are monotonic.

    Hot callers read ``is_closed``, which is ``state is CLOSED``, and may write ``good += 1`` themselves when it is
    true and ``bad_in_a_row`` is 0. ``roll`` belongs into the gateway's sweep: it keeps the window moving, so that
    noting an answer needs no clock.
    """

    is_closed: bool = True
    good: int = 0
    """Good answers in the newest bucket."""
    bad_in_a_row: int = 0
    state: State = State.CLOSED
    kind: Failure | None = None
    """What it was ejected for; None while closed."""
    reason: str = ""
    """Why it failed last, for people; kept after it came back."""
    open_until_s: float = 0.0
    ejections: int = 0
    """Ejections in a row, each within ``RELAPSE_S`` of the one before."""
    _closed_at_s: float = 0.0
    _bad: int = 0
    _second: int = 0
    _good_sum: int = 0
    _bad_sum: int = 0
    _goods: list[int] = field(default_factory=lambda: [0] * (WINDOW_BUCKETS - 1))
    _bads: list[int] = field(default_factory=lambda: [0] * (WINDOW_BUCKETS - 1))

    def __repr__(self) -> str:
        share = f"{self.error_share:.0%} of {self.samples} bad"
        return f"<Health {self.state.name.lower()}: {share}{f', {self.reason}' if self.reason else ''}>"

    @property
    def samples(self) -> int:
        """Return how many answers and failures the window holds."""
        return self.good + self._bad + self._good_sum + self._bad_sum

    @property
    def error_share(self) -> float:
        """Return the share of failures in the window, 0 for an empty one."""
        return (self._bad + self._bad_sum) / max(1, self.samples)

    # --- what happened to requests ---

    def succeeded(self) -> None:
        """Note a good answer, or one below 500, of an ordinary request.

        On an ejected replica it changes no state, since the request may have begun long before the ejection; but who
        was thought unreachable and still answers is probed at once.
        """
        if self.is_closed:
            self.good += 1
            self.bad_in_a_row = 0
        elif self.kind is Failure.UNREACHABLE and self.state is State.OPEN:
            self.open_until_s = 0.0

    def is_unfit(self, kind: Failure, *, now_s: float, error_share_max: float) -> bool:
        """Note a failure and say whether it is one too many. Failures of an ejected replica are old news.

        A replica that dies fails all its requests at once; they are one failure, and lengthen no pause.
        """
        if not self.is_closed:
            return False
        self.roll(now_s)
        self._bad += 1
        self.bad_in_a_row += 1
        if kind is not Failure.BAD_ANSWER or self.bad_in_a_row >= BAD_IN_A_ROW_MAX:
            return True
        return self.samples >= SAMPLES_MIN and self.error_share > error_share_max

    def eject(self, kind: Failure, reason: str, *, now_s: float) -> None:
        """Stop sending to it, for a pause that doubles with each relapse."""
        if self.state is State.CLOSED and now_s - self._closed_at_s > RELAPSE_S:
            self.ejections = 0
        self.ejections += 1
        self.open_until_s = now_s + ejection_s(self.ejections)
        self.state = State.OPEN
        self.is_closed = False
        self.kind, self.reason = kind, reason

    def close(self, *, now_s: float) -> None:
        """Let requests in again, with a clean sheet: what was bad before must not eject it again at once."""
        self.state = State.CLOSED
        self.is_closed = True
        self.kind = None
        self.open_until_s = 0.0
        self._closed_at_s = now_s
        self._clear()

    # --- the way back ---

    def probe_due(self, now_s: float) -> bool:
        """Say whether the pause is over and no probe is under way."""
        return self.state is State.OPEN and now_s >= self.open_until_s

    def probe_began(self) -> None:
        """Note that a one-token request, or where there can be none exactly one ordinary request, was sent to try it.

        Who began the probe must end it with one of ``probe_ended`` and ``probe_dropped``, whatever happens.
        """
        assert self.state is State.OPEN, "probed without need"
        self.state = State.HALF_OPEN

    def probe_ended(self, *, is_good: bool, now_s: float, kind: Failure = Failure.BAD_ANSWER, reason: str = "") -> None:
        """Close after a good probe, pause again after a bad one. An answer below 500 is good."""
        if self.state is not State.HALF_OPEN:
            # It was let back as the last that answers while the probe was on its way.
            return
        if is_good:
            self.close(now_s=now_s)
        else:
            self.eject(kind, reason or self.reason, now_s=now_s)

    def probe_dropped(self) -> None:
        """Note that the probe ended without saying anything (its client left, say): the next is due at once."""
        if self.state is State.HALF_OPEN:
            self.state = State.OPEN

    # --- the window ---

    def roll(self, now_s: float) -> None:
        """Move the window on to ``now_s``; the answers noted since the last call count for the second of that call."""
        second = int(now_s)
        steps = second - self._second
        if steps <= 0:
            return
        self._second = second
        if steps >= WINDOW_BUCKETS:
            if self.samples:
                self._clear(keeps_row=True)
            return
        for step in range(steps):
            good, bad = (self.good, self._bad) if step == 0 else (0, 0)
            self._goods.append(good)
            self._bads.append(bad)
            self._good_sum += good - self._goods.pop(0)
            self._bad_sum += bad - self._bads.pop(0)
        self.good = self._bad = 0

    def _clear(self, *, keeps_row: bool = False) -> None:
        self.good = self._bad = self._good_sum = self._bad_sum = 0
        self._goods[:] = self._bads[:] = [0] * (WINDOW_BUCKETS - 1)
        if not keeps_row:
            self.bad_in_a_row = 0


def may_eject(health: Health, healths: Collection[Health], kind: Failure, *, share_max: float) -> bool:
    """Say whether ``health`` may be ejected; ``healths`` are those of all replicas of the endpoint not draining.

    Exactly: (1) a replica that cannot be reached, or lacks the guest, may always be ejected, since there is nothing to
    send to. (2) Else some *other* replica must be closed: the last one that still answers is never ejected, because
    one request whose answer is bad must not stop all others. (3) And the replicas ejected for answering badly or not at
    all (anything but those of (1)), with this one, are at most ``share_max`` of all, rounded down, but one is always
    allowed unless ``share_max`` is 0: when most of them answer badly it is the requests, or all of them are overloaded,
    and sending everything to the few that are left would finish these too.
    """
    if kind in _NOTHING_THERE:
        return True
    if not any(other.is_closed for other in healths if other is not health):
        return False
    ejected = sum(not other.is_closed and other.kind not in _NOTHING_THERE for other in healths if other is not health)
    return ejected + 1 <= (max(1, int(share_max * len(healths) + 1e-9)) if share_max > 0 else 0)


def failed(
    health: Health, healths: Collection[Health], kind: Failure, reason: str, *, now_s: float, tolerance: Tolerance
) -> bool:
    """Note a failed request of an endpoint's replica and eject it where the rules say so; return whether they did.

    Afterwards one of those that answer takes requests, if there is any (see ``reprieve``).
    """
    if not health.is_unfit(kind, now_s=now_s, error_share_max=tolerance.error_share_max):
        return False
    health.reason = reason
    if not may_eject(health, healths, kind, share_max=tolerance.ejection_share_max):
        return False
    health.eject(kind, reason, now_s=now_s)
    reprieve(healths, now_s=now_s)
    return True


def reprieve(healths: Collection[Health], *, now_s: float) -> Health | None:
    """Let one back that answers, if badly, when none is closed; return it.

    The good ones may be lost after a bad one was ejected: some good answers are better than none. Called by ``failed``;
    call it too when a table takes replicas away.
    """
    if any(health.is_closed for health in healths):
        return None
    answering = [health for health in healths if health.kind is Failure.BAD_ANSWER]
    if not answering:
        return None
    best = min(answering, key=lambda health: health.error_share)
    best.close(now_s=now_s)
    return best
