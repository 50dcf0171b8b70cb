"""Deterministic unit vectors from a hash of the text: equal texts are equal, others are about orthogonal."""

import base64
import hashlib
import math
import struct


def vector_of(text: str, dimensions: int, keep: int) -> list[float]:
    """Return the first ``keep`` of ``dimensions`` values, scaled to length 1 (float32), as Matryoshka models do."""
    stream = hashlib.shake_256(text.encode("utf-8", "replace")).digest(dimensions * 2)
    values = struct.unpack(f"<{dimensions}h", stream)[:keep]
    length = math.sqrt(sum(value * value for value in values)) or 1.0
    return list(struct.unpack(f"<{keep}f", struct.pack(f"<{keep}f", *(value / length for value in values))))


def as_base64(vector: list[float]) -> str:
    """Return little-endian float32 bytes in base64, as OpenAI's SDKs ask for by default."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
