"""The usage journal: a gateway's durable record of what it is about to bill.

One append-only file a segment, one ``write()`` a record, so that a process
killed at any instant loses nothing it acknowledged; a group ``fdatasync`` at
most ``sync_s`` later bounds what a power loss can take. A record is
``[u32 length][u32 crc32][msgpack]``. Every gateway worker owns one folder, and
starts a new segment with each start. Open intents are written again at the
head of each new segment, so that a segment can be deleted once delivered.

What the database, Kafka or Stripe know are projections of this file
(``reference/faults.md`` 1.4).
"""

import asyncio
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from modelyard.clock import Clock
from modelyard.domain.usage import Intent, JournalRecord, Mark, Settle, UsageStatus

SEGMENT_BYTES = 64 * 1024 * 1024
RECORD_BYTES_MAX = 64 * 1024
RETRY_S = 0.5

_HEAD = struct.Struct("<II")
_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JournalRecord).decode


class JournalError(Exception):
    """The journal cannot be written: no new work may begin."""


class JournalLockedError(Exception):
    """Another process owns this journal folder."""


def segments(folder: Path) -> list[Path]:
    """Return the segments of one worker, oldest first; empty when there is no such folder."""
    return sorted(folder.glob("*.journal"))


def read_records(path: Path, offset: int) -> tuple[list[JournalRecord], int]:
    """Return the whole records of a segment from ``offset`` on, and the offset behind the last.

    An unfinished record at the end is left for the next call. A record whose
    checksum is wrong is skipped and logged: one flipped bit must not cost the
    rest of the file.
    """
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    records: list[JournalRecord] = []
    at = 0
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        if length == 0 or length > RECORD_BYTES_MAX:
            _log.error("journal %s is damaged at byte %d: the rest of the segment is unreadable", path, offset + at)
            break
        end = at + _HEAD.size + length
        if end > len(data):
            break
        payload = data[at + _HEAD.size : end]
        if zlib.crc32(payload) == checksum:
            records.append(_decode(payload))
        else:
            _log.error("journal %s: skipped a damaged record at byte %d", path, offset + at)
        at = end
    return records, offset + at


def open_work(records: Iterable[JournalRecord]) -> dict[str, tuple[Intent | None, Mark | None]]:
    """Return the requests that ``records`` began and never settled, with their last mark."""
    found: dict[str, tuple[Intent | None, Mark | None]] = {}
    for record in records:
        match record:
            case Intent():
                found[record.request_id] = (record, found.get(record.request_id, (None, None))[1])
            case Mark():
                found[record.request_id] = (found.get(record.request_id, (None, None))[0], record)
            case Settle():
                found.pop(record.request_id, None)
    return found


def interrupted(request_id: str, intent: Intent | None, mark: Mark | None, *, now_s: float) -> Settle:
    """Return the settlement of a request whose gateway died: its last mark, nothing without one."""
    return Settle(
        request_id=request_id,
        at=now_s,
        prompt_tokens=mark.prompt_tokens if mark else 0,
        cached_tokens=0,
        completion_tokens=mark.completion_tokens if mark else 0,
        status=UsageStatus.INTERRUPTED,
        http_status=0,
        error_code="gateway_lost",
        ttft_ms=None,
        latency_ms=max(0.0, (now_s - intent.at) * 1000) if intent else 0.0,
        replica_id="",
        attempts=1,
        is_estimated=True,
    )


