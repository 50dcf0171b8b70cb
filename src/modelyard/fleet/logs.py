"""Reading a replica's log while it grows, through rotation and through the replica's end."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

from modelyard.fleet.records import Records

_BLOCK_BYTES = 256 * 1024
_LINE_BYTES_MAX = 64 * 1024
_POLL_S = 0.2
LAST_LINES = 5
"""Of a replica that ended: enough for an exception or a loader's complaint."""
_LAST_BYTES = 8 * 1024
_LAST_LINE_CHARACTERS = 300
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


async def log_lines(records: Records, replica_id: str, *, follow: bool) -> AsyncIterator[str]:
    """Yield the log's lines, oldest first; a line without an end yet is given when reading stops.

    ``follow`` goes on until closed, or until the replica is forgotten and all was given. A log that started again
    (``Records.bound_log``) is read from its start.
    """
    for file, is_last in _files(records, replica_id):
        async for line in _lines_of(file, records, replica_id, follow=follow and is_last):
            yield line


def last_lines(file: Path, *, most: int = LAST_LINES) -> tuple[str, ...]:
    """Return the last lines of a log that say something, each cut to a readable length. Blocks for one small read."""
    try:
        with file.open("rb") as reader:
            reader.seek(max(0, reader.seek(0, os.SEEK_END) - _LAST_BYTES))
            text = reader.read(_LAST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ()
    plain = (_CONTROL.sub("", _COLOUR.sub("", line)).strip() for line in text.splitlines())
    return tuple(line[:_LAST_LINE_CHARACTERS] for line in [line for line in plain if line][-most:])


def _files(records: Records, replica_id: str) -> list[tuple[Path, bool]]:
    log = records.log(replica_id)
    kept = records.kept_log(replica_id)
    if not log.exists() and kept.exists():
        return [(kept, True)]
    return [(log.with_suffix(".log.1"), False), (log, True)]


async def _lines_of(file: Path, records: Records, replica_id: str, *, follow: bool) -> AsyncIterator[str]:
    while (handle := _open(file)) is None:
        if not follow or not _is_kept(records, replica_id):
            return
        await asyncio.sleep(_POLL_S)
    try:
        position = 0
        rest = b""
        while True:
            block = await asyncio.to_thread(os.pread, handle, _BLOCK_BYTES, position)
            if block:
                position += len(block)
                *whole, rest = (rest + block).split(b"\n")
                for line in whole:
                    yield _text(line)
                if len(rest) > _LINE_BYTES_MAX:
                    yield _text(rest)
                    rest = b""
                continue
            if not follow or not _is_kept(records, replica_id):
                break
            if os.fstat(handle).st_size < position:
                position = 0
                continue
            await asyncio.sleep(_POLL_S)
        if rest:
            yield _text(rest)
    finally:
        os.close(handle)


def _open(file: Path) -> int | None:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _is_kept(records: Records, replica_id: str) -> bool:
    return records.folder(replica_id).exists()


def _text(line: bytes) -> str:
    return line[:_LINE_BYTES_MAX].decode("utf-8", "replace").rstrip("\r")
