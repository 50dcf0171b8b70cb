"""GGUF: the header of a llama.cpp model, walked within bounds.

What llama.cpp and Ollama were attacked with (S9) is refused here: counts and
lengths beyond the file, overflowing dims, arrays where a number belongs, more
than 512 layers, misaligned or overlapping tensors, byte tokens like ``<0x-1>``.
Only keys that ``gguf_facts.py`` asks for are kept; arrays are passed over.
"""

import struct
from collections import Counter
from math import prod

from modelyard.domain.facts import ModelFacts
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.cursor import Cursor, plain_text
from modelyard.formats.ggml import BLOCKS
from modelyard.formats.gguf_facts import KINDS, LAYERS_MAX, Tensors, Value, facts_from, kind_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
KEYS_MAX = 2048
TENSORS_MAX = 8192
ALIGNMENT_MAX = 4096
ELEMENTS_MAX = 1 << 48
"""Numbers in a tensor; far beyond any, and far from overflowing 64 bits."""
TEMPLATE_CHARACTERS = 16 * 1024

_KEY_BYTES_MAX = 1024
_NAME_BYTES_MAX = 255
_ARRAY_TEXT_BYTES_MAX = 65_535
_DIMS_MAX = 4
_KEPT_MAX = 256
_TEXT_CHARACTERS = 256
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_ARRAY_TYPES = {
    "tokenizer.ggml.tokens": {_STRING},
    "tokenizer.ggml.merges": {_STRING},
    "tokenizer.ggml.scores": {6},
    "tokenizer.ggml.token_type": {4, 5},
}
"""Arrays that llama.cpp takes without looking at the type of what is in them."""
_LENGTH = struct.Struct("<Q").unpack_from
_BYTE_TOKEN = bytes(6) + b"<0x"


def read(cursor: Cursor) -> ModelFacts:
    """Return what the header says.

    Raises:
        ArtifactInvalidError: it is broken, or could break an engine.
    """
    return read_shapes(cursor)[0]


def read_shapes(cursor: Cursor) -> tuple[ModelFacts, dict[str, tuple[int, ...]]]:
    """Return what the header says, and the dims of each tensor as GGUF has them (the fastest first).

    Raises:
        ArtifactInvalidError: it is broken, or could break an engine.
    """
    tensor_count, key_count = _counts(cursor)
    values: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    seen: set[str] = set()
    for _ in range(key_count):
        key = _string(cursor, _KEY_BYTES_MAX, "key")
        if key in seen:
            raise ArtifactInvalidError(f"The GGUF file has the key '{key}' twice.")
        seen.add(key)
        _value(cursor, key, values, lengths)
        if len(values) > _KEPT_MAX:
            raise ArtifactInvalidError("The GGUF file describes more than one model.")
    _check_vocabulary(lengths)
    tensors = _tensors(cursor, tensor_count, _alignment(values))
    return facts_from(values, lengths.get("tokenizer.ggml.tokens", 0), tensors), tensors.shapes


def _counts(cursor: Cursor) -> tuple[int, int]:
    head = cursor.take(min(24, cursor.left))
    if head[:4] != MAGIC:
        raise ArtifactInvalidError("The artifact is not a GGUF file.")
    if len(head) < 24:
        raise ArtifactInvalidError("The artifact is a truncated GGUF file. Fetch it again.")
    version, tensors, keys = struct.unpack("<IQQ", head[4:])
    if version not in VERSIONS:
        if int.from_bytes(head[4:8], "big") in VERSIONS:
            raise ArtifactInvalidError("The artifact is a big-endian GGUF file; convert it to little-endian.")
        raise ArtifactInvalidError(
            f"The artifact is GGUF version {version}; versions 2 and 3 are read. Convert it again."
        )
    if not 1 <= tensors <= TENSORS_MAX:
        raise ArtifactInvalidError(f"The artifact is a GGUF file with {tensors} tensors, which is no model.")
    if not 1 <= keys <= KEYS_MAX:
        raise ArtifactInvalidError(f"The artifact is a GGUF file with {keys} keys, which is no model.")
    return tensors, keys


