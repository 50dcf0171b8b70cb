"""Simulated replicas, thousands on one machine: all in one process beside the controller.

Each has a socket, a secret and a folder of its own, as a local one has; what
they share is the process (``engines/simulated/host.py``), which this fleet
starts and finds again. Who runs is asked of that process; what was ordered
stands in the same records as a local replica's, so that the end of the host is
the end of all of them, with a reason.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from modelyard.clock import Clock
from modelyard.engines.simulated.hosting import (
    ENGINE_MODULE,
    HOST_MODULE,
    HostAnswer,
    HostCall,
    HostIdentity,
    identity_of,
    read_identity,
    socket_of,
)
from modelyard.fleet import Address, Fence, FleetError, NodeSeen, Observed, StartOrder, processes
from modelyard.fleet.endings import STOPPED, exit_code, reason_of
from modelyard.fleet.logs import log_lines
from modelyard.fleet.machine import Machine
from modelyard.fleet.ports import HOST, free_port, is_free
from modelyard.fleet.records import ProcessRecord, Records

CALL_TIMEOUT_S = 5.0
HOST_START_S = 20.0
_POLL_S = 0.02
_DYING_S = 1.0
_ANSWER_BYTES_MAX = 64 * 1024 * 1024


class SimulatedFleet:
    """The ``Fleet`` contract. Records are kept in memory too, in step with their folders: thousands of files are slow.

    Everything happens in threads, under one lock; no call to the host lasts long. What changes something takes its turn
    before it takes a thread: with hundreds of starts in line, a look waits for one of them and not for all.
    """

    def __init__(self, root: Path, clock: Clock, machine: Machine | None = None, fence: Fence | None = None) -> None:
        self._records = Records(root)
        self._machine = machine or Machine()
        self._fence = fence or Fence()
        self._clock = clock
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()
        self._hosting = threading.Lock()
        """Held while the host is looked for or started, which takes longer than a look may wait."""
        self._known: dict[str, ProcessRecord] = {}
        self._ports: dict[str, int] = {}
        """By replica, also of those that were not started yet."""
        self._endings: dict[int, str] = {}
        """How hosts ended, by pid: an exit code can be had once."""

    def __repr__(self) -> str:
        return f"<SimulatedFleet of {len(self._known)} replicas>"

    async def reserve(self, replica_id: str) -> Address:
        """Choose a free port, the same again for the same replica while nobody else took it."""
        async with self._turn:
            return await asyncio.to_thread(self._reserve, replica_id)

    async def start(self, order: StartOrder) -> None:
        """Start the replica, and its host if none runs; do nothing when it runs.

        Raises:
            FleetError: another engine than the simulated one, or no host can be started.
        """
        async with self._turn:
            await asyncio.to_thread(self._start, order)

    async def stop(self, replica_id: str, *, grace_s: float) -> None:
        """Ask the replica to end, end it at once after ``grace_s``; returns when it is gone."""
        await asyncio.to_thread(self._records.admit, self._fence.epoch)
        deadline_s = self._clock.monotonic_s() + grace_s
        while (await asyncio.to_thread(self._seen_now, replica_id)) == "":
            is_due = self._clock.monotonic_s() >= deadline_s
            call = HostCall(op="kill" if is_due else "stop", replica_id=replica_id)
            await asyncio.to_thread(ask, self._records.root, call)

    async def forget(self, replica_id: str) -> None:
        """Drop the records of a replica that is gone, and keep its log.

        Raises:
            FleetError: it still runs.
        """
        async with self._turn:
            await asyncio.to_thread(self._forget, replica_id)

    async def observe(self) -> list[Observed]:
        """Return all replicas; takes over what an earlier controller started."""
        return await asyncio.to_thread(self._observe)

    async def nodes(self) -> list[NodeSeen]:
        """Return this machine's node and those that are declared beside it."""
        return await self._machine.nodes()

    def log_lines(self, replica_id: str, *, follow: bool) -> AsyncIterator[str]:
        """Yield the lines of the replica's log."""
        return log_lines(self._records, replica_id, follow=follow)

    # --- in threads ------------------------------------------------------------------

    def _reserve(self, replica_id: str) -> Address:
        with self._lock:
            self._records.admit(self._fence.epoch)
            folder = self._records.make_folder(replica_id)
            self._load(replica_id)
            port = self._ports.get(replica_id, 0)
            record = self._known.get(replica_id)
            runs = record is not None and not record.exit_reason
            if not port or not (runs or is_free(port)):
                port = free_port(set(self._ports.values()))
                self._records.write_port(replica_id, port)
                self._ports[replica_id] = port
            return Address(host=HOST, port=port, work_dir=str(folder))

    def _start(self, order: StartOrder) -> None:
        if ENGINE_MODULE not in order.command.argv:
            raise FleetError("A simulated fleet runs the engine 'simulated' only: deploy with that framework.")
        with self._hosting:
            self._records.admit(self._fence.epoch)
            host = self._ensure_host()
        with self._lock:
            self._records.admit(self._fence.epoch)
            self._settle(only=order.replica_id)
            earlier = self._known.get(order.replica_id)
            if earlier is not None and not earlier.exit_reason:
                return
            self._records.make_folder(order.replica_id)
            record = ProcessRecord.of(
                order,
                started_at=self._clock.unix_s(),
                boot_id=host.boot_id,
                pid=host.pid,
                start_time=host.start_time,
            )
            self._write(record)
            answer = ask(
                self._records.root,
                HostCall(
                    op="start",
                    replica_id=order.replica_id,
                    argv=order.command.argv,
                    secret=order.secret,
                    log=str(self._records.log(order.replica_id)),
                ),
            )
            if answer is None or answer.error:
                reason = f"cannot be started: {answer.error if answer else 'its host is gone'}"
                self._write(msgspec.structs.replace(record, exit_reason=reason))
                raise FleetError(f"The simulated replica {reason}.")

    def _seen_now(self, replica_id: str) -> str | None:
        """Return the exit reason of a replica, empty while it runs, None for one that is not there."""
        with self._lock:
            self._settle(only=replica_id)
            record = self._known.get(replica_id)
            return None if record is None else record.exit_reason

    def _forget(self, replica_id: str) -> None:
        self._records.folder(replica_id)  # refuses what is no id
        with self._lock:
            self._records.admit(self._fence.epoch)
            self._settle(only=replica_id)
            record = self._known.pop(replica_id, None)
            if record is not None and not record.exit_reason:
                self._known[replica_id] = record
                raise FleetError(f"Replica {replica_id} still runs: stop it first.")
            ask(self._records.root, HostCall(op="forget", replica_id=replica_id))
            self._records.remove(replica_id)
            self._ports.pop(replica_id, None)

    def _observe(self) -> list[Observed]:
        with self._lock:
            self._settle()
            return [record.observed() for record in self._known.values()]

    # --- under the lock ----------------------------------------------------------------

    def _load(self, only: str = "") -> None:
        """Bring the records in memory (or one) in step with the folders."""
        if only in self._known and self._records.folder(only).exists():
            return
        ids = self._records.replica_ids()
        for replica_id in self._ports.keys() - set(ids):
            del self._ports[replica_id]
            self._known.pop(replica_id, None)
        for replica_id in ids:
            if replica_id not in self._ports and (port := self._records.read_port(replica_id)):
                self._ports[replica_id] = port
                if (record := self._records.read(replica_id)) is not None:
                    self._known[replica_id] = record

    def _settle(self, *, only: str = "") -> None:
        """Bring all records (or one) up to what is true now: running, or ended with a reason."""
        self._load(only)
        answer = ask(self._records.root, HostCall(op="list", replica_id=only))
        for replica_id in [only] if only else list(self._known):
            record = self._known.get(replica_id)
            if record is None or record.exit_reason:
                continue
            if answer is not None and record.pid == answer.pid:
                reason = answer.replicas.get(replica_id, "the controller ended while starting it")
            else:
                reason = self._reason_without_host(record)
            if reason:
                self._write(msgspec.structs.replace(record, exit_reason=reason))

    def _reason_without_host(self, record: ProcessRecord) -> str:
        """Return how the host of ``record`` ended, which is not the one that answers now, if any does.

        Raises:
            FleetError: it runs and does not answer.
        """
        if record.boot_id == processes.boot_id() and processes.is_alive(record.pid, record.start_time):
            identity = read_identity(self._records.root)
            if identity is None or identity.pid != record.pid:
                # A replica of ``fleet.kind = "local"``: this fleet cannot own it, and nobody else does.
                processes.signal_group(record.pid, signal.SIGKILL)
                return "ended: the fleet is simulated now"
            # A process that is being killed closes its sockets first.
            if not processes.wait_for(lambda: not processes.is_alive(record.pid, record.start_time), _DYING_S):
                raise FleetError(f"The host of the simulated replicas (pid {record.pid}) does not answer.")
        stored = self._records.read(record.replica_id)
        if stored is not None and stored.exit_reason:
            return stored.exit_reason  # of a host that was ended with all its replicas (``stop_all``)
        if record.pid not in self._endings:
            self._endings[record.pid] = reason_of(exit_code(record.pid), is_stopping=False)
        return f"its host ended: {self._endings[record.pid]}"

    def _write(self, record: ProcessRecord) -> None:
        self._records.write(record)
        self._known[record.replica_id] = record

    def _ensure_host(self) -> HostIdentity:
        root = self._records.root
        answer = ask(root, HostCall(op="list", replica_id="-"))
        if answer is None:
            _spawn(root)
            deadline_s = self._clock.monotonic_s() + HOST_START_S
            while (answer := ask(root, HostCall(op="list", replica_id="-"))) is None:
                if self._clock.monotonic_s() >= deadline_s:
                    raise FleetError(f"The host of simulated replicas does not start; see {root / '.host.log'}.")
                time.sleep(_POLL_S)
        identity = HostIdentity(answer.pid, processes.start_time(answer.pid), processes.boot_id())
        if identity != read_identity(root):
            file = identity_of(root)
            draft = file.with_name(f"{file.name}.new")
            draft.write_bytes(msgspec.json.encode(identity))
            draft.replace(file)
        return identity