class Journal:
    """The writing end, owned by one gateway worker.

    Raises:
        JournalLockedError: another process writes into ``folder``.
    """

    def __init__(self, folder: Path, *, sync_s: float, clock: Clock, segment_bytes: int = SEGMENT_BYTES) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._sync_s = sync_s
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._lock = _lock(folder)
        self._open: dict[str, Intent] = {}
        self._marks: dict[str, Mark] = {}
        self._unwritten: list[Settle] = []
        self._is_dirty = False
        self._dirty = asyncio.Event()
        left_open = self._left_open()
        self._fd = -1
        self._size = 0
        self._start_segment()
        now_s = clock.unix_s()
        for request_id, (intent, mark) in left_open.items():
            self.settle(interrupted(request_id, intent, mark, now_s=now_s))
        self.recovered = len(left_open)

    @property
    def is_writable(self) -> bool:
        """Say whether new work may begin: false while a settlement waits for disk space."""
        return not self._unwritten

    def begin(self, intent: Intent) -> None:
        """Record a request that is about to be dispatched.

        Raises:
            JournalError: it could not be recorded, so it must not be dispatched.
        """
        if self._unwritten:
            raise JournalError("settlements are waiting for disk space")
        self._write(intent)
        self._open[intent.request_id] = intent

    def mark(self, mark: Mark) -> None:
        """Record progress; a full disk only costs precision here, so it is not an error."""
        self._marks[mark.request_id] = mark
        try:
            self._write(mark)
        except JournalError:
            _log.warning("a progress mark was not written")

    def settle(self, settle: Settle) -> None:
        """Record the end of a request; kept in memory and tried again while the disk is full."""
        self._open.pop(settle.request_id, None)
        self._marks.pop(settle.request_id, None)
        try:
            self._write(settle)
        except JournalError:
            self._unwritten.append(settle)
            self._note_dirty()

    async def run(self) -> None:
        """Sync to disk within ``sync_s`` of a write, rotate full segments, until cancelled."""
        while True:
            await self._dirty.wait()
            await asyncio.sleep(self._sync_s if not self._unwritten else RETRY_S)
            self._dirty.clear()
            self._is_dirty = False
            self._retry_unwritten()
            if self._size > self._segment_bytes:
                self._rotate()
            await self._sync()

    def close(self) -> None:
        """Write out and sync what is left, then give the folder free."""
        self._retry_unwritten()
        try:
            os.fdatasync(self._fd)
        except OSError:
            _log.exception("the journal could not be synced at shutdown")
        os.close(self._fd)
        os.close(self._lock)

    def _write(self, record: JournalRecord) -> None:
        body = _encode(record)
        frame = _HEAD.pack(len(body), zlib.crc32(body)) + body
        try:
            written = os.write(self._fd, frame)
        except OSError as error:
            raise JournalError(error.strerror) from error
        if written != len(frame):
            # A torn record would hide all that follow it.
            os.ftruncate(self._fd, self._size)
            raise JournalError("disk full")
        self._size += written
        if not self._is_dirty:
            self._note_dirty()

    def _note_dirty(self) -> None:
        self._is_dirty = True
        self._dirty.set()

    def _retry_unwritten(self) -> None:
        while self._unwritten:
            try:
                self._write(self._unwritten[0])
            except JournalError:
                self._note_dirty()
                return
            del self._unwritten[0]

    async def _sync(self) -> None:
        try:
            await asyncio.to_thread(os.fdatasync, self._fd)
        except OSError:
            # After a failed sync the kernel may drop the dirty pages and report success next time, so this
            # file can no longer be trusted: go on in a new one.
            _log.exception("the journal could not be synced; starting a new segment")
            self._rotate()

    def _rotate(self) -> None:
        old = self._fd
        try:
            self._start_segment()
        except OSError:
            _log.exception("a new journal segment could not be started; staying with the old one")
            self._fd = old
            return
        os.close(old)
        for request_id, intent in self._open.items():
            self._write(intent)
            if mark := self._marks.get(request_id):
                self._write(mark)

    def _start_segment(self) -> None:
        existing = segments(self._folder)
        # Numbers follow the clock, so that a folder that was lost or restored never repeats one that was delivered.
        number = max(int(existing[-1].stem) + 1 if existing else 1, int(self._clock.unix_s()))
        path = self._folder / f"{number:010d}.journal"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._size = 0

    def _left_open(self) -> dict[str, tuple[Intent | None, Mark | None]]:
        records: list[JournalRecord] = []
        for path in segments(self._folder):
            records += read_records(path, 0)[0]
        return open_work(records)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise JournalLockedError(f"another gateway worker writes into {folder}") from None
    return descriptor
