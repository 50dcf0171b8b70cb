"""The wire format of protocol buffers, as far as ONNX needs it: fields one after the other, within bounds."""

from collections.abc import Iterator

from modelyard.formats import ArtifactInvalidError
from modelyard.formats.cursor import Cursor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10


def fields(cursor: Cursor, end: int) -> Iterator[tuple[int, int, int]]:
    """Give number, wire type and value of each field up to ``end``.

    Of bytes the value is their length, and the cursor stands at their begin; whatever the caller did not pass of them
    is passed over before the next field.

    Raises:
        ArtifactInvalidError: it is no protocol buffer, or a field goes on behind ``end``.
    """
    while cursor.at < end:
        cursor.step()
        tag = varint(cursor)
        number, wire = tag >> 3, tag & 7
        if not number:
            raise _broken(cursor)
        if wire == VARINT:
            yield number, wire, varint(cursor)
        elif wire == BYTES:
            length = varint(cursor)
            after = cursor.at + length
            if after > end:
                raise cursor.truncated(after) if end == cursor.size else _broken(cursor)
            yield number, wire, length
            cursor.at = after
        elif wire in (FIXED32, FIXED64):
            yield number, wire, int.from_bytes(cursor.take(4 if wire == FIXED32 else 8), "little")
        else:
            raise _broken(cursor)
    if cursor.at > end:
        raise _broken(cursor)


def varint(cursor: Cursor) -> int:
    """Return the next number of 64 bits and pass it."""
    window, at = cursor.window(1)
    first = window[at]
    if first < 0x80:
        cursor.at += 1
        return first
    count = min(_VARINT_BYTES_MAX, cursor.left)
    window, at = cursor.window(count)
    value = 0
    for index in range(count):
        byte = window[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            cursor.at += index + 1
            return value & 0xFFFF_FFFF_FFFF_FFFF
    raise _broken(cursor)


def packed(cursor: Cursor, length: int) -> Iterator[int]:
    """Give the numbers of a packed field of ``length`` bytes."""
    end = cursor.at + length
    while cursor.at < end:
        cursor.step()
        yield varint(cursor)


def _broken(cursor: Cursor) -> ArtifactInvalidError:
    return ArtifactInvalidError(f"The {cursor.what} is broken at byte {cursor.at:,}. Fetch it again.")
