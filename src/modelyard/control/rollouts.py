"""Rollouts under way: a look every second that judges them and moves traffic.

Nothing is remembered here: a look reads the endpoint, asks ``policy/canary.py``
and stores what comes of it in one write, as the API does. A controller that is
killed before that write leaves a rollout as it was; after it, the next look or
the next pass of the reconciler goes on from there. Gateways are told at once.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from modelyard.clock import Clock
from modelyard.control.passes import Passed
from modelyard.control.tasks import boundary
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.rollouts import Rollout, RolloutState
from modelyard.domain.signals import Window
from modelyard.policy.canary import Cost, Data, Evidence, Start, Verdict, is_watched, judge
from modelyard.policy.reconcile import crashes
from modelyard.policy.rollouts import advanced, decided, weight_of
from modelyard.stores import ControlStore, Event

WINDOW_MAX_S = 900.0
"""Longest time that is judged; gateways report releases for as long."""

_log = logging.getLogger(__name__)


class Windows(Protocol):
    """What gateways counted of a release."""

    def window(self, endpoint_id: str, version_id: str | None, seconds: float) -> Window:
        """Return what happened to a version of an endpoint in the last ``seconds``."""
        ...


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Judges rollouts until cancelled.

    ``changing`` is held from a look to its write, as by every change of endpoints. ``price`` is that of a replica
    with all its accelerators for an hour, 0 where it has none.
    """

    store: ControlStore
    clock: Clock
    changing: asyncio.Lock
    windows: Windows
    passed: Callable[[], Mapping[str, Passed]]
    refresh: Callable[[], Awaitable[None]]
    wake: Callable[[], None]
    interval_s: float = 1.0
    price: Callable[[Replica], float] = lambda _: 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            with boundary("a look at rollouts"):
                await self.look()
            await asyncio.sleep(self.interval_s)

    async def look(self) -> None:
        """Take every rollout one step further."""
        passed = self.passed()
        if not any(one.has_rollout for one in passed.values()):
            return
        has_changed = False
        async with self.changing:
            for endpoint in await self.store.endpoints():
                is_open = endpoint.rollout is not None and endpoint.rollout.is_live and not endpoint.is_deleted
                if is_open and (seen := passed.get(endpoint.id)) is not None:
                    with boundary(f"the rollout of {endpoint.id}"):
                        has_changed |= await self._tend(endpoint, seen)
        if has_changed:
            self.wake()
            await self.refresh()

    async def _tend(self, before: Endpoint, passed: Passed) -> bool:
        """Store what becomes of one endpoint now; say whether anything did."""
        now = self.clock.unix_s()
        replicas = await self.store.replicas(endpoint_id=before.id)
        ready = Counter(one.version_id for one in replicas if one.state is ReplicaState.READY)
        after = await self._judged(before, replicas, passed, now)
        after = advanced(after, ready, passed.replicas, now)
        if after == before:
            return False
        events = events_of(before, after, await self._names(before), now)
        await self.store.put_endpoint(after, events=events)
        for event in events:
            _log.info("%s: %s: %s", before.name, event.kind, event.reason)
        return after.releases != before.releases or _target(after) != _target(before)

    async def _judged(self, endpoint: Endpoint, replicas: Sequence[Replica], passed: Passed, now: float) -> Endpoint:
        rollout = endpoint.rollout
        assert rollout is not None, "only endpoints with a rollout are looked at"
        if rollout.state is not RolloutState.RUNNING and not is_watched(rollout, now):
            return endpoint
        seconds = min(now - rollout.step_began_at, WINDOW_MAX_S) if rollout.step_began_at else 0.0
        versions = {version.id: version for version in await self.store.versions(tenant_id=endpoint.tenant_id)}

        def window(version_id: str) -> Window:
            empty = Window(seconds=0.0)
            return self.windows.window(endpoint.id, version_id, seconds) if seconds > 0 else empty

        evidence = Evidence(
            weight=weight_of(endpoint, rollout.candidate_id),
            stable=window(rollout.stable_id),
            candidate=window(rollout.candidate_id),
            start=start_of(rollout, replicas, passed),
            stable_cost=self._cost(versions.get(rollout.stable_id), replicas),
            candidate_cost=self._cost(versions.get(rollout.candidate_id), replicas),
        )
        decision = judge(rollout, evidence, now)
        is_quiet = decision.verdict is Verdict.WAIT and not rollout.is_open
        return endpoint if is_quiet else decided(endpoint, decision, now)

    def _cost(self, version: ModelVersion | None, replicas: Sequence[Replica]) -> Cost:
        if version is None:
            return Cost()
        mine = next((one for one in replicas if one.version_id == version.id and one.slots), None)
        if mine is None:
            return Cost(accelerators=version.gpu_count, kind=version.gpu_type)
        if price := self.price(mine):
            return Cost(mine.slots, 1, price, version.gpu_type)
        return Cost(mine.slots, version.gpu_count, kind=version.gpu_type)

    async def _names(self, endpoint: Endpoint) -> dict[str, str]:
        versions = await self.store.versions(tenant_id=endpoint.tenant_id)
        return {version.id: version.version for version in versions}


