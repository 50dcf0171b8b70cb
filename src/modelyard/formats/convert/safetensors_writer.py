"""Safetensors files written as a stream, in bfloat16: memory holds some rows and never a model.

The format is a JSON header and then the numbers, so a writer is small; the
library's own wants all tensors in memory, and knows no bfloat16 without torch.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    import numpy as np

SHARD_BYTES = 5 * 10**9
"""As Hugging Face's own libraries cut."""
_ALIGNMENT = 8
_ONE_FILE = "model.safetensors"


class Tensor(NamedTuple):
    """What is to be written: its rows are asked for when it is its turn."""

    name: str
    shape: tuple[int, ...]
    rows: Callable[[], Iterable["np.ndarray"]]

    @property
    def size(self) -> int:
        """Bytes in 16 bits."""
        size = 2
        for length in self.shape:
            size *= length
        return size


def write(tensors: Sequence[Tensor], folder: Path, note: Callable[[int], None]) -> None:
    """Write ``tensors`` into ``folder``, with an index when they take several files; ``note`` hears of each write."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size
    if len(shards) == 1:
        _write_file(shards[0], folder / _ONE_FILE, note)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(shard, folder / name, note)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.size for tensor in tensors)}, "weight_map": weight_map}
    (folder / f"{_ONE_FILE}.index.json").write_bytes(msgspec.json.format(msgspec.json.encode(index)))


def bfloat16(numbers: "np.ndarray") -> "np.ndarray":
    """Return 32-bit floats as the 16 bits of bfloat16, rounded to the nearest (ties to even)."""
    import numpy as np

    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # A NaN whose bits would be rounded away must stay one.
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded.astype(np.uint16))


def _write_file(tensors: Sequence[Tensor], file: Path, note: Callable[[int], None]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": (at, at + tensor.size)}
        at += tensor.size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            written = 0
            for rows in tensor.rows():
                content = bfloat16(rows).tobytes()
                out.write(content)
                written += len(content)
                note(len(content))
            assert written == tensor.size, f"{tensor.name} has other rows than its shape says"
