"""Quotas: tokens and money of a key or tenant in a UTC day and month, and money in all (prepaid credit).

The ledger is the truth; it lags a gateway by the time of a delivery. So a
gateway counts, beside the sums that it hears, what it settled since and the
worst case of what runs:

    left = limit - heard - settled since - reserved

A settled request leaves ``settled since`` at the very sums that have it: each
carries the place of its settlement in the gateway's journal, and sums carry
how far that journal was delivered when they were taken. Nothing is counted
twice and nothing falls between (a state machine in the tests drives this with
any order of settling, delivering, hearing and restarts). A request counts in
the day and month in which it arrived, as in the ledger.

Until sums have been heard once that reach to the end of what a gateway wrote in
its earlier lives, a quota refuses everything; later it goes on without news for
as long as the controller is away.

With several workers each may use an equal part of the whole, by the sums of its
own journal (``equal_part``). One whose part is used says so, and whether another
one has room: then the request is worth a second try, on another connection.

Pure: no clock, no file, no task. One owner, no locks.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from modelyard.domain.routing_table import Spent
from modelyard.domain.tenants import Limits
from modelyard.policy.utc import DAY_S, day_name, day_number, day_of, month_name, next_month

ENTRIES_MAX = 512
"""Settlements that one quota remembers one by one; of more, two and two are put together, and leave a little later."""

KINDS = (("tokens", "day"), ("tokens", "month"), ("money", "day"), ("money", "month"), ("money", "total"))
"""What each of the five numbers of a quota is, in the order of every list here. The last one never begins anew."""
_DAYS, _MONTHS = (0, 2), (1, 3)

Position = tuple[str, int]
"""Segment and offset; later places of one journal compare greater."""


class QuotaRefusal(NamedTuple):
    """Why a request may not begin: ``kind`` is ``tokens`` or ``money``, empty when nothing was heard of the quota yet;
    ``period`` is ``day``, ``month``, or ``total``, which no time renews."""

    kind: str
    period: str
    is_tenants: bool
    retry_after_s: float | None
    needed: int = 0
    left: int = 0
    limit: int = 0
    """Tokens, or nano-dollars: what the request may need, what is left for it, and the whole quota."""
    model: str = ""
    """The model that the quota is of, "" for one of all."""
    is_elsewhere: bool = False
    """What this gateway may use is used; another one still has room for the request."""
    share: int | None = None
    """What this gateway may use in all, where several divide the quota; ``left`` and ``limit`` are of the whole."""
    share_left: int = 0
    fits_no_share: bool = False
    """It is more than any gateway's part of the whole quota, were nothing used of it."""
    is_reserved: bool = False
    """Only what runs is in the way, at its worst case: the request may fit when that has settled."""


class _Entry(NamedTuple):
    """What settled up to ``position`` of the journal and may not be in the heard sums yet."""

    position: Position
    day: str
    month: str
    tokens: int
    nanousd: int
    settled: int = 1

    def and_then(self, later: "_Entry") -> "_Entry":
        """Return both in one, at the later place."""
        tokens, nanousd = self.tokens + later.tokens, self.nanousd + later.nanousd
        return _Entry(later.position, self.day, self.month, tokens, nanousd, self.settled + later.settled)


