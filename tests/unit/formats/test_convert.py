"""GGUF files become Hugging Face folders: names, order of rows, numbers, configuration and tokenizer."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from modelyard.formats.convert import ConvertError, to_hf
from modelyard.formats.convert.safetensors_writer import Tensor, bfloat16, write
from modelyard.formats.folder import facts_of

gguf = pytest.importorskip("gguf", reason="needs the extra 'convert'")
np = pytest.importorskip("numpy")
tokenizers = pytest.importorskip("tokenizers")

LAYERS, HEADS, KV_HEADS, SIZE, HIDDEN, INNER = 2, 4, 2, 8, 32, 64
TOKENS = ["<|end|>", "<|begin|>", "a", "b", "Ġ", "ab", "1", "2", "12", "<tool>"]


def pairwise(rows: Any, heads: int) -> Any:
    """Store the rows of queries or keys as llama.cpp's own converter does."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def numbers(seed: int, *shape: int) -> Any:
    """Return numbers that bfloat16 holds exactly."""
    return np.random.default_rng(seed).integers(-64, 64, shape).astype(np.float32) / 8


def tensors_of(architecture: str) -> dict[str, Any]:
    """Return the tensors of a small model by llama.cpp's names, in Hugging Face's order of rows."""
    found = {"token_embd.weight": numbers(1, len(TOKENS), HIDDEN), "output_norm.weight": numbers(2, HIDDEN)}
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        found |= {f"{block}.{name}.weight": numbers(3 + layer, HIDDEN) for name in ("attn_norm", "ffn_norm")}
        found[f"{block}.attn_q.weight"] = numbers(5 + layer, HEADS * SIZE, HIDDEN)
        found |= {
            f"{block}.{name}.weight": numbers(7 + layer, KV_HEADS * SIZE, HIDDEN) for name in ("attn_k", "attn_v")
        }
        found[f"{block}.attn_output.weight"] = numbers(9 + layer, HIDDEN, HEADS * SIZE)
        found |= {f"{block}.{name}.weight": numbers(11 + layer, INNER, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        found[f"{block}.ffn_down.weight"] = numbers(13 + layer, HIDDEN, INNER)
        if architecture == "qwen2":
            found[f"{block}.attn_q.bias"] = numbers(15 + layer, HEADS * SIZE)
        if architecture == "qwen3":
            found |= {f"{block}.{name}.weight": numbers(17 + layer, SIZE) for name in ("attn_q_norm", "attn_k_norm")}
    return found


def write_gguf(file: Path, architecture: str, **changed: Any) -> dict[str, Any]:
    """Write a small model; return its tensors as Hugging Face has them."""
    tensors = tensors_of(architecture) | changed.pop("tensors", {})
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(changed.pop("context_length", 512))
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(SIZE)
    writer.add_value_length(SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(changed.pop("theta", 10_000.0))
    if scaling := changed.pop("scaling", None):
        writer.add_rope_scaling_type(scaling)
    if experts := changed.pop("experts", 0):
        writer.add_expert_count(experts)
    writer.add_tokenizer_model(changed.pop("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(changed.pop("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 3), 4])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(changed.pop("begins", False))
    writer.add_chat_template("{{ messages }}")
    assert not changed, f"{changed} are unknown"
    for name, value in tensors.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2], 0)
        is_pairwise = architecture == "llama" and heads
        writer.add_tensor(name, pairwise(value, heads) if is_pairwise else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def read_safetensors(file: Path) -> dict[str, Any]:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    found = {}
    for name, about in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            assert about["dtype"] == "BF16"
            begin, end = about["data_offsets"]
            bits = np.frombuffer(raw[8 + length :][begin:end], np.uint16).astype(np.uint32) << 16
            found[name] = bits.view(np.float32).reshape(about["shape"])
    return found


def converted(file: Path, place: Path) -> Path:
    place.mkdir()
    to_hf.convert(file, place, lambda done, whole: None)
    return place


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_tensor_comes_out_as_it_went_in(architecture: str, tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "m.gguf", architecture)
    place = converted(tmp_path / "m.gguf", tmp_path / "out")
    found = read_safetensors(place / "model.safetensors")
    assert len(found) == len(tensors)
    for mine, theirs in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
    ):
        assert np.array_equal(found[theirs], tensors[mine]), theirs
    if architecture == "qwen2":
        bias = found["model.layers.1.self_attn.q_proj.bias"]
        assert np.array_equal(bias, tensors["blk.1.attn_q.bias"])
    if architecture == "qwen3":
        assert np.array_equal(found["model.layers.1.self_attn.q_norm.weight"], tensors["blk.1.attn_q_norm.weight"])


