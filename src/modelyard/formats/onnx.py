"""ONNX: a graph in a protocol buffer, and tensors in it or in files beside it.

The reader visits every tensor that a runtime would load (initializers, sparse
ones, attributes of nodes, subgraphs, functions, training graphs) without
reading its numbers, and keeps where external ones are: a path that leaves the
model's folder has let engines read any file of their host (S7).
"""

from collections import Counter
from dataclasses import dataclass, field
from math import prod

from modelyard.domain.facts import ModelFacts, TensorFacts
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.cursor import Cursor, plain_text
from modelyard.formats.protobuf import BYTES, VARINT, fields, packed

ELEMENTS_MAX = 1 << 48
TENSORS_MAX = 65_536
DEPTH_MAX = 16
STEPS_MAX = 120_000
"""Fields that may be looked at: one takes about a microsecond."""
_DIMS_MAX = 16
_INPUT, _OUTPUT = 11, 12
"""Fields of a graph."""
_ENDS_MAX = 256
"""Inputs, or outputs, that are told of; the largest decoders have some 130 of each."""
_SMALL_NODE_BYTES = 64 * 1024
_TYPES = {
    1: ("F32", 32), 2: ("U8", 8), 3: ("I8", 8), 4: ("U16", 16), 5: ("I16", 16), 6: ("I32", 32), 7: ("I64", 64),
    8: ("STRING", 0), 9: ("BOOL", 8), 10: ("F16", 16), 11: ("F64", 64), 12: ("U32", 32), 13: ("U64", 64),
    14: ("C64", 64), 15: ("C128", 128), 16: ("BF16", 16), 17: ("F8_E4M3", 8), 18: ("F8_E4M3FNUZ", 8),
    19: ("F8_E5M2", 8), 20: ("F8_E5M2FNUZ", 8), 21: ("U4", 4), 22: ("I4", 4), 23: ("F4", 4), 24: ("F8_E8M0", 8),
    25: ("U2", 2), 26: ("I2", 2),
}  # fmt: skip

_PROTOCOL_TYPES = {
    "F32": "FP32", "F16": "FP16", "F64": "FP64", "U8": "UINT8", "U16": "UINT16", "U32": "UINT32", "U64": "UINT64",
    "I8": "INT8", "I16": "INT16", "I32": "INT32", "I64": "INT64", "STRING": "BYTES",
}  # fmt: skip
"""What the Open Inference Protocol calls them; the others are called the same, or cannot be sent by it."""

# Which field of which message holds which message: the places where tensors can be.
_NESTED: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
}


@dataclass(slots=True)
class _Seen:
    """What was found of the whole file so far."""

    ir_version: int = 0
    graphs: int = 0
    name: str = ""
    tensors: int = 0
    parameters: int = 0
    bytes_of_type: Counter[str] = field(default_factory=Counter)
    initializers: set[str] = field(default_factory=set)
    inputs: list[TensorFacts] = field(default_factory=list)
    outputs: list[TensorFacts] = field(default_factory=list)
    external: dict[str, int] = field(default_factory=dict)
    """Files beside the model: how many bytes they must have."""


@dataclass(slots=True)
class _Tensor:
    dims: list[int] = field(default_factory=list)
    kind: int = 0
    name: str = ""
    raw_bytes: int | None = None
    is_external: bool = False
    places: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Header:
    """What one file holds, and the files that must stand beside it, with the bytes that each must have."""

    facts: ModelFacts
    external: dict[str, int]


def read(cursor: Cursor) -> Header:
    """Return what the file says.

    Raises:
        ArtifactInvalidError: it is broken, or wants to read files that are not its own.
    """
    seen = _Seen()
    _visit(cursor, "model", cursor.size, seen, 0)
    if not seen.graphs or not seen.ir_version:
        raise ArtifactInvalidError("The artifact is no ONNX file: it has no graph.")
    main = seen.bytes_of_type.most_common(1)
    facts = ModelFacts(
        format="onnx",
        name=seen.name,
        parameters=seen.parameters,
        quantisation=main[0][0] if main else "",
        weights_bytes=sum(seen.bytes_of_type.values()),
        # Older files repeat their weights as inputs, which nobody has to give.
        inputs=tuple(one for one in seen.inputs if one.name not in seen.initializers)[:_ENDS_MAX],
        outputs=tuple(seen.outputs),
    )
    return Header(facts, seen.external)


