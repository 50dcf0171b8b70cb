"""PEFT folders become llama.cpp's adapters: the same product under the base's names, or a refusal that says why."""

import json
import struct
from array import array
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import Tensor, gguf, llama, safetensors
from tests.support.peft import stored

from modelyard.engines.llamacpp.adapters import Adapter, AdapterMissingError, Base, admit, read_base
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.cursor import opened
from modelyard.formats.gguf import read_shapes

HEADS, KV_HEADS, HEAD, EMBEDDING, FEED, RANK = 4, 2, 16, 64, 96, 2
"""The shape of ``tests.support.models.llama``."""
QUERY, FEED_DOWN = "layers.1.self_attn.q_proj", "layers.0.mlp.down_proj"


def base(tmp_path: Path, architecture: str = "llama") -> Base:
    weights = {
        "attn_q": (EMBEDDING, EMBEDDING),
        "attn_k": (EMBEDDING, KV_HEADS * HEAD),
        "attn_v": (EMBEDDING, KV_HEADS * HEAD),
        "attn_output": (EMBEDDING, EMBEDDING),
        "ffn_gate": (EMBEDDING, FEED),
        "ffn_down": (FEED, EMBEDDING),
    }
    tensors = [Tensor(f"blk.{layer}.{name}.weight", dims) for layer in range(2) for name, dims in weights.items()]
    keys = llama(general__architecture=architecture)
    if architecture != "llama":
        keys = {key.replace("llama.", f"{architecture}."): value for key, value in keys.items()}
    file = tmp_path / "base.gguf"
    file.write_bytes(gguf(keys, [Tensor("token_embd.weight", (EMBEDDING, 32)), *tensors]))
    return read_base(file)


def numbers(count: int) -> "array[float]":
    """Numbers that each type keeps exactly, each another one."""
    return array("f", (index % 128 + 1 for index in range(count)))


