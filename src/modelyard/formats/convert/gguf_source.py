"""A GGUF file's keys and weights in numpy, by llama.cpp's own package ``gguf``.

Our bounded reader goes through the header first (``formats/gguf.py``): what
reaches the package is a file that it found to be sound.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.formats import gguf as headers
from modelyard.formats.convert import ConvertError
from modelyard.formats.cursor import opened

if TYPE_CHECKING:
    import numpy as np

_CHUNK_BYTES = 64 * 1024 * 1024
"""Of 32-bit numbers in memory at once, whatever the size of a tensor."""


class GgufSource:
    """An open GGUF file. Shapes are numpy's, rows first: the other way round than the file has them."""

    def __init__(self, file: Path) -> None:
        with opened(file, "GGUF file") as cursor:
            self.facts = headers.read(cursor)
        from gguf import GGUFReader

        reader = GGUFReader(file)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.get("general.architecture"))

    @property
    def names(self) -> list[str]:
        """The names of its tensors, in the order of the file."""
        return list(self._tensors)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def own(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of its architecture, like ``block_count``."""
        return self.get(f"{self.architecture}.{key}", default)

    def number(self, key: str) -> int:
        """Return the value of a key of its architecture, which must be there.

        Raises:
            ConvertError: it is not, or differs between layers.
        """
        value = self.own(key)
        if not isinstance(value, int):
            raise ConvertError(f"The GGUF file has no single number '{self.architecture}.{key}', which a model needs.")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def size(self, name: str) -> int:
        """Return the bytes of a tensor in the file."""
        return int(self._tensors[name].n_bytes)

    def rows(self, name: str, order: "np.ndarray | None" = None) -> Iterator["np.ndarray"]:
        """Yield a tensor's numbers as 32-bit floats, some rows at a time; ``order``: which row comes when.

        Raises:
            ConvertError: nobody wrote down how to unpack its quantisation.
        """
        import numpy as np
        from gguf import dequantize

        tensor = self._tensors[name]
        shape = self.shape(name)
        packed = tensor.data if tensor.data.ndim > 1 else tensor.data.reshape(1, -1)
        step = max(1, _CHUNK_BYTES // (4 * shape[-1]))
        for start in range(0, len(packed), step):
            some = packed[start : start + step] if order is None else packed[order[start : start + step]]
            try:
                yield np.asarray(dequantize(some, tensor.tensor_type), np.float32)
            except NotImplementedError as error:
                kind = tensor.tensor_type.name
                raise ConvertError(
                    f"The GGUF file has the tensor '{name}' in {kind}, which cannot be unpacked."
                ) from error
