"""What the forecast would have done: a replay of when requests came, with and without it.

Both endpoints sleep after the same idle time; one is woken by requests only,
the other also by the production rules (``prewarming.threshold``,
``forecast.expected``), which learn as the replay goes on. The first week only
teaches, where there is more than one.

Of slots whose requests are only counted, the moments are taken as spread
evenly. With an idle time shorter than a slot their cold starts are an estimate.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from modelyard.domain.endpoints import Autoscale
from modelyard.policy.forecast import DAY, SLOT_S, WEEK, Profile, expected, observe, slot_of
from modelyard.policy.prewarming import HOUR_S, threshold

_POINTS_MAX = 60
"""Moments within a slot that stand for its requests, where they are only counted."""
_SLOTS_MAX = 400 * DAY


class Line(msgspec.Struct, frozen=True):
    """One endpoint of the two."""

    cold_starts: int
    gpu_hours: float


class Backtest(msgspec.Struct, frozen=True):
    """The comparison. ``days`` are those that count; ``precision`` and ``recall`` are of slots of ten minutes.

    ``hit_rate``: share of the awakenings without forecast that no longer wait for a load.
    """

    days: float
    learned_days: float
    requests: int
    fixed: Line
    forecast: Line
    hit_rate: float | None
    precision: float | None
    recall: float | None


class _Run:
    """A replica that is awake for some intervals."""

    def __init__(self) -> None:
        self.ready_s = self.until_s = float("-inf")
        self.awake_s = 0.0
        self.cold_starts = 0

    def stay(self, begin_s: float, until_s: float) -> None:
        """Be awake in an interval that begins no earlier than the last one."""
        self.awake_s += max(0.0, until_s - max(begin_s, self.until_s))
        self.until_s = max(self.until_s, until_s)

    def ask(self, at_s: float, idle_s: float, load_s: float) -> None:
        """Serve a request; one that comes while it loads waits for the same load."""
        if at_s > self.until_s:
            self.cold_starts += 1
            self.ready_s = at_s + load_s
        self.stay(at_s, max(at_s, self.ready_s) + idle_s)

    def forget(self) -> None:
        """Begin to count anew; what is awake stays so."""
        self.awake_s, self.cold_starts = 0.0, 0

    def line(self, accelerators: int) -> Line:
        return Line(self.cold_starts, self.awake_s * accelerators / HOUR_S)


class _Budget:
    """The day's accelerator time for waiting; what requests use of it is not waiting."""

    def __init__(self, rules: Autoscale, load_s: float, accelerators: int) -> None:
        self._limit_s = rules.prewarm_budget * HOUR_S
        self._longest_s = (load_s + rules.prewarm_s + SLOT_S) * accelerators
        self._accelerators = accelerators
        self._day, self._spent_s = -1, 0.0

    def has_room(self, slot: int) -> bool:
        """Say whether a wait for nothing in this slot stays within it."""
        if slot // DAY != self._day:
            self._day, self._spent_s = slot // DAY, 0.0
        return self._spent_s + self._longest_s <= self._limit_s

    def spend(self, seconds: float) -> None:
        """Book a wait."""
        self._spent_s += seconds * self._accelerators


class _Tally:
    """Slots that were foreseen, and that were active."""

    def __init__(self) -> None:
        self.wanted = self.active = self.right = 0

    def add(self, *, is_wanted: bool, is_active: bool) -> None:
        """Count a slot."""
        self.wanted += is_wanted
        self.active += is_active
        self.right += is_wanted and is_active


def by_slot(arrivals: Iterable[float]) -> dict[int, list[float]]:
    """Return the moments of each slot, from moments in unix seconds, in order."""
    found: dict[int, list[float]] = {}
    for at_s in arrivals:
        found.setdefault(slot_of(at_s), []).append(at_s)
    return found


def backtest(
    history: Mapping[int, int | Sequence[float]],
    rules: Autoscale,
    *,
    idle_s: float,
    load_s: float,
    accelerators: int = 1,
    first: int | None = None,
    last: int | None = None,
) -> Backtest:
    """Replay ``history`` (of each slot the moments of its requests, in order, or only their number).

    ``first`` and ``last`` are the slots to replay; None: the ends of ``history``.

    Raises:
        ValueError: there is nothing to replay, or more than a year.
    """
    if not history:
        raise ValueError("no requests to replay")
    first = min(history) if first is None else first
    last = max(history) if last is None else last
    if last - first > _SLOTS_MAX:
        raise ValueError(f"more than {_SLOTS_MAX // DAY} days to replay")
    counted = first + WEEK if last - first >= WEEK + 1 else first
    fixed, foreseen, tally = _Run(), _Run(), _Tally()
    budget = _Budget(rules, load_s, accelerators)
    profile, limit = Profile(), threshold(rules, load_s, accelerators)
    for slot in range(first, last + 1):
        if slot == counted:
            fixed.forget()
            foreseen.forget()
        found, begin_s = history.get(slot, 0), float(slot * SLOT_S)
        requests = _number(found)
        is_wanted = rules.prewarm and expected(profile, slot).probability > limit
        if is_wanted and budget.has_room(slot):
            before_s = foreseen.awake_s
            foreseen.stay(begin_s - load_s - rules.prewarm_s, begin_s + SLOT_S)
            budget.spend(foreseen.awake_s - before_s if requests == 0 else 0.0)
        for at_s in _evenly(begin_s, found) if isinstance(found, int) else found:
            fixed.ask(at_s, idle_s, load_s)
            foreseen.ask(at_s, idle_s, load_s)
        if slot >= counted:
            tally.add(is_wanted=is_wanted, is_active=requests > 0)
        profile = observe(profile, slot, requests)
    avoided = fixed.cold_starts - foreseen.cold_starts
    return Backtest(
        days=(last + 1 - counted) / DAY,
        learned_days=(counted - first) / DAY,
        requests=sum(_number(found) for slot, found in history.items() if counted <= slot <= last),
        fixed=fixed.line(accelerators),
        forecast=foreseen.line(accelerators),
        hit_rate=avoided / fixed.cold_starts if fixed.cold_starts else None,
        precision=tally.right / tally.wanted if tally.wanted else None,
        recall=tally.right / tally.active if tally.active else None,
    )


def _number(found: int | Sequence[float]) -> int:
    return found if isinstance(found, int) else len(found)


def _evenly(begin_s: float, requests: int) -> Iterator[float]:
    """Yield moments that stand for the requests of a slot, evenly."""
    points = min(requests, _POINTS_MAX)
    return (begin_s + SLOT_S * (at + 0.5) / points for at in range(points))
