"""What to do so that what runs becomes what should run.

``plan`` is a level-triggered pure function: it looks at one endpoint as it is
now and returns the next actions, never a plan that must be finished. Whatever
subset of them happens, calling it again on what came of it converges.

A replica is a *place* (version and ordinal) and a *generation* (how often the
place was started). At most one generation of a place runs at any time. The
newest record of a place is kept as its tombstone when it ended, so that an id
is never given twice; the ``FAILED`` records of a place are its crash history,
so that the pause between two starts survives a restart of the controller.
A replica moves by another one, in a place of its own, that takes over from it
(``takeovers.py``).

Times are unix seconds, because they are compared with stored ones; a clock
that was set back never lengthens a pause.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial

import msgspec

from modelyard.domain.fleet import THERE, Replica, ReplicaState, replica_id
from modelyard.policy import takeovers
from modelyard.policy.actions import (
    Action,
    DrainReplica,
    ForgetEndpoint,
    ForgetProcess,
    ForgetReplica,
    KillReplica,
    MarkEnded,
    MarkFailed,
    MarkLoading,
    MarkReady,
    StartReplica,
    StopReplica,
    Wait,
)

LIVE = THERE | {ReplicaState.STARTING, ReplicaState.LOADING}
"""States that count as a replica one has."""
_RANK = {
    ReplicaState.READY: 0,
    ReplicaState.WAKING: 1,
    ReplicaState.FALLING_ASLEEP: 2,
    ReplicaState.ASLEEP: 3,
    ReplicaState.LOADING: 4,
    ReplicaState.STARTING: 5,
    ReplicaState.DRAINING: 6,
}
"""Who is kept first where fewer are wanted."""
FAILURES_KEPT = 10
"""Crash records kept of a place: 2**10 first pauses are beyond every longest pause."""


class Vital(StrEnum):
    """What probes say of a replica."""

    UNKNOWN = "unknown"
    LOADING = "loading"
    READY = "ready"
    HUNG = "hung"


class ReplicaSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as recorded, with what is seen of it.

    ``is_known``: the fleet has a process on record, running or ended.
    ``in_flight`` of one that drains, falls asleep or wakes is the sum over gateways, None until all know it: before
    that a gateway may still send to it, so that having nothing on it proves nothing.
    ``is_busy``: an earlier action on it still runs, so leave it alone.
    """

    record: Replica
    is_known: bool = False
    is_running: bool = False
    exit_reason: str = ""
    last_lines: tuple[str, ...] = ()
    vital: Vital = Vital.UNKNOWN
    vital_reason: str = ""
    in_flight: int | None = 0
    is_busy: bool = False
    is_evicted: bool = False
    """Somebody else needs its very place: it goes, whatever is wanted here, and does not come back."""
    moves_because: str = ""
    """Why another one is to take over from it elsewhere, "" where it stays."""


