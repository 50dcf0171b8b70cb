"""Replicas as processes of this machine.

Each replica leads its own session and process group, so that an engine of
several processes is signalled as one, and survives the controller: what it is
and where it listens stands in files (``records.py``), and the next controller
takes it over. A process is known by pid *and* start time, never by pid alone.
Its environment is minimal: nothing of the platform is in it.
"""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from modelyard.clock import Clock
from modelyard.domain.fleet import OUT_OF_MEMORY
from modelyard.domain.nodes import Placement
from modelyard.fleet import Address, Fence, FleetError, NodeSeen, Observed, StartOrder, processes
from modelyard.fleet.accelerators import cuda_environment
from modelyard.fleet.declared import LOCAL
from modelyard.fleet.endings import STOPPED, exit_code, reason_of
from modelyard.fleet.logs import last_lines, log_lines
from modelyard.fleet.machine import Machine
from modelyard.fleet.memory_kills import KillWatch, kills_around
from modelyard.fleet.ports import HOST, free_port, is_free
from modelyard.fleet.records import REPLICA_ID_VARIABLE, ProcessRecord, Records

_POLL_S = 0.02
_KILLED_WITHIN_S = 10.0
"""How long a killed process may need to vanish (a big one unmaps its memory first)."""


class LocalFleet:
    """The ``Fleet`` contract on this machine. File work is done in threads, one replica change at a time."""

    def __init__(self, root: Path, clock: Clock, machine: Machine | None = None, fence: Fence | None = None) -> None:
        self._records = Records(root)
        self._machine = machine or Machine()
        self._clock = clock
        self._fence = fence or Fence()
        self._lock = threading.Lock()
        self._kills: dict[str, KillWatch] = {}
        """What the kernel had killed around each replica when it was last seen to run."""

    async def reserve(self, replica_id: str) -> Address:
        """Choose a free port, the same again for the same replica while nobody else took it."""
        return await asyncio.to_thread(self._reserve, replica_id)

    async def start(self, order: StartOrder) -> None:
        """Start the replica's process, or do nothing when it runs."""
        await asyncio.to_thread(self._start, order)

    async def stop(self, replica_id: str, *, grace_s: float) -> None:
        """Send SIGTERM to the replica's processes, after ``grace_s`` SIGKILL; return when they are gone."""
        record = await asyncio.to_thread(self._mark_stopping, replica_id)
        if record is None:
            return
        processes.signal_group(record.pid, signal.SIGTERM)
        if not await self._is_gone_within(record, grace_s):
            processes.signal_group(record.pid, signal.SIGKILL)
            await self._is_gone_within(record, _KILLED_WITHIN_S)
        await asyncio.to_thread(self._observe_one, replica_id)

    async def forget(self, replica_id: str) -> None:
        """Drop the records of a replica that is gone, and keep its log.

        Raises:
            FleetError: it still runs.
        """
        await asyncio.to_thread(self._forget, replica_id)

    async def observe(self) -> list[Observed]:
        """Return all replicas; takes over what an earlier controller started."""
        return await asyncio.to_thread(self._observe)

    async def nodes(self) -> list[NodeSeen]:
        """Return this machine and the declared nodes, whose replicas run here, too."""
        return await self._machine.nodes()

    def log_lines(self, replica_id: str, *, follow: bool) -> AsyncIterator[str]:
        """Yield the lines of the replica's log."""
        return log_lines(self._records, replica_id, follow=follow)

    # --- in threads, under the lock ------------------------------------------------

    def _reserve(self, replica_id: str) -> Address:
        with self._lock:
            self._records.admit(self._fence.epoch)
            folder = self._records.make_folder(replica_id)
            port = self._records.read_port(replica_id)
            record = self._records.read(replica_id)
            runs = record is not None and _is_running(record)
            if not port or not (runs or is_free(port)):
                taken = {self._records.read_port(other) for other in self._records.replica_ids() if other != replica_id}
                port = free_port(taken)
                self._records.write_port(replica_id, port)
            return Address(host=HOST, port=port, work_dir=str(folder))

    def _start(self, order: StartOrder) -> None:
        with self._lock:
            self._records.admit(self._fence.epoch)
            earlier = self._settled(order.replica_id)
            if earlier is not None and not earlier.exit_reason:
                return
            folder = self._records.make_folder(order.replica_id)
            record = ProcessRecord.of(order, started_at=self._clock.unix_s(), boot_id=processes.boot_id())
            self._records.write(record)
            # Its own group is this process's until somebody moves it; looked at before, it may have ended after.
            self._kills[order.replica_id] = KillWatch(kills_around(os.getpid()), self._clock.monotonic_s())
            try:
                pid = _spawn(order, folder, self._records.log(order.replica_id))
            except OSError as error:
                reason = f"cannot be started: {error.strerror}"
                self._records.write(msgspec.structs.replace(record, exit_reason=reason))
                raise FleetError(f"The engine process {reason} ({Path(order.command.argv[0]).name}).") from error
            self._records.write(msgspec.structs.replace(record, pid=pid, start_time=processes.start_time(pid)))

    def _mark_stopping(self, replica_id: str) -> ProcessRecord | None:
        """Return the record of a running replica after noting that its end is wanted; None when it is gone."""
        with self._lock:
            self._records.admit(self._fence.epoch)
            record = self._settled(replica_id)
            if record is None or record.exit_reason:
                return None
            record = msgspec.structs.replace(record, is_stopping=True)
            self._records.write(record)
            return record

    def _forget(self, replica_id: str) -> None:
        with self._lock:
            self._records.admit(self._fence.epoch)
            record = self._settled(replica_id)
            if record is not None and not record.exit_reason:
                raise FleetError(f"Replica {replica_id} still runs: stop it first.")
            self._records.remove(replica_id)
            self._kills.pop(replica_id, None)

    def _observe(self) -> list[Observed]:
        return [seen for replica_id in self._records.replica_ids() if (seen := self._observe_one(replica_id))]

    def _observe_one(self, replica_id: str) -> Observed | None:
        with self._lock:
            record = self._settled(replica_id)
            if record is None:
                return None
            self._records.bound_log(replica_id)
        return record.observed()

    def _settled(self, replica_id: str) -> ProcessRecord | None:
        """Return the record, brought up to what is true now: found, running, or ended with its reason."""
        record = self._records.read(replica_id)
        if record is None or record.exit_reason:
            return record
        if record.pid == 0:
            record = _find(record, self._records.folder(replica_id))
            self._records.write(record)
        if record.exit_reason:
            return record
        if _is_running(record):
            # Kept only if it still ran after the look: at its end it leaves its group.
            kills = kills_around(record.pid)
            if _is_running(record):
                now_s = self._clock.monotonic_s()
                self._kills.setdefault(replica_id, KillWatch(kills, now_s)).look(kills, now_s)
            return record
        _kill_rest(record)
        watch = self._kills.pop(replica_id, None)
        log = self._records.log(record.replica_id)
        record = _ended(record, exit_code(record.pid), log, was_short=watch is not None and watch.has_risen())
        self._records.write(record)
        return record

    async def _is_gone_within(self, record: ProcessRecord, limit_s: float) -> bool:
        deadline_s = self._clock.monotonic_s() + limit_s
        while _is_running(record):
            if self._clock.monotonic_s() >= deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True