def ask(root: Path, call: HostCall) -> HostAnswer | None:
    """Ask the host; None when there is none.

    Raises:
        FleetError: it does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(CALL_TIMEOUT_S)
        try:
            peer.connect(str(socket_of(root)))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise FleetError(f"The host of simulated replicas cannot be reached: {error}.") from error
        try:
            peer.sendall(msgspec.json.encode(call) + b"\n")
            with peer.makefile("rb") as answer:
                return msgspec.json.decode(answer.readline(_ANSWER_BYTES_MAX), type=HostAnswer)
        except (ConnectionError, msgspec.DecodeError):
            return None  # it ended under our hands; its process tells
        except OSError as error:
            raise FleetError("The host of simulated replicas does not answer.") from error


def _spawn(root: Path) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(root), "LANG": "C.UTF-8"}
    log = os.open(root / ".host.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", HOST_MODULE, str(root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=root,
            env=environment,
            start_new_session=True,
            umask=0o077,
        )
    finally:
        os.close(log)
    process.returncode = 0  # it outlives us: nothing for Popen to reap


def stop_all(root: Path, grace_s: float) -> None:
    """End the host under ``root``, and so every replica; for the supervisor, when no controller runs any more."""
    identity = read_identity(root)
    if identity is None or identity.boot_id != processes.boot_id():
        return
    if not processes.is_alive(identity.pid, identity.start_time):
        return
    records = Records(root)
    running = [one for one in records.all() if not one.exit_reason and one.pid == identity.pid]
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, CALL_TIMEOUT_S)):
        processes.signal_group(identity.pid, number)
        if processes.wait_for(lambda: not processes.is_alive(identity.pid, identity.start_time), limit_s):
            break
    for record in running:
        records.write(msgspec.structs.replace(record, is_stopping=True, exit_reason=STOPPED))
    with contextlib.suppress(FileNotFoundError):
        socket_of(root).unlink()
