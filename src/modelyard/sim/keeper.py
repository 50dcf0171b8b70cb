"""The controller of a simulated world that keeps its replicas: what failed is found out, ended and started again.

``policy.vitality.judge`` says from probes which engine hangs, and
``policy.reconcile.plan`` what to do about everything, with its pauses between
starts; what ``control/`` carries out for it is done here in virtual time.
"""

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

import msgspec

from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.policy.actions import (
    Action,
    DrainReplica,
    ForgetReplica,
    KillReplica,
    MarkEnded,
    MarkFailed,
    MarkLoading,
    MarkReady,
    StartReplica,
    StopReplica,
)
from modelyard.policy.reconcile import Pace, ReplicaSeen, Situation, Vital, plan
from modelyard.policy.vitality import Probe, Pulse, first_pulse, judge
from modelyard.sim.gateway import ENDPOINT_ID, Gateway

if TYPE_CHECKING:
    from modelyard.sim.world import Replica as Running
    from modelyard.sim.world import World

PACE = Pace(backoff_s=1.0, backoff_max_s=60.0, drain_timeout_s=30.0)
"""As ``fleet.*`` of the configuration has it."""
HANG_TIMEOUT_S = 30.0
LOAD_TIMEOUT_S = 1800.0
_ENDED = {MarkFailed: ReplicaState.FAILED, KillReplica: ReplicaState.FAILED, MarkEnded: ReplicaState.STOPPED}


class Keeper:
    """Keeps the records of a world's replicas, and makes what runs what should run."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._pulses: dict[str, Pulse] = {}
        self._loaded_s: dict[str, float] = {}
        self._is_first = False
        self.records: dict[str, Replica] = {}
        self.failures: list[tuple[float, str, str]] = []
        """When which replica was found to have failed, and why."""
        ordinals: dict[str, int] = {}
        for one in world.replicas.values():
            version_id = one.release.version_id
            ordinal = ordinals[version_id] = ordinals.get(version_id, -1) + 1
            self.records[one.id] = Replica(
                one.id, ENDPOINT_ID, version_id, ordinal, 0, ReplicaState.READY, one.began_s, ready_at=one.began_s
            )
            self._pulses[one.id] = first_pulse(one.began_s, was_ready=True)

    def tend(self, now_s: float, wanted: Mapping[str, int]) -> None:
        """Look at everything, and do what is to be done so that each version has its number of replicas."""
        situation = Situation(
            endpoint_id=ENDPOINT_ID,
            now_s=now_s,
            wanted=wanted,
            replicas=[self._seen(record, now_s) for record in self.records.values()],
            size_reason="it is wanted",
        )
        actions = plan(situation, PACE)
        for action in actions:
            self._carry_out(action, now_s)
        if actions:
            self._world.tell()

    def _seen(self, record: Replica, now_s: float) -> ReplicaSeen:
        running = self._world.replicas.get(record.id)
        is_running = running is not None and not running.is_down
        vital, reason = Vital.UNKNOWN, ""
        if running is not None and is_running:
            vital, reason = self._judge(running, now_s)
        busy = sum(task.replica_id == record.id for task in self._world.tasks.values())
        return ReplicaSeen(
            record=record,
            is_known=running is not None,
            is_running=is_running,
            exit_reason="" if is_running else "its process is gone",
            vital=vital,
            vital_reason=reason,
            in_flight=busy,
        )

    def _judge(self, running: "Running", now_s: float) -> tuple[Vital, str]:
        """Return what probes say of a replica; the page of one that hangs is answered all the same."""
        engine = running.engine
        totals = engine.totals(min(now_s, running.hung_s))
        gateways = [front for front in self._world.fronts if isinstance(front, Gateway)]
        loads = (load for gateway in gateways for load in gateway.dispatcher.replicas if load.route.id == running.id)
        on_it = sum(task.replica_id == running.id for task in self._world.tasks.values())
        probe = Probe(
            now_s=now_s,
            is_answering=now_s >= self._loaded_s.get(running.id, -inf),
            running=max(on_it, engine.running + engine.waiting),
            progress=totals.prefill_tokens + totals.generated,
            reading=sum(load.pending_tokens for load in loads),
        )
        verdict = judge(self._pulses[running.id], probe, hang_timeout_s=HANG_TIMEOUT_S, load_timeout_s=LOAD_TIMEOUT_S)
        self._pulses[running.id] = verdict.pulse
        return verdict.vital, verdict.reason

    def _carry_out(self, action: Action, now_s: float) -> None:
        match action:
            case StartReplica(replica=record):
                self._start(record, now_s)
            case MarkLoading(replica_id=replica_id):
                self._mark(replica_id, ReplicaState.LOADING, now_s)
            case MarkReady(replica_id=replica_id):
                self._mark(replica_id, ReplicaState.READY, now_s, ready_at=now_s)
                self._world.replicas[replica_id].ready_s = now_s
                self._world.replicas[replica_id].is_draining = False
            case DrainReplica(replica_id=replica_id):
                self._mark(replica_id, ReplicaState.DRAINING, now_s)
                self._world.replicas[replica_id].is_draining = True
            case MarkFailed() | KillReplica() | MarkEnded():
                self._mark(action.replica_id, _ENDED[type(action)], now_s, reason=action.reason)
                if not isinstance(action, MarkEnded):
                    self.failures.append((now_s, action.replica_id, action.reason))
                self._end(action.replica_id)
            case StopReplica(replica_id=replica_id):
                self._mark(replica_id, ReplicaState.STOPPED, now_s, reason=action.reason)
                self._end(replica_id)
            case ForgetReplica(replica_id=replica_id):
                del self.records[replica_id]
            case _:
                pass  # it waits, or speaks of what there is none of here

    def _start(self, record: Replica, now_s: float) -> None:
        self.records[record.id] = record
        release = next(one for one in self._world.spec.releases if one.version_id == record.version_id)
        self._world.begin(release, load_s=self._world.spec.load_s, replica_id=record.id)
        self._loaded_s[record.id] = now_s + self._world.spec.load_s
        self._pulses[record.id] = first_pulse(now_s, was_ready=False)

    def _end(self, replica_id: str) -> None:
        """End a replica's process, whatever is on it; gateways hear that it is gone."""
        running = self._world.replicas.get(replica_id)
        if running is None:
            return
        running.is_draining = True
        self._world.tell()
        if not running.is_down and self._world.breakage is not None:
            self._world.breakage.crash(running)
        self._world.forget(running)

    def _mark(
        self, replica_id: str, state: ReplicaState, now_s: float, *, ready_at: float | None = None, reason: str = ""
    ) -> None:
        record = self.records[replica_id]
        ready_at = record.ready_at if ready_at is None else ready_at
        self.records[replica_id] = msgspec.structs.replace(
            record, state=state, state_since=now_s, ready_at=ready_at, reason=reason
        )