def _string(cursor: Cursor, bytes_max: int, what: str) -> str:
    length = cursor.u64()
    if length > bytes_max:
        raise ArtifactInvalidError(f"The GGUF file has a {what} of {length:,} bytes; the most is {bytes_max:,}.")
    cursor.step()
    content = cursor.take(length)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactInvalidError(f"The GGUF file has a {what} that is not UTF-8.") from error
    if not text.isprintable():
        raise ArtifactInvalidError(f"The GGUF file has a {what} with control characters.")
    return text


def _value(cursor: Cursor, key: str, values: dict[str, Value], lengths: dict[str, int]) -> None:
    cursor.step()
    kind = cursor.u32()
    wanted = kind_of(key)
    value: Value
    if kind == _STRING:
        value = _text(cursor, TEMPLATE_CHARACTERS if wanted == "template" else _TEXT_CHARACTERS)
    elif kind == _ARRAY:
        value = _array(cursor, key, lengths, is_wanted=wanted in KINDS)
    elif (scalar := _SCALARS.get(kind)) is not None:
        value = scalar.unpack(cursor.take(scalar.size))[0]
    else:
        raise ArtifactInvalidError(f"The GGUF file has the key '{key}' of the unknown type {kind}.")
    if wanted in KINDS:
        if not KINDS[wanted](value):
            raise ArtifactInvalidError(f"The GGUF file has the key '{key}' with a value of the wrong type or range.")
        values[key] = value


def _text(cursor: Cursor, characters: int) -> str:
    length = cursor.u64()
    if length > cursor.left:
        raise cursor.truncated(cursor.at + length)
    read = min(length, 4 * characters)
    content = cursor.take(read)
    cursor.skip(length - read)
    return plain_text(content, characters)


def _array(cursor: Cursor, key: str, lengths: dict[str, int], *, is_wanted: bool) -> tuple[int | float | bool, ...]:
    kind, count = cursor.u32(), cursor.u64()
    if kind not in _ARRAY_TYPES.get(key, {kind}):
        raise ArtifactInvalidError(f"The GGUF file has the key '{key}' with an array of the wrong type.")
    lengths[key] = count
    if kind == _STRING:
        _pass_strings(cursor, count, key)
        return ()
    scalar = _SCALARS.get(kind)
    if scalar is None:
        # No model has arrays in arrays; llama.cpp does not read them either.
        raise ArtifactInvalidError(f"The GGUF file has the key '{key}' with an array of the type {kind}.")
    if count * scalar.size > cursor.left:
        raise cursor.truncated(cursor.at + count * scalar.size)
    if not is_wanted:
        cursor.skip(count * scalar.size)
        return ()
    if count > LAYERS_MAX:
        raise ArtifactInvalidError(f"The GGUF file has the key '{key}' for {count} layers; the most is {LAYERS_MAX}.")
    cursor.step(count)
    return tuple(item for (item,) in scalar.iter_unpack(cursor.take(count * scalar.size)))


def _pass_strings(cursor: Cursor, count: int, key: str) -> None:
    """Walk over the strings of an array: only their lengths say where it ends. The hot loop of this module."""
    if count * 8 > cursor.left:
        raise cursor.truncated(cursor.at + count * 8)
    cursor.step(count)
    left = count
    unpack = _LENGTH
    while left:
        window, begin = cursor.window(8)
        at, size, length, passed = begin, len(window), 0, 0
        for passed in range(left + 1):
            if passed == left or at + 8 > size:
                break
            (length,) = unpack(window, at)
            after = at + 8 + length
            if after > size:
                break
            at = after
        left -= passed
        if at == begin:
            if length > _ARRAY_TEXT_BYTES_MAX:
                raise ArtifactInvalidError(f"The GGUF file has in '{key}' a text of {length:,} bytes.")
            cursor.window(8 + length)
            continue
        _check_byte_tokens(window, begin, at)
        cursor.skip(at - begin)


