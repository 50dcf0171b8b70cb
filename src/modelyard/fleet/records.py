"""The local fleet's records: one folder a replica, with its address, its process and its log.

``process.json`` is written with pid 0 before the process is started and again
after it: a controller that dies in between leaves a record by which the next
one finds the process (it carries ``REPLICA_ID``). All files are private; the
record holds the replica's secret.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from modelyard.fleet import FleetError, Observed, StartOrder

REPLICA_ID_VARIABLE = "REPLICA_ID"
"""In the environment of every replica's process; all that it knows of the platform."""

LOGS_KEPT = 50
LOG_BYTES_MAX = 32 * 1024 * 1024

_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


class ProcessRecord(msgspec.Struct, frozen=True):
    """``process.json``: what was started, and how it ended."""

    replica_id: str
    endpoint_id: str
    host: str
    port: int
    secret: str
    argv: tuple[str, ...]
    started_at: float
    boot_id: str
    pid: int = 0
    """0: about to be started."""
    start_time: int = 0
    """In clock ticks since boot, so that a reused pid is not taken for it."""
    is_stopping: bool = False
    """We asked it to end, so its end is no crash."""
    exit_reason: str = ""
    """Empty while it runs."""
    is_out_of_memory: bool = False
    last_lines: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        order: StartOrder,
        *,
        started_at: float,
        boot_id: str,
        pid: int = 0,
        start_time: int = 0,
    ) -> "ProcessRecord":
        """Return the record of what ``order`` starts."""
        return cls(
            replica_id=order.replica_id,
            endpoint_id=order.endpoint_id,
            host=order.host,
            port=order.port,
            secret=order.secret,
            argv=order.command.argv,
            started_at=started_at,
            boot_id=boot_id,
            pid=pid,
            start_time=start_time,
        )

    def observed(self) -> Observed:
        """Return what a fleet tells of it."""
        return Observed(
            replica_id=self.replica_id,
            endpoint_id=self.endpoint_id,
            host=self.host,
            port=self.port,
            secret=self.secret,
            is_running=not self.exit_reason,
            started_at=self.started_at,
            exit_reason=self.exit_reason,
            pid=self.pid,
            is_out_of_memory=self.is_out_of_memory,
            last_lines=self.last_lines,
        )


class Records:
    """Reads and writes the records under one root; every call is a few small file operations."""

    __slots__ = ("root",)

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, replica_id: str) -> Path:
        """Return the replica's folder.

        Raises:
            ValueError: an id that is no plain name; it would lead out of the root.
        """
        if not _ID_PATTERN.fullmatch(replica_id):
            raise ValueError(f"'{replica_id[:80]}' is no replica id")
        return self.root / replica_id

    def log(self, replica_id: str) -> Path:
        """Return the file of the replica's output."""
        return self.folder(replica_id) / "engine.log"

    def kept_log(self, replica_id: str) -> Path:
        """Return where the output is kept after the replica is forgotten."""
        return self.root / ".logs" / f"{self.folder(replica_id).name}.log"

    def make_folder(self, replica_id: str) -> Path:
        """Make the replica's folder, private to this user."""
        folder = self.folder(replica_id)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def read(self, replica_id: str) -> ProcessRecord | None:
        """Return the record, or None when the replica was never started (or forgotten)."""
        try:
            return msgspec.json.decode((self.folder(replica_id) / "process.json").read_bytes(), type=ProcessRecord)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Writes are atomic, so this is a damaged disk or a foreign hand: treat it as never started.
            return None

    def write(self, record: ProcessRecord) -> None:
        """Replace the record in one step."""
        self._replace(self.folder(record.replica_id) / "process.json", msgspec.json.encode(record))

    def all(self) -> Iterator[ProcessRecord]:
        """Yield every record."""
        for replica_id in self.replica_ids():
            record = self.read(replica_id)
            if record is not None:
                yield record

    def replica_ids(self) -> list[str]:
        """Return the replicas that have a folder, in order."""
        try:
            names = os.listdir(self.root)  # noqa: PTH208 - names only
        except FileNotFoundError:
            return []
        return sorted(name for name in names if _ID_PATTERN.fullmatch(name))

    def read_port(self, replica_id: str) -> int:
        """Return the port reserved for the replica, or 0."""
        try:
            return int((self.folder(replica_id) / "port").read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return 0

    def write_port(self, replica_id: str, port: int) -> None:
        """Reserve the port."""
        self._replace(self.folder(replica_id) / "port", str(port).encode())

    def admit(self, epoch: int) -> None:
        """Note the epoch of the controller that commands.

        Raises:
            FleetError: one of a higher epoch has commanded already; this one was replaced and does not know it.
        """
        file = self.root / ".epoch"
        try:
            highest = int(file.read_text())
        except (FileNotFoundError, ValueError):
            highest = 0
        if epoch < highest:
            raise FleetError(f"another controller (epoch {highest}) commands this fleet; this one has epoch {epoch}")
        if epoch > highest:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._replace(file, str(epoch).encode())

    def remove(self, replica_id: str) -> None:
        """Delete the replica's folder and keep its log."""
        folder = self.folder(replica_id)
        kept = self.kept_log(replica_id)
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.log(replica_id).replace(kept)
        shutil.rmtree(folder, ignore_errors=True)
        newest_first = sorted(kept.parent.glob("*.log"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in newest_first[LOGS_KEPT:]:
            file.unlink(missing_ok=True)

    def bound_log(self, replica_id: str) -> None:
        """Start the log again when it is too long; the part before stays in ``engine.log.1``.

        The engine writes in append mode and never learns; what it writes between copy and truncation is lost.
        """
        log = self.log(replica_id)
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > LOG_BYTES_MAX:
                shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)

    @staticmethod
    def _replace(file: Path, content: bytes) -> None:
        draft = file.with_name(f"{file.name}.new")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, content)
        finally:
            os.close(handle)
        draft.replace(file)