class Stray(msgspec.Struct, frozen=True):
    """A process of the fleet that no record knows."""

    replica_id: str
    is_running: bool


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint, now. ``wanted`` is replicas by version; a version that is missing has no release any more.

    ``size_reason`` is why it is this many.

    ``is_first``: nobody watched until now, so that a process that is gone did
    not necessarily crash (the machine may have been restarted).
    """

    endpoint_id: str
    now_s: float
    wanted: Mapping[str, int]
    replicas: Sequence[ReplicaSeen] = ()
    strays: Sequence[Stray] = ()
    size_reason: str = ""
    taken_ids: Collection[str] = ()
    """Ids of replicas that began here and belong to another endpoint now: never given again while they live."""
    beside: Collection[str] = ()
    """Versions whose replicas are there whatever the others have: they replace nothing."""
    is_deleted: bool = False
    is_first: bool = False


class Pace(msgspec.Struct, frozen=True):
    """Waiting times."""

    backoff_s: float
    backoff_max_s: float
    drain_timeout_s: float

    @property
    def stable_s(self) -> float:
        """Seconds that a replica must have been ready for its earlier crashes to be forgiven."""
        return self.backoff_max_s


def plan(situation: Situation, pace: Pace) -> list[Action]:
    """Return what to do now; at most one action a replica, each with its reason."""
    actions: list[Action] = []
    tended: set[str] = set()
    for seen in situation.replicas:
        action = None if seen.is_busy else _tend(seen, situation, pace)
        if action is not None:
            actions.append(action)
        if action is not None or seen.is_busy:
            tended.add(seen.record.id)
    actions += [_clear(stray) for stray in situation.strays]
    places = _by_place(situation.replicas)
    for version_id in sorted({*situation.wanted, *(version_id for version_id, _ in places)}):
        mine = {ordinal: group for (of, ordinal), group in places.items() if of == version_id}
        actions += _size(version_id, mine, tended, situation, pace)
    if situation.is_deleted and not situation.strays and not any(map(_is_present, situation.replicas)):
        return [ForgetEndpoint("deleted, and nothing of it runs any more")]
    # What goes, goes first: a replica that takes over from one that leaves must not be one too many for a moment.
    return sorted(actions, key=lambda action: isinstance(action, StartReplica))


def crashes(replicas: Iterable[Replica]) -> dict[tuple[str, int], list[Replica]]:
    """Return the crash history of each place that has one, oldest first."""
    history: dict[tuple[str, int], list[Replica]] = defaultdict(list)
    for replica in sorted(replicas, key=lambda replica: replica.generation):
        if replica.state is ReplicaState.FAILED:
            history[replica.version_id, replica.ordinal].append(replica)
    return history


def _is_present(seen: ReplicaSeen) -> bool:
    return seen.is_busy or seen.is_known or seen.record.state in LIVE or seen.record.state is ReplicaState.DRAINING


def _by_place(replicas: Sequence[ReplicaSeen]) -> dict[tuple[str, int], list[ReplicaSeen]]:
    """Group by version and ordinal, newest generation first."""
    places: dict[tuple[str, int], list[ReplicaSeen]] = defaultdict(list)
    for seen in sorted(replicas, key=lambda seen: -seen.record.generation):
        places[seen.record.version_id, seen.record.ordinal].append(seen)
    return places


def _clear(stray: Stray) -> Action:
    if stray.is_running:
        return StopReplica(stray.replica_id, "it runs but no record knows it")
    return ForgetProcess(stray.replica_id, "it ended and no record knows it")


# --- facts: what became of each replica, whether it is wanted or not -------------


def _tend(seen: ReplicaSeen, situation: Situation, pace: Pace) -> Action | None:
    """Bring the record in line with what is seen of the process."""
    match seen.record.state:
        case ReplicaState.STOPPED | ReplicaState.FAILED:
            return _tend_ended(seen)
        case ReplicaState.STARTING if not seen.is_known:
            return None  # recorded, not started yet: whether to start it is a question of size
        case _ if not seen.is_running:
            return _tend_gone(seen, situation)
        case ReplicaState.STARTING:
            return MarkLoading(seen.record.id, "its process runs")
        case ReplicaState.LOADING if seen.vital is Vital.READY:
            return MarkReady(seen.record.id, seen.vital_reason or "it answers its readiness probe")
        case ReplicaState.DRAINING:
            return _tend_draining(seen, situation.now_s, pace)
        case _ if seen.vital is Vital.HUNG:
            return KillReplica(seen.record.id, seen.vital_reason or "it hangs")
        case _:
            return None


def _tend_ended(seen: ReplicaSeen) -> Action | None:
    if not seen.is_running:
        return ForgetProcess(seen.record.id, "its process ended") if seen.is_known else None
    if seen.record.state is ReplicaState.FAILED:
        return KillReplica(seen.record.id, seen.record.reason or "it was being killed")
    return StopReplica(seen.record.id, seen.record.reason or "it was being stopped")


def _tend_gone(seen: ReplicaSeen, situation: Situation) -> Action:
    why = seen.exit_reason or "its process disappeared"
    if seen.record.state is ReplicaState.DRAINING:
        return MarkEnded(seen.record.id, f"ended while it drained: {why}")
    if situation.is_first:
        return MarkEnded(seen.record.id, f"ended while no controller ran: {why}")
    return MarkFailed(seen.record.id, why, seen.last_lines)


def _tend_draining(seen: ReplicaSeen, now_s: float, pace: Pace) -> Action | None:
    if seen.vital is Vital.HUNG:
        return StopReplica(seen.record.id, f"hung while it drained: {seen.vital_reason}")
    if left_s(seen.record.state_since, pace.drain_timeout_s, now_s) == 0:
        return StopReplica(seen.record.id, f"not drained within {pace.drain_timeout_s:g} s")
    if seen.in_flight == 0:
        return StopReplica(seen.record.id, "drained")
    return None


# --- size: which places should run ------------------------------------------------


def _size(
    version_id: str,
    places: Mapping[int, list[ReplicaSeen]],
    tended: set[str],
    situation: Situation,
    pace: Pace,
) -> list[Action]:
    """Start, drain and forget so that the version has its number of replicas."""
    arriving, left = takeovers.standing(places, lambda seen: _can_serve(seen, tended))
    kept = _keep(places, situation.wanted.get(version_id, 0), beyond={*arriving, *left})
    # Replaced, or its traffic went to others: they must be there first.
    others = (number for other, number in situation.wanted.items() if other not in situation.beside)
    is_replaced = not situation.wanted.get(version_id) and any(others)
    may_drain = not is_replaced or _is_served(situation)
    actions: list[Action] = []
    for ordinal in sorted({*places, *kept}):
        group = places.get(ordinal, [])
        is_arriving = arriving.get(ordinal) in kept and takeovers.may_arrive(group, partial(_is_late, situation.now_s))
        if ordinal in kept or is_arriving:
            action = _fill(version_id, ordinal, group, tended, situation, pace)
            actions += [action] if action else []
            surplus = [seen for seen in group if seen.record.state in LIVE][1:]
        else:
            surplus = [seen for seen in group if seen.record.state in LIVE]
        reason = situation.size_reason
        if ordinal in left:
            reason = f"it moved: {left[ordinal].id} is ready on {takeovers.where(left[ordinal])}"
        elif ordinal in arriving:
            reason = "its move is given up"
        elif is_replaced:
            reason = "its version gets no traffic" if version_id in situation.wanted else "its version was replaced"
        for seen in surplus:
            may_go = may_drain or ordinal in left or seen.is_evicted or not _is_there(seen)
            if seen.record.id not in tended and may_go:
                why = situation.size_reason if seen.is_evicted else reason
                why = why or "fewer replicas are needed"
                released = _release(seen, why, situation.now_s, pace, is_move=ordinal in left)
                actions += [released] if released else []
        actions += _forget(group, tended, situation.now_s, pace)
    if not arriving and not left:
        actions += _begin_move(version_id, places, kept, tended, situation, pace)
    return actions


def _is_there(seen: ReplicaSeen) -> bool:
    return seen.record.state in THERE and seen.is_running


def _can_serve(seen: ReplicaSeen, tended: Collection[str]) -> bool:
    """Whether it answers, and nothing is wrong with it."""
    is_ready = seen.record.state is ReplicaState.READY and seen.is_running
    return is_ready and seen.record.id not in tended and not seen.is_evicted


def _is_served(situation: Situation) -> bool:
    """Whether the versions that have releases are ready in their number, so that older ones may go."""
    ready: dict[str, int] = defaultdict(int)
    moving = takeovers.takeovers(seen.record for seen in situation.replicas)
    for seen in situation.replicas:
        ready[seen.record.version_id] += _is_there(seen) and seen.record.id not in moving
    return all(
        ready[version_id] >= number
        for version_id, number in situation.wanted.items()
        if version_id not in situation.beside
    )


def _keep(places: Mapping[int, list[ReplicaSeen]], number: int, beyond: Collection[int] = ()) -> set[int]:
    """Choose the ordinals to have: what serves, what sleeps, what loads, what must be started; then the lowest.

    One whose replica is evicted is not kept: whoever was promised its room would wait for ever. Nor are those
    ``beyond`` the number, by which replicas move.
    """
    going = {
        ordinal
        for ordinal, group in places.items()
        if any(seen.is_evicted and seen.record.state in LIVE for seen in group)
    }

    def cost(ordinal: int) -> tuple[bool, int, int]:
        group = places.get(ordinal, ())
        is_evicted = any(seen.is_evicted for seen in group)
        return (
            is_evicted,
            min((_RANK.get(seen.record.state, len(_RANK)) for seen in group), default=len(_RANK)),
            ordinal,
        )

    able = {*places, *range(number + len(beyond))} - going - set(beyond)
    return set(sorted(able, key=cost)[:number])


def _fill(
    version_id: str,
    ordinal: int,
    group: Sequence[ReplicaSeen],
    tended: set[str],
    situation: Situation,
    pace: Pace,
) -> Action | None:
    """Get a wanted place running, or say what it waits for; None when it runs or is being tended."""
    live = next((seen for seen in group if seen.record.state in LIVE), None)
    if live is not None:
        if live.record.state is ReplicaState.STARTING and not live.is_known and live.record.id not in tended:
            return StartReplica(live.record, "it was recorded but not started")
        return None
    draining = next((seen for seen in group if seen.record.state is ReplicaState.DRAINING), None)
    if draining is not None and _may_return(draining) and draining.record.id not in tended:
        return MarkReady(draining.record.id, "it is needed again")
    for seen in group:
        if seen.is_running or seen.is_busy or seen.record.state is ReplicaState.DRAINING:
            return Wait(version_id, ordinal, None, f"{seen.record.id} is still being stopped")
    tries = (seen.record for seen in group if seen.record.state is ReplicaState.FAILED)
    failed = [one for one in tries if not takeovers.is_mere_try(one)]  # moves have a pause of their own
    if failed:
        pause_s = min(pace.backoff_s * 2.0 ** (len(failed) - 1), pace.backoff_max_s)
        if (pause_left_s := left_s(failed[0].state_since, pause_s, situation.now_s)) > 0:
            times = "once" if len(failed) == 1 else f"{len(failed)} times"
            reason = f"it failed {times} ({failed[0].reason}); the pause between starts is {pause_s:g} s"
            return Wait(version_id, ordinal, situation.now_s + pause_left_s, reason)
    reason = f"start {len(failed) + 1} after: {failed[0].reason}" if failed else situation.size_reason
    return StartReplica(_new(version_id, ordinal, group, situation), reason or "it is needed")


def _new(version_id: str, ordinal: int, group: Sequence[ReplicaSeen], situation: Situation) -> Replica:
    """Return the record of a place's next generation."""
    generation = group[0].record.generation + 1 if group else 0
    while replica_id(situation.endpoint_id, version_id, ordinal, generation) in situation.taken_ids:
        generation += 1
    return Replica(
        id=replica_id(situation.endpoint_id, version_id, ordinal, generation),
        endpoint_id=situation.endpoint_id,
        version_id=version_id,
        ordinal=ordinal,
        generation=generation,
        state=ReplicaState.STARTING,
        state_since=situation.now_s,
        started_at=situation.now_s,
    )


