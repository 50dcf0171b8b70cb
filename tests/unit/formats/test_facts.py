"""What the readers read of good files: GGUF, safetensors, ONNX, whole folders, and a real model."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import models
from tests.support.models import Tensor, Typed, gguf, llama
from tools.smollm import ModelMissing, model_file

from modelyard.domain.facts import ModelFacts, TensorFacts
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.folder import facts_of


def facts(tmp_path: Path, content: bytes) -> ModelFacts:
    file = tmp_path / "model"
    file.write_bytes(content)
    return facts_of({"model": file})


def folder(tmp_path: Path, **files: bytes | dict[str, Any]) -> ModelFacts:
    """Return the facts of these files; a name has ``__`` for each dot."""
    found = {}
    for key, content in files.items():
        name = key.replace("__", ".")
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        found[name] = file
    return facts_of(found)


def weights(*names: str, dtype: str = "BF16") -> bytes:
    return models.safetensors({name: (dtype, [4, 2], bytes(16)) for name in names})


def test_smollm2_is_read_to_the_byte() -> None:
    try:
        file = model_file()
    except ModelMissing as error:
        pytest.skip(str(error))
    read = facts_of({"model.gguf": file})
    assert (read.format, read.architecture, read.licence, read.quantisation) == ("gguf", "llama", "apache-2.0", "Q4_1")
    assert (read.parameters, read.layers, read.heads, read.kv_heads, read.head_size) == (134_515_008, 30, 9, 3, 64)
    assert (read.embedding_size, read.vocabulary, read.context_length) == (576, 49_152, 8192)
    assert (read.tokenizer, read.weights_bytes, read.kv_bytes_per_token) == ("gpt2", 96_576_768, 23_040)
    assert read.chat_template.startswith("{% for message in messages %}")
    assert not read.is_adapter


def test_a_gguf_file_says_what_it_is(tmp_path: Path) -> None:
    read = facts(tmp_path, gguf(llama(general__file_type=15), [Tensor("a", (64, 4), 8), Tensor("b", (32,))], room=4096))
    assert read == ModelFacts(
        format="gguf",
        architecture="llama",
        name="Tiny",
        licence="mit",
        parameters=64 * 4 + 32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_size=16,
        embedding_size=64,
        vocabulary=3,
        context_length=1024,
        quantisation="Q4_K_M",
        tokenizer="gpt2",
        chat_template="{{ messages }}",
        weights_bytes=8 * 34 + 32 * 4,
        kv_bytes_per_token=2 * 2 * 2 * 16 * 2,
    )


def test_keys_may_come_in_any_order_and_version_2_is_read(tmp_path: Path) -> None:
    keys = dict(reversed(llama().items()))
    assert facts(tmp_path, gguf(keys, version=2)) == facts(tmp_path, gguf(llama()))


def test_heads_may_differ_by_layer_and_key_sizes_be_given(tmp_path: Path) -> None:
    read = facts(tmp_path, gguf(llama(llama__attention__head_count_kv=[0, 3])))
    assert (read.kv_heads, read.kv_bytes_per_token) == (3, 3 * (16 + 16) * 2)
    sizes = {"llama.attention.key_length": 256, "llama.attention.value_length": 128}
    assert facts(tmp_path, gguf(llama() | sizes)).kv_bytes_per_token == 2 * 2 * (256 + 128) * 2


def test_latent_attention_keeps_one_vector(tmp_path: Path) -> None:
    keys = {"attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512}
    keys["attention.key_length_mla"] = 192
    read = facts(tmp_path, gguf(llama() | {f"llama.{key}": value for key, value in keys.items()}))
    assert read.kv_bytes_per_token == 2 * 576 * 2


def test_windows_are_counted_where_the_layers_that_have_one_are_known(tmp_path: Path) -> None:
    gemma = {
        key.replace("llama.", "gemma3."): value
        for key, value in llama(general__architecture="gemma3", llama__block_count=12).items()
    }
    gemma["gemma3.attention.sliding_window"] = 512
    read = facts(tmp_path, gguf(gemma))
    layer = 2 * 2 * 16 * 2
    assert (read.sliding_window, read.kv_bytes_per_token) == (512, 12 * layer)
    assert read.kv_window_bytes_per_token == 10 * layer
    pattern = {"llama.attention.sliding_window": 64, "llama.attention.sliding_window_pattern": [True, False]}
    assert facts(tmp_path, gguf(llama() | pattern)).kv_window_bytes_per_token == layer
    unknown = facts(tmp_path, gguf(llama(llama__attention__sliding_window=64)))
    assert (unknown.sliding_window, unknown.kv_window_bytes_per_token) == (0, 0), "to count too much is safe"


def test_encoders_keep_nothing_and_recurrent_layers_a_state(tmp_path: Path) -> None:
    assert facts(tmp_path, gguf(llama(llama__attention__causal=False))).kv_bytes_per_token == 0
    mamba = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "attention.head_count": 0}
    read = facts(tmp_path, gguf(llama(llama__attention__head_count_kv=0) | {f"llama.{k}": v for k, v in mamba.items()}))
    assert (read.kv_bytes_per_token, read.state_bytes) == (0, 2 * 4 * (3 * 128 + 16 * 128))


def test_an_adapter_says_its_base_and_rank(tmp_path: Path) -> None:
    keys = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 16.0,
        "general.base_model.0.name": "SmolLM2 135M Instruct",
    }
    read = facts(tmp_path, gguf(keys, [Tensor("q.lora_a", (64, 8)), Tensor("q.lora_b", (8, 64))]))
    assert (read.is_adapter, read.adapter_base, read.adapter_rank) == (True, "SmolLM2 135M Instruct", 8)
    assert read.kv_bytes_per_token == 0


def test_a_long_template_is_cut_and_texts_lose_control_characters(tmp_path: Path) -> None:
    read = facts(
        tmp_path, gguf(llama(tokenizer__chat_template="{{x}}\n" * 40_000, general__name="A\x1b[2J\x00B\n" + "x" * 999))
    )
    assert len(read.chat_template) == 16 * 1024
    assert read.name.startswith("A[2JB\nxxx")
    assert len(read.name) == 256


def test_a_byte_token_and_what_looks_like_a_bad_one_are_fine(tmp_path: Path) -> None:
    tokens = ["<0x0A>", "<0x", "-" * 45, "a<0x-1>", "<0x" + "y" * 300, "<unk>"]
    read = facts(
        tmp_path, gguf(llama(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=Typed(9, (5, [1] * 6))))
    )
    assert read.vocabulary == 6


def test_a_vocabulary_longer_than_a_piece_is_walked(tmp_path: Path) -> None:
    tokens = [f"token-{number}" * (number % 7) for number in range(60_000)]
    keys = llama(tokenizer__ggml__tokens=tokens)
    del keys["tokenizer.ggml.token_type"]
    assert facts(tmp_path, gguf(keys)).vocabulary == 60_000
    tokens[59_999] = "<0x-1>"
    with pytest.raises(ArtifactInvalidError, match="negative"):
        facts(tmp_path, gguf(keys | {"tokenizer.ggml.tokens": tokens}))


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}


def test_a_folder_is_read_from_its_configuration_and_its_tensors(tmp_path: Path) -> None:
    read = folder(
        tmp_path,
        config__json=LLAMA_70B,
        tokenizer_config__json={"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"},
        README__md=b"---\nlicense: llama3.1\ntags: [x]\n---\n# Llama\n",
        model__safetensors=weights("a", "b"),
    )
    assert read == ModelFacts(
        format="safetensors",
        architecture="LlamaForCausalLM",
        licence="llama3.1",
        parameters=16,
        layers=80,
        heads=64,
        kv_heads=8,
        head_size=128,
        embedding_size=8192,
        vocabulary=128_256,
        context_length=131_072,
        quantisation="BF16",
        tokenizer="PreTrainedTokenizerFast",
        chat_template="{{ messages }}",
        weights_bytes=32,
        kv_bytes_per_token=320 * 1024,
    )


def shape(kind: str, layers: int, heads: int, hidden: int, kv_heads: int = 0, **more: Any) -> dict[str, Any]:
    """Return a configuration as transformers writes it."""
    config = {"model_type": kind, "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden}
    return config | ({"num_key_value_heads": kv_heads} if kv_heads else {}) | more


GEMMA = shape("gemma3_text", 6, 8, 2560, 4, head_dim=256, sliding_window=1024, sliding_window_pattern=6)
HALF = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "per_token", "window"),
    [
        (shape("deepseek_v3", 61, 128, 7168, kv_lora_rank=512, qk_rope_head_dim=64), 70_272, (0, 0)),
        (shape("mistral", 32, 32, 4096, 8, sliding_window=4096), 131_072, (4096, 131_072)),
        (shape("qwen2", 28, 28, 3584, 4, sliding_window=131_072, use_sliding_window=False), 57_344, (0, 0)),
        ({"model_type": "gemma3", "text_config": GEMMA}, 24_576, (1024, 20_480)),
        (shape("gpt_oss", 2, 64, 2880, 8, head_dim=64, sliding_window=128, layer_types=HALF), 4096, (128, 2048)),
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, 36_864, (0, 0)),
        (shape("falcon", 32, 71, 4544, multi_query=True), 8192, (0, 0)),
        (shape("openelm", 2, 20, 1280, head_dim=64, num_kv_heads=[3, 5]), 2048, (0, 0)),
        (shape("bert", 6, 12, 384), 0, (0, 0)),
    ],
)
def test_the_cache_of_known_architectures(
    tmp_path: Path, config: dict[str, Any], per_token: int, window: tuple[int, int]
) -> None:
    read = folder(tmp_path, config__json=config, model__safetensors=weights("w"))
    assert read.kv_bytes_per_token == per_token
    assert (read.sliding_window, read.kv_window_bytes_per_token) == window


def test_linear_attention_keeps_a_state_and_no_keys(tmp_path: Path) -> None:
    linear = {
        "num_key_heads": 16,
        "key_head_dim": 128,
        "num_value_heads": 32,
        "value_head_dim": 128,
        "conv_kernel_dim": 4,
    }
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = shape("qwen3_next", 4, 16, 2048, 2, head_dim=256, layer_types=kinds)
    config |= {f"linear_{name}": value for name, value in linear.items()}
    read = folder(tmp_path, config__json=config, model__safetensors=weights("w"))
    assert read.kv_bytes_per_token == 2 * 2 * 256 * 2
    assert read.state_bytes == 3 * 4 * (32 * 128 * 128 + 4 * (2 * 16 * 128 + 32 * 128))


def test_shards_are_added_up_by_their_index(tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}}
    files = {
        "config__json": LLAMA_70B,
        "m-1__safetensors": weights("a", "b"),
        "m-2__safetensors": weights("c"),
        "consolidated__safetensors": weights("a", "b", "c"),
    }
    read = folder(tmp_path, **files, model__safetensors__index__json=index)  # type: ignore[arg-type]
    assert (read.parameters, read.weights_bytes) == (24, 48), "what the index does not name is not loaded"
    for bad, said in (
        ({"weight_map": {"a": "m-3.safetensors"}}, "'m-3.safetensors', which is not there"),
        ({"weight_map": {"z": "m-1.safetensors"}}, "lacks the tensor 'z'"),
        ({"weight_map": {"a": "../m-1.safetensors"}}, "not there"),
        ({"weight_map": {}}, "names no tensors"),
        ({}, "is no index"),
    ):
        with pytest.raises(ArtifactInvalidError, match=said):
            folder(tmp_path, **files, model__safetensors__index__json=bad)  # type: ignore[arg-type]


def test_a_quantised_folder_says_how_and_counts_no_parameters(tmp_path: Path) -> None:
    config = LLAMA_70B | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    read = folder(tmp_path, config__json=config, model__safetensors=weights("w"))
    assert (read.quantisation, read.parameters, read.weights_bytes) == ("awq", 0, 16)


def test_a_peft_adapter_names_its_base_and_rank(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct", "r": 16}
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = models.safetensors({name: ("F32", [16, 4], bytes(256))})
    read = folder(tmp_path, adapter_config__json=adapter, adapter_model__safetensors=tensors)
    assert (read.is_adapter, read.adapter_base) == (True, "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert (read.adapter_rank, read.parameters) == (16, 64)
    alone = facts(tmp_path, tensors)
    assert (alone.is_adapter, alone.adapter_rank) == (True, 16), "its tensors say so, too"
    with pytest.raises(ArtifactInvalidError, match="of the kind 'IA3'"):
        folder(tmp_path, adapter_config__json={"peft_type": "IA3"}, adapter_model__safetensors=tensors)


def test_a_folder_without_weights_or_with_two_gguf_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactInvalidError, match="holds no weights"):
        folder(tmp_path, config__json=LLAMA_70B, tokenizer__json={})
    with pytest.raises(ArtifactInvalidError, match=r"several GGUF files: a\.gguf, b\.gguf"):
        folder(tmp_path, a__gguf=gguf(llama()), b__gguf=gguf(llama()))
    assert folder(tmp_path, a__gguf=gguf(llama()), README__md=b"# Tiny\n").name == "Tiny"


def test_templates_come_from_any_of_their_places(tmp_path: Path) -> None:
    named = {"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]}
    read = folder(tmp_path, tokenizer_config__json=named, model__safetensors=weights("w"))
    assert read.chat_template == "plain"
    read = folder(
        tmp_path, tokenizer_config__json=named, chat_template__jinja=b"{{ own }}", model__safetensors=weights("w")
    )
    assert read.chat_template == "{{ own }}"


def test_the_inputs_and_outputs_of_an_onnx_graph_are_told_without_its_weights(tmp_path: Path) -> None:
    def end(number: int, name: str, kind: int, *sizes: int | str) -> bytes:
        dims = b"".join(models.field(1, models.field(1 if isinstance(one, int) else 2, one)) for one in sizes)
        tensor = models.field(1, models.field(1, kind) + models.field(2, dims))
        return models.field(number, models.field(1, name) + models.field(2, tensor))

    plain = models.onnx_tensor("w", [1], bytes(4))
    graph = end(11, "x", 1, "batch", 512) + end(11, "w", 1, 1) + end(11, "sr", 7) + end(12, "y", 10, "batch", 1)
    graph += models.field(5, plain)
    read = facts(tmp_path, models.field(1, 9) + models.field(7, graph) + models.field(8, models.field(2, 17)))
    assert read.inputs == (TensorFacts("x", "FP32", (-1, 512)), TensorFacts("sr", "INT64"))
    assert read.outputs == (TensorFacts("y", "FP16", (-1, 1)),)


def test_onnx_is_read_with_all_its_tensors(tmp_path: Path) -> None:
    constant = models.field(4, "Constant") + models.field(5, models.field(1, "v") + models.field(5, bytes(70_000)))
    inner = models.field(5, models.field(6, models.field(5, models.onnx_tensor("deep", [8], bytes(32)))))
    filler = models.field(3, "x" * 70_000)
    read = facts(
        tmp_path,
        models.onnx(
            models.onnx_tensor("w", [100, 8], bytes(800), kind=3),
            models.onnx_tensor("packed", [3], bytes(2), kind=22),
            nodes=[models.field(4, "Relu"), models.field(4, "If") + filler + inner],
            name="minilm",
        ),
    )
    assert (read.format, read.name, read.quantisation) == ("onnx", "minilm", "I8")
    assert (read.parameters, read.weights_bytes) == (811, 834)
    with pytest.raises(ArtifactInvalidError, match="broken"):
        facts(tmp_path, models.onnx(nodes=[constant]))