def _visit(cursor: Cursor, message: str, end: int, seen: _Seen, depth: int) -> None:
    if depth > DEPTH_MAX:
        raise ArtifactInvalidError(f"The ONNX file has graphs in graphs, deeper than {DEPTH_MAX} levels.")
    nested = _NESTED[message]
    for number, wire, value in fields(cursor, end):
        if cursor.steps > STEPS_MAX:
            raise ArtifactInvalidError(f"The ONNX file has a graph of more than {STEPS_MAX:,} fields.")
        if wire == VARINT:
            if message == "model" and number == 1:
                seen.ir_version = value
            continue
        if wire != BYTES:
            continue
        inner = nested.get(number, "")
        if inner == "tensor":
            seen.initializers.add(_tensor(cursor, cursor.at + value, seen))
        elif inner and not (inner == "node" and _is_plain_node(cursor, value)):
            seen.graphs += inner == "graph"
            _visit(cursor, inner, cursor.at + value, seen, depth + 1)
        elif message == "graph":
            _about_graph(cursor, number, value, seen, is_main=depth == 1)


def _is_plain_node(cursor: Cursor, length: int) -> bool:
    """Say whether a node has nothing to look at: no tensor outside of the file, which says ``location``.

    Most of a file's fields are in its nodes, and walking them would take most of the time. A larger one is walked,
    since it holds tensors or graphs.
    """
    if length > _SMALL_NODE_BYTES:
        return False
    window, at = cursor.window(length)
    return window.find(b"location", at, at + length) < 0


def _about_graph(cursor: Cursor, number: int, length: int, seen: _Seen, *, is_main: bool) -> None:
    """Note what a graph is called, and what goes into the main one and comes out of it."""
    if number == 2 and not seen.name:
        seen.name = plain_text(cursor.take(min(length, 1024)), 256)
    elif is_main and number == _INPUT:
        _end(cursor, cursor.at + length, seen.inputs, TENSORS_MAX)  # weights among them are sorted out later
    elif is_main and number == _OUTPUT:
        _end(cursor, cursor.at + length, seen.outputs, _ENDS_MAX)


def _end(cursor: Cursor, end: int, found: list[TensorFacts], limit: int) -> None:
    """Note an input or an output."""
    if len(found) >= limit:
        return
    name = datatype = ""
    shape: tuple[int, ...] = ()
    for number, wire, value in fields(cursor, end):
        if wire != BYTES:
            continue
        if number == 1:
            name = plain_text(cursor.take(min(value, 256)), 128)
        elif number == 2:
            datatype, shape = _tensor_type(cursor, cursor.at + value)
    found.append(TensorFacts(name, datatype, shape))


def _tensor_type(cursor: Cursor, end: int) -> tuple[str, tuple[int, ...]]:
    """Return the type and the shape of a TypeProto; of what is no tensor neither."""
    kind, sizes = "", []
    for number, wire, length in fields(cursor, end):
        if number != 1 or wire != BYTES:
            continue
        for part, part_wire, value in fields(cursor, cursor.at + length):
            if part == 1 and part_wire == VARINT:
                kind = _TYPES.get(value, ("", 0))[0]
            elif part == 2 and part_wire == BYTES:
                sizes = _sizes(cursor, cursor.at + value)
    return _PROTOCOL_TYPES.get(kind, kind), tuple(sizes)


def _sizes(cursor: Cursor, end: int) -> list[int]:
    """Return the sizes of a shape, -1 for one that has only a name or none."""
    sizes: list[int] = []
    for number, wire, length in fields(cursor, end):
        if number != 1 or wire != BYTES or len(sizes) >= _DIMS_MAX:
            continue
        size = -1
        for part, part_wire, value in fields(cursor, cursor.at + length):
            if part == 1 and part_wire == VARINT and value < ELEMENTS_MAX:
                size = value
        sizes.append(size)
    return sizes