def test_the_folder_is_one_that_our_own_readers_know(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama")
    place = converted(tmp_path / "m.gguf", tmp_path / "out")
    config = json.loads((place / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert (config["num_key_value_heads"], config["head_dim"]) == (KV_HEADS, SIZE)
    assert config["tie_word_embeddings"] is True
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 10_000.0)
    facts = facts_of({file.name: file for file in place.iterdir()})
    assert (facts.format, facts.layers, facts.heads, facts.kv_heads) == ("safetensors", LAYERS, HEADS, KV_HEADS)
    assert facts.kv_bytes_per_token == 2 * LAYERS * KV_HEADS * SIZE * 2
    assert facts.chat_template == "{{ messages }}"


def test_the_tokenizer_cuts_as_the_file_says(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama")
    place = converted(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    assert tokenizer.encode("ab 12").tokens == ["ab", "Ġ", "1", "2"], "digits stand alone"
    assert tokenizer.encode("<|end|><tool>").ids == [0, 9]
    assert tokenizer.decode([0, 5]) == "ab", "a control token is not text"
    config = json.loads((place / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|begin|>", "<|end|>")


@pytest.mark.parametrize(("pre", "pieces"), [("qwen2", ["1", "2"]), ("llama-bpe", ["12"]), ("gpt-2", ["12"])])
def test_other_ways_to_cut_are_kept_apart(pre: str, pieces: list[str], tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", pre=pre, begins=True)
    place = converted(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    assert tokenizer.encode("12").tokens == ["<|begin|>", *pieces]


def test_packed_weights_are_unpacked(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama")
    exact = read_safetensors(converted(tmp_path / "m.gguf", tmp_path / "exact") / "model.safetensors")
    packed = gguf.quants.quantize(tensors_of("llama")["blk.0.ffn_up.weight"], gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    source = gguf.GGUFReader(tmp_path / "m.gguf")
    for key, field in source.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, inner)
    for tensor in source.tensors:
        if tensor.name == "blk.0.ffn_up.weight":
            writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_safetensors(converted(tmp_path / "q.gguf", tmp_path / "out") / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(found[name], exact[name])
    assert np.allclose(found[name], exact[name], atol=0.06)


def llama3_factors(factor: float, theta: float) -> Any:
    """Return what llama.cpp's converter writes for Llama 3.1, by the formula of its paper's code."""
    found = []
    for pair in range(0, SIZE, 2):
        wave = 2 * np.pi * theta ** (pair / SIZE)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_the_scaling_of_llama_3_becomes_configuration(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": llama3_factors(8.0, 500_000.0)}
    write_gguf(tmp_path / "m.gguf", "llama", tensors=factors, theta=500_000.0)
    place = converted(tmp_path / "m.gguf", tmp_path / "out")
    scaling = json.loads((place / "config.json").read_text())["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 8.0)
    assert "rope_freqs" not in "".join(read_safetensors(place / "model.safetensors"))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"architecture": "gemma3"}, "'gemma3'"),
        ({"scaling": gguf.RopeScalingType.YARN}, "yarn"),
        ({"experts": 8}, "mixture of experts"),
        ({"tokenizer": "llama"}, "byte-level BPE"),
        ({"pre": "deepseek-llm"}, "deepseek-llm"),
        ({"tensors": {"blk.0.odd.weight": numbers(1, 4)}}, "blk.0.odd.weight"),
        ({"tensors": {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}}, "rope_freqs"),
    ],
)
def test_what_would_come_out_slightly_wrong_is_refused(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", changed.pop("architecture", "llama"), **changed)
    with pytest.raises(ConvertError, match=reason):
        converted(tmp_path / "m.gguf", tmp_path / "out")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.txt"
    file.write_text("hello")
    with pytest.raises(ConvertError, match="converts a GGUF file"):
        to_hf.convert(file, tmp_path, lambda done, whole: None)


def test_bfloat16_rounds_to_the_nearest_and_keeps_what_is_no_number() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.5, np.inf, np.nan, 1e-40], np.float32)
    back = (bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    assert back[0] == 1.0
    assert back[1] == 1.0, "a tie goes to the even one"
    assert back[2] == pytest.approx(1.015625)
    assert (back[3], back[4]) == (-3.5, np.inf)
    assert np.isnan(back[5])


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.formats.convert.safetensors_writer.SHARD_BYTES", 100)
    values = {f"t{n}": numbers(n, 5, 8) for n in range(3)}
    write(
        [Tensor(name, value.shape, lambda value=value: [value]) for name, value in values.items()],
        tmp_path,
        lambda _: None,
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {f"t{n}": f"model-0000{n + 1}-of-00003.safetensors" for n in range(3)}
    assert index["metadata"]["total_size"] == 240
    for name, file in index["weight_map"].items():
        assert np.array_equal(read_safetensors(tmp_path / file)[name], values[name])