def _begin_move(
    version_id: str,
    places: Mapping[int, list[ReplicaSeen]],
    kept: Collection[int],
    tended: set[str],
    situation: Situation,
    pace: Pace,
) -> list[Action]:
    """Start what takes over from a replica that is to move, unless its place pauses after a crash."""
    seen = [one for ordinal in sorted(kept) for one in places.get(ordinal, ())]
    old = next((one for one in seen if one.moves_because and _can_serve(one, tended)), None)
    if old is None:
        return []
    ordinal = takeovers.free_ordinal(places, kept, _is_present)
    action = _fill(version_id, ordinal, places.get(ordinal, []), tended, situation, pace)
    if not isinstance(action, StartReplica):
        return []
    return [StartReplica(msgspec.structs.replace(action.replica, takes_over=old.record.id), old.moves_because)]


def _is_late(now_s: float, since_s: float) -> bool:
    return left_s(since_s, takeovers.START_S, now_s) == 0


def _may_return(draining: ReplicaSeen) -> bool:
    return draining.record.ready_at is not None and not draining.is_evicted


def _release(seen: ReplicaSeen, reason: str, now_s: float, pace: Pace, *, is_move: bool = False) -> Action | None:
    """Let a surplus replica go: only one that was routed to has requests to finish.

    One that falls asleep gets nothing new already, and one that wakes may have requests from before it fell asleep.
    Neither drains: who drains may come back, and its engine may sleep.
    """
    if seen.record.state is ReplicaState.READY:
        return DrainReplica(seen.record.id, reason, seen.is_evicted, is_move)
    if seen.record.state in (ReplicaState.FALLING_ASLEEP, ReplicaState.WAKING) and seen.in_flight != 0:
        if left_s(seen.record.state_since, pace.drain_timeout_s, now_s) > 0:
            return None
        return StopReplica(seen.record.id, f"{reason}; its requests did not end within {pace.drain_timeout_s:g} s")
    if seen.is_known:
        return StopReplica(seen.record.id, reason)
    return MarkEnded(seen.record.id, f"never started: {reason}")


def _forget(group: Sequence[ReplicaSeen], tended: set[str], now_s: float, pace: Pace) -> list[Action]:
    """Drop ended records behind the newest one, but keep crashes until a replica proved itself."""
    if not group:
        return []
    newest = group[0].record
    is_stable = newest.state in THERE and left_s(newest.ready_at or now_s, pace.stable_s, now_s) == 0
    ended = [seen for seen in group[1:] if not seen.is_known and seen.record.id not in tended]
    failed = [seen for seen in ended if seen.record.state is ReplicaState.FAILED]
    dropped = [seen for seen in ended if seen.record.state is ReplicaState.STOPPED]
    dropped += failed if is_stable else failed[FAILURES_KEPT:]
    return [ForgetReplica(seen.record.id, "a later start took its place") for seen in dropped]


def left_s(since_s: float, length_s: float, now_s: float) -> float:
    """Return the seconds left of a pause; none when it seems to begin in the future (the clock was set back)."""
    return 0.0 if since_s > now_s + 1 else max(0.0, since_s + length_s - now_s)