@dataclass(slots=True, eq=False)
class Quota:
    """What one key or tenant (for one model) may use and has used. Lists have five numbers, by ``KINDS``.

    ``used`` is all of it: heard, settled since and reserved; ``heard`` the part that came from the ledger.
    ``bounds`` are the numbers that are limited, with this gateway's limit.
    """

    subject_id: str
    is_tenants: bool
    limits: tuple[int | None, ...]
    bounds: tuple[tuple[int, int], ...] = ()
    used: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    heard: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    reserved: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    """The part of ``used`` that is the worst case of what runs."""
    entries: deque[_Entry] = field(default_factory=deque)
    grain: int = 1
    model: str = ""
    is_known: bool = False

    def refusing(self, tokens: int, nanousd: int) -> int | None:
        """Return the index of the first of the numbers that has no room for this, or None."""
        return self._refusing(self.used, tokens, nanousd)

    def refusing_alone(self, tokens: int, nanousd: int) -> int | None:
        """Return the same, were all that runs to cost nothing."""
        settled = [used - reserved for used, reserved in zip(self.used, self.reserved, strict=True)]
        return self._refusing(settled, tokens, nanousd)

    def _refusing(self, used: Sequence[int], tokens: int, nanousd: int) -> int | None:
        for index, limit in self.bounds:
            # A limit of 0 stops even what costs nothing.
            if used[index] + (tokens if index < 2 else nanousd) > limit or not limit:
                return index
        return None

    def add(self, tokens: int, nanousd: int, *, of_day: bool, of_month: bool) -> None:
        """Change what is used of the present day and month, and in all."""
        _add(self.used, tokens, nanousd, of_day=of_day, of_month=of_month)

    def reserve(self, tokens: int, nanousd: int, *, of_day: bool, of_month: bool) -> None:
        """Change what of it is the worst case of what runs."""
        _add(self.used, tokens, nanousd, of_day=of_day, of_month=of_month)
        _add(self.reserved, tokens, nanousd, of_day=of_day, of_month=of_month)

    def remember(self, entry: _Entry) -> None:
        """Add what settled to what the heard sums may not have; in one with its neighbours if there are very many."""
        entries = self.entries
        if not entries:
            self.grain = 1
        if entries and entries[-1].settled < self.grain and entries[-1].day == entry.day:
            entries[-1] = entries[-1].and_then(entry)
            return
        entries.append(entry)
        if len(entries) > ENTRIES_MAX:
            self.grain *= 2
            self.entries = _halved(entries)

    def left(self) -> tuple[int | None, ...]:
        """Return what is left by ``KINDS``; None is unlimited."""
        found: list[int | None] = [None] * len(KINDS)
        for index, limit in self.bounds:
            found[index] = max(0, limit - self.used[index])
        return tuple(found)


class Hold(NamedTuple):
    """The worst case of a running request, as it was taken from its quotas."""

    quotas: tuple[Quota, ...]
    tokens: int
    nanousd: int
    day: str
    month: str


