"""Carries out the actions of ``policy/reconcile.py``, in an order that survives being cut off anywhere.

Two rules make every cut harmless. What is about to run is recorded before it
runs, so that no process is ever unknown. What is about to end is recorded as
ended before it ends, so that its end is never taken for a crash. Whatever is
left half done, the next pass sees it and plans the rest.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from modelyard.clock import Clock
from modelyard.control.loadtimes import LoadTimes
from modelyard.control.supplies import Supplied
from modelyard.control.tasks import KeyedTasks
from modelyard.domain.catalog import ModelVersion, VersionStatus
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import OUT_OF_MEMORY, Replica, ReplicaState
from modelyard.domain.nodes import NodeSeen, Placement
from modelyard.engines import LaunchSpec
from modelyard.fleet import Fleet, FleetError, StartOrder
from modelyard.policy import actions as act
from modelyard.policy.admission_cap import slots_after
from modelyard.policy.cluster import CPU
from modelyard.policy.takeovers import is_mere_try
from modelyard.policy.threads import threads_for
from modelyard.stores import ControlStore, Event, EventData

FLEET_TIMEOUT_S = 30.0
"""Longest that a fleet may take to begin a process or to drop its records."""

_log = logging.getLogger(__name__)

Records = dict[str, Replica]
"""Replica records by id, as of now: the executor keeps them in step with what it stores."""


class Executor:
    """The controller's hands. ``tasks`` runs what takes its time, under the replica's id."""

    def __init__(
        self,
        *,
        store: ControlStore,
        fleet: Fleet,
        tasks: KeyedTasks,
        loads: LoadTimes,
        clock: Clock,
        grace_s: float,
        threads: int,
        nodes: Callable[[], Mapping[str, NodeSeen]] = dict,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._tasks = tasks
        self._loads = loads
        self._clock = clock
        self._grace_s = grace_s
        self._threads = threads
        self._nodes = nodes
        self._begun_s = clock.unix_s()

    async def start(
        self,
        action: act.StartReplica,
        endpoint: Endpoint,
        supplied: Supplied,
        placement: Placement,
        records: Records,
    ) -> None:
        """Start a replica where it was placed: address, record, process, record."""
        address = await self._fleet.reserve(action.replica.id)
        slots, reason = _capped(action, supplied.settings.slots, records)
        replica = msgspec.structs.replace(
            action.replica,
            host=address.host,
            port=address.port,
            secret=secrets.token_urlsafe(32),
            slots=slots,
            started_at=self._clock.unix_s(),
            placement=placement,
        )
        replica = await self._put(records, replica, ReplicaState.STARTING, reason)
        data = _supply_of(supplied) | ({"takes_over": replica.takes_over} if replica.takes_over else {})
        await self._tell(endpoint.id, "replica_started", reason, replica.id, data)
        spec = LaunchSpec(
            replica_id=replica.id,
            model_name=endpoint.name,
            artifact=supplied.artifact,
            host=replica.host,
            port=replica.port,
            secret=replica.secret,
            slots=slots,
            context_length=supplied.settings.context_length,
            threads=self._threads_at(placement),
            options=supplied.version.options,
            work_dir=Path(address.work_dir),
            accelerators=placement.parts[0].accelerators if placement.parts else (),
            accelerator_kind=self._kind_at(placement),
            memory_bytes=placement.parts[0].memory_bytes if placement.parts else 0,
            kv_cache_bytes=supplied.settings.kv_tokens * supplied.settings.kv_bytes_per_token,
        )
        command = supplied.engine.command(spec)
        order = StartOrder(replica.id, endpoint.id, replica.host, replica.port, replica.secret, command, placement)
        try:
            async with asyncio.timeout(FLEET_TIMEOUT_S):
                await self._fleet.start(order)
        except (FleetError, OSError) as error:  # a TimeoutError is an OSError
            reason = str(error) or "the fleet did not answer in time"
            await self._fail(endpoint.id, replica.id, reason, records)
            return
        # Why it moves is asked for as long as it does.
        await self._put(records, replica, ReplicaState.LOADING, reason if replica.takes_over else "")
        if supplied.version.status is VersionStatus.REGISTERED:
            await self._set_status(supplied.version, VersionStatus.DEPLOYING)

    def _threads_at(self, placement: Placement) -> int:
        """Return the threads of an engine there: its share of this machine's cores beside a GPU, all on a CPU."""
        seen = self._nodes().get(placement.node_id)
        accelerators = seen.node.accelerators if seen else ()
        return threads_for(
            cores=len(os.sched_getaffinity(0)),
            most=self._threads,
            kind=self._kind_at(placement),
            count=len(set(placement.parts[0].accelerators)) if placement.parts else 0,
            accelerators=sum(one.kind != CPU for one in accelerators),
        )

    def _kind_at(self, placement: Placement) -> str:
        """Return the kind of accelerator that a replica was given there; where nothing is known it is a CPU."""
        seen = self._nodes().get(placement.node_id)
        mine = set(placement.parts[0].accelerators) if placement.parts else set()
        return next((one.kind for one in (seen.node.accelerators if seen else ()) if one.index in mine), CPU)

    async def carry_out(self, action: act.Action, endpoint_id: str, records: Records) -> bool:  # noqa: C901 - one line a case
        """Do ``action`` or begin it; say whether anything changed. Starting has a method of its own."""
        match action:
            case act.Wait() | act.StartReplica():
                return False
            case act.MarkLoading(replica_id=id):
                await self._put(records, records[id], ReplicaState.LOADING, action.reason)
            case act.MarkReady(replica_id=id):
                await self._ready(endpoint_id, records[id], action.reason, records)
            case act.MarkFailed(replica_id=id):
                await self._fail(endpoint_id, id, action.reason, records, last_lines=action.last_lines)
            case act.MarkEnded(replica_id=id):
                await self._put(records, records[id], ReplicaState.STOPPED, action.reason)
                await self._tell(endpoint_id, "replica_ended", action.reason, id)
                await self._forget_process(id)
            case act.DrainReplica(replica_id=id):
                await self._put(records, records[id], ReplicaState.DRAINING, action.reason)
                kind = "evicted" if action.is_eviction else "moved" if action.is_move else "replica_draining"
                await self._tell(endpoint_id, kind, action.reason, id)
            case act.StopReplica(replica_id=id):
                return await self._end(endpoint_id, id, action.reason, records, kind="replica_stopped")
            case act.KillReplica(replica_id=id):
                return await self._end(endpoint_id, id, action.reason, records, kind="replica_killed")
            case act.ForgetProcess(replica_id=id):
                return await self._forget_process(id)
            case act.ForgetReplica(replica_id=id):
                await self._store.remove_replica(id)
                del records[id]
            case act.ForgetEndpoint():
                _log.info("%s is gone: %s", endpoint_id, action.reason)
                await self._store.remove_endpoint(endpoint_id)
                records.clear()
        return True

    async def adopt(self, replica: Replica, reason: str, records: Records) -> None:
        """Make a running replica of a warm pool that of the endpoint in its record; one write moves it."""
        await self._put(records, replica, ReplicaState.READY, reason)
        await self._tell(replica.endpoint_id, "replica_taken", reason, replica.id)

    async def turn(self, replica: Replica, state: ReplicaState, reason: str, records: Records) -> None:
        """Record where a replica is between awake and asleep. It is no event: naps would soon be all that is kept."""
        _log.info("%s: %s: %s", replica.id, state, reason)
        await self._put(records, replica, state, reason)

    async def activate(self, version: ModelVersion) -> None:
        """Note that a version has served: the source's status ``active``."""
        if version.status is not VersionStatus.ACTIVE:
            await self._set_status(version, VersionStatus.ACTIVE)

    async def _ready(self, endpoint_id: str, replica: Replica, reason: str, records: Records) -> None:
        is_first_time = replica.ready_at is None
        now_s = self._clock.unix_s()
        if is_first_time:
            replica = msgspec.structs.replace(replica, ready_at=now_s)
        await self._put(records, replica, ReplicaState.READY, reason)
        load_s = max(now_s - replica.started_at, 0.0)
        data: EventData = {"load_s": round(load_s, 3)} if is_first_time else {}
        await self._tell(endpoint_id, "replica_ready", reason, replica.id, data)
        # What began before this controller did may have been ready for long before anybody looked.
        if is_first_time and replica.started_at >= self._begun_s:
            await self._loads.add(replica.version_id, load_s)

    async def _fail(
        self, endpoint_id: str, replica_id: str, reason: str, records: Records, *, last_lines: Sequence[str] = ()
    ) -> None:
        await self._put(records, records[replica_id], ReplicaState.FAILED, reason)
        data: EventData = {"last_lines": "\n".join(last_lines)} if last_lines else {}
        await self._tell(endpoint_id, "replica_failed", reason, replica_id, data)
        await self._forget_process(replica_id)

    async def _end(self, endpoint_id: str, replica_id: str, reason: str, records: Records, *, kind: str) -> bool:
        """Record the end, then bring it about beside the loops. A process without a record is just ended."""
        is_kill = kind == "replica_killed"
        state = ReplicaState.FAILED if is_kill else ReplicaState.STOPPED
        is_news = (record := records.get(replica_id)) is not None and record.state is not state
        if record is not None and is_news:
            await self._put(records, record, state, reason)
            await self._tell(endpoint_id, kind, reason, replica_id)

        async def end() -> None:
            await self._fleet.stop(replica_id, grace_s=0.0 if is_kill else self._grace_s)
            await self._fleet.forget(replica_id)

        self._tasks.spawn(replica_id, end)
        return is_news

    async def _forget_process(self, replica_id: str) -> bool:
        """Drop the fleet's records; a later pass tries again where that fails, so that it holds up nothing else."""
        try:
            async with asyncio.timeout(FLEET_TIMEOUT_S):
                await self._fleet.forget(replica_id)
        except (FleetError, OSError) as error:
            _log.warning("%s: its process records cannot be dropped: %s", replica_id, error)
            return False
        return True

    async def _put(self, records: Records, replica: Replica, state: ReplicaState, reason: str) -> Replica:
        replica = msgspec.structs.replace(replica, state=state, state_since=self._clock.unix_s(), reason=reason)
        await self._store.put_replica(replica)
        records[replica.id] = replica
        return replica

    async def _set_status(self, version: ModelVersion, status: VersionStatus) -> None:
        await self._store.put_version(msgspec.structs.replace(version, status=status))

    async def _tell(
        self, endpoint_id: str, kind: str, reason: str, replica_id: str, data: EventData | None = None
    ) -> None:
        _log.info("%s: %s: %s", replica_id, kind, reason)
        await self._store.add_event(Event(self._clock.unix_s(), endpoint_id, kind, reason, replica_id, data or {}))


def _capped(action: act.StartReplica, slots: int, records: Records) -> tuple[int, str]:
    """Return the slots that a replica may have after those of its version that ran out of memory, and why it starts."""
    ooms = sum(
        one.state is ReplicaState.FAILED
        and one.version_id == action.replica.version_id
        and one.reason.endswith(OUT_OF_MEMORY)
        and not is_mere_try(one)  # as long as one serves with these slots it is the other place that is short
        for one in records.values()
    )
    if (capped := slots_after(slots, ooms)) == slots:
        return slots, action.reason
    return capped, f"{action.reason}; with {capped} of {slots} slots, for {ooms} ran out of memory"


def _supply_of(supplied: Supplied) -> EventData:
    """Return what a start says of its weights: whether they had to be fetched, and how long that took."""
    if supplied.artifact is None:
        return {}
    size = supplied.version.artifact.size_bytes
    took = supplied.fetched_s
    return {"weights_bytes": size, "fetch_s": None if took is None else round(took, 3)}