def _tensor(cursor: Cursor, end: int, seen: _Seen) -> str:
    seen.tensors += 1
    if seen.tensors > TENSORS_MAX:
        raise ArtifactInvalidError(f"The ONNX file has more than {TENSORS_MAX:,} tensors.")
    tensor = _read_tensor(cursor, end)
    if len(tensor.dims) > _DIMS_MAX or any(dim >= ELEMENTS_MAX for dim in tensor.dims):
        raise _bad(tensor, "has an impossible shape")
    elements = prod(tensor.dims)
    if elements >= ELEMENTS_MAX:
        raise _bad(tensor, "has an impossible shape")
    if tensor.kind not in _TYPES:
        raise _bad(tensor, f"has the unknown type {tensor.kind}")
    name, bits = _TYPES[tensor.kind]
    size = -(-elements * bits // 8)
    if tensor.raw_bytes is not None and bits and tensor.raw_bytes != size:
        raise _bad(tensor, f"has {tensor.raw_bytes:,} bytes, but its shape needs {size:,}")
    if tensor.is_external or tensor.places:
        _external(tensor, size, seen)
    seen.parameters += elements
    seen.bytes_of_type[name] += size
    return tensor.name


def _read_tensor(cursor: Cursor, end: int) -> _Tensor:
    tensor = _Tensor()
    for number, wire, value in fields(cursor, end):
        if number == 1:
            tensor.dims += packed(cursor, value) if wire == BYTES else [value]
            if len(tensor.dims) > _DIMS_MAX:
                break
        elif number == 2 and wire == VARINT:
            tensor.kind = value
        elif number == 8 and wire == BYTES:
            tensor.name = plain_text(cursor.take(min(value, 256)), 128)
        elif number == 9 and wire == BYTES:
            tensor.raw_bytes = value
        elif number == 13 and wire == BYTES:
            key, text = _entry(cursor, cursor.at + value)
            if key in tensor.places:
                raise _bad(tensor, f"says twice what its '{key}' is")
            tensor.places[key] = text
        elif number == 14 and wire == VARINT:
            tensor.is_external = value == 1
    return tensor


def _entry(cursor: Cursor, end: int) -> tuple[str, str]:
    key = text = ""
    for number, wire, value in fields(cursor, end):
        if wire != BYTES or number not in (1, 2):
            continue
        if value > 4096:
            raise ArtifactInvalidError("The ONNX file has a tensor with a path or an offset of more than 4,096 bytes.")
        content = cursor.take(value).decode("utf-8", "replace")
        key, text = (content, text) if number == 1 else (key, content)
    return key, text


def _external(tensor: _Tensor, size: int, seen: _Seen) -> None:
    location = tensor.places.get("location", "")
    if not is_plain_path(location):
        raise _bad(
            tensor, f"is in the file '{plain_text(location.encode(), 200)}', which is no plain path beside the model"
        )
    numbers = [tensor.places.get(key, "0") for key in ("offset", "length")]
    if not all(len(text) < 20 and text.isascii() and text.isdecimal() for text in numbers):
        raise _bad(tensor, "has a place that is no number")
    offset, length = map(int, numbers)
    if length and length != size:
        raise _bad(tensor, f"has {length:,} bytes, but its shape needs {size:,}")
    seen.external[location] = max(seen.external.get(location, 0), offset + size)


def is_plain_path(path: str) -> bool:
    """Say whether ``path`` is relative, stays in its folder and means the same on every system."""
    parts = path.split("/")
    return path.isprintable() and not any(part in ("", ".", "..") or "\\" in part or ":" in part for part in parts)


def _bad(tensor: _Tensor, what: str) -> ArtifactInvalidError:
    return ArtifactInvalidError(f"The ONNX file has the tensor '{tensor.name}' that {what}.")
