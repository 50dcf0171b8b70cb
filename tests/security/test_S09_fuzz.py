"""S9: whatever the bytes, a reader gives facts or one clean refusal, and its work is bounded by the file.

Work is counted, not timed: values looked at and bytes read. ``tools/reader_bounds.py`` prints the time and the memory.
"""

import contextlib
import io
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import models
from tests.support.models import STRING, Tensor, Typed, gguf, llama

from modelyard.domain.facts import ModelFacts
from modelyard.formats import ArtifactInvalidError, cursor, huggingface, onnx, safetensors
from modelyard.formats import gguf as gguf_format
from modelyard.formats.cursor import Cursor
from modelyard.formats.folder import facts_of
from modelyard.formats.sniff import kind_of

MUTATIONS = 10_000
"""Of each format."""
INTERESTING = [0, 1, 2, 7, 8, 9, 31, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**63, 2**64 - 1]
TENSORS = [Tensor("token_embd.weight", (64, 3)), Tensor("blk.0.attn_q.weight", (64, 2), 8), Tensor("x.lora_a", (32, 4))]
SPARSE = Typed(9, (STRING, ["word"] * 40))

SEEDS: dict[str, tuple[bytes, Callable[[Cursor], ModelFacts]]] = {
    "gguf": (gguf(llama(x=SPARSE, llama__attention__head_count_kv=[2, 0]), TENSORS, room=1900), gguf_format.read),
    "safetensors": (
        models.safetensors(
            {f"model.layers.{n}.weight": ("F16", [n + 1, 4], bytes(8 * n + 8)) for n in range(6)}, {"format": "pt"}
        ),
        lambda cursor: safetensors.read(cursor).facts,
    ),
    "onnx": (
        models.onnx(
            models.onnx_tensor("a", [4, 4], bytes(64)),
            models.onnx_tensor("b", [2], location="weights.bin", offset="0", length="8"),
            nodes=[
                models.field(4, "If") + models.field(5, models.field(6, models.field(5, models.onnx_tensor("c", [1])))),
                models.field(1, "a") + models.field(2, "y") + models.field(4, "Relu"),
            ],
        ),
        lambda cursor: onnx.read(cursor).facts,
    ),
}  # fmt: skip


