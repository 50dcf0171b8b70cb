"""One upload's form on its way in: the file to its writer block by block, the few texts beside it.

A client may send the fields in any order. What is known of the purpose when
the file comes is held against it at once; what comes behind it, at the end.
"""

import re
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from modelyard import errors
from modelyard.domain.files import (
    BATCH_FILE_ENDING,
    EXPIRES_AFTER_S_MAX,
    EXPIRES_AFTER_S_MIN,
    UPLOADABLE,
    FilePurpose,
)
from modelyard.stores import ContentWriter
from modelyard.web.forms import Happening, PartData, PartEnd, PartHead

BLOCK_BYTES = 1024 * 1024
"""What is written at once."""
TEXT_BYTES_MAX = 256
FILE_NAME_MAX = 255
NAMELESS = "upload"

FILE = "file"
PURPOSE = "purpose"
ANCHOR = "expires_after[anchor]"
SECONDS = "expires_after[seconds]"

_TEXTS = (PURPOSE, ANCHOR, SECONDS)
_CREATED_AT = "created_at"


class SizeLimits(NamedTuple):
    """Most bytes of a file, and of one for batches."""

    file_bytes: int
    batch_bytes: int


class FileOrder(NamedTuple):
    """What a form asked for."""

    filename: str
    purpose: FilePurpose
    expires_after_s: int | None


class FileForm:
    """Takes a form in; ``writer`` is there once its file has begun."""

    def __init__(self, begin: Callable[[], Awaitable[ContentWriter]], limits: SizeLimits) -> None:
        self._begin = begin
        self._limits = limits
        self._texts: dict[str, str] = {}
        self._field = ""
        self._text = b""
        self._block = bytearray()
        self._received = 0
        self._filename = ""
        self.writer: ContentWriter | None = None

    async def take(self, happening: Happening) -> None:
        """Take the next thing that the form brought.

        Raises:
            ApiError: 400 for what may not be here, 413 for a file that is too large.
            OSError: the disk is full or broken.
        """
        match happening:
            case PartHead(name, file_name):
                await self._part_begins(name, file_name)
            case PartData(content):
                await self._data(content)
            case PartEnd():
                await self._part_ends()

    def order(self) -> FileOrder:
        """Return what was asked for, once all of it is here.

        Raises:
            ApiError: 400 naming the field that is missing or wrong; 413 for a batch's file that is too large.
        """
        if self.writer is None:
            raise errors.missing_parameter(FILE)
        purpose = self._purpose()
        if purpose is None:
            raise errors.missing_parameter(PURPOSE)
        self._check_size(purpose)
        self._check_name(purpose)
        return FileOrder(self._filename, purpose, self._expires_after_s())

    async def _part_begins(self, name: str, file_name: str | None) -> None:
        if name == FILE:
            if self.writer is not None:
                raise errors.invalid_value(FILE, "it is given more than once; send each file by itself")
            self._filename = plain_name(file_name)
            self._check_name(self._purpose())
            self.writer = await self._begin()
        elif name not in _TEXTS:
            raise errors.unsupported_parameter(name[:64], f"this form has {FILE}, {', '.join(_TEXTS)}")
        elif file_name is not None:
            raise errors.invalid_value(name, "it is a file, and a text is expected", code="invalid_type")
        elif name in self._texts:
            raise errors.invalid_value(name, "it is given more than once")
        self._field, self._text = name, b""

    async def _data(self, content: bytes) -> None:
        if self._field != FILE:
            self._text += content
            if len(self._text) > TEXT_BYTES_MAX:
                raise errors.invalid_value(self._field, f"it is longer than {TEXT_BYTES_MAX} bytes")
            return
        self._received += len(content)
        self._check_size(self._purpose())
        self._block += content
        if len(self._block) >= BLOCK_BYTES:
            await self._write()

    async def _part_ends(self) -> None:
        if self._field == FILE:
            await self._write()
            return
        try:
            self._texts[self._field] = self._text.decode()
        except UnicodeDecodeError:
            raise errors.invalid_value(self._field, "it is no UTF-8 text") from None
        if self._field == PURPOSE:
            self._purpose()  # so that what is wrong is told before the file comes

    async def _write(self) -> None:
        block, self._block = self._block, bytearray()
        if block and self.writer is not None:
            await self.writer.write(block)

    def _purpose(self) -> FilePurpose | None:
        text = self._texts.get(PURPOSE)
        if text is None:
            return None
        if text not in UPLOADABLE:
            raise errors.invalid_value(PURPOSE, f"it must be one of {', '.join(UPLOADABLE)}")
        return FilePurpose(text)

    def _check_size(self, purpose: FilePurpose | None) -> None:
        if purpose is FilePurpose.BATCH and self._received > self._limits.batch_bytes:
            raise errors.file_too_large(self._limits.batch_bytes, "control.batch_file_bytes_max")
        if self._received > self._limits.file_bytes:
            raise errors.file_too_large(self._limits.file_bytes, "gateway.file_bytes_max")

    def _check_name(self, purpose: FilePurpose | None) -> None:
        if purpose is FilePurpose.BATCH and not self._filename.lower().endswith(BATCH_FILE_ENDING):
            raise errors.invalid_value(FILE, "invalid file format for Batch API, the name must end in .jsonl")

    def _expires_after_s(self) -> int | None:
        anchor, seconds = self._texts.get(ANCHOR), self._texts.get(SECONDS)
        if anchor is None and seconds is None:
            return None
        if anchor is None or seconds is None:
            raise errors.missing_parameter(SECONDS if seconds is None else ANCHOR)
        if anchor != _CREATED_AT:
            raise errors.invalid_value(ANCHOR, f"it must be '{_CREATED_AT}'")
        found = int(seconds) if re.fullmatch(r"[0-9]{1,9}", seconds, re.ASCII) else 0
        if not EXPIRES_AFTER_S_MIN <= found <= EXPIRES_AFTER_S_MAX:
            raise errors.invalid_value(
                SECONDS, f"it must be a whole number from {EXPIRES_AFTER_S_MIN} to {EXPIRES_AFTER_S_MAX}"
            )
        return found


def plain_name(given: str | None) -> str:
    """Return the name of a file without the folders and the invisible characters that a client may send with it.

    It is shown and sent back, and never a path here; both must not forge lines or folders elsewhere.
    """
    name = (given or "").replace("\\", "/").rpartition("/")[2]
    name = "".join(one for one in name if one.isprintable()).strip()
    if len(name) > FILE_NAME_MAX:
        stem, dot, ending = name.rpartition(".")
        kept = f"{dot}{ending}" if stem and len(ending) <= 16 else ""
        name = name[: FILE_NAME_MAX - len(kept)] + kept
    return NAMELESS if name in ("", ".", "..") else name