def stop_all(root: Path, grace_s: float) -> None:
    """Stop every replica under ``root``; for the supervisor, when no controller runs any more."""
    records = Records(root)
    running: list[ProcessRecord] = []
    for record in records.all():
        found = (
            _find(record, records.folder(record.replica_id)) if record.pid == 0 and not record.exit_reason else record
        )
        if not found.exit_reason and _is_running(found):
            records.write(msgspec.structs.replace(found, is_stopping=True))
            processes.signal_group(found.pid, signal.SIGTERM)
            running.append(found)
    processes.wait_for(lambda: not any(_is_running(record) for record in running), grace_s)
    for record in running:
        _kill_rest(record)
    processes.wait_for(lambda: not any(_is_running(record) for record in running), _KILLED_WITHIN_S)
    for record in running:
        records.write(msgspec.structs.replace(record, is_stopping=True, exit_reason=STOPPED))


def _spawn(order: StartOrder, folder: Path, log: Path) -> int:
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        REPLICA_ID_VARIABLE: order.replica_id,
        **_accelerators_of(order.placement),
        **order.command.env,
    }
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            order.command.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment,
            start_new_session=True,
            umask=0o077,
        )
    finally:
        os.close(output)
    # We wait by pid and outlive no replica: tell Popen that it has nothing to reap or to complain of.
    process.returncode = 0
    return process.pid


def _accelerators_of(placement: Placement) -> dict[str, str]:
    """Return what shows an engine its own accelerators: none of this machine's where it is on a declared node."""
    if not placement.parts:
        return {}
    return cuda_environment(
        tuple(index for part in placement.parts if part.node_id == LOCAL for index in part.accelerators)
    )


def _find(record: ProcessRecord, folder: Path) -> ProcessRecord:
    """Return the record of a start that nobody saw the end of: with its process, or as failed."""
    pid = 0
    if record.boot_id == processes.boot_id():
        pid = processes.find_by_environment({REPLICA_ID_VARIABLE: record.replica_id, "HOME": str(folder)})
    if not pid:
        return msgspec.structs.replace(record, exit_reason="the controller ended while starting it")
    return msgspec.structs.replace(record, pid=pid, start_time=processes.start_time(pid))


def _is_running(record: ProcessRecord) -> bool:
    return record.boot_id == processes.boot_id() and processes.is_alive(record.pid, record.start_time)


def _kill_rest(record: ProcessRecord) -> None:
    """Kill what a replica's first process left of its group: it would hold port and memory.

    While any of them lives the kernel gives the first one's pid to nobody else; if a stranger has it, none lives.
    """
    if record.boot_id == processes.boot_id() and processes.is_free_or(record.pid, record.start_time):
        processes.signal_group(record.pid, signal.SIGKILL)


def _ended(record: ProcessRecord, code: int | None, log: Path, *, was_short: bool) -> ProcessRecord:
    """Return the record of a process that ended: how, why as far as the kernel says, and its last words.

    ``was_short``: the kernel killed for want of memory around it.
    """
    # A SIGKILL that nobody of ours sent; that of somebody else's child is not seen.
    is_out_of_memory = was_short and not record.is_stopping and code in (None, -signal.SIGKILL)
    reason = OUT_OF_MEMORY if is_out_of_memory else reason_of(code, is_stopping=record.is_stopping)
    return msgspec.structs.replace(
        record,
        exit_reason=reason,
        is_out_of_memory=is_out_of_memory,
        last_lines=() if record.is_stopping else last_lines(log),
    )
