"""The replicas of one endpoint: what there is, what runs there, how they do, and which one a request should get.

A state machine without I/O; ``dispatch.py`` puts a waiting line before it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from modelyard.domain.routing_table import ReplicaRoute, ReplicaSnapshot
from modelyard.policy import breaker
from modelyard.policy.admission import can_ever_fit
from modelyard.policy.breaker import Failure, Tolerance
from modelyard.policy.engine_model import Speed, request_s
from modelyard.policy.fairness import OUTPUT_WEIGHT
from modelyard.policy.job import NEVER_S, Job, Looks
from modelyard.policy.occupancy import Occupancy
from modelyard.policy.prefixes import PrefixHolders
from modelyard.policy.replica_load import ReplicaLoad
from modelyard.policy.retries import RetryBudget
from modelyard.policy.routing import (
    CROWD,
    EngineModel,
    choose,
    expected,
    is_shadowed,
    learn,
    need_tokens,
    pick_release,
    release_point,
)
from modelyard.policy.seats import Seats

GUESS_SHARE = 0.5
"""Part of a guessed wait that is believed before anything was served here."""
HOLDER_BLOCKS_MAX = 200_000
NAMES_MAX = 64
"""Ids of replicas that are kept, those of gone ones among them."""
_NONE: Mapping[str, int] = {}


class Release(msgspec.Struct):
    """A release with its replicas."""

    version_id: str
    weight: int
    shadow: int
    replicas: list[ReplicaLoad]
    fallback: int = 0


class ReplicaSet:
    """The replicas of one endpoint, by release.

    ``kv_share_max`` is the share of a replica's KV cache that requests may reserve; ``chance`` draws numbers from 0 to
    1. ``seats`` knows which replicas others send requests to as well.
    """

    __slots__ = (
        "_by_id",
        "_chance",
        "_dispatches",
        "_fallbacks",
        "_has_changed",
        "_has_kv",
        "_holders",
        "_kv_share_max",
        "_only",
        "_own",
        "_releases",
        "_seats",
        "_serving",
        "_speed",
        "_tolerance",
        "has_ejected",
        "has_shadow",
        "is_asleep",
        "is_cold",
        "is_crowd",
        "model",
        "names",
        "retries",
    )

    def __init__(
        self,
        *,
        kv_share_max: float,
        retry_share_max: float,
        tolerance: Tolerance,
        chance: Callable[[], float],
        seats: Seats | None = None,
    ) -> None:
        self._seats = seats if seats is not None else Seats()
        self.retries = RetryBudget(retry_share_max)
        self.model = EngineModel()
        self._speed: Speed | None = None
        self.is_cold = True
        """Whether no replica could take a request even if it were idle."""
        self.is_asleep = True
        """The same of the releases with weight alone: what answers meanwhile is there for when they do not."""
        self.has_ejected = False
        """Whether some replica pauses, and has to be probed some time."""
        self.has_shadow = False
        self.is_crowd = False
        """Whether there is a choice between replicas, so that prefixes matter."""
        self._kv_share_max = kv_share_max
        self._tolerance = tolerance
        self._chance = chance
        self._releases: list[Release] = []
        self._only: ReplicaLoad | None = None
        self._fallbacks: list[Release] = []
        # Those of releases with weight: all that a request may get that must not go to a fallback.
        self._own: list[ReplicaLoad] = []
        self._by_id: dict[str, ReplicaLoad] = {}
        # Those that a request may be sent to: copies alone, or a release without weight, help nobody who waits.
        self._serving: list[ReplicaLoad] = []
        self._holders: PrefixHolders[ReplicaLoad] | None = None
        self._dispatches = 0
        self._has_kv = False
        self._has_changed = False
        """Whether one was ejected since anybody was served: another may have been let back for it."""
        self.names: dict[int, str] = {}
        """Ids of replicas by their ``identity``, of late ones too, for whoever asks why a request went where it did."""

    @property
    def replicas(self) -> Collection[ReplicaLoad]:
        """Return every replica of the last table, and gone ones that still have requests."""
        return self._by_id.values()

    @property
    def has_choice(self) -> bool:
        """Say whether an answer that one replica begins could be gone on with by another; a fallback's cannot."""
        return len(self._own) > 1

    @property
    def has_fallback(self) -> bool:
        """Say whether some release answers what the others have no room for."""
        return bool(self._fallbacks)

    def is_fallback(self, replica: ReplicaLoad) -> bool:
        """Say whether a replica is of such a release."""
        return any(release.version_id == replica.version_id for release in self._fallbacks)

    @property
    def running(self) -> int:
        """Return how many requests are on its replicas now, those of others who share them among them."""
        return sum(replica.running for replica in self._by_id.values())

    # --- what there is ---

    def take_releases(
        self,
        releases: Sequence[tuple[str, int, int, Sequence[tuple[ReplicaRoute, int]]]],
        *,
        now_s: float,
        fallbacks: Mapping[str, int] = _NONE,
    ) -> None:
        """Take over ``(version_id, weight, shadow, [(replica, slots)])`` of a new table; known replicas keep theirs.

        ``fallbacks`` are the turns of versions that answer what those with weight have no room for.
        """
        seen: dict[str, ReplicaLoad] = {}
        self._releases = []
        for version_id, weight, shadow, routes in releases:
            release = Release(version_id, weight, shadow, [], fallbacks.get(version_id, 0))
            for route, slots in routes:
                load = self._load_for(route, version_id, slots, now_s)
                load.take_route(route, slots)
                seen[route.id] = load
                self.names.pop(load.identity, None)  # so that those of today are the last to be forgotten
                self.names[load.identity] = route.id
                release.replicas.append(load)
            self._releases.append(release)
        for replica_id, load in self._by_id.items():
            if replica_id in seen:
                continue
            if load.own:
                load.is_draining = load.is_gone = True
                seen[replica_id] = load
            else:
                self._seats.let_go(load)
        self._by_id = seen
        for identity in list(self.names)[: -max(NAMES_MAX, 2 * len(seen))]:
            del self.names[identity]
        self.is_crowd = len(seen) > 1
        of_weight = [release for release in self._releases if release.weight or len(self._releases) == 1]
        in_turn = (release for release in self._releases if release.fallback and release.replicas)
        self._fallbacks = sorted(in_turn, key=lambda release: release.fallback)
        self._own = [replica for release in of_weight for replica in release.replicas]
        self._serving = self._own + [replica for release in self._fallbacks for replica in release.replicas]
        of_first = self._releases[0].replicas if len(self._releases) == 1 else ()
        self._only = of_first[0] if len(of_first) == 1 else None
        self.has_shadow = any(release.shadow and release.replicas for release in self._releases)
        self._has_kv = any(replica.kv.capacity for replica in seen.values())
        if len(seen) <= CROWD:
            self._holders = None
        else:
            self._holders = self._holders or PrefixHolders(HOLDER_BLOCKS_MAX)
            self._holders.keep(seen.values())
        breaker.reprieve(self._healths(), now_s=now_s)
        self._note_health()

    def _load_for(self, route: ReplicaRoute, version_id: str, slots: int, now_s: float) -> ReplicaLoad:
        """Return the record of a replica: the known one, or another where it is news or began anew at another port."""
        known = self._by_id.get(route.id)
        if known is not None and known.route.port == route.port:
            return known
        load = self._seats.load_of(route, version_id, slots)
        load.roll(now_s)
        if known is not None:
            self._seats.let_go(known)
        return load

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot]) -> None:
        """Take over what engines themselves reported: the load that is not from here."""
        for replica in self._by_id.values():
            if (snapshot := snapshots.get(replica.route.seat_of or replica.route.id)) is not None:
                replica.observe(snapshot)

    # --- how they do ---

    def failed(self, replica: ReplicaLoad, kind: Failure, reason: str, *, now_s: float) -> None:
        """Note a failed request; the rules of ``breaker.py`` say whether that ejects its replica."""
        health = replica.judged(kind)
        replica.blame(kind, reason)
        is_out = breaker.failed(health, self._healths(), kind, reason, now_s=now_s, tolerance=self._tolerance)
        if kind is Failure.UNREACHABLE and not health.is_closed and health.open_until_s != replica.granted_s:
            # Each endpoint that has requests there loses them to this one failure.
            replica.granted_s = health.open_until_s
            if is_out or replica.occupancy is not None:
                self.retries.grant(replica.own)
        elif kind is Failure.SILENT and is_out:
            # An engine that hangs fails all that is on it at the same moment, and gets nothing more either.
            self.retries.grant(replica.own)
        if is_out:
            breaker.reprieve(self._healths(), now_s=now_s)
            self._note_health()
            self._has_changed = True

    def succeeded(self, replica: ReplicaLoad) -> None:
        """Note a good answer, or one that blames the request."""
        replica.answered()

    def wake(self, now_s: float) -> None:
        """Move all windows on after a time in which nobody called ``probes_due``: what comes now belongs to now."""
        self.retries.roll(now_s)
        for replica in self._by_id.values():
            replica.roll(now_s)

    def probes_due(self, now_s: float) -> list[ReplicaLoad]:
        """Return the ejected replicas that should be asked for a token now; called by the sweep."""
        self.retries.roll(now_s)
        due = []
        for replica in self._by_id.values():
            replica.roll(now_s)
            if replica.probe_due(now_s) and not replica.is_draining:
                due.append(replica)
        return due

    def take_verdict(
        self,
        replica: ReplicaLoad,
        *,
        is_good: bool,
        kind: Failure = Failure.UNREACHABLE,
        reason: str = "",
        now_s: float,
    ) -> None:
        """Take the verdict of a probe, or of nobody where an endpoint cannot be probed (``is_good`` then)."""
        replica.probe_ended(is_good=is_good, now_s=now_s, kind=kind, reason=reason)
        self._note_health()

    def _healths(self) -> list[breaker.Health]:
        return [replica.health for replica in self._serving if not replica.is_draining and not replica.is_cut_off]

    def _note_health(self) -> None:
        self.has_ejected = False
        for replica in self._by_id.values():
            replica.note_health()
            self.has_ejected = self.has_ejected or replica.ejected_until_s > 0.0
        self.is_cold = all(replica.is_draining or replica.is_missing for replica in self._serving)
        self.is_asleep = all(replica.is_draining or replica.is_missing for replica in self._own)

    def may_retry(self, job: Job, failed_on: Collection[ReplicaLoad], now_s: float) -> bool:
        """Say whether some other replica may help a request, and the budget of retries allows to try it."""
        return self.retries.has_left(now_s) and any(
            other not in failed_on and not other.is_draining and not other.ejected_until_s
            for other in self._may_get(job)
        )

    # --- what runs there ---

    def expect(self, speed: Speed) -> None:
        """Take what the engines' pages told others of their speed, until there are answers."""
        self.model = expected(self.model, speed)
        self._speed = speed

    def guess_s(self, ahead: int, jobs: Sequence[Job]) -> float | None:
        """Return what ``ahead`` of cost will last at least, of requests like ``jobs``, by what was told of the engines.

        None: nothing was. Answers' lengths are a guess, too, so half of it is believed.
        """
        speed = self._speed
        if speed is None or not jobs:
            return None
        prompt = sum(job.prompt_tokens for job in jobs) // len(jobs)
        output = sum(job.output_tokens for job in jobs) // len(jobs)
        tokens, rate = max(1, prompt + output), 0.0
        for replica in self._own:
            if not replica.is_draining and not replica.ejected_until_s:
                held = int(self._kv_share_max * replica.kv.capacity / tokens) if replica.kv.capacity else replica.slots
                batch = max(1, min(replica.slots, held))
                each_s = request_s(speed, batch=batch, prompt_tokens=prompt, completion_tokens=output)
                rate += (prompt + OUTPUT_WEIGHT * output) / each_s
        return GUESS_SHARE * ahead / rate if rate else None

    def began(self, replica: ReplicaLoad, job: Job, *, now_s: float) -> None:
        """Note the first token of an answer: the prompt has been read."""
        if job.was_first:
            job.was_first = False
            self.model = learn(
                self.model,
                prompt_tokens=job.pending_tokens,
                cached_tokens=0,
                ttft_s=now_s - job.dispatched_s,
                running=max(0, replica.running - 1),
                slots=replica.slots,
            )
        self._read(replica, job)
        replica.reading_since_s = now_s

    def grew(self, replica: ReplicaLoad, job: Job, tokens: int) -> None:
        """Note that an answer has ``tokens`` tokens by now."""
        if self._has_kv:
            replica.kv.grow(job, tokens)

    # --- copies for other releases ---

    def shadows(self, job: Job, *, now_s: float) -> list[tuple[ReplicaLoad, Job]]:
        """Take a slot at each shadow release that wants a copy of this request and has room.

        Each comes with a job of its own, for ``drop_shadow``: copies count neither for fairness nor for the line.
        """
        taken = []
        for release in self._releases:
            if not release.shadow or not is_shadowed(release.shadow, self._chance):
                continue
            copy = Job(job.tenant_id, prompt_tokens=job.prompt_tokens, output_tokens=job.output_tokens)
            copy.output_max = job.output_max
            replica = choose(
                release.replicas, copy, now_s=now_s, model=self.model, chance=self._chance, fits=self._fits(copy)
            )
            if replica is not None:
                self._occupy(replica, copy, now_s)
                taken.append((replica, copy))
        return taken

    # --- inside ---

    def _is_hopeless(self, job: Job) -> bool:
        """Say whether no replica could hold the request even if it were idle."""
        return (
            self._has_kv
            and not self.is_cold_for(job)
            and not any(can_ever_fit(job, replica.kv.capacity) for replica in self._may_get(job))
        )

    def is_cold_for(self, job: Job) -> bool:
        """Say whether no replica that the request may ever get could take it even if it were idle."""
        return self.is_asleep if job.fallback_s == NEVER_S else self.is_cold

    def _may_get(self, job: Job) -> list[ReplicaLoad]:
        """Return the replicas that the request may ever be sent to."""
        return self._own if job.fallback_s == NEVER_S else self._serving

    def _find(self, job: Job, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        releases = self._releases
        if len(releases) != 1:
            return self._find_by_weight(job, now_s, avoid)
        if (only := self._only) is None:
            return self._choose(releases[0], job, now_s, avoid)
        # What ``choose`` says of one replica, in place of three calls: most endpoints have no more.
        if only.running >= only.slots or only.is_draining or only.ejected_until_s > now_s or only in avoid:
            return None
        if self._has_kv and not only.kv.fits(job, self._kv_share_max):
            return None
        return only if only.occupancy is None or not self._is_kept(only.occupancy, job) else None

    def _find_by_weight(self, job: Job, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        job.spilled = None
        left = [release for release in self._releases if release.replicas and release.weight]
        while left:
            point = release_point(job.release_session, self._chance)
            index = pick_release([release.weight for release in left], point)
            if (replica := self._choose(left[index], job, now_s, avoid)) is not None:
                return replica
            # A release without room must not make its share of requests wait beside idle replicas of another.
            del left[index]
        return self._find_fallback(job, now_s, avoid) if self._fallbacks else None

    def _find_fallback(self, job: Job, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        """Return a replica of the first fallback with room, if it is time for one."""
        if job.fallback_s > now_s:
            return None
        own = [replica for replica in self._own if not replica.is_draining]
        looks = job.looks
        for release in self._fallbacks:
            if (replica := self._choose(release, job, now_s, avoid)) is not None:
                ejected = sum(one.ejected_until_s > now_s for one in own)
                full = sum(one.running >= one.slots and one.ejected_until_s <= now_s for one in own)
                job.spilled = (len(own), full, ejected)
                return replica
        job.looks = looks
        return None

    def _choose(self, release: Release, job: Job, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        looks: Looks = []
        job.looks = looks
        return choose(
            release.replicas,
            job,
            now_s=now_s,
            model=self.model,
            avoid=avoid,
            fits=self._fits(job) if self._has_kv else None,
            chance=self._chance,
            holders=self._holders,
            looks=looks,
        )

    def _is_held(self, replica: ReplicaLoad, job: Job) -> bool:
        """Say whether the replica's memory holds the request, and is not kept for somebody else."""
        return not self._has_kv or self._fits(job)(replica)

    def _is_kept(self, occupancy: Occupancy, job: Job) -> bool:
        """Say whether a replica's memory is kept for others; without a line nobody waits."""
        return False

    def _fits(self, job: Job) -> Callable[[ReplicaLoad], bool]:
        share_max = self._kv_share_max
        return lambda replica: (
            replica.kv.fits(job, share_max) and (replica.occupancy is None or not self._is_kept(replica.occupancy, job))
        )

    def _occupy(self, replica: ReplicaLoad, job: Job, now_s: float) -> None:
        pending = replica.pending_tokens
        tokens = job.prompt_tokens
        job.dispatched_s = now_s
        job.beside = replica.running
        if not pending:
            job.was_first = True
            replica.reading_since_s = now_s
        else:
            job.was_first = False
        if job.prefix:
            matched = replica.prefixes.add(job.prefix)
            if self._holders is not None:
                self._holders.add(job.prefix, replica)
            if matched:
                tokens = need_tokens(job, matched, self.model)
        job.pending_tokens = tokens
        replica.pending_tokens = pending + tokens
        replica.unanswered += 1
        replica.running = running = replica.running + 1
        peak = replica.running_peak
        replica.running_peak = running if running > peak else peak
        self._dispatches = replica.last_dispatch = self._dispatches + 1
        if self._has_kv:
            replica.kv.take(job)

    def _free(self, replica: ReplicaLoad, job: Job) -> None:
        replica.running -= 1
        assert replica.running >= 0, "finished more often than begun"
        if job.pending_tokens:
            self._read(replica, job)
        if replica.kv.held and job in replica.kv.held:
            replica.kv.give_back(job)

    @staticmethod
    def _read(replica: ReplicaLoad, job: Job) -> None:
        """Note that nothing of the prompt is left to read."""
        if job.pending_tokens:
            replica.pending_tokens -= job.pending_tokens
            replica.unanswered -= 1
            job.pending_tokens = 0
