"""Model files written byte by byte: small, valid, and easily made bad."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_FORMS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    U32: "<I",
    I32: "<i",
    F32: "<f",
    BOOL: "<?",
    U64: "<Q",
    11: "<q",
    12: "<d",
}


class Typed(NamedTuple):
    """A value of GGUF of a type that Python does not tell."""

    kind: int
    value: Any


class Tensor(NamedTuple):
    """A tensor of GGUF: F32 without more, and where its type's size leads to."""

    name: str
    dims: tuple[int, ...] = (32,)
    kind: int = 0
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    """Return a string as GGUF writes it."""
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def typed(value: Any) -> bytes:
    """Return type and value of a key of GGUF."""
    kind, inner = value if isinstance(value, Typed) else (_kind_of(value), value)
    return struct.pack("<I", kind) + _value(kind, inner)


def gguf(
    keys: Mapping[str, Any] | Sequence[tuple[str, Any]],
    tensors: Sequence[Tensor] = (Tensor("token_embd.weight"),),
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    room: int | None = None,
) -> bytes:
    """Return a GGUF file; ``counts`` of tensors and keys may lie, ``room`` is how many bytes of tensors there are."""
    pairs = list(keys.items()) if isinstance(keys, Mapping) else list(keys)
    alignment = dict(pairs).get("general.alignment", 32)
    step = alignment if isinstance(alignment, int) and 0 < alignment <= 4096 else 32
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(pairs))))
    head += b"".join(text(key) + typed(value) for key, value in pairs)
    at = 0
    for tensor in tensors:
        offset = at if tensor.offset is None else tensor.offset
        head += text(tensor.name) + struct.pack(
            f"<I{len(tensor.dims)}QIQ", len(tensor.dims), *tensor.dims, tensor.kind, offset
        )
        size = 4
        for dim in tensor.dims:
            size *= dim
        at = offset + -(-size // step) * step
    return head + bytes(-len(head) % step) + bytes(at if room is None else room)


def llama(**changes: Any) -> dict[str, Any]:
    """Return the keys of a small Llama: 2 layers, 4 heads, 2 KV heads of 16; a name with ``__`` for each dot."""
    keys = {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "general.license": "mit",
        "general.file_type": 0,
        "llama.block_count": 2,
        "llama.context_length": 1024,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "<0x0A>"],
        "tokenizer.ggml.token_type": Typed(ARRAY, (I32, [1, 1, 6])),
        "tokenizer.chat_template": "{{ messages }}",
    }
    return keys | {name.replace("__", "."): value for name, value in changes.items()}


def tiny_gguf(file: Path, **changes: Any) -> Path:
    """Write a valid GGUF file, which says that it is a small Llama, and return it."""
    file.write_bytes(gguf(llama(**changes)))
    return file


def safetensors(
    tensors: Mapping[str, tuple[str, list[int], bytes]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return a safetensors file: dtype, shape and content by name."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
    return with_header(json.dumps(header).encode(), b"".join(content for _, _, content in tensors.values()))


def with_header(header: bytes, content: bytes = b"") -> bytes:
    """Return a safetensors file with this header, whatever it says."""
    return struct.pack("<Q", len(header)) + header + content


def varint(value: int) -> bytes:
    """Return a number as protocol buffers write it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes | str) -> bytes:
    """Return a field of a protocol buffer."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def onnx_tensor(name: str, dims: Sequence[int], raw: bytes | None = None, *, kind: int = 1, **places: str) -> bytes:
    """Return a TensorProto; ``places`` are where it is outside of the file: location, offset, length."""
    out = b"".join(field(1, dim) for dim in dims) + field(2, kind) + field(8, name)
    if raw is not None:
        out += field(9, raw)
    for key, value in places.items():
        out += field(13, field(1, key) + field(2, value))
    return out + (field(14, 1) if places else b"")


def onnx(*tensors: bytes, nodes: Sequence[bytes] = (), name: str = "tiny") -> bytes:
    """Return an ONNX file with these initializers and nodes."""
    graph = b"".join(field(1, node) for node in nodes) + field(2, name) + b"".join(field(5, one) for one in tensors)
    return field(1, 9) + field(2, "tests") + field(7, graph) + field(8, field(2, 17))


def _kind_of(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return U32
    if isinstance(value, float):
        return F32
    return ARRAY if isinstance(value, list) else STRING


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        inner, items = value if isinstance(value, tuple) else (_kind_of(value[0]) if value else U32, value)
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack(_FORMS[kind], value)
