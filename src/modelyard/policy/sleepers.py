"""Which engines give their accelerators back for a while, and whose turn it is to have them again.

An engine that sleeps keeps its process, and its weights in the memory of its machine; its accelerators are free for
others (vLLM's sleep mode, ``Engine.sleep``). It is awake within seconds, where a start takes a minute, so that it may
sleep as soon as nobody needs it: after seconds, not after the idle time. How many replicas there are stays with
``scaling.decide``; ``decide`` here says how many of them are awake.

A process cannot move to other accelerators. Those who sleep beside one another take turns on theirs: whoever is asked
for wakes where there is room, else in the place of one that nobody needs, else it is started elsewhere. Pure; seconds
are monotonic. ``control/sleeping.py`` and the simulator carry it out.
"""

import math
from collections.abc import Collection, Sequence

import msgspec


class Rule(msgspec.Struct, frozen=True):
    """When a replica may sleep, and how busy those are meant to be that are awake (percent)."""

    idle_s: float = 10.0
    """Nobody needed it for so long. What a turn costs is seconds of an accelerator, and of a caller who comes back."""
    residency_s: float = 5.0
    """Awake without a request for so long it gives its place to one that is waited for."""
    share_up: float = 90.0
    """Higher than ``load_share_up``: another one is awake within seconds, not minutes."""
    share_down: float = 80.0


STANDARD = Rule()
WAKE_S = 1.0
"""What waking takes besides moving weights (s): an assumption, until it was measured."""
MEMORY_BYTES_PER_S = 52e9
"""From the memory of a machine to its accelerators (ServerlessLLM, OSDI 2024)."""
MOST = 8
"""Sleepers of one accelerator: each keeps its context there, and an engine that is awake leaves a tenth of the memory
free."""


def wake_s(weights_bytes: int) -> float:
    """Return the seconds that an engine of such weights should take to wake."""
    return WAKE_S + weights_bytes / MEMORY_BYTES_PER_S


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The ready replicas of one version: ``awake`` with those that wake up just now, and ``asleep``.

    ``load`` is in replicas that are wholly busy, ``idle_s`` the time since there was a request; ``floor`` of them never
    sleep.
    """

    now_s: float
    awake: int
    asleep: int
    demand: int
    slots: int
    load: float
    idle_s: float
    floor: int = 0


class Decision(msgspec.Struct, frozen=True):
    """How many to wake (above 0) or to put to sleep (below), and since when fewer would do (None: they would not)."""

    change: int
    spare_since_s: float | None
    reason: str


def decide(spare_since_s: float | None, seen: Seen, rule: Rule = STANDARD) -> Decision:
    """Return what to do now; ``spare_since_s`` is what the decision before said."""
    by_slots = math.ceil(seen.demand / max(seen.slots, 1))
    wanted = max(by_slots, seen.floor, math.ceil(seen.load * 100 / rule.share_up) if seen.demand else 0)
    if wanted > seen.awake and seen.asleep:
        number = min(seen.asleep, wanted - seen.awake)
        return Decision(number, None, f"{seen.demand} requests and a load of {seen.load:.2f} need {wanted}")
    is_idle = not seen.demand and seen.idle_s >= rule.idle_s
    # A rate of the last minute says nothing once nobody has come for a while.
    kept = max(by_slots, seen.floor, 0 if is_idle else max(1, math.ceil(seen.load * 100 / rule.share_down)))
    spare = seen.awake - kept
    if spare <= 0:
        return Decision(0, None, f"{seen.awake} are needed")
    since_s = seen.now_s if spare_since_s is None else spare_since_s
    if is_idle:
        return Decision(-spare, None, f"no request for {seen.idle_s:.0f} s")
    if seen.now_s - since_s < rule.idle_s:
        return Decision(0, since_s, f"{kept} would do, for {seen.now_s - since_s:.0f} of {rule.idle_s:g} s")
    return Decision(-spare, None, f"{kept} carry a load of {seen.load:.2f}, for {rule.idle_s:g} s")


class Bed(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that sleeps, and how it stands around its accelerators.

    ``is_held``: others are awake on them. ``in_the_way``: for each of those that would have to sleep first, the seconds
    since it had a request; None: one of them is needed, or waking it would not make room. Empty: there is room.
    """

    replica_id: str
    is_held: bool = False
    in_the_way: tuple[tuple[str, float], ...] | None = ()


class Turn(msgspec.Struct, frozen=True):
    """Wake one replica once those in its way sleep; None: none can wake where it is, start another one elsewhere."""

    replica_id: str | None
    instead_of: tuple[str, ...]
    reason: str


def turn(beds: Sequence[Bed], rule: Rule = STANDARD) -> Turn:
    """Return which of its sleeping replicas a version wakes.

    First where there is room beside others, so that no further accelerator is held; then where there is room; then in
    the place of those whom nobody has asked for longest.
    """
    roomy = [bed for bed in beds if bed.in_the_way == ()]
    if roomy:
        best = min(roomy, key=lambda bed: (not bed.is_held, bed.replica_id))
        return Turn(best.replica_id, (), "there is room beside others" if best.is_held else "its accelerators are free")
    able = [bed for bed in beds if bed.in_the_way and all(idle_s >= rule.residency_s for _, idle_s in bed.in_the_way)]
    if not able:
        return Turn(None, (), "those on its accelerators are needed")

    def rank(bed: Bed) -> tuple[int, float, str]:
        assert bed.in_the_way, "those without have room"
        return len(bed.in_the_way), -min(idle_s for _, idle_s in bed.in_the_way), bed.replica_id

    best = min(able, key=rank)
    victims = tuple(replica_id for replica_id, _ in best.in_the_way or ())
    return Turn(best.replica_id, victims, f"in the place of {len(victims)} that nobody asks for")


def spared(awake: Sequence[tuple[str, bool]], number: int) -> list[str]:
    """Return ``number`` replicas to put to sleep; of each it is said whether it is alone on its accelerators.

    Those that are alone go first, since only theirs become empty; of equals the ones that came last.
    """
    order = sorted(range(len(awake)), key=lambda at: (awake[at][1], at), reverse=True)
    return [awake[at][0] for at in order[:number]]


class Sleeper(msgspec.Struct, frozen=True):
    """A replica that sleeps: the bytes that it keeps in its machine's memory, and its accelerators there."""

    replica_id: str
    weights_bytes: int
    accelerators: frozenset[int]


def outgrown(here: Sequence[Sleeper], room_bytes: int, *, but: Collection[str] = ()) -> list[str]:
    """Return who of a node's sleepers has no room there any more, now that the last of them came.

    ``here`` has the one that has slept for longest first: those go, but for ``but``, who is about to wake, and for the
    last one itself.
    """
    newest = here[-1]
    left = room_bytes - sum(one.weights_bytes for one in here)
    crowd = sum(not one.accelerators.isdisjoint(newest.accelerators) for one in here)
    gone: list[str] = []
    for one in here[:-1]:
        if left >= 0 and crowd <= MOST:
            break
        is_beside = not one.accelerators.isdisjoint(newest.accelerators)
        if one.replica_id not in but and (left < 0 or is_beside):
            gone.append(one.replica_id)
            left += one.weights_bytes
            crowd -= is_beside
    return gone