class QuotaBook:
    """All quotas of gateway worker number ``worker`` of ``workers``.

    ``source`` is the name of its journal, and ``required`` where that ends that its earlier lives wrote; None while
    that is not known.
    """

    def __init__(self, *, worker: int, workers: int) -> None:
        self._worker = worker
        self._workers = workers
        self.source = f"gateway-{worker}"
        self.required: Position | None = None
        self._heard_to: Position = ("", 0)
        self._rows: dict[str, list[Spent]] = {}
        self._fresh: list[tuple[Quota, str, str, int, int]] = []
        self._quotas: dict[str, Quota] = {}
        self.day = ""
        self.month = ""
        self._day = 0
        self._day_ends_s = float("-inf")

    @property
    def has_unplaced(self) -> bool:
        """Say whether something settled whose place in the journal is not known yet."""
        return bool(self._fresh)

    @property
    def number_of_day(self) -> int:
        """The day that quotas are counted in; 0 before the first."""
        return self._day

    # --- what there is ---

    def quota(self, subject_id: str, limits: Limits, *, is_tenants: bool, model: str = "") -> Quota | None:
        """Return the quota of a key or tenant (for one model), None when it has none.

        What was used stays used when limits change.
        """
        if not limits.has_quota:
            self._quotas.pop(subject_id, None)
            return None
        wanted = limits.quotas
        quota = self._quotas.get(subject_id)
        if quota is None:
            quota = self._quotas[subject_id] = Quota(subject_id, is_tenants, wanted, model=model)
            quota.bounds = self._bounds(quota)
            self._apply(quota)
        elif quota.limits != wanted:
            is_new_total = wanted[4] is not None and quota.limits[4] is None
            quota.limits = wanted
            quota.bounds = self._bounds(quota)
            if is_new_total:
                # What was ever spent is told of those only who pay in advance, and this one did not.
                quota.is_known = False
                self._apply(quota)
        return quota

    def keep_only(self, subject_ids: frozenset[str]) -> None:
        """Forget all other quotas."""
        for gone in self._quotas.keys() - subject_ids:
            del self._quotas[gone]

    # --- time ---

    def advance(self, now_unix_s: float) -> None:
        """Begin a new day or month when it has come. A clock that went back changes nothing: what is spent is spent."""
        if now_unix_s < self._day_ends_s:
            return
        self._begin(day_of(now_unix_s))

    def arrival(self, now_unix_s: float) -> float:
        """Return the time to bill a request by that arrives now: never before the present day."""
        return max(now_unix_s, float(self._day * DAY_S))

    def _begin(self, day: int) -> None:
        is_new_month = self.month != month_name(day)
        self._day, self.day, self.month = day, day_name(day), month_name(day)
        self._day_ends_s = float((day + 1) * DAY_S)
        for quota in self._quotas.values():
            for index in _DAYS + _MONTHS if is_new_month else _DAYS:
                quota.used[index] = quota.heard[index] = quota.reserved[index] = 0
            quota.bounds = self._bounds(quota)

    def _renewed_in_s(self, period: str, now_unix_s: float) -> float | None:
        if period == "total":
            return None
        if period == "day":
            return max(1.0, self._day_ends_s - now_unix_s)
        return max(1.0, next_month(self._day) * DAY_S - now_unix_s)

    # --- requests ---

    def refusal(self, quotas: Sequence[Quota], tokens: int, nanousd: int, *, now_unix_s: float) -> QuotaRefusal | None:
        """Return why a request of this worst case may not begin now, or None: what time does not mend comes first."""
        self.advance(now_unix_s)
        passing = None
        for quota in quotas:
            if not quota.is_known:
                return QuotaRefusal("", "", quota.is_tenants, 1.0)
            if (first := quota.refusing(tokens, nanousd)) is not None:
                alone = quota.refusing_alone(tokens, nanousd)
                if alone is not None:
                    return self._refusal(quota, alone, tokens, nanousd, now_unix_s)
                if passing is None:
                    passing = self._refusal(quota, first, tokens, nanousd, now_unix_s)._replace(is_reserved=True)
        return passing

    def _refusal(self, quota: Quota, index: int, tokens: int, nanousd: int, now_unix_s: float) -> QuotaRefusal:
        """Return the refusal of a quota whose number ``index`` is in the way."""
        kind, period = KINDS[index]
        bound = next(limit for place, limit in quota.bounds if place == index)
        limit, needed = quota.limits[index] or 0, tokens if index < 2 else nanousd
        return QuotaRefusal(
            kind,
            period,
            quota.is_tenants,
            self._renewed_in_s(period, now_unix_s),
            needed=needed,
            left=max(0, limit - self._used_of_whole(quota, index)),
            limit=limit,
            model=quota.model,
            is_elsewhere=self._is_elsewhere(quota, index, needed),
            share=None if self._workers == 1 else bound,
            share_left=max(0, bound - quota.used[index]),
            fits_no_share=needed > limit // self._workers,
        )

    def _used_of_whole(self, quota: Quota, index: int) -> int:
        """Return what is used of the whole quota: this gateway's own, and what was heard of all others."""
        own = quota.used[index]
        if self._workers == 1:
            return own
        used, strange = self._used_by_worker(quota)
        return own + strange[index] + sum(used[one][index] for one in range(self._workers) if one != self._worker)

    def hold(self, quotas: tuple[Quota, ...], tokens: int, nanousd: int) -> Hold:
        """Take the worst case of a request for which there was no ``refusal``."""
        for quota in quotas:
            quota.reserve(tokens, nanousd, of_day=True, of_month=True)
        return Hold(quotas, tokens, nanousd, self.day, self.month)

    def settle(self, hold: Hold, tokens: int, nanousd: int) -> None:
        """Put what a request really cost in the place of its worst case. Where it went has to be told by ``placed``."""
        of_day, of_month = hold.day == self.day, hold.month == self.month
        for quota in hold.quotas:
            quota.reserve(-hold.tokens, -hold.nanousd, of_day=of_day, of_month=of_month)
            quota.add(tokens, nanousd, of_day=of_day, of_month=of_month)
            if tokens or nanousd:
                self._fresh.append((quota, hold.day, hold.month, tokens, nanousd))

    def placed(self, position: Position) -> None:
        """Take note that all that settled so far stands before ``position`` of the journal."""
        for quota, day, month, tokens, nanousd in self._fresh:
            quota.remember(_Entry(position, day, month, tokens, nanousd))
        self._fresh.clear()

    # --- news ---

    def hear(self, spent: Sequence[Spent], delivered: Mapping[str, Position]) -> None:
        """Take sums of the ledger that hold what was delivered up to ``delivered``.

        Nothing is said of a key or tenant that does not occur. Sums from before the end of an earlier life of this
        gateway say too little and are ignored, and so are sums that are older than those heard last.
        """
        position = delivered.get(self.source, ("", 0))
        if not spent or self.required is None or position < max(self.required, self._heard_to):
            return
        newest = max(row.day for row in spent)
        if newest > self.day:
            self._begin(day_number(newest))
        elif newest < self.day:
            return  # taken before midnight; it does not tell of this day
        self._heard_to = position
        self._rows = {}
        for row in spent:
            self._rows.setdefault(row.subject_id, []).append(row)
        for quota in self._quotas.values():
            self._apply(quota)

    def _apply(self, quota: Quota) -> None:
        """Put the heard sums in the place of what they hold of this quota."""
        rows = [row for row in self._rows.get(quota.subject_id, ()) if row.day == self.day]
        if not rows:
            return
        heard = [0] * len(KINDS)
        for row in rows:
            if self._workers == 1 or worker_of(row.source) == self._worker:
                for index, amount in enumerate(_amounts(row)):
                    heard[index] += amount
        while quota.entries and quota.entries[0].position <= self._heard_to:
            entry = quota.entries.popleft()
            quota.add(-entry.tokens, -entry.nanousd, of_day=entry.day == self.day, of_month=entry.month == self.month)
        for index in range(len(KINDS)):
            quota.used[index] += heard[index] - quota.heard[index]
        quota.heard = heard
        quota.bounds = self._bounds(quota)
        quota.is_known = quota.limits[4] is None or all(row.total_nanousd is not None for row in rows)

    def _is_present(self, row: Spent, index: int) -> bool:
        """Say whether a row tells of the present time what the number ``index`` is of."""
        if index in _DAYS:
            return row.day == self.day
        return row.month == self.month or index not in _MONTHS

    def _bounds(self, quota: Quota) -> tuple[tuple[int, int], ...]:
        """Return the limited numbers with the part of each limit that is this gateway's."""
        limited = [(index, limit) for index, limit in enumerate(quota.limits) if limit is not None]
        if self._workers == 1:
            return tuple(limited)
        used, strange = self._used_by_worker(quota)
        return tuple(
            (index, equal_part(limit - strange[index], [amounts[index] for amounts in used], self._worker))
            for index, limit in limited
        )

    def _is_elsewhere(self, quota: Quota, index: int, needed: int) -> bool:
        """Say whether another worker's part has room for so much, by what was heard of it last."""
        limit = quota.limits[index]
        if self._workers == 1 or limit is None:
            return False
        used, strange = self._used_by_worker(quota)
        have = [amounts[index] for amounts in used]
        parts = [equal_part(limit - strange[index], have, one) for one in range(self._workers)]
        others = (one for one in range(self._workers) if one != self._worker)
        return any(parts[one] > 0 and parts[one] - have[one] >= needed for one in others)

    def _used_by_worker(self, quota: Quota) -> tuple[list[list[int]], list[int]]:
        """Return what the ledger has of each worker, and of journals of none of them."""
        used = [[0] * len(KINDS) for _ in range(self._workers)]
        strange = [0] * len(KINDS)
        for row in self._rows.get(quota.subject_id, ()):
            worker = worker_of(row.source)
            amounts = used[worker] if worker is not None and worker < self._workers else strange
            for index, amount in enumerate(_amounts(row)):
                amounts[index] += amount if self._is_present(row, index) else 0
        return used, strange


