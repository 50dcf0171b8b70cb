"""One file on its way from a source into a draft: in parts, hashed, resumed after any cut.

A part is noted in a small file beside the draft once its bytes are on the
disk, so that a killed controller goes on where it was. What was noted counts
only for the same content: the note carries the source's mark and size. Bytes
are hashed in order as they become whole, read back from the disk, so that
what is checked is what is kept.
"""

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from modelyard.control.artifacts.disk import Disk, as_error, is_full
from modelyard.control.artifacts.errors import ArtifactError, ChangedError
from modelyard.control.artifacts.sources import Source, SourceFile
from modelyard.control.artifacts.threads import in_thread

CHUNK_BYTES = 1024 * 1024
"""What is written or hashed in one go."""
FAILURES_MAX = 4
"""Tries of a part in a row that bring nothing; the supplies' own retries, minutes apart, come after that."""
CUTS_MAX = 32
"""Tries of a part that bring something and are cut off again."""
STREAMS_MAX = 3
"""Tries of a file that can only be had from its beginning."""
PAUSE_S = 0.2
SPARE_BYTES = 16 * 1024 * 1024
"""What a fetch leaves free of the disk."""

Got = Callable[[int], None]
"""Called with the bytes that are here."""


class _Note(msgspec.Struct, frozen=True):
    """What is on the disk of a draft: parts of ``part_bytes`` by number, of the content with this mark and size."""

    inode: int
    location: str
    mark: str
    digest: str
    size_bytes: int
    part_bytes: int
    parts: list[int]


@dataclass(slots=True)
class _Part:
    """A range under way; ``at`` is where it goes on."""

    at: int
    end: int