def mutated(seed: bytes, chance: random.Random) -> bytes:
    content = bytearray(seed)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        at = chance.randrange(len(content) or 1)
        kind = chance.randrange(8)
        if kind <= 1 and content:
            content[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            content[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 3:
            content[at : at + 8] = struct.pack("<Q", chance.choice(INTERESTING))
        elif kind == 4:
            content[at : at + 4] = struct.pack("<I", chance.choice(INTERESTING) & 0xFFFF_FFFF)
        elif kind == 5:
            del content[at : at + chance.randrange(1, 64)]
        elif kind == 6:
            content[at:at] = content[chance.randrange(len(content) or 1) :][: chance.randrange(1, 64)]
        else:
            del content[at:]
    return bytes(content)


@pytest.mark.parametrize("name", SEEDS)
def test_mutations_give_facts_or_a_clean_refusal_within_bounded_work(name: str) -> None:
    seed, read = SEEDS[name]
    read(Cursor(io.BytesIO(seed), len(seed)))  # what is mutated is valid
    chance = random.Random(f"modelyard {name}")
    taken = 0
    for number in range(MUTATIONS):
        content = mutated(seed, chance)
        kind_of(content, len(content))
        place = Cursor(io.BytesIO(content), len(content))
        try:
            facts = read(place)
        except ArtifactInvalidError:
            pass  # ``ArtifactInvalidError`` itself keeps to one line
        else:
            taken += 1
            assert facts.format == name, number
            assert 0 <= facts.weights_bytes < 2**52, number
            assert 0 <= facts.kv_bytes_per_token < 2**63, number
        assert place.steps <= len(content), (number, place)
        assert place.bytes_read <= 8 * len(content), (number, place)
    assert 0 < taken < MUTATIONS, "some are harmless, and some are not"


def test_mutated_configurations_give_facts_or_a_clean_refusal() -> None:
    shape = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    windows = {"layer_types": ["sliding_attention"] * 4, "sliding_window": 16}
    latent = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "text_config": {"hidden_size": 8}}
    seeds = [shape | windows, latent | {"quantization_config": {"quant_method": "awq"}}]
    chance = random.Random("modelyard config")
    for number in range(2000):
        content = mutated(json.dumps(seeds[number % 2]).encode(), chance)
        try:
            facts = huggingface.facts_from({"config.json": content, "tokenizer_config.json": b"{}"})
            huggingface.named_code(content, "config.json")
        except ArtifactInvalidError:
            continue
        assert 0 <= facts.kv_bytes_per_token < 2**63


def hostile(folder: Path) -> Iterator[tuple[str, Path]]:
    """Give files that are made to take long or much memory; they are sparse, so that they cost no disk."""

    def sparse(name: str, head: bytes, size: int) -> Path:
        file = folder / name
        with file.open("wb") as writer:
            writer.write(head)
            writer.truncate(size)
        return file

    def keys(*pairs: tuple[str, bytes]) -> bytes:
        body = b"".join(models.text(key) + value for key, value in pairs)
        return b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + body

    strings = struct.pack("<IIQ", 9, STRING, 2**36)
    yield "2^36 empty strings", sparse("a", keys(("tokenizer.ggml.tokens", strings)), 2**40)
    fitting = struct.pack("<IIQ", 9, STRING, 790_000)
    yield "790,000 empty strings", sparse("p", keys(("tokenizer.ggml.tokens", fitting)), 2**23)
    long_ones = struct.pack("<IIQ", 9, STRING, 500_000) + (struct.pack("<Q", 1000) + bytes(1000)) * 500
    yield "strings that fill the budget", sparse("b", keys(("x", long_ones)), 2**33)
    yield (
        "a template of 4 GiB",
        sparse("c", keys(("tokenizer.chat_template", struct.pack("<IQ", STRING, 2**32))), 2**33),
    )
    yield "a name of 4 GiB", sparse("d", keys(("general.name", struct.pack("<IQ", STRING, 2**32))), 2**33)
    yield "2^32 heads", sparse("e", keys(("llama.attention.head_count", struct.pack("<IIQ", 9, 4, 2**32))), 2**36)
    many = [(f"key.{number:04}.{'k' * 1000}", struct.pack("<IQ", STRING, 0)) for number in range(2048)]
    yield "2,048 long keys", sparse("f", keys(*many), 2**24)
    names = [Tensor(f"{number:05}" + "t" * 240, (1,), 24, 0) for number in range(8192)]
    yield "8,192 tensors", sparse("g", gguf(llama(), names, room=0), 2**24)
    entries = ",".join(f'"{n}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for n in range(65_536))
    yield "65,536 tensors", sparse("h", models.with_header(f"{{{entries}}}".encode()), 2**23)
    tiny = b"{" + b",".join(b'"%x":0' % number for number in range(400_000)) + b"}"
    yield "400,000 tiny entries", sparse("i", models.with_header(tiny), 2**24)
    yield "a header of 1 GiB", sparse("j", struct.pack("<Q", 2**30) + b'{"', 2**31)
    yield "a header of braces", sparse("k", models.with_header(b'{"__metadata__":' + b"{" * 8_000_000), 2**23)
    yield "300,000 fields", sparse("l", b"\x08\x09\x12\x00" + b"\x08\x01" * 300_000, 2**20)
    node = models.field(1, b"\x00" * 4)
    yield "300,000 nodes", sparse("m", models.onnx(nodes=[node] * 300_000), 2_800_000)
    tensor = models.onnx_tensor("", [1], b"1234")
    yield "60,000 tensors of ONNX", sparse("n", models.onnx(*[tensor] * 60_000), 900_000)
    jumps = models.field(1, 1) + models.field(1, 2**14) + models.field(2, 3) + models.field(9, bytes(2**14))
    yield "jumps", sparse("o", models.onnx(*[jumps] * 4000), 2**26 + 2**21)


HOSTILE = 16


def test_files_that_are_made_to_take_long_are_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Cursor] = []

    class Watched(Cursor):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            places.append(self)

    monkeypatch.setattr(cursor, "Cursor", Watched)
    names = []
    for name, file in hostile(tmp_path):
        with contextlib.suppress(ArtifactInvalidError):
            facts_of({"model": file})
        names.append(name)
        for place in places:
            assert place.steps <= cursor.STEPS_MAX, (name, place)
            assert place.bytes_read <= cursor.BYTES_MAX, (name, place)
        places.clear()
        file.unlink()
    assert len(names) == HOSTILE
