"""The usage journal: a gateway's durable record of what it is about to bill.

One append-only file a segment, one ``write()`` a turn of the event loop, before
anything of it is acknowledged, so that a process killed at any instant loses
nothing it acknowledged; a group ``fdatasync`` at
most ``sync_s`` later bounds what a power loss can take. A record is
``[u32 length][u32 crc32][msgpack]``. Every gateway worker owns one folder, and
starts a new segment with each start. Open intents are written again at the
head of each new segment, so that a segment can be deleted once delivered.

What the database, Kafka or Stripe know are projections of this file
(``reference/faults.md`` 1.4).
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from modelyard.clock import Clock
from modelyard.domain.usage import Intent, JournalRecord, Mark, Settle, UsageStatus

SEGMENT_BYTES = 64 * 1024 * 1024
RECORD_BYTES_MAX = 64 * 1024
READ_BYTES = 1024 * 1024
"""Bytes read at a time at a start: what is open fits into memory, and all that was kept for Kafka does not."""
SEGMENTS_BACK = 4
"""Segments with records that a start reads, the newest ones. Each begins with all that was open then, so the last would
do; one that is killed while it writes that costs one more."""
RETRY_S = 0.5
LOCK_PAUSE_S = 0.05
LOCK_PATIENCE_S = 2.0
"""Time for another worker to have done with a folder that it found abandoned (``abandoned.py``)."""

Position = tuple[str, int]
"""A place in a worker's journal: the segment's name and an offset into it. Later places compare greater."""

_HEAD = struct.Struct("<II")
_FAILED_AFTER = "a request failed after it was recorded"
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


def read_records(path: Path, offset: int, bytes_max: int = -1) -> tuple[list[JournalRecord], int]:
    """Return the whole records of a segment from ``offset`` on, and the offset behind the last.

    An unfinished record at the end is left for the next call; ``bytes_max`` (at least twice the longest record) makes
    that the end of a piece. What is damaged
    is skipped and logged: one flipped bit, be it in a length, must not cost the
    rest of the file.
    """
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(bytes_max)
    records: list[JournalRecord] = []
    at = 0
    while at < len(data):
        end = _end_of(data, at)
        if end is None:
            following = _next_whole(data, at + 1)
            if following is None:
                break
            _log.error("journal %s: skipped %d damaged bytes at byte %d", path, following - at, offset + at)
            at = following
            continue
        try:
            records.append(_decode(data[at + _HEAD.size : end]))
        except msgspec.MsgspecError as error:
            _log.error("journal %s: skipped an unknown record at byte %d: %s", path, offset + at, error)
        at = end
    return records, offset + at


def _end_of(data: bytes, at: int) -> int | None:
    """Return where the record at ``at`` ends, or None when there is no whole one."""
    if at + _HEAD.size > len(data):
        return None
    length, checksum = _HEAD.unpack_from(data, at)
    end: int = at + _HEAD.size + length
    if not 0 < length <= RECORD_BYTES_MAX or end > len(data) or zlib.crc32(data[at + _HEAD.size : end]) != checksum:
        return None
    return end


def _next_whole(data: bytes, at: int) -> int | None:
    """Return where the next whole record begins, if that is no further than the longest record reaches."""
    furthest = min(len(data) - _HEAD.size, at + _HEAD.size + RECORD_BYTES_MAX)
    return next((place for place in range(at, furthest) if _end_of(data, place) is not None), None)


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
        at=max(now_s, intent.at) if intent else now_s,  # the clock may have been set back meanwhile
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

    Records of one turn of the event loop go out in one ``write()``, which
    ``soon`` (``loop.call_soon``) brings about at the turn's end. What must not
    happen before a record is written is given as ``then`` and happens right
    after: a dispatch after its intent, an answer after its settlement.

    Raises:
        JournalLockedError: another process writes into ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sync_s: float,
        clock: Clock,
        soon: Callable[[Callable[[], None]], object],
        segment_bytes: int = SEGMENT_BYTES,
        patience_s: float = LOCK_PATIENCE_S,
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._sync_s = sync_s
        self._clock = clock
        self._soon = soon
        self._segment_bytes = segment_bytes
        self._lock = _lock(folder, patience_s)
        self._frames: list[bytes] = []
        self._intents: list[tuple[Intent, Callable[[bool], None]]] = []
        self._settles: list[tuple[Settle, Callable[[], None]]] = []
        self._open: dict[str, Intent] = {}
        self._marks: dict[str, Mark] = {}
        self._latest_s = 0.0
        """The latest arrival that was recorded."""
        self._unwritten: list[Settle] = []
        self._is_dirty = False
        self._dirty = asyncio.Event()
        self.on_written: Callable[[], None] | None = None
        """Called after each write of a turn, while it is set: ``position`` is then where that turn's records end."""
        self._end_before: Position = ("", 0)
        left_open = open_work(self._recorded_before())
        self._segment = ""
        self._fd, self._size = self._new_segment(), 0
        now_s = clock.unix_s()
        for request_id, (intent, mark) in left_open.items():
            self._unwritten.append(interrupted(request_id, intent, mark, now_s=now_s))
        self._retry_unwritten()
        self.recovered = len(left_open)

    @property
    def is_writable(self) -> bool:
        """Say whether new work may begin: false while a settlement waits for disk space."""
        return not self._unwritten

    @property
    def source(self) -> str:
        """Return the name that its deliveries go by."""
        return self._folder.name

    @property
    def position(self) -> Position | None:
        """Return where all that was recorded ends, in this run or before; None while some of it is not written.

        A delivery that has come this far has delivered all of it. Nothing recorded yet is ``("", 0)``.
        """
        if self._frames or self._unwritten:
            return None
        return (self._segment, self._size) if self._size else self._end_before

    def begin(self, intent: Intent, then: Callable[[bool], None]) -> None:
        """Record a request, then dispatch it: ``then`` is told whether it was recorded; without that it must not be."""
        self._open[intent.request_id] = intent
        self._latest_s = max(self._latest_s, intent.at)
        self._intents.append((intent, then))
        self._add(intent)

    def mark(self, mark: Mark) -> None:
        """Record progress; a full disk only costs precision here, so it is not an error."""
        self._marks[mark.request_id] = mark
        self._add(mark)

    def settle(self, settle: Settle, then: Callable[[], None]) -> None:
        """Record the end of a request, then answer it; while the disk is full, it is kept in memory and tried again."""
        self._open.pop(settle.request_id, None)
        self._marks.pop(settle.request_id, None)
        self._settles.append((settle, then))
        self._add(settle)

    def flush(self) -> None:
        """Write what this turn recorded, and let what waited for it happen."""
        frames, intents, settles = self._frames, self._intents, self._settles
        self._frames, self._intents, self._settles = [], [], []
        if not frames:
            return
        is_written = self._try_write(frames)
        if not is_written:
            for intent, _ in intents:
                self._open.pop(intent.request_id, None)
            self._unwritten += [settle for settle, _ in settles]
            self._note_dirty()
        elif self.on_written is not None:
            self.on_written()
        for intent, dispatch in intents:
            try:
                dispatch(is_written)
            except Exception:  # noqa: BLE001 - boundary: one request must not keep the others of its turn from going on
                _log.exception(_FAILED_AFTER, extra={"request_id": intent.request_id})
        for settle, answer in settles:
            try:
                answer()
            except Exception:  # noqa: BLE001 - boundary: the same
                _log.exception(_FAILED_AFTER, extra={"request_id": settle.request_id})

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
        if self._frames:
            self.flush()
        self._retry_unwritten()
        try:
            os.fdatasync(self._fd)
        except OSError:
            _log.exception("the journal could not be synced at shutdown")
        os.close(self._fd)
        if not self._open and not self._unwritten:
            os.ftruncate(self._lock, 0)
        os.close(self._lock)

    def _add(self, record: JournalRecord) -> None:
        frames = self._frames
        frames.append(frame_of(record))
        if len(frames) == 1:
            self._soon(self.flush)

    def _try_write(self, frames: list[bytes]) -> bool:
        """Write a turn's records, unless older settlements still wait for disk space."""
        if self._unwritten:
            return False
        try:
            self._write(b"".join(frames))
        except JournalError as error:
            _log.error("the journal cannot be written: %s", error)
            return False
        return True

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise JournalError(error.strerror) from error
        if written != len(data):
            # Half a record is skipped by readers, but is better not there.
            try:
                os.ftruncate(self._fd, self._size)
            except OSError:
                self._size += written
            raise JournalError("disk full")
        self._size += written
        if not self._is_dirty:
            self._note_dirty()

    def _note_dirty(self) -> None:
        self._is_dirty = True
        self._dirty.set()

    def _retry_unwritten(self) -> None:
        if not self._unwritten:
            return
        try:
            self._write(b"".join(map(frame_of, self._unwritten)))
        except JournalError:
            self._note_dirty()
        else:
            self._unwritten.clear()

    async def _sync(self) -> None:
        try:
            await asyncio.to_thread(os.fdatasync, self._fd)
        except OSError:
            # After a failed sync the kernel may drop the dirty pages and report success next time, so this
            # file can no longer be trusted: go on in a new one.
            _log.exception("the journal could not be synced; starting a new segment")
            self._rotate()

    def _rotate(self) -> None:
        """Go on in a new segment that begins with all open work; stay with the old one if that cannot be written."""
        old_fd, old_size, old_segment = self._fd, self._size, self._segment
        end_before = self._end_before
        try:
            if old_size:
                self._end_before = (old_segment, old_size)
            self._fd, self._size = self._new_segment(), 0
            self._write(b"".join(self._open_frames()))
        except (OSError, JournalError):
            _log.exception("a new journal segment could not be started; staying with the old one")
            if self._fd != old_fd:
                os.close(self._fd)
                segments(self._folder)[-1].unlink()
            self._fd, self._size, self._segment = old_fd, old_size, old_segment
            self._end_before = end_before
        else:
            os.close(old_fd)

    def _open_frames(self) -> Iterator[bytes]:
        for request_id, intent in self._open.items():
            yield frame_of(intent)
            if mark := self._marks.get(request_id):
                yield frame_of(mark)

    def _new_segment(self) -> int:
        existing = segments(self._folder)
        # Numbers follow the clock, so that a folder that was lost or restored never repeats one that was delivered; and
        # all that arrived before, so that one which was ahead for a while leaves nothing that seems to be of later.
        follows = int(existing[-1].stem) + 1 if existing else 1
        number = max(follows, int(self._clock.unix_s()), int(self._latest_s) + 1 if self._latest_s else 1)
        name = f"{number:010d}.journal"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self._folder / name, flags, 0o600)
        self._segment = name
        return descriptor

    def _recorded_before(self) -> Iterator[JournalRecord]:
        """Yield the newest records of earlier runs, and note where their last whole one ends."""
        for path in [path for path in segments(self._folder) if _size_of(path)][-SEGMENTS_BACK:]:
            start, end = -1, 0
            while end != start:
                start = end
                try:
                    records, end = read_records(path, start, READ_BYTES)
                except FileNotFoundError:  # delivered, and deleted since it was listed
                    break
                for record in records:
                    if isinstance(record, Intent):
                        self._latest_s = max(self._latest_s, record.at)
                    yield record
            if end:
                self._end_before = (path.name, end)


def frame_of(record: JournalRecord) -> bytes:
    """Return a record as it stands in a segment."""
    body = _encode(record)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _size_of(path: Path) -> int:
    """Return a segment's size; one that was delivered may be deleted since it was listed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _lock(folder: Path, patience_s: float) -> int:
    """Lock a folder, and write into the lock's file that whoever has it has not ended well yet."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if patience_s <= 0:
                os.close(descriptor)
                raise JournalLockedError(f"another gateway worker writes into {folder}") from None
        else:
            break
        time.sleep(LOCK_PAUSE_S)  # a start: nothing waits for the loop yet
        patience_s -= LOCK_PAUSE_S
    with contextlib.suppress(OSError):  # a full disk must not keep a worker from its start; it only looks clean then
        os.write(descriptor, b"in use\n")
    return descriptor
