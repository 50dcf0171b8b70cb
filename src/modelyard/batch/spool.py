"""Answers of a shard on disk, from the first to the last: a file that is only ever added to.

Each lease writes a file of its own, named by its token, and begins it with
what the leases before it left: their whole lines are copied, and only then
does it get its name. So the newest file of a shard has everything, a process
that was killed leaves at most a line that is not whole, and one that comes
back from the dead writes into a file that nobody reads any more.

A record is one line: the number of the request, ``o`` for an answer or ``e``
for an error, the tokens it used, and the line for the user's file.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from modelyard.domain.batches import Progress, Tokens

OUTPUT, ERROR = b"o", b"e"
_DRAFT = ".draft"
_TOKEN_DIGITS = 12

_encode = msgspec.json.Encoder().encode
_tokens_of = msgspec.json.Decoder(Tokens).decode


class Record(NamedTuple):
    """One answered line: its number in the batch, its kind, its tokens, and where its text is in the file."""

    ordinal: int
    is_error: bool
    tokens: Tokens
    offset: int
    size: int


class Spool:
    """What one lease of a shard has answered. It blocks: adding is a write into the page cache, ``sync`` is not."""

    __slots__ = ("_descriptor", "_has_unsynced", "completed", "done", "failed", "tokens")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._has_unsynced = False
        self.done: set[int] = set()
        """Numbers of the requests that are answered."""
        self.completed = self.failed = 0
        self.tokens = Tokens()

    def __repr__(self) -> str:
        return f"<Spool {self.completed} completed, {self.failed} failed>"

    @property
    def progress(self) -> Progress:
        """Return how far it is."""
        return Progress(self.completed, self.failed, self.tokens)

    def add(self, ordinal: int, line: bytes, *, is_error: bool, tokens: Tokens) -> None:
        """Keep the answer of a request; raises ``OSError``, and then nothing of it counts."""
        assert ordinal not in self.done, "a line was answered twice"
        kind = ERROR if is_error else OUTPUT
        record = b"%d %b %b %b\n" % (ordinal, kind, _encode(tokens), line)
        # One write: whoever kills this process leaves all of it, or a part without its end.
        at = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            written = os.write(self._descriptor, record)
        except OSError:
            written = 0
        if written != len(record):
            os.ftruncate(self._descriptor, at)
            raise OSError(errno.ENOSPC, "the answer of a line could not be written")
        self._has_unsynced = True
        self._count(ordinal, tokens, is_error=is_error)

    def recall(self, records: Iterator[Record]) -> None:
        """Count what is in the file already."""
        for record in records:
            self._count(record.ordinal, record.tokens, is_error=record.is_error)

    def sync(self) -> None:
        """Wait until all of it is on the disk; raises ``OSError``."""
        if self._has_unsynced:
            self._has_unsynced = False
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _count(self, ordinal: int, tokens: Tokens, *, is_error: bool) -> None:
        self.done.add(ordinal)
        self.tokens += tokens
        if is_error:
            self.failed += 1
        else:
            self.completed += 1


def open_spool(folder: Path, shard: int, token: int) -> Spool:
    """Return the spool of a new lease, with all that earlier ones left; theirs are removed. Raises ``OSError``."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    earlier = newest(folder, shard)
    draft = folder / f"{shard}.{token:0{_TOKEN_DIGITS}}{_DRAFT}"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        if earlier is not None:
            _copy_whole(earlier, descriptor)
        os.fsync(descriptor)
        draft.rename(draft.with_suffix(""))
        spool = Spool(descriptor)
        with draft.with_suffix("").open("rb") as file:
            spool.recall(records_of(file))
    except BaseException:
        os.close(descriptor)
        raise
    for old in _spools(folder, shard):
        if token_of(old) < token:
            old.unlink(missing_ok=True)
    return spool


def newest(folder: Path, shard: int) -> Path | None:
    """Return the file of a shard that has everything, None if nothing was answered."""
    return max(_spools(folder, shard), key=token_of, default=None)


def records_of(file: BinaryIO) -> Iterator[Record]:
    """Yield the whole records of a spool, each request once; what is behind the last whole line is not there."""
    seen: set[int] = set()
    at = 0
    for line in file:
        if not line.endswith(b"\n"):
            return
        head, kind, rest = line.split(b" ", 2)
        tokens, _, text = rest.partition(b" ")
        ordinal = int(head)
        if ordinal not in seen:
            seen.add(ordinal)
            begin = at + len(line) - len(text)
            yield Record(ordinal, kind == ERROR, _tokens_of(tokens), begin, len(text))
        at += len(line)


def token_of(spool: Path) -> int:
    """Return the token of the lease that writes, or wrote, this file."""
    return int(spool.name.partition(".")[2])


def _spools(folder: Path, shard: int) -> list[Path]:
    return [path for path in folder.glob(f"{shard}.*") if path.suffix != _DRAFT]


def _copy_whole(source: Path, descriptor: int) -> None:
    """Copy the whole lines of ``source``; somebody may still be writing to it."""
    with source.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            view = memoryview(line)
            while view:
                view = view[os.write(descriptor, view) :]
