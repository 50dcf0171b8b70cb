"""Writing GGUF: as much of it as an adapter needs."""

import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

from modelyard.formats.ggml import BLOCKS

_VERSION = 3
_ALIGNMENT = 32
_FLOAT, _STRING = 6, 8


class Tensor(NamedTuple):
    """A tensor to write. ``dims`` as GGUF has them: the fastest first; ``kind`` is a ``ggml_type``."""

    name: str
    dims: tuple[int, ...]
    kind: int
    content: bytes


def write_gguf(file: Path, keys: Mapping[str, str | float], tensors: Iterable[Tensor]) -> None:
    """Write a GGUF file that is there whole or not at all."""
    tensors = list(tensors)
    head = [struct.pack("<4sIQQ", b"GGUF", _VERSION, len(tensors), len(keys))]
    head += [_text(key) + _value(value) for key, value in keys.items()]
    at = 0
    for tensor in tensors:
        _, block, block_bytes = BLOCKS[tensor.kind]
        assert len(tensor.content) == prod(tensor.dims) // block * block_bytes, tensor.name
        count = len(tensor.dims)
        head.append(_text(tensor.name) + struct.pack(f"<I{count}QIQ", count, *tensor.dims, tensor.kind, at))
        at += len(tensor.content) + _padding(len(tensor.content))
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as out:
        written = out.write(b"".join(head))
        out.write(bytes(_padding(written)))
        for tensor in tensors:
            out.write(tensor.content)
            out.write(bytes(_padding(len(tensor.content))))
    part.replace(file)


def _text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: str | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    return struct.pack("<If", _FLOAT, value)


def _padding(length: int) -> int:
    return -length % _ALIGNMENT
