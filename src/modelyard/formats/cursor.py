"""Reading a file whose numbers may all be lies.

A cursor only goes forward in a file of known size. Each read is checked against
the end of the file, and the work of a reader is bounded twice: by bytes that
are read and by steps (values looked at), so that a file of any size is done in
milliseconds and in a few megabytes. Files are read in pieces and not mapped: a
mapped file that somebody truncates meanwhile would kill the process.
"""

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from modelyard.formats import ArtifactInvalidError

BYTES_MAX = 64 * 1024 * 1024
"""Bytes that may be read of one file: headers of real models are below 16 MiB."""
STEPS_MAX = 800_000
"""Values that may be looked at: the largest real vocabularies have 650,000 tokens and merges together."""
TAKE_MAX = 16 * 1024 * 1024
_PIECE_MIN = 4096
_PIECE_MAX = 256 * 1024
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


class Cursor:
    """A place in ``file``, which has ``size`` bytes; ``what`` names it in refusals."""

    __slots__ = ("_base", "_file", "_piece", "_piece_bytes", "at", "bytes_read", "size", "steps", "what")

    def __init__(self, file: BinaryIO, size: int, what: str = "file") -> None:
        self._file = file
        self.size = size
        self.what = what
        self.at = 0
        self.bytes_read = 0
        self.steps = 0
        self._base = 0
        self._piece = b""
        self._piece_bytes = _PIECE_MIN

    def __repr__(self) -> str:
        return f"<Cursor {self.at}/{self.size} of {self.what}: {self.steps} steps, {self.bytes_read} bytes read>"

    @property
    def left(self) -> int:
        """Bytes behind this place."""
        return self.size - self.at

    def step(self, count: int = 1) -> None:
        """Account for ``count`` values looked at."""
        if self.steps + count > STEPS_MAX:
            raise ArtifactInvalidError(
                f"The {self.what} has a header of more than {STEPS_MAX:,} values, which is no model's."
            )
        self.steps += count

    def skip(self, count: int) -> None:
        """Pass over ``count`` bytes without reading them."""
        if count > self.left:
            raise self.truncated(self.at + count)
        self.at += count

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes and pass them."""
        window, start = self.window(count)
        self.at += count
        return window[start : start + count]

    def u32(self) -> int:
        """Return the next 4 bytes, little-endian."""
        window, start = self.window(4)
        self.at += 4
        return int(_U32(window, start)[0])

    def u64(self) -> int:
        """Return the next 8 bytes, little-endian."""
        window, start = self.window(8)
        self.at += 8
        return int(_U64(window, start)[0])

    def window(self, count: int) -> tuple[bytes, int]:
        """Return bytes, and where in them the next ``count`` begin; more may follow. Does not move."""
        start = self.at - self._base
        if start >= 0 and start + count <= len(self._piece):
            return self._piece, start
        if count > self.left:
            raise self.truncated(self.at + count)
        if count > TAKE_MAX:
            raise ArtifactInvalidError(f"The {self.what} has a value of {count:,} bytes in its header.")
        # Reading on doubles the piece; a jump begins small again, as between the tensors of an ONNX file.
        is_near = 0 <= start <= len(self._piece)
        self._piece_bytes = min(self._piece_bytes * 2, _PIECE_MAX) if is_near and self._piece else _PIECE_MIN
        self._load(min(max(count, self._piece_bytes), self.left))
        if len(self._piece) < count:
            raise self.truncated(self.at + count)
        return self._piece, 0

    def truncated(self, needed: int) -> ArtifactInvalidError:
        """Return the refusal of a file that ends before ``needed`` bytes."""
        return ArtifactInvalidError(
            f"The {self.what} is truncated or broken: it ends at byte {self.size:,} and says it goes on to {needed:,}. "
            "Fetch it again."
        )

    def _load(self, count: int) -> None:
        if self.bytes_read + count > BYTES_MAX:
            raise ArtifactInvalidError(
                f"The {self.what} has a header of more than {BYTES_MAX // 1024 // 1024} MiB, which is no model's."
            )
        self.bytes_read += count
        self._file.seek(self.at)
        self._base = self.at
        self._piece = self._file.read(count)


@contextmanager
def opened(path: Path, what: str = "file") -> Iterator[Cursor]:
    """Open ``path`` for reading, without waiting on a pipe or touching a device.

    Raises:
        ArtifactInvalidError: it is no regular file.
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise ArtifactInvalidError("It is not a regular file.")
        yield Cursor(file, state.st_size, what)


def plain_text(content: bytes, characters_max: int) -> str:
    """Return ``content`` as text for people and databases: no control characters, cut to ``characters_max``."""
    text = content.decode("utf-8", "replace")
    return "".join(c for c in text if c >= " " or c in "\n\t")[:characters_max]
