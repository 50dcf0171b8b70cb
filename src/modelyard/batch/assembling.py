"""The files of a batch from its spools: every line of the input once, in the order of the input.

It may be done again at any time, by anybody: what it reads is sealed, and what
it writes is a draft until it is whole. It blocks, and runs in a thread.
"""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from modelyard.batch import answers, spool
from modelyard.batch.lines import lines_of
from modelyard.batch.shard import INPUT
from modelyard.domain.batches import Batch, Counts, Shard, Tokens


class Draft:
    """A file on its way; made with its first line, so that there is none without."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None

    @property
    def digest(self) -> str:
        """Return ``sha256:<hex>`` of what was written."""
        return f"sha256:{self._hash.hexdigest()}"

    def write(self, line: bytes) -> None:
        """Append a line, with its end."""
        if self._file is None:
            self._file = self.path.open("wb")
        self._file.write(line)
        self._hash.update(line)
        self.size_bytes += len(line)

    def close(self) -> None:
        """Write what is held."""
        if self._file is not None:
            self._file.close()


class Assembled(NamedTuple):
    """The two files, as far as there is anything in them, and what is in both."""

    output: Draft
    errors: Draft
    counts: Counts
    tokens: Tokens
    unanswered: int
    """Lines that got what is said of the rest."""


class _Custom(msgspec.Struct):
    custom_id: str


_custom = msgspec.json.Decoder(_Custom).decode


def assemble(
    batch: Batch,
    folder: Path,
    shards: list[Shard],
    rest: tuple[str, str],
    *,
    name: str,
    line_bytes_max: int,
    is_wanted: Callable[[], bool],
) -> Assembled | None:
    """Return the drafts in ``folder``; None once they are not wanted.

    ``rest`` is the code and message of lines without an answer. ``name`` is this writer's own.
    """
    output, errors = Draft(folder / f"output.{name}"), Draft(folder / f"errors.{name}")
    completed = failed = unanswered = 0
    tokens = Tokens()
    with ExitStack() as stack:
        stack.callback(output.close)
        stack.callback(errors.close)
        for shard in shards:
            if not is_wanted():
                return None
            done, bad, left, used = _add_shard(batch, folder, shard, rest, output, errors, line_bytes_max)
            completed, failed, unanswered, tokens = completed + done, failed + bad, unanswered + left, tokens + used
    return Assembled(output, errors, Counts(completed + failed, completed, failed), tokens, unanswered)


def _add_shard(
    batch: Batch,
    folder: Path,
    shard: Shard,
    rest: tuple[str, str],
    output: Draft,
    errors: Draft,
    line_bytes_max: int,
) -> tuple[int, int, int, Tokens]:
    """Write the lines of a shard; return how many are answered, failed, and have no answer, and their tokens."""
    with ExitStack() as stack:
        newest = spool.newest(folder, shard.number)
        source = None if newest is None else stack.enter_context(newest.open("rb"))
        records = {} if source is None else {one.ordinal: one for one in spool.records_of(source)}
        texts: dict[int, str] = {}
        if len(records) < shard.lines:
            with (folder / INPUT).open("rb") as file:
                lines = lines_of(file, start=shard.offset, length=shard.size, longest=line_bytes_max)
                for ordinal, line in enumerate(lines, shard.first):
                    if ordinal not in records and line.text is not None:
                        texts[ordinal] = _custom(line.text).custom_id
        failed, tokens = 0, Tokens()
        for ordinal in range(shard.first, shard.first + shard.lines):
            record = records.get(ordinal)
            if record is None or source is None:
                id_ = answers.line_id(batch.id, ordinal)
                errors.write(answers.unanswered(id_, texts[ordinal], *rest).text + b"\n")
                failed += 1
                continue
            source.seek(record.offset)
            (errors if record.is_error else output).write(source.read(record.size))
            failed += record.is_error
            tokens += record.tokens
    return shard.lines - failed, failed, len(texts), tokens