def start_of(rollout: Rollout, replicas: Sequence[Replica], passed: Passed) -> Start:
    """Return how far the candidate's replicas are."""
    mine = [one for one in replicas if one.version_id == rollout.candidate_id]
    ready = [one for one in mine if one.state is ReplicaState.READY]
    # What an earlier rollout of the same version met may be put right by now.
    histories = crashes(one for one in replicas if one.state_since >= rollout.began_at)
    attempts, reason = 0, ""
    for (version_id, _), history in histories.items():
        if version_id == rollout.candidate_id and len(history) > attempts:
            attempts, reason = len(history), history[-1].reason
    reason = reason or passed.no_room.get(rollout.candidate_id, "")
    trouble = passed.troubles.get(rollout.candidate_id)
    if trouble is not None:
        attempts, reason = max(attempts, trouble.attempts or 0), str(trouble)
    return Start(
        ready=len(ready),
        ready_at=min((one.ready_at or 0.0 for one in ready), default=0.0),
        # While the endpoint slept nobody could become ready.
        since=max([passed.awake_at, *(one.state_since for one in mine)]),
        attempts=attempts,
        stable_attempts=max((len(h) for (of, _), h in histories.items() if of == rollout.stable_id), default=0),
        trouble=reason,
        is_hopeless=trouble is not None and trouble.attempts is None,
        is_asleep=passed.replicas == 0,
    )


def events_of(before: Endpoint, after: Endpoint, names: Mapping[str, str], now: float) -> list[Event]:
    """Return what to tell of a change of a rollout: its steps and its end, with their numbers."""
    old, new = before.rollout, after.rollout
    if old is None or new is None:
        return []
    candidate = names.get(new.candidate_id, new.candidate_id)
    stable = names.get(new.stable_id, new.stable_id)
    told: Data = {"candidate": candidate, "stable": stable}
    if new.judgements:
        told |= new.judgements[-1].data

    def event(kind: str, reason: str) -> Event:
        return Event(now, after.id, kind, reason, data=dict(told))

    if new.state is RolloutState.ROLLED_BACK and old.state is not RolloutState.ROLLED_BACK:
        return [event("rollout_rolled_back", f"from {candidate} to {stable}: {new.reason}")]
    events = []
    if new.step > old.step and new.judgements:
        events.append(event("rollout_step", f"{candidate} may have {new.target} %: {new.judgements[-1].reason}"))
    if (weight := weight_of(after, new.candidate_id)) != weight_of(before, new.candidate_id):
        told["weight"] = weight
        events.append(event("rollout_weight", f"{candidate} has {weight} % now, its replicas are ready"))
    if new.state is RolloutState.PROMOTED and old.state is not RolloutState.PROMOTED:
        kept = f"; {stable} is kept for {new.keep_s:g} s" if new.keep_s else ""
        events.append(event("rollout_promoted", f"{candidate} has all traffic{kept}"))
    if old.kept_until and not new.kept_until and new.state is RolloutState.PROMOTED:
        events.append(event("rollout_ended", f"{stable} is kept no longer"))
    return events


def _target(endpoint: Endpoint) -> int:
    return endpoint.rollout.target if endpoint.rollout else 0