def equal_part(limit: int, used: Sequence[int], index: int) -> int:
    """Return how much of ``limit`` gateway ``index`` may have used in all, when each may have the same.

    One that used more already, since it was alone before, keeps that, and the others divide the rest: all parts
    together never exceed the limit, unless more than that was used already.
    """
    over: set[int] = set()
    while len(over) < len(used):
        part = max(0, limit - sum(used[one] for one in over)) // (len(used) - len(over))
        found = {one for one, amount in enumerate(used) if one not in over and amount > part}
        if not found:
            return used[index] if index in over else part
        over |= found
    return used[index]


def worker_of(source: str) -> int | None:
    """Return the number of the worker that wrote the journal ``source`` (``gateway-3``, ``gateway-3-later``)."""
    kind, _, rest = source.partition("-")
    number = rest.partition("-")[0].partition(".")[0]
    return int(number) if kind == "gateway" and number.isdecimal() else None


def _add(numbers: list[int], tokens: int, nanousd: int, *, of_day: bool, of_month: bool) -> None:
    """Change five numbers by ``KINDS``: those of the present day and month, and in all."""
    numbers[4] += nanousd
    if of_day:
        numbers[0] += tokens
        numbers[2] += nanousd
    if of_month:
        numbers[1] += tokens
        numbers[3] += nanousd


def _amounts(row: Spent) -> tuple[int, ...]:
    return row.day_tokens, row.month_tokens, row.day_nanousd, row.month_nanousd, row.total_nanousd or 0


def _halved(entries: deque[_Entry]) -> deque[_Entry]:
    """Put pairs of neighbours of one day together."""
    found: deque[_Entry] = deque()
    first: _Entry | None = None
    for entry in entries:
        if first is not None and first.day == entry.day:
            found.append(first.and_then(entry))
            first = None
        else:
            if first is not None:
                found.append(first)
            first = entry
    if first is not None:
        found.append(first)
    return found