def _check_byte_tokens(window: bytes, begin: int, end: int) -> None:
    """Refuse ``<0x-1>``: llama.cpp takes the digits for the number of a byte and writes outside of its table."""
    at = begin
    while (at := window.find(_BYTE_TOKEN, at, end)) >= 0:
        start = at + len(_BYTE_TOKEN)
        (length,) = _LENGTH(window, at - 2) if at - 2 >= begin else (0,)
        if b"-" in window[start : min(start + 2, start + length - 3)]:
            raise ArtifactInvalidError("The GGUF file has a byte token with a negative number.")
        at += 1


def _check_vocabulary(lengths: dict[str, int]) -> None:
    tokens = lengths.get("tokenizer.ggml.tokens")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        if key in lengths and lengths[key] != tokens:
            raise ArtifactInvalidError(
                f"The GGUF file has {tokens or 0} tokens, but {lengths[key]} entries in '{key}'."
            )


def _alignment(values: dict[str, Value]) -> int:
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
        raise ArtifactInvalidError(
            f"The GGUF file has the alignment {alignment}; it must be a power of two of at most {ALIGNMENT_MAX}."
        )
    return alignment


def _tensors(cursor: Cursor, count: int, alignment: int) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {}
    found: list[tuple[int, int]] = []
    bytes_of_type: Counter[str] = Counter()
    parameters = adapter_rank = 0
    for _ in range(count):
        name = _string(cursor, _NAME_BYTES_MAX, "tensor name")
        if name in shapes:
            raise ArtifactInvalidError(f"The GGUF file has the tensor '{name}' twice.")
        dims, kind, size, offset = _tensor(cursor, name)
        shapes[name] = dims
        if offset % alignment:
            raise ArtifactInvalidError(
                f"The GGUF file has the tensor '{name}' at {offset}, not aligned to {alignment}."
            )
        found.append((offset, size))
        bytes_of_type[kind] += size
        parameters += prod(dims)
        if name.endswith(".lora_a"):
            adapter_rank = max(adapter_rank, dims[1] if len(dims) > 1 else 1)
    _check_places(cursor, found, alignment)
    return Tensors(shapes, parameters, sum(bytes_of_type.values()), bytes_of_type.most_common(1)[0][0], adapter_rank)


def _tensor(cursor: Cursor, name: str) -> tuple[tuple[int, ...], str, int, int]:
    """Return dims, type, bytes and offset."""
    dims_count = cursor.u32()
    if not 1 <= dims_count <= _DIMS_MAX:
        raise ArtifactInvalidError(f"The GGUF file has the tensor '{name}' with {dims_count} dimensions.")
    *dims, kind, offset = struct.unpack(f"<{dims_count}QIQ", cursor.take(8 * dims_count + 12))
    elements = prod(dims)
    if not 1 <= elements < ELEMENTS_MAX:
        raise ArtifactInvalidError(f"The GGUF file has the tensor '{name}' of the impossible shape {dims}.")
    if kind not in BLOCKS:
        raise ArtifactInvalidError(f"The GGUF file has the tensor '{name}' of the unknown type {kind}.")
    type_name, block, block_bytes = BLOCKS[kind]
    if dims[0] % block:
        raise ArtifactInvalidError(
            f"The GGUF file has the tensor '{name}' with rows of {dims[0]}, not whole blocks of {block}."
        )
    return tuple(dims), type_name, elements // block * block_bytes, offset


def _check_places(cursor: Cursor, found: list[tuple[int, int]], alignment: int) -> None:
    start = -(-cursor.at // alignment) * alignment
    end = 0
    for offset, size in found:
        if offset < end:
            raise ArtifactInvalidError("The GGUF file has tensors that overlap or are out of order.")
        end = offset + size
    if start + end > cursor.size:
        raise cursor.truncated(start + end)
