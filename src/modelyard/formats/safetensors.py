"""safetensors: a JSON header of names, types, shapes and places, and nothing else.

The file must be covered by its tensors exactly, one behind the other, as the
reference implementation demands: no overlap, no gap to hide something in, no
bytes behind the last. The JSON is decoded by types and within limits; keys
that are there twice are refused, because readers differ in which one they take.
"""

import json
import re
from collections import Counter
from math import prod
from typing import NamedTuple

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.cursor import Cursor

HEADER_MAX = 8 * 1024 * 1024
TENSORS_MAX = 65_536
ELEMENTS_MAX = 1 << 48
_METADATA_MAX = 1024 * 1024
_DIMS_MAX = 16
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_LORA_A = re.compile(r"(?:lora_A|lora_down)(?:\.\w+)?\.weight")


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What the header says of a tensor; ``data_offsets`` count from ``Header.data_at``."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(NamedTuple):
    """What one file holds."""

    facts: ModelFacts
    tensors: dict[str, Tensor]
    data_at: int
    """Where in the file the numbers begin."""

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the tensors."""
        return frozenset(self.tensors)


_decode_entries = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_tensor = msgspec.json.Decoder(Tensor).decode


def read(cursor: Cursor) -> Header:
    """Return what the header says, in facts as far as tensors alone can tell.

    Raises:
        ArtifactInvalidError: it is broken, or says something of its data that cannot be.
    """
    length = cursor.u64() if cursor.size >= 8 else 0
    if not 2 <= length <= cursor.left:
        raise ArtifactInvalidError(
            "The artifact is no safetensors file, or a truncated one: "
            f"its header would have {length:,} bytes of {cursor.left:,}."
        )
    if length > HEADER_MAX:
        raise ArtifactInvalidError(
            f"The safetensors file has a header of {length:,} bytes; the most is {HEADER_MAX:,}. "
            "Save it in several files."
        )
    tensors = _entries(cursor.take(length))
    cursor.step(len(tensors))
    bytes_of_type: Counter[str] = Counter()
    parameters = rank = 0
    for name, tensor in tensors.items():
        elements, size = _size_of(name, tensor)
        parameters += elements
        bytes_of_type[tensor.dtype] += size
        if _LORA_A.search(name):
            rank = max(rank, tensor.shape[0] if tensor.shape else 1)
    _check_places(cursor, tensors)
    facts = ModelFacts(
        format="safetensors",
        parameters=parameters,
        quantisation=bytes_of_type.most_common(1)[0][0],
        weights_bytes=sum(bytes_of_type.values()),
        is_adapter=rank > 0,
        adapter_rank=rank,
    )
    return Header(facts, tensors, data_at=cursor.at)


def _entries(raw: bytes) -> dict[str, Tensor]:
    if raw[:1] != b"{":
        raise ArtifactInvalidError("The artifact is no safetensors file: its header is no JSON object.")
    tensor_count = raw.count(b'"dtype"')
    # Counted before anything is decoded: a header of a million tiny entries would take a hundred times its size.
    if tensor_count > TENSORS_MAX or raw.count(b":") > 4 * TENSORS_MAX + tensor_count:
        raise ArtifactInvalidError(
            f"The safetensors file has more than {TENSORS_MAX:,} tensors. Save it in several files."
        )
    try:
        entries = _decode_entries(raw)
        metadata = bytes(entries.pop("__metadata__", msgspec.Raw(b"{}")))
        _check_metadata(metadata)
        tensors = {name: _decode_tensor(entry) for name, entry in entries.items()}
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        if isinstance(error, ArtifactInvalidError):
            raise
        raise ArtifactInvalidError(f"The safetensors file has a bad header: {error}.") from error
    if not tensors:
        raise ArtifactInvalidError("The safetensors file holds no tensors.")
    _check_once(raw, metadata, len(tensors))
    return tensors


def _check_once(raw: bytes, metadata: bytes, tensor_count: int) -> None:
    """Refuse what is written twice: each name of a field is there once for each tensor that was decoded.

    A quote inside a text is escaped, so that texts do not count; a name in escapes is missing here, and refused too.
    """
    for field in (b'"dtype"', b'"shape"', b'"data_offsets"'):
        if raw.count(field) - metadata.count(field) != tensor_count:
            raise ArtifactInvalidError("The safetensors file has a key in its header twice, or in escapes.")
    if raw.count(b'"__metadata__"') > 1:
        raise ArtifactInvalidError("The safetensors file has the key '__metadata__' twice.")


def _check_metadata(raw: bytes) -> None:
    if len(raw) > _METADATA_MAX:
        raise ArtifactInvalidError(
            f"The safetensors file has metadata of {len(raw):,} bytes; the most is {_METADATA_MAX:,}."
        )

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs) or not all(isinstance(value, str) for value in found.values()):
            raise ArtifactInvalidError("The safetensors file has a key of its metadata twice, or one that is no text.")
        return found

    json.loads(raw, object_pairs_hook=once)


def _size_of(name: str, tensor: Tensor) -> tuple[int, int]:
    """Return how many numbers it has, and in how many bytes."""
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        raise ArtifactInvalidError(f"The safetensors file has a tensor of the unknown type '{tensor.dtype[:32]}'.")
    if len(tensor.shape) > _DIMS_MAX or any(dim < 0 or dim >= ELEMENTS_MAX for dim in tensor.shape):
        raise ArtifactInvalidError(f"The safetensors file has the tensor '{name[:200]}' of an impossible shape.")
    elements = prod(tensor.shape)
    begin, end = tensor.data_offsets
    if elements >= ELEMENTS_MAX or elements * bits % 8 or end - begin != elements * bits // 8:
        raise ArtifactInvalidError(
            f"The safetensors file has the tensor '{name[:200]}' whose shape and type do not fit "
            f"its {end - begin:,} bytes."
        )
    return elements, end - begin


def _check_places(cursor: Cursor, tensors: dict[str, Tensor]) -> None:
    expected = 0
    for begin, end in sorted(tensor.data_offsets for tensor in tensors.values()):
        if begin != expected or end < begin:
            raise ArtifactInvalidError("The safetensors file has tensors that overlap, or a gap between them.")
        expected = end
    if expected > cursor.left:
        raise cursor.truncated(cursor.at + expected)
    if expected < cursor.left:
        raise ArtifactInvalidError(f"The safetensors file has {cursor.left - expected:,} bytes behind its last tensor.")
