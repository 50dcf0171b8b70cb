"""S9: headers that lie are refused before any engine sees the file, each with one line that says what is wrong."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.support import models
from tests.support.models import F32, I32, STRING, Tensor, Typed, gguf, llama, with_header

from modelyard.formats import ArtifactInvalidError
from modelyard.formats.folder import facts_of

LORA = {"general.type": "adapter", "adapter.type": "lora"}
NOTHING = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)


def raw_keys(*pairs: tuple[str, bytes]) -> bytes:
    """Return a GGUF file of one tensor whose keys have these bytes for type and value."""
    keys = b"".join(models.text(key) + value for key, value in pairs)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + keys + bytes(4096)


GGUF_ATTACKS: dict[str, tuple[bytes, str]] = {
    "2^63 keys": (gguf(llama(), counts=(1, 2**63)), "keys"),
    "2^61 tensors": (gguf(llama(), counts=(2**61, 13)), "tensors"),
    "more keys than there are": (gguf(llama(), counts=(1, 2000)), "truncated|key|type"),
    "more tensors than there are": (gguf(llama(), counts=(8000, 13)), "truncated|tensor"),
    "no tensors": (gguf(llama(), []), "0 tensors"),
    "a key of 2^64-1 bytes": (NOTHING + struct.pack("<Q", 2**64 - 1) + bytes(4096), "18,446,744,073,709,551,615"),
    "a text of 2^64-1 bytes": (raw_keys(("general.name", struct.pack("<IQ", STRING, 2**64 - 1))), "truncated"),
    "a text longer than the file": (raw_keys(("general.name", struct.pack("<IQ", STRING, 5000))), "truncated"),
    "an array of 2^61 strings": (raw_keys(("x", struct.pack("<IIQ", 9, STRING, 2**61))), "truncated"),
    "an array of 2^62 numbers": (raw_keys(("x", struct.pack("<IIQ", 9, 10, 2**62))), "truncated"),
    "an array of arrays": (raw_keys(("x", struct.pack("<IIQ", 9, 9, 1))), "array of the type 9"),
    "a token of 2^40 bytes": (
        raw_keys(("tokenizer.ggml.tokens", struct.pack("<IIQQ", 9, STRING, 1, 2**40))),
        "a text of 1,099,511,627,776 bytes",
    ),
    "a value of an unknown type": (raw_keys(("x", struct.pack("<I", 13))), "unknown type 13"),
    "a key twice": (gguf([*llama().items(), ("llama.block_count", 1)]), "twice"),
    "a key of control characters": (gguf(llama() | {"a\x1b[2J": 1}), "control characters"),
    "a dim of 2^42+1": (gguf(llama(), [Tensor("w", (2**42 + 1,))], room=64), "truncated"),
    "dims whose product overflows to 0": (gguf(llama(), [Tensor("w", (2**32, 2**32))], room=64), "impossible shape"),
    "dims whose product overflows to 32": (
        gguf(llama(), [Tensor("w", (2**62 + 8, 4))], room=128),
        "impossible shape",
    ),
    "a dim of 0": (gguf(llama(), [Tensor("w", (0,))]), "impossible shape"),
    "5 dims": (gguf(llama(), [Tensor("w", (2, 2, 2, 2, 2))]), "5 dimensions"),
    "an unknown tensor type": (gguf(llama(), [Tensor("w", (32,), 4)]), "unknown type 4"),
    "rows of half a block": (gguf(llama(), [Tensor("w", (48, 2), 2)]), "whole blocks of 32"),
    "the alignment 0x80000000": (gguf(llama(general__alignment=0x80000000)), "alignment"),
    "the alignment 0": (gguf(llama(general__alignment=0)), "alignment"),
    "the alignment 48": (gguf(llama(general__alignment=48)), "alignment"),
    "the alignment 8192": (gguf(llama(general__alignment=8192)), "alignment"),
    "an alignment that is text": (gguf(llama(general__alignment="32")), "wrong type"),
    "overlapping tensors": (gguf(llama(), [Tensor("a", (64,)), Tensor("b", (64,), offset=64)], room=512), "overlap"),
    "tensors out of order": (
        gguf(llama(), [Tensor("a", (8,), offset=256), Tensor("b", (8,), offset=0)], room=512),
        "out of order",
    ),
    "a tensor off its alignment": (gguf(llama(), [Tensor("a", (8,), offset=4)], room=64), "not aligned"),
    "a tensor behind the end": (gguf(llama(), [Tensor("a", (8,), offset=2**62)], room=64), "truncated"),
    "a tensor twice": (gguf(llama(), [Tensor("a"), Tensor("a")]), "twice"),
    "a tensor name of 300 bytes": (gguf(llama(), [Tensor("a" * 300)]), "300 bytes"),
    "513 layers": (gguf(llama(llama__block_count=513)), "wrong type or range"),
    "-1 layers": (gguf(llama(llama__block_count=Typed(I32, -1))), "wrong type or range"),
    "layers as text": (gguf(llama(llama__block_count="2")), "wrong type or range"),
    "layers as an array": (gguf(llama(llama__block_count=[2])), "wrong type or range"),
    "heads for 2,000 layers": (gguf(llama(llama__attention__head_count_kv=[1] * 2000)), "for 2000 layers"),
    "heads for another number of layers": (gguf(llama(llama__attention__head_count_kv=[1, 1, 1])), "2 layers, but 3"),
    "heads as texts": (gguf(llama(llama__attention__head_count=["4", "4"])), "wrong type|entries"),
    "tokens that are numbers": (gguf(llama(tokenizer__ggml__tokens=[1, 2, 3])), "array of the wrong type"),
    "scores that are texts": (gguf(llama(tokenizer__ggml__scores=["a", "b", "c"])), "array of the wrong type"),
    "types that are floats": (
        gguf(llama(tokenizer__ggml__token_type=Typed(9, (F32, [1.0, 1.0, 6.0])))),
        "array of the wrong type",
    ),
    "more scores than tokens": (gguf(llama(tokenizer__ggml__scores=[0.0] * 4)), "3 tokens, but 4"),
    "the byte token <0x-1>": (gguf(llama(tokenizer__ggml__tokens=["a", "b", "<0x-1>"])), "negative"),
    "the byte token <0xA->": (gguf(llama(tokenizer__ggml__tokens=["<0xA->", "b", "c"])), "negative"),
    "no architecture": (gguf({"general.name": "x"}), "no architecture"),
    "version 9": (gguf(llama(), version=9), "version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64), "big-endian"),
    "one part of several": (gguf(llama(split__count=3)), "one of 3 parts"),
    "half a file": (gguf(llama(), [Tensor("w", (4096,))])[:-8192], "truncated"),
    "a template as a number": (gguf(llama(tokenizer__chat_template=1)), "wrong type"),
}


def header(**changes: Any) -> bytes:
    """Return a header of safetensors of the tensor ``w``, with changes to it."""
    return json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}).encode()


ONE = '"dtype":"F32","shape":[2],"data_offsets":[0,8]'
SAFETENSORS_ATTACKS: dict[str, tuple[bytes, str]] = {
    "a header of 2^63 bytes": (struct.pack("<Q", 2**63) + b"{" + bytes(64), "no safetensors file"),
    "a header longer than the file": (struct.pack("<Q", 500) + header() + bytes(8), "truncated"),
    "a header of 100 MiB": (struct.pack("<Q", 100 << 20) + b"{" + bytes(200), "truncated"),
    "no tensors": (with_header(b"{}  "), "no tensors"),
    "no JSON": (with_header(b"{" + b"x" * 40), "bad header"),
    "JSON in JSON in JSON": (with_header(b'{"a":' + b"[" * 100_000), "bad header"),
    "the same tensor twice": (with_header(f'{{"w":{{{ONE}}},"w":{{{ONE}}}}}'.encode(), bytes(8)), "twice"),
    "the same field twice": (with_header(f'{{"w":{{{ONE},"shape":[2]}}}}'.encode(), bytes(8)), "twice"),
    "the same field twice, in escapes": (
        with_header(f'{{"w":{{{ONE},"\\u0064type":"F32"}},"v":{{{ONE}}}}}'.encode(), bytes(8)),
        "overlap|twice",
    ),
    "the same metadata twice": (
        with_header(f'{{"__metadata__":{{"a":"b"}},"__metadata__":{{"a":"c"}},"w":{{{ONE}}}}}'.encode(), bytes(8)),
        "twice",
    ),
    "the same key of metadata twice": (
        with_header(f'{{"__metadata__":{{"a":"b","a":"c"}},"w":{{{ONE}}}}}'.encode(), bytes(8)),
        "twice",
    ),
    "metadata that is no text": (
        with_header(f'{{"__metadata__":{{"a":{{}}}},"w":{{{ONE}}}}}'.encode(), bytes(8)),
        "text",
    ),
    "a field that nobody knows": (with_header(header(code="import os"), bytes(8)), "unknown field"),
    "overlapping tensors": (
        with_header(f'{{"a":{{{ONE}}},"b":{{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}}}'.encode(), bytes(12)),
        "overlap",
    ),
    "a gap": (with_header(header(data_offsets=[8, 16]), bytes(16)), "gap"),
    "offsets backwards": (with_header(header(data_offsets=[8, 0]), bytes(8)), "do not fit"),
    "negative offsets": (with_header(header(data_offsets=[-8, 0]), bytes(8)), "gap"),
    "offsets behind the end": (with_header(header(shape=[2**30], data_offsets=[0, 2**32]), bytes(8)), "truncated"),
    "bytes behind the last tensor": (with_header(header(), bytes(8) + b"PK\x03\x04 a zip"), "behind its last"),
    "a shape that does not fit": (with_header(header(shape=[3]), bytes(8)), "do not fit"),
    "a shape that overflows to 2": (with_header(header(shape=[2**63 + 1, 2]), bytes(8)), "impossible|bad header"),
    "a negative dim": (with_header(header(shape=[-2, -1]), bytes(8)), "impossible"),
    "1,000 dims": (with_header(header(shape=[1] * 1000), bytes(8)), "impossible"),
    "an unknown type": (with_header(header(dtype="Q9"), bytes(8)), "unknown type 'Q9'"),
    "NaN for a number": (
        with_header(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)),
        "bad header",
    ),
    "half a file": (with_header(header(shape=[1024], data_offsets=[0, 4096]), bytes(100)), "truncated"),
}


def one_tensor(**changes: Any) -> bytes:
    return models.onnx(models.onnx_tensor(**{"name": "w", "dims": [2], "raw": bytes(8)} | changes))


def nested(levels: int) -> bytes:
    """Return an ONNX file with graphs in attributes of nodes in graphs, and a tensor outside in the innermost."""
    graph = models.field(5, models.onnx_tensor("deep", [2], location="../secret"))
    for _ in range(levels):
        graph = models.field(1, models.field(4, "If") + models.field(5, models.field(6, graph)))
    return models.field(1, 9) + models.field(2, "x") + models.field(7, graph)


ONNX_ATTACKS: dict[str, tuple[bytes, str]] = {
    "a dim of 2^63": (one_tensor(dims=[2**63]), "impossible shape"),
    "dims whose product overflows": (one_tensor(dims=[2**32, 2**32]), "impossible shape"),
    "a shape that does not fit its bytes": (one_tensor(dims=[3]), "its shape needs 12"),
    "an unknown type": (one_tensor(kind=99), "unknown type 99"),
    "1,000 dims": (one_tensor(dims=[1] * 1000, raw=bytes(4)), "impossible shape"),
    "a field longer than the file": (models.onnx()[:-3] + b"\x3a\xff\xff\xff\xff\x0f", "truncated"),
    "a number without end": (b"\x08\x09\x12\x01x" + b"\xff" * 40, "broken"),
    "a field of the number 0": (b"\x08\x09\x12\x01x\x00\x00", "broken"),
    "a group, which is no longer read": (b"\x08\x09\x12\x01x\x0b\x0c", "broken"),
    "no graph": (b"\x08\x09\x12\x05tests", "no graph"),
    "graphs 40 levels deep": (nested(40), "deeper than 16|no plain path"),
    "a path out of the folder in an inner graph": (nested(3), "no plain path"),
    "half a file": (one_tensor()[:-12], "truncated|broken"),
}


@pytest.mark.parametrize("attack", [*GGUF_ATTACKS, *(f"safetensors: {name}" for name in SAFETENSORS_ATTACKS)])
def test_a_header_that_lies_is_refused(tmp_path: Path, attack: str) -> None:
    name = attack.removeprefix("safetensors: ")
    content, said = SAFETENSORS_ATTACKS[name] if name != attack else GGUF_ATTACKS[name]
    refused(tmp_path, content, said)


@pytest.mark.parametrize("attack", ONNX_ATTACKS)
def test_an_onnx_file_that_lies_is_refused(tmp_path: Path, attack: str) -> None:
    refused(tmp_path, *ONNX_ATTACKS[attack])


def refused(folder: Path, content: bytes, said: str) -> None:
    file = folder / "model"
    file.write_bytes(content)
    with pytest.raises(ArtifactInvalidError, match=said) as caught:
        facts_of({"model": file})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert caught.value.code == "artifact_invalid"


def test_what_is_attacked_here_is_fine_without_the_attack(tmp_path: Path) -> None:
    for content in (gguf(llama()), with_header(header(), bytes(8)), one_tensor()):
        file = tmp_path / "model"
        file.write_bytes(content)
        assert facts_of({"model": file}).weights_bytes > 0


def test_a_pipe_or_a_device_is_no_model(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ArtifactInvalidError, match="regular file"):
            facts_of({"model": path})