class Transfer:
    """One fetch of one file into ``draft``."""

    def __init__(
        self, source: Source, file: SourceFile, draft: Path, *, disk: Disk, part_bytes: int, bytes_max: int, got: Got
    ) -> None:
        self._source = source
        self._file = file
        self._draft = draft
        self._note_file = draft.with_name(f"{draft.name}.json")
        self._disk = disk
        self._part_bytes = part_bytes
        self._bytes_max = bytes_max
        self._got = got
        self._done: set[int] = set()
        self._here = 0
        self._prefix = 0
        """Bytes from the beginning that are whole."""
        self._grew = asyncio.Event()
        self._noting = threading.Lock()

    async def run(self) -> tuple[str, int]:
        """Return the digest and the size of the file, which is whole and on the disk.

        What came so far stays for the next try, unless the disk is full.

        Raises:
            ArtifactError: it cannot be had; ``ChangedError`` when its content is another now.
        """
        try:
            descriptor = os.open(self._draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise as_error(error, "the artifact") from error
        try:
            return await self._run(descriptor)
        except OSError as error:
            if is_full(error):
                self.discard()
            raise as_error(error, "the artifact") from error
        except ChangedError:
            self.discard()
            raise
        finally:
            os.close(descriptor)

    def discard(self) -> None:
        """Remove the draft and its note."""
        for file in (self._note_file, self._draft):  # a note without its draft would vouch for holes
            file.unlink(missing_ok=True)

    async def _run(self, descriptor: int) -> tuple[str, int]:
        size = self._file.size_bytes
        if size is not None and size > self._bytes_max:
            raise ArtifactError(f"it has {size} bytes, more than fetch.artifact_bytes_max allows ({self._bytes_max})")
        if size is None or not self._file.has_ranges:
            return await self._stream(descriptor)
        self._done = await in_thread(self._resumed, descriptor, size)
        self._here = sum(end - start for start, end in map(self._span, self._done))
        self._check_room(size - self._here)
        self._advance()
        self._got(self._here)
        missing = iter([number for number in range(self._count(size)) if number not in self._done])
        try:
            async with asyncio.TaskGroup() as group:
                hashing = group.create_task(self._hash(descriptor, size))
                for _ in range(self._source.parallel):
                    group.create_task(self._fetch_parts(descriptor, missing))
        except ExceptionGroup as failed:
            raise _first(failed) from failed
        return hashing.result(), size

    # --- in parts ------------------------------------------------------------------------

    async def _fetch_parts(self, descriptor: int, missing: Iterator[int]) -> None:
        for number in missing:
            start, end = self._span(number)
            await self._fetch_part(descriptor, start, end)
            await in_thread(self._disk.sync, descriptor)
            self._done.add(number)
            await in_thread(self._put_note, os.fstat(descriptor).st_ino, sorted(self._done))
            self._advance()

    async def _fetch_part(self, descriptor: int, start: int, end: int) -> None:
        part, failures, cuts = _Part(start, end), 0, 0
        while part.at < end:
            before = part.at
            try:
                await self._read_on(descriptor, part)
            except ArtifactError as error:
                failures, cuts = (failures + 1, cuts) if part.at == before else (0, cuts + 1)
                if not error.is_transient or failures >= FAILURES_MAX or cuts >= CUTS_MAX:
                    raise
                await asyncio.sleep(PAUSE_S * 2**failures)

    async def _read_on(self, descriptor: int, part: "_Part") -> None:
        async with self._source.read(self._file, part.at, part.end) as chunks:
            async for block in _blocks(chunks):
                if part.at + len(block) > part.end:
                    raise ArtifactError("its server sends more than was asked for")
                await in_thread(self._disk.write, descriptor, part.at, block)
                part.at += len(block)
                self._here += len(block)
                self._got(self._here)
        if part.at < part.end:
            raise ArtifactError(f"it ends at byte {part.at}, in the middle of a part", is_transient=True)

    # --- from the beginning ----------------------------------------------------------------

    async def _stream(self, descriptor: int) -> tuple[str, int]:
        for left in reversed(range(STREAMS_MAX)):
            try:
                return await self._stream_once(descriptor)
            except ArtifactError as error:
                if not error.is_transient or not left:
                    raise
                await asyncio.sleep(PAUSE_S)
        raise AssertionError("the last try raises")

    async def _stream_once(self, descriptor: int) -> tuple[str, int]:
        os.ftruncate(descriptor, 0)
        expected, at, hasher = self._file.size_bytes, 0, hashlib.sha256()
        self._check_room(expected or 0)
        async with self._source.read(self._file, 0, None) as chunks:
            async for block in _blocks(chunks):
                if at + len(block) > (self._bytes_max if expected is None else expected):
                    raise ArtifactError("its server sends more than it said, or than fetch.artifact_bytes_max allows")
                await in_thread(self._write_hashed, descriptor, at, block, hasher)
                at += len(block)
                self._got(at)
        if expected is not None and at != expected:
            raise ArtifactError(f"it ends after {at} of {expected} bytes", is_transient=True)
        await in_thread(self._disk.sync, descriptor)
        return f"sha256:{hasher.hexdigest()}", at

    def _write_hashed(self, descriptor: int, at: int, block: bytes, hasher: "hashlib._Hash") -> None:
        hasher.update(block)
        self._disk.write(descriptor, at, block)

    # --- the hash ------------------------------------------------------------------------

    async def _hash(self, descriptor: int, size: int) -> str:
        """Follow the bytes that are whole from the beginning."""
        hasher, hashed = hashlib.sha256(), 0
        while hashed < size:
            await self._grew.wait()
            self._grew.clear()
            while hashed < self._prefix:
                hashed += await in_thread(_hash_block, hasher, descriptor, hashed, self._prefix)
        return f"sha256:{hasher.hexdigest()}"

    def _advance(self) -> None:
        size = self._file.size_bytes or 0
        number = self._prefix // self._part_bytes
        while number in self._done:
            number += 1
        self._prefix = min(number * self._part_bytes, size)
        self._grew.set()

    # --- parts and their note ----------------------------------------------------------------

    def _count(self, size: int) -> int:
        return -(-size // self._part_bytes)

    def _span(self, number: int) -> tuple[int, int]:
        start = number * self._part_bytes
        return start, min(start + self._part_bytes, self._file.size_bytes or 0)

    def _resumed(self, descriptor: int, size: int) -> set[int]:
        """Return the parts that an earlier try left for this very content; empties the draft when there are none."""
        try:
            note = msgspec.json.decode(self._note_file.read_bytes(), type=_Note)
        except (OSError, msgspec.MsgspecError):
            note = None
        file = self._file
        is_same = (
            note is not None
            and (note.mark, note.digest, note.size_bytes) == (file.mark, file.digest, size)
            and (bool(file.digest) or (bool(file.mark) and note.location == file.location))
            and note.part_bytes == self._part_bytes
            and note.inode == os.fstat(descriptor).st_ino
        )
        if note is None or not is_same:
            self._note_file.unlink(missing_ok=True)
            os.ftruncate(descriptor, 0)
            return set()
        return {number for number in note.parts if 0 <= number < self._count(size)}

    def _put_note(self, inode: int, parts: list[int]) -> None:
        with self._noting:
            file = self._file
            note = _Note(inode, file.location, file.mark, file.digest, file.size_bytes or 0, self._part_bytes, parts)
            fresh = self._note_file.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode(note))
            fresh.replace(self._note_file)

    def _check_room(self, needed: int) -> None:
        free = self._disk.free_bytes(self._draft.parent)
        if needed + SPARE_BYTES > free:
            self.discard()
            raise ArtifactError(
                f"it needs {needed:,} bytes, and the disk of the data directory has {free:,} free. Free some, or bound "
                "what is kept with control.artifact_cache_bytes"
            )


async def _blocks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join chunks to blocks worth a thread; what came before a cut is given before the error."""
    block = bytearray()
    try:
        async for chunk in chunks:
            block += chunk
            if len(block) >= CHUNK_BYTES:
                yield bytes(block)
                block.clear()
    except ArtifactError:
        if block:
            yield bytes(block)
        raise
    if block:
        yield bytes(block)


def _hash_block(hasher: "hashlib._Hash", descriptor: int, at: int, end: int) -> int:
    block = os.pread(descriptor, min(CHUNK_BYTES * 4, end - at), at)
    if not block:
        raise ArtifactError("the draft became shorter while it was read back")
    hasher.update(block)
    return len(block)


def _first(failed: ExceptionGroup[Exception]) -> Exception:
    """Return the failure that tells most: one that is final before one that may go better."""
    leaves = [_first(error) if isinstance(error, ExceptionGroup) else error for error in failed.exceptions]
    final = [error for error in leaves if not (isinstance(error, ArtifactError) and error.is_transient)]
    return (final or leaves)[0]
