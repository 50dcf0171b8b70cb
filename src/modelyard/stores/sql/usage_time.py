"""How a span of time is divided among the ledger's rows and its roll-ups.

Whole UTC hours, days and months come from roll-ups; what is left at the ends
comes from the rows. So a year costs as little as a day and
all agree to the token. Days and months of a time zone are made of hours. Where
its days begin within an hour (India, Nepal, Newfoundland) that one hour of each
day comes from the rows. Before rows were removed nothing can divide an hour any
more: moments then move down to the start of theirs, so that spans which follow
one another still add up.
"""

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import NamedTuple
from zoneinfo import ZoneInfo

from modelyard.policy.utc import first_of_month, next_month
from modelyard.stores.sql.rollups import DAY_S, HOUR_S, Step

MINUTE_S = 60
LAST_S = 253_370_764_800
"""The year 9999, the last one whose date has four digits."""
STEPS = {"minute": MINUTE_S, "hour": HOUR_S, "day": DAY_S}
_FORMATS = {
    "minute": "%Y-%m-%dT%H:%M:00Z",
    "hour": "%Y-%m-%dT%H:00:00Z",
    "day": "%Y-%m-%d",
    "month": "%Y-%m",
}
TIMES = tuple(_FORMATS)
"""Dimensions of time, the finest first."""


class Piece(NamedTuple):
    """A span and who answers for it.

    Its buckets begin at ``phase`` and every ``step`` seconds; with ``step`` 0 it is all of the one that begins at
    ``phase``.
    """

    source: Step | None
    """The span of the roll-up's rows; None: the ledger's own rows."""
    since: float
    until: float
    step: int
    phase: int
    without: int | None = None
    """The second of each UTC day at which an hour begins that others answer for."""


def hour_of(at: float) -> int:
    """Return the start of the UTC hour of ``at``, as unix seconds."""
    return math.floor(at / HOUR_S) * HOUR_S


def exact(moment: float, kept_since: int) -> float:
    """Return the moment, or the start of its hour where nothing can divide that any more."""
    moment = min(max(moment, 0.0), LAST_S)
    return moment if moment >= kept_since else hour_of(moment)


def pieces(since: float, until: float, by: str | None, zone: ZoneInfo, kept_since: int) -> Iterator[Piece]:
    """Divide a span whose buckets are minutes, hours, or the zone's days or months; without ``by`` it is one bucket."""
    since, until = exact(since, kept_since), exact(until, kept_since)
    if since >= until:
        return
    match by:
        case None:
            yield from _whole(since, until, 0)
        case "minute":
            yield Piece(None, since, until, MINUTE_S, 0)
        case "hour":
            yield from _hours(since, until, HOUR_S, 0)
        case "day":
            is_utc = zone.key == "UTC"
            yield from _hours(since, until, DAY_S, 0) if is_utc else _days(since, until, zone, kept_since)
        case _:
            for start, end in _between(_months(since, until, zone), kept_since):
                yield from _whole(max(start, since), min(end, until), start)


def label(name: str, at: int, zone: ZoneInfo) -> str:
    """Return what a bucket is called: an hour by UTC, a day and a month by the zone."""
    if name in ("minute", "hour"):
        return datetime.fromtimestamp(at, UTC).strftime(_FORMATS[name])
    # A day may begin up to an hour early, at an hour that nothing can divide any more.
    return datetime.fromtimestamp(at + HOUR_S - 1, zone).strftime(_FORMATS[name])


def _whole(since: float, until: float, start: int) -> Iterator[Piece]:
    """One bucket: whole months, days and hours, and the rows at the ends."""
    if since >= until:
        return
    first, last = math.ceil(since / HOUR_S) * HOUR_S, hour_of(until)
    if first >= last:
        yield Piece(None, since, until, 0, start)
        return
    for source, begin, end in [(None, since, first), *_rolled(first, last), (None, last, until)]:
        if begin < end:
            yield Piece(source, begin, end, 0, start)


