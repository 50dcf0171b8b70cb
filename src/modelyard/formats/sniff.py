"""What kind of file it is, by its first bytes; names and extensions are never looked at."""

import re
from enum import StrEnum

from modelyard.formats.pickles import is_pickle

HEAD_BYTES = 8192


class Kind(StrEnum):
    """What a file can be. The value is what a person reads: "it is ..."."""

    GGUF = "a GGUF file"
    SAFETENSORS = "a safetensors file"
    ONNX = "an ONNX file"
    JSON = "JSON"
    TEXT = "text"
    SENTENCEPIECE = "a SentencePiece vocabulary"
    PICTURE = "a picture"
    PICKLE = "a pickle, which could run code"
    ZIP = "a zip file (PyTorch checkpoints are zip files with pickle inside)"
    ARCHIVE = "an archive"
    SCRIPT = "a script"
    PROGRAM = "a program"
    GGUF_BIG_ENDIAN = "a big-endian GGUF file"
    GGML = "an old GGML file from before GGUF"
    HDF5 = "an HDF5 file"
    NUMPY = "a NumPy array"
    WEB_PAGE = "a web page"
    LFS_POINTER = "a Git LFS pointer, not the file itself"
    EMPTY = "empty"
    UNKNOWN = "of an unknown kind"


WEIGHTS = frozenset({Kind.GGUF, Kind.SAFETENSORS, Kind.ONNX})
"""What an engine may be given."""
BESIDE = frozenset({Kind.JSON, Kind.TEXT, Kind.SENTENCEPIECE, Kind.PICTURE, Kind.EMPTY})
"""What may stand beside weights."""

_STARTS: tuple[tuple[bytes, Kind], ...] = (
    (b"GGUF", Kind.GGUF),
    (b"FUGG", Kind.GGUF_BIG_ENDIAN),
    (b"lmgg", Kind.GGML),
    (b"tjgg", Kind.GGML),
    (b"fmgg", Kind.GGML),
    (b"PK\x03\x04", Kind.ZIP),
    (b"PK\x05\x06", Kind.ZIP),
    (b"PK\x07\x08", Kind.ZIP),
    (b"\x1f\x8b", Kind.ARCHIVE),
    (b"BZh", Kind.ARCHIVE),
    (b"\xfd7zXZ\x00", Kind.ARCHIVE),
    (b"\x28\xb5\x2f\xfd", Kind.ARCHIVE),
    (b"7z\xbc\xaf\x27\x1c", Kind.ARCHIVE),
    (b"Rar!\x1a\x07", Kind.ARCHIVE),
    (b"\x04\x22\x4d\x18", Kind.ARCHIVE),
    (b"!<arch>\n", Kind.ARCHIVE),
    (b"070701", Kind.ARCHIVE),
    (b"\x89HDF\r\n\x1a\n", Kind.HDF5),
    (b"\x93NUMPY", Kind.NUMPY),
    (b"\x7fELF", Kind.PROGRAM),
    (b"MZ", Kind.PROGRAM),
    (b"\xfe\xed\xfa\xce", Kind.PROGRAM),
    (b"\xfe\xed\xfa\xcf", Kind.PROGRAM),
    (b"\xce\xfa\xed\xfe", Kind.PROGRAM),
    (b"\xcf\xfa\xed\xfe", Kind.PROGRAM),
    (b"\xca\xfe\xba\xbe", Kind.PROGRAM),
    (b"\x00asm", Kind.PROGRAM),
    (b"#!", Kind.SCRIPT),
    (b"version https://git-lfs", Kind.LFS_POINTER),
    (b"\x89PNG\r\n\x1a\n", Kind.PICTURE),
    (b"\xff\xd8\xff", Kind.PICTURE),
    (b"GIF8", Kind.PICTURE),
)
_TAR_AT = 257
_WEB_PAGE = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<!--.{0,512}?-->\s*)?<(?:!doctype|html|head|body|\?xml|script)", re.I | re.S
)
_PYTHON = re.compile(
    rb"^(?:import [a-zA-Z_][\w.]*(?: as \w+)?(?:, ?[\w.]+)*|from [a-zA-Z_.][\w.]* import \S.*"
    rb"|def \w+\(.*|class \w+[(:].*)\r?$",
    re.M,
)
_ONNX_NEXT_TAGS = frozenset({0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42, 0x72})


def kind_of(head: bytes, size: int) -> Kind:
    """Return the kind of a file of ``size`` bytes that begins with ``head`` (``HEAD_BYTES``, or all)."""
    if not head:
        return Kind.EMPTY
    for start, kind in _STARTS:
        if head.startswith(start):
            return kind
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar":
        return Kind.ARCHIVE
    if _is_safetensors(head):
        return Kind.SAFETENSORS
    if is_pickle(head):
        return Kind.PICKLE
    if len(head) > 2 and head[0] == 0x08 and 1 <= head[1] < 0x80 and head[2] in _ONNX_NEXT_TAGS:
        return Kind.ONNX
    if _is_sentencepiece(head):
        return Kind.SENTENCEPIECE
    return _kind_of_text(head, size)


def _is_safetensors(head: bytes) -> bool:
    """Eight bytes of length, then a JSON object. A length of nonsense is for the reader to refuse."""
    return len(head) > 9 and head[8:9] == b"{" and b"\0" in head[:8]


def _is_sentencepiece(head: bytes) -> bool:
    """A ``ModelProto``: pieces, each a message that begins with its text."""
    return len(head) > 4 and head[0] == 0x0A and head[2] == 0x0A and head[3] <= head[1] - 2


def _kind_of_text(head: bytes, size: int) -> Kind:
    try:
        # A character may be cut where the head ends.
        text = (
            head.decode("utf-8")
            if len(head) == size
            else head[: head.rfind(b"\n") + 1 or len(head) - 4].decode("utf-8")
        )
    except UnicodeDecodeError:
        return Kind.UNKNOWN
    if "\x00" in text:
        return Kind.UNKNOWN
    if _WEB_PAGE.match(head):
        return Kind.WEB_PAGE
    if text.lstrip("\ufeff \t\r\n")[:1] in ("{", "["):
        return Kind.JSON
    return Kind.SCRIPT if _PYTHON.search(_outside_fences(head)) else Kind.TEXT


def _outside_fences(head: bytes) -> bytes:
    """Return the text without what Markdown quotes: a README shows Python and is none."""
    return b"\n".join(head.split(b"```")[::2])
