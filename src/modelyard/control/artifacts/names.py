"""Which files of a model are taken, by their names; and what their first bytes give away.

Weights in formats that hold numbers and no code, and the texts beside them.
What could run code (``*.py``, pickles) is never taken, whatever its name: the
first bytes decide in the end.
"""

import re
from pathlib import PurePosixPath

FILES_MAX = 1000
HEAD_BYTES = 4096
"""What is looked at of a file before it is fetched."""
WEIGHTS = (".safetensors", ".gguf", ".onnx")

_TEXTS = (".json", ".jinja", ".tiktoken", ".onnx_data", ".txt", ".model")
_NAMED = frozenset({"vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"})
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,127}")
_DEPTH_MAX = 8
_FOREIGN = {
    b"PK\x03\x04": "a zip file (PyTorch checkpoints are zip files with pickle inside)",
    b"PK\x05\x06": "a zip file",
    b"\x80\x02": "a pickle, which could run code",
    b"\x80\x03": "a pickle, which could run code",
    b"\x80\x04": "a pickle, which could run code",
    b"\x80\x05": "a pickle, which could run code",
    b"\x1f\x8b": "a gzip archive",
    b"\xfd7zXZ": "an xz archive",
    b"BZh": "a bzip2 archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x89HDF": "an HDF5 file",
    b"\x7fELF": "a program",
    b"MZ": "a program",
    b"#!": "a script",
    b"<htm": "a web page",
    b"<HTM": "a web page",
    b"<!DO": "a web page",
    b"<!do": "a web page",
    b"<?xml": "an XML document",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself",
}
_PICKLE_0 = re.compile(rb"[\(\]\}]?[lpd]?c[A-Za-z_][\w.]*\n[A-Za-z_]\w*\n|\(dp\d|\(lp\d")
"""The oldest pickles are text: a global, or a list or dict that is put away."""


def foreign(head: bytes) -> str:
    """Return what ``head`` is the beginning of when that is nothing a model may consist of, else ""."""
    for start, kind in _FOREIGN.items():
        if head.startswith(start):
            return kind
    if head[257:262] == b"ustar":
        return "a tar archive"
    if _PICKLE_0.match(head):
        return "a pickle, which could run code"
    return ""


def is_weights(path: str) -> bool:
    """Say whether a file of this name holds weights."""
    return path.lower().endswith(WEIGHTS)


def is_taken(path: str) -> bool:
    """Say whether a file of a model's folder is taken: weights and the texts that go with them."""
    name = PurePosixPath(path).name
    if not is_plain(path) or name.lower().startswith(("readme", "license", "requirements")):
        return False
    if name.endswith((".txt", ".model")):
        return name in _NAMED or name.startswith(("tokenizer", "vocab", "merges"))
    return name.endswith((*WEIGHTS, *_TEXTS))


def is_plain(path: str) -> bool:
    """Say whether ``path`` is relative and holds nothing that could mean more than a name."""
    segments = path.split("/")
    return len(segments) <= _DEPTH_MAX and all(_SEGMENT.fullmatch(segment) for segment in segments)