def _rolled(first: int, last: int) -> Iterator[tuple[Step, int, int]]:
    """Divide whole hours: whole months, the days beside them, and the hours beside those."""
    begin, end = math.ceil(first / DAY_S), last // DAY_S
    if begin >= end:
        yield Step.HOUR, first, last
        return
    month = begin if begin == first_of_month(begin) else next_month(begin)
    months = (month, first_of_month(end)) if month < first_of_month(end) else (end, end)
    yield Step.HOUR, first, begin * DAY_S
    yield Step.DAY, begin * DAY_S, months[0] * DAY_S
    yield Step.MONTH, months[0] * DAY_S, months[1] * DAY_S
    yield Step.DAY, months[1] * DAY_S, end * DAY_S
    yield Step.HOUR, end * DAY_S, last


def _hours(since: float, until: float, step: int, phase: int) -> Iterator[Piece]:
    """Buckets that begin at whole hours; the longest rows that tell them apart answer."""
    if since >= until:
        return
    first, last = math.ceil(since / HOUR_S) * HOUR_S, hour_of(until)
    if first >= last:
        yield Piece(None, since, until, step, phase)
        return
    parts: list[tuple[Step | None, float, float]] = [(Step.HOUR, first, last)]
    if not phase and step >= DAY_S and (days := (math.ceil(first / DAY_S) * DAY_S, last // DAY_S * DAY_S))[0] < days[1]:
        parts = [(Step.HOUR, first, days[0]), (Step.DAY, *days), (Step.HOUR, days[1], last)]
    for source, begin, end in [(None, since, first), *parts, (None, last, until)]:
        if begin < end:
            yield Piece(source, begin, end, step, phase)


def _days(since: float, until: float, zone: ZoneInfo, kept_since: int) -> Iterator[Piece]:
    """Days of a zone: runs of such as have 24 hours and begin at one time of the UTC day, and others one by one."""
    run: tuple[int, int] | None = None
    for start, end in _between(_dates(since, until, zone), kept_since):
        if end - start != DAY_S:
            if run is not None:
                yield from _run(*run, since, until)
            run = None
            yield from _whole(max(start, since), min(end, until), start)
        elif run is not None and run[1] == start:
            run = run[0], end
        else:
            if run is not None:
                yield from _run(*run, since, until)
            run = start, end
    if run is not None:
        yield from _run(*run, since, until)


def _run(start: int, end: int, since: float, until: float) -> Iterator[Piece]:
    phase = start % DAY_S
    begin, finish = max(start, since), min(end, until)
    if phase % HOUR_S == 0:
        yield from _hours(begin, finish, DAY_S, phase)
        return
    cut = phase - phase % HOUR_S
    for piece in _hours(begin, finish, DAY_S, phase):
        if piece.source is None:
            yield piece
            continue
        yield piece._replace(without=cut)
        first = math.ceil((piece.since - cut) / DAY_S) * DAY_S + cut
        for hour in range(int(first), int(piece.until), DAY_S):
            yield Piece(None, hour, hour + HOUR_S, DAY_S, phase)


def _between(starts: Sequence[int], kept_since: int) -> Iterator[tuple[int, int]]:
    """Return start and end of each bucket; a day that a zone left out is none."""
    moved = [int(exact(start, kept_since)) for start in starts]
    for start, end in pairwise(moved):
        if start < end:
            yield start, end


def _dates(since: float, until: float, zone: ZoneInfo) -> list[int]:
    """Return where the zone's days begin, from the one of ``since`` to the one after that of ``until``."""
    day = datetime.fromtimestamp(since, zone).date()
    last = datetime.fromtimestamp(until, zone).date()
    found = []
    while day <= last:
        found.append(_start(day, zone))
        day += timedelta(1)
    return [*found, _start(day, zone)]


def _months(since: float, until: float, zone: ZoneInfo) -> list[int]:
    """Return where the zone's months begin, likewise."""
    month = datetime.fromtimestamp(since, zone).date().replace(day=1)
    last = datetime.fromtimestamp(until, zone).date()
    found = []
    while month <= last:
        found.append(_start(month, zone))
        month = (month + timedelta(32)).replace(day=1)
    return [*found, _start(month, zone)]


def _start(day: date, zone: ZoneInfo) -> int:
    """Return when a day begins. Where midnight is left out (it was put forward then) that is the moment itself."""
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp())
