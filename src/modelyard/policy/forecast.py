"""When requests come, learned from when they came: a profile of the week.

A week has 1,008 slots of ten minutes. For each the profile keeps the rate and
how often it was active, both fading with 0.3 a week; the same slot yesterday
counts as one more week. What nobody saw (no gateway, no controller) changes
nothing: missing data is never taken for missing demand.

Slots are counted from 1970 in UTC, so a habit moves by an hour when clocks
change, and the profile learns that within two weeks. There is one profile for
each of ten thousand endpoints, so it is packed: 9 KB, less when stored.
"""

import math
import struct
import zlib
from collections.abc import Iterator, Sequence

import msgspec

from modelyard.policy.idleness import Gaps

SLOT_S = 600
DAY = 144
WEEK = 1008
FADE = 0.3
"""Weight of the newest week."""
_PRIOR = 0.25, 0.75
"""What is believed of a slot that nobody saw: active once in four."""
_YESTERDAY = 1.0
"""Weeks of evidence that the same slot yesterday counts for."""
_UNKNOWN = -1.0
_UNIT = 10_000
_VERSION = 1
_BYTES_MAX = 256 * 1024

_COUNTS = struct.Struct(f"<{WEEK}H")
_RATES = struct.Struct(f"<{WEEK}f")
_RECENT = struct.Struct(f"<{DAY}f")
_COUNT = struct.Struct("<H")
_RATE = struct.Struct("<f")


class Score(msgspec.Struct, frozen=True, array_like=True):
    """How well the forecast did. ``hits``: it was awake in time; ``misses``: requests woke it; ``wasted``: none came.

    ``day_s``: accelerator-seconds that waited for expected requests on ``day`` (since 1970).
    """

    hits: int = 0
    misses: int = 0
    wasted: int = 0
    day: int = 0
    day_s: float = 0.0
    waiting_s: float = 0.0
    """The same, ever."""

    @property
    def hit_rate(self) -> float | None:
        """Share of awakenings that were foreseen; None before the first."""
        return self.hits / awakenings if (awakenings := self.hits + self.misses) else None

    @property
    def precision(self) -> float | None:
        """Share of waits for expected requests that met some; None before the first."""
        return self.hits / waits if (waits := self.hits + self.wasted) else None


class Profile(msgspec.Struct, frozen=True, array_like=True):
    """What is known of the weeks of one endpoint.

    ``hits`` and ``seen`` are the faded numbers of weeks in which a slot was active and was looked at, in units of
    1/10,000; ``rates`` its requests a second; ``recent`` the rates of the last 144 slots, below 0 where nobody looked.
    ``open_…`` is the slot under way: what was counted of it, and for how many seconds somebody looked.
    """

    hits: bytes = bytes(_COUNTS.size)
    seen: bytes = bytes(_COUNTS.size)
    rates: bytes = bytes(_RATES.size)
    recent: bytes = _RECENT.pack(*(_UNKNOWN,) * DAY)
    last_slot: int = -1
    """The newest slot that was closed."""
    open_slot: int = -1
    open_requests: int = 0
    open_s: float = 0.0
    score: Score = Score()
    gaps: Gaps = Gaps()
    """Idle times, for an endpoint that learns its idle time."""


class Slot(msgspec.Struct, frozen=True):
    """What is expected of one slot."""

    slot: int
    probability: float
    rate: float
    """Requests a second, if it is active as often as expected."""

    @property
    def begin_s(self) -> int:
        """Unix seconds of its start."""
        return self.slot * SLOT_S


def slot_of(unix_s: float) -> int:
    """Return the slot that a moment lies in."""
    return math.floor(unix_s / SLOT_S)


def count(profile: Profile, now_s: float, requests: int, looked_s: float) -> Profile:
    """Return ``profile`` with ``requests`` more, seen in the last ``looked_s`` seconds before ``now_s`` (unix)."""
    slot = slot_of(now_s)
    if slot < profile.open_slot:  # the clock was put back: what was learned stays
        return profile
    if slot != profile.open_slot:
        profile = close(profile)
        profile = msgspec.structs.replace(profile, open_slot=slot, open_requests=0, open_s=0.0)
    return msgspec.structs.replace(
        profile,
        open_requests=profile.open_requests + requests,
        open_s=min(profile.open_s + max(looked_s, 0.0), SLOT_S),
    )


def close(profile: Profile) -> Profile:
    """Return ``profile`` with the slot under way learned; one that was hardly looked at teaches only its requests."""
    slot = profile.open_slot
    if slot < 0 or slot <= profile.last_slot or (profile.open_requests == 0 and profile.open_s < SLOT_S / 2):
        return profile
    return observe(profile, slot, profile.open_requests)