def folder(
    tmp_path: Path,
    modules: dict[str, tuple[list[int], list[int]]] | None = None,
    *,
    dtype: str = "F32",
    more: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A PEFT folder; ``modules`` have the shapes of A and B."""
    modules = {QUERY: ([RANK, EMBEDDING], [EMBEDDING, RANK])} if modules is None else modules
    tensors: dict[str, Any] = dict(more or {})
    for module, shapes in modules.items():
        for half, shape in zip("AB", shapes, strict=True):
            content = stored(numbers(shape[0] * shape[1]), dtype)
            tensors[f"base_model.model.model.{module}.lora_{half}.weight"] = (dtype, shape, content)
    made = tmp_path / "adapter"
    made.mkdir(exist_ok=True)
    (made / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    (made / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": 8, "peft_type": "LORA", **config}))
    return made


def admitted(tmp_path: Path, source: Path, against: Base | None = None, rank_max: int = 16) -> Adapter:
    return admit("a@1", source, against or base(tmp_path), work_dir=tmp_path, rank_max=rank_max)


def content_of(file: Path, name: str, count: int, form: str = "f") -> list[float]:
    """Return the numbers of a tensor, found as llama.cpp finds them: by the offsets of the header."""
    raw = file.read_bytes()
    at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (dims,) = struct.unpack_from("<I", raw, at)
    (offset,) = struct.unpack_from("<Q", raw, at + 4 + 8 * dims + 4)
    with opened(file) as cursor:
        read_shapes(cursor)
        start = -(-cursor.at // 32) * 32
    return list(struct.unpack_from(f"<{count}{form}", raw, start + offset))


def test_a_pair_stands_under_the_bases_name_with_the_numbers_as_they_were(tmp_path: Path) -> None:
    source = folder(tmp_path, {FEED_DOWN: ([RANK, FEED], [EMBEDDING, RANK])})
    file = admitted(tmp_path, source).file
    with opened(file) as cursor:
        facts, shapes = read_shapes(cursor)
    assert (facts.is_adapter, facts.architecture, facts.adapter_rank) == (True, "llama", RANK)
    assert shapes == {
        "blk.0.ffn_down.weight.lora_a": (FEED, RANK),
        "blk.0.ffn_down.weight.lora_b": (RANK, EMBEDDING),
    }
    assert content_of(file, "blk.0.ffn_down.weight.lora_a", RANK * FEED) == list(numbers(RANK * FEED))
    assert content_of(file, "blk.0.ffn_down.weight.lora_b", RANK * EMBEDDING) == list(numbers(RANK * EMBEDDING))


def test_rows_of_query_and_key_are_reordered_as_those_of_the_base_were(tmp_path: Path) -> None:
    """Of a head of 16: rows 0, 8, 1, 9 … because llama.cpp turns neighbours, the original halves."""
    key = "layers.0.self_attn.k_proj"
    modules = {QUERY: ([RANK, EMBEDDING], [EMBEDDING, RANK]), key: ([RANK, EMBEDDING], [KV_HEADS * HEAD, RANK])}
    file = admitted(tmp_path, folder(tmp_path, modules)).file
    for name, rows in (("blk.1.attn_q", EMBEDDING), ("blk.0.attn_k", KV_HEADS * HEAD)):
        given = list(numbers(rows * RANK))
        order = [head * HEAD + half * 8 + row for head in range(rows // HEAD) for row in range(8) for half in (0, 1)]
        expected = [number for row in order for number in given[row * RANK : (row + 1) * RANK]]
        assert content_of(file, f"{name}.weight.lora_b", rows * RANK) == expected


def test_architectures_that_rotate_halves_keep_their_order(tmp_path: Path) -> None:
    file = admitted(tmp_path, folder(tmp_path), base(tmp_path, "qwen2")).file
    assert content_of(file, "blk.1.attn_q.weight.lora_b", EMBEDDING * RANK) == list(numbers(EMBEDDING * RANK))


@pytest.mark.parametrize(("dtype", "form", "kind"), [("F16", "e", 1), ("BF16", "", 30), ("F32", "f", 0)])
def test_types_of_numbers_stay(tmp_path: Path, dtype: str, form: str, kind: int) -> None:
    file = admitted(tmp_path, folder(tmp_path, dtype=dtype)).file
    name = b"blk.1.attn_q.weight.lora_a"
    raw = file.read_bytes()
    at = raw.index(name) + len(name) + 4 + 16
    assert struct.unpack_from("<I", raw, at) == (kind,)
    if form:
        found = content_of(file, name.decode(), RANK * EMBEDDING, form)
        assert found == list(numbers(RANK * EMBEDDING))


def scale_of(file: Path, name: str) -> float:
    """Return what llama.cpp multiplies the pair with, and what of it stands in B itself."""
    raw = file.read_bytes()
    key = b"adapter.lora.alpha"
    (alpha,) = struct.unpack_from("<f", raw, raw.index(key) + len(key) + 4)
    with opened(file) as cursor:
        rank = read_shapes(cursor)[1][f"{name}.lora_b"][0]
    return float(alpha) / rank * content_of(file, f"{name}.lora_b", 1)[0]


def test_scales_are_pefts_whatever_they_are_made_of(tmp_path: Path) -> None:
    down = {FEED_DOWN: ([RANK, FEED], [EMBEDDING, RANK])}
    name = "blk.0.ffn_down.weight"
    assert scale_of(admitted(tmp_path, folder(tmp_path, down)).file, name) == pytest.approx(8 / RANK)
    stabilised = admitted(tmp_path, folder(tmp_path, down, use_rslora=True)).file
    assert scale_of(stabilised, name) == pytest.approx(8 / sqrt(RANK))
    patterned = folder(tmp_path, {FEED_DOWN: ([4, FEED], [EMBEDDING, 4])}, rank_pattern={"down_proj": 4})
    assert scale_of(admitted(tmp_path, patterned).file, name) == pytest.approx(8 / 4)
    for dtype in ("F32", "F16", "BF16"):
        other = folder(tmp_path, down, alpha_pattern={"mlp.down_proj": 2, "q_proj": 100}, dtype=dtype)
        assert scale_of(admitted(tmp_path, other).file, name) == pytest.approx(2 / RANK)
    off = admitted(tmp_path, folder(tmp_path, down, lora_alpha=0)).file
    assert content_of(off, f"{name}.lora_b", 4) == [0, 0, 0, 0], "llama.cpp takes an alpha of 0 for none, so for all"
    partly = admitted(tmp_path, folder(tmp_path, down, lora_alpha=0, alpha_pattern={"down_proj": 2})).file
    assert scale_of(partly, name) == pytest.approx(2 / RANK)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"peft_type": "IA3"}, "kind 'IA3'"),
        ({"alora_invocation_tokens": [1]}, "activation by tokens"),
        ({"r": 0}, "rank 0"),
        ({"r": "many"}, "no LoRA configuration"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "pattern"),
    ],
)
def test_what_llamacpp_cannot_apply_is_refused_and_named(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ArtifactInvalidError, match=said):
        admitted(tmp_path, folder(tmp_path, **config))


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({"layers.0.self_attn.q_proj": ([RANK, 32], [EMBEDDING, RANK])}, "for another base"),
        ({"layers.0.self_attn.q_proj": ([RANK, EMBEDDING], [63, RANK])}, "63 rows for 4 heads"),
        ({"layers.0.self_attn.q_proj": ([RANK, EMBEDDING], [EMBEDDING, 3])}, "no whole pair"),
        ({"layers.7.self_attn.q_proj": ([RANK, EMBEDDING], [EMBEDDING, RANK])}, "does not have"),
        ({"layers.0.mlp.up_proj": ([RANK, EMBEDDING], [FEED, RANK])}, "does not have"),
        ({"layers.0.self_attn.rotary": ([RANK, EMBEDDING], [EMBEDDING, RANK])}, "cannot be converted"),
        ({"layers.0.self_attn.q_proj": ([32, EMBEDDING], [EMBEDDING, 32])}, "rank 32; .*max_adapter_rank"),
        ({}, "holds no tensors"),
    ],
)
def test_what_does_not_fit_the_base_is_refused_before_llamacpp_sees_it(
    tmp_path: Path, modules: dict[str, tuple[list[int], list[int]]], said: str
) -> None:
    with pytest.raises(ArtifactInvalidError, match=said):
        admitted(tmp_path, folder(tmp_path, modules))
    assert not list(tmp_path.glob("adapters/*")), "nothing is left behind"


def test_tensors_beside_the_pairs_are_refused_and_not_left_out(tmp_path: Path) -> None:
    more = {"base_model.model.lm_head.weight": ("F32", [1, 1], bytes(4))}
    with pytest.raises(ArtifactInvalidError, match=r"lm_head\.weight"):
        admitted(tmp_path, folder(tmp_path, more=more))


def test_an_unknown_architecture_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ArtifactInvalidError, match=r"'rwkv6' .*convert_lora_to_gguf\.py"):
        admitted(tmp_path, folder(tmp_path), base(tmp_path, "rwkv6"))


def test_a_gguf_adapter_is_taken_as_it_is_when_it_fits(tmp_path: Path) -> None:
    converted = admitted(tmp_path, folder(tmp_path)).file
    assert admitted(tmp_path, converted).file == converted


def test_files_that_are_no_adapter_of_this_base_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterMissingError):
        admitted(tmp_path, tmp_path / "nothing")
    with pytest.raises(ArtifactInvalidError, match="whole model"):
        admitted(tmp_path, (base(tmp_path), tmp_path / "base.gguf")[1])
    file = tmp_path / "adapter.gguf"
    keys = {"general.architecture": "qwen2", "general.type": "adapter", "adapter.type": "lora"}
    file.write_bytes(gguf(keys, [Tensor("blk.0.attn_q.weight.lora_a", (EMBEDDING, RANK))]))
    with pytest.raises(ArtifactInvalidError, match="architecture 'qwen2'"):
        admitted(tmp_path, file)
    file.write_bytes(gguf({**keys, "general.architecture": "llama"}, [Tensor("blk.0.attn_q.weight.lora_a", (64, 2))]))
    with pytest.raises(ArtifactInvalidError, match="without 'blk"):
        admitted(tmp_path, file)
    file.write_bytes(b"no model at all")
    with pytest.raises(ArtifactInvalidError):
        admitted(tmp_path, file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactInvalidError, match=r"no 'adapter_config\.json'"):
        admitted(tmp_path, tmp_path / "empty")