def observe(profile: Profile, slot: int, requests: int) -> Profile:
    """Return ``profile`` after a whole slot with ``requests``; slots come in order."""
    at, rate = slot % WEEK, requests / SLOT_S
    hits, seen, rates = bytearray(profile.hits), bytearray(profile.seen), bytearray(profile.rates)
    before = _COUNT.unpack_from(seen, _COUNT.size * at)[0]
    _fade(hits, at, _UNIT if requests else 0)
    _fade(seen, at, _UNIT)
    mean = _RATE.unpack_from(rates, _RATE.size * at)[0]
    _RATE.pack_into(rates, _RATE.size * at, rate if before == 0 else mean + FADE * (rate - mean))
    recent = bytearray(profile.recent)
    for missed in range(max(profile.last_slot + 1, slot - DAY + 1), slot):
        _RATE.pack_into(recent, _RATE.size * (missed % DAY), _UNKNOWN)
    _RATE.pack_into(recent, _RATE.size * (slot % DAY), rate)
    return msgspec.structs.replace(
        profile, hits=bytes(hits), seen=bytes(seen), rates=bytes(rates), recent=bytes(recent), last_slot=slot
    )


def learned(profile: Profile, first: int, counts: Sequence[int]) -> Profile:
    """Return ``profile`` after whole slots from ``first`` on with so many requests each, as ``observe`` for each would.

    Weeks at once: what is packed is unpacked once.
    """
    if not counts:
        return profile
    hits, seen = list(_COUNTS.unpack(profile.hits)), list(_COUNTS.unpack(profile.seen))
    rates, recent = list(_RATES.unpack(profile.rates)), list(_RECENT.unpack(profile.recent))
    for missed in range(max(profile.last_slot + 1, first - DAY + 1), first):
        recent[missed % DAY] = _UNKNOWN
    for slot, requests in enumerate(counts, first):
        at, rate = slot % WEEK, requests / SLOT_S
        if seen[at] == 0:
            rates[at], seen[at] = rate, _UNIT
            hits[at] += _UNIT if requests else 0
        else:
            mean = _RATE.unpack(_RATE.pack(rates[at]))[0]  # kept as a float of 32 bits between two weeks
            rates[at] = mean + FADE * (rate - mean)
            hits[at] = round(hits[at] * (1 - FADE)) + (_UNIT if requests else 0)
            seen[at] = round(seen[at] * (1 - FADE)) + _UNIT
        recent[slot % DAY] = rate
    return msgspec.structs.replace(
        profile,
        hits=_COUNTS.pack(*hits),
        seen=_COUNTS.pack(*seen),
        rates=_RATES.pack(*rates),
        recent=_RECENT.pack(*recent),
        last_slot=first + len(counts) - 1,
    )


def expected(profile: Profile, slot: int) -> Slot:
    """Return what is expected of ``slot``, which is not over."""
    at = slot % WEEK
    hits: float = _COUNT.unpack_from(profile.hits, _COUNT.size * at)[0] / _UNIT
    seen: float = _COUNT.unpack_from(profile.seen, _COUNT.size * at)[0] / _UNIT
    rate = _RATE.unpack_from(profile.rates, _RATE.size * at)[0] if seen else 0.0
    yesterday = _yesterday(profile, slot)
    if yesterday is not None:
        hits, seen = hits + _YESTERDAY * (yesterday > 0), seen + _YESTERDAY
        rate = max(rate, yesterday)
    return Slot(slot, (_PRIOR[0] + hits) / (sum(_PRIOR) + seen), rate)


def coming(profile: Profile, slot: int, slots: int) -> Iterator[Slot]:
    """Yield what is expected from ``slot`` on."""
    return (expected(profile, at) for at in range(slot, slot + slots))


def weeks_seen(profile: Profile) -> float:
    """Return how many weeks of evidence there are, faded, over all slots."""
    weeks: float = sum(_COUNTS.unpack(profile.seen)) / _UNIT / WEEK
    return weeks


def encode(profile: Profile) -> bytes:
    """Return ``profile`` for a store."""
    return zlib.compress(msgspec.msgpack.encode((_VERSION, profile)), 6)


def decode(text: bytes) -> Profile:
    """Return what ``encode`` made.

    Raises:
        ValueError: it is damaged, or of another release.
    """
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(text, _BYTES_MAX)
        version, profile = msgspec.msgpack.decode(plain, type=tuple[int, Profile])
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"not a forecast profile: {error}") from error
    sizes = [len(part) for part in (profile.hits, profile.seen, profile.rates, profile.recent)]
    if version != _VERSION or sizes != [_COUNTS.size, _COUNTS.size, _RATES.size, _RECENT.size]:
        raise ValueError(f"a forecast profile of version {version}, sizes {sizes}; this release reads {_VERSION}")
    return profile


def _fade(counts: bytearray, at: int, new: int) -> None:
    before = _COUNT.unpack_from(counts, _COUNT.size * at)[0]
    _COUNT.pack_into(counts, _COUNT.size * at, round(before * (1 - FADE)) + new)


def _yesterday(profile: Profile, slot: int) -> float | None:
    """Return the rate of the same slot a day before, None when nobody looked."""
    if not slot - DAY <= profile.last_slot < slot:
        return None
    rate = float(_RATE.unpack_from(profile.recent, _RATE.size * (slot % DAY))[0])
    return None if rate < 0 else rate
