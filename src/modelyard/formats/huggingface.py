"""The configuration files of a Hugging Face folder: a model's shape, its chat template, an adapter's base.

Nothing here is trusted: files are small, numbers are bounded, and ``auto_map``,
which makes libraries run Python that comes with a model (S8), is found wherever
it stands.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from modelyard.domain.attention import Attention
from modelyard.domain.facts import ModelFacts
from modelyard.formats import ArtifactInvalidError, parameters
from modelyard.formats.cursor import plain_text

CONFIG_BYTES_MAX = 2 * 1024 * 1024
NESTED_MAX = 100_000
"""Objects and lists in it; without this limit, nothing but braces would take half a second."""
TEMPLATE_CHARACTERS = 16 * 1024
LAYERS_MAX = 4096
RUNS_CODE = frozenset({"auto_map", "custom_pipelines"})
"""Keys that name Python to run."""

_SIZE_MAX = 1 << 24
_TOKENS_MAX = 1 << 31
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
_WITHOUT_CACHE = frozenset(
    {
        "albert", "bert", "camembert", "clip", "convnext", "deberta", "deberta-v2", "distilbert", "electra", "ernie",
        "modernbert", "mpnet", "new", "nomic_bert", "resnet", "roberta", "siglip", "vit", "xlm-roberta",
    }
)  # fmt: skip
"""Encoders, by ``model_type``: they keep nothing between tokens."""
_ALL_WINDOWED = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
_BERTS = frozenset({"bert", "camembert", "roberta", "xlm-roberta"})
_UNGATED = frozenset({"falcon", "gpt2", "gpt_neox", "opt", "starcoder2"}) | _BERTS
"""Models with two matrices in an inner layer, not three."""
_PACKED = frozenset({"awq", "gptq", "bitsandbytes", "compressed-tensors", "aqlm", "hqq", "auto-round", "autoround"})
"""Quantisations that keep several weights in one number, so that numbers do not count parameters."""
_TIED = frozenset({"bloom", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "mamba", "opt"})
"""Decoders whose output layer is the embeddings where their configuration does not say."""
_LICENCE = re.compile(rb"^license: *[\"']?([\w.+-]{1,64})", re.M)

Config = dict[str, Any]


def read_config(content: bytes, name: str) -> Config:
    """Return the JSON object of the file ``name``.

    Raises:
        ArtifactInvalidError: it is none, or it is too large.
    """
    if len(content) > CONFIG_BYTES_MAX:
        raise ArtifactInvalidError(
            f"The file '{name}' has more than {CONFIG_BYTES_MAX:,} bytes, which is no configuration."
        )
    if content.count(b"{") + content.count(b"[") > NESTED_MAX:
        raise ArtifactInvalidError(f"The file '{name}' has more than {NESTED_MAX:,} values in values.")
    try:
        value = msgspec.json.decode(content)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ArtifactInvalidError(f"The file '{name}' is not valid JSON: {error}.") from error
    return value if isinstance(value, dict) else {}


def named_code(content: bytes, name: str) -> str:
    """Return the key by which the JSON file ``name`` asks for Python to be run, or ""."""
    if not any(key.encode() in content for key in RUNS_CODE) and b"\\u" not in content:
        return ""
    waiting: list[Any] = [read_config(content, name)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if found := next((key for key in RUNS_CODE if value.get(key)), ""):
                return found
            waiting.extend(one for one in value.values() if isinstance(one, dict | list))
        elif isinstance(value, list):
            waiting.extend(one for one in value if isinstance(one, dict | list))
    return ""


def facts_from(configs: Mapping[str, bytes]) -> ModelFacts:
    """Return what ``config.json``, ``tokenizer_config.json``, ``adapter_config.json`` … say, those that are there."""
    outer = _config(configs, "config.json")
    inner: Config = next((one for key in _INNER if isinstance(one := outer.get(key), dict)), {})
    config = {**outer, **inner}
    tokenizer = _config(configs, "tokenizer_config.json")
    facts = ModelFacts(
        architecture=_architecture(outer),
        licence=_licence(configs.get("README.md", b"")),
        quantisation=_quantisation(outer, config),
        tokenizer=_text(tokenizer.get("tokenizer_class")),
        chat_template=_template(configs, tokenizer),
        vocabulary=_int(config, "vocab_size"),
        context_length=_int(
            config, "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length", most=_TOKENS_MAX
        ),
    )
    if "adapter_config.json" in configs:
        return _with_adapter(facts, _config(configs, "adapter_config.json"))
    return _with_shape(facts, config)


def is_packed(facts: ModelFacts) -> bool:
    """Say whether the numbers in its tensors are more than its parameters."""
    return facts.quantisation in _PACKED


def _config(configs: Mapping[str, bytes], name: str) -> Config:
    return read_config(configs[name], name) if name in configs else {}


def _architecture(config: Config) -> str:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else config.get("model_type")
    return _text(first)


def _quantisation(outer: Config, config: Config) -> str:
    quantised = outer.get("quantization_config") or config.get("quantization_config")
    if isinstance(quantised, dict):
        return _text(quantised.get("quant_method")) or "quantised"
    named = _text(config.get("torch_dtype") or config.get("dtype") or outer.get("torch_dtype") or outer.get("dtype"))
    return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(named, named)


def _template(configs: Mapping[str, bytes], tokenizer: Config) -> str:
    if "chat_template.jinja" in configs:
        return plain_text(configs["chat_template.jinja"][: 4 * TEMPLATE_CHARACTERS], TEMPLATE_CHARACTERS)
    template = tokenizer.get("chat_template") or _config(configs, "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = [one for one in template if isinstance(one, dict)]
        default = next((one for one in named if one.get("name") == "default"), named[0] if named else {})
        template = default.get("template")
    return _text(template, TEMPLATE_CHARACTERS)


def _licence(readme: bytes) -> str:
    if not readme.startswith(b"---"):
        return ""
    front = readme[3:].split(b"\n---", 1)[0]
    match = _LICENCE.search(front)
    return match[1].decode() if match else ""


def _with_adapter(facts: ModelFacts, adapter: Config) -> ModelFacts:
    kind = _text(adapter.get("peft_type")) or "LORA"
    if kind.upper() != "LORA":
        raise ArtifactInvalidError(
            f"The artifact is an adapter of the kind '{kind}'; only LoRA adapters can be loaded."
        )
    return replace(
        facts,
        is_adapter=True,
        adapter_base=_text(adapter.get("base_model_name_or_path")),
        adapter_rank=_int(adapter, "r"),
    )


def _with_shape(facts: ModelFacts, config: Config) -> ModelFacts:
    layers = _int(
        config, "num_hidden_layers", "n_layer", "n_layers", "num_decoder_layers", "num_layers", most=LAYERS_MAX
    )
    heads = _int(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    embedding = _int(config, "hidden_size", "n_embd", "d_model")
    head_size = _int(config, "head_dim") or (embedding // heads if heads else 0)
    kinds = config.get("layer_types")
    layer_kinds = kinds if isinstance(kinds, list) and len(kinds) == layers else []
    kv_heads = _kv_heads(config, layers, heads, layer_kinds)
    window, windowed = _window(config, layers, layer_kinds)
    rank = _int(config, "kv_lora_rank")
    attention = Attention(
        kv_heads=() if config.get("model_type") in _WITHOUT_CACHE else kv_heads,
        key_size=head_size,
        value_size=_int(config, "v_head_dim") or head_size,
        latent_size=rank + _int(config, "qk_rope_head_dim") if rank else 0,
        window=window,
        windowed=windowed,
    )
    shaped = replace(
        attention.on(facts),
        layers=layers,
        heads=heads,
        kv_heads=max(kv_heads, default=0),
        head_size=head_size,
        embedding_size=embedding,
        state_bytes=_state_bytes(config, layer_kinds.count("linear_attention")) + _mamba_bytes(config, layers),
    )
    shape = _shape(config)
    return parameters.with_experts(replace(shaped, parameters=parameters.count(shaped, shape)), shape)


def _shape(config: Config) -> parameters.Shape:
    """Return what its parameters can be counted by."""
    expert_inner = _int(config, "moe_intermediate_size")
    shared = _int(config, "shared_expert_intermediate_size") or _int(config, "n_shared_experts") * expert_inner
    return parameters.Shape(
        inner=_int(config, "intermediate_size", "n_inner", "ffn_dim") or expert_inner,
        is_tied=_is_tied(config),
        is_gated=config.get("model_type") not in _UNGATED,
        experts=_int(config, "num_local_experts", "n_routed_experts", "num_experts"),
        experts_used=_int(config, "num_experts_per_tok", "moe_topk"),
        expert_inner=expert_inner,
        shared_inner=shared,
        dense_layers=_int(config, "first_k_dense_replace", most=LAYERS_MAX),
        query_rank=_int(config, "q_lora_rank"),
        latent_rank=_int(config, "kv_lora_rank"),
        plain_size=_int(config, "qk_nope_head_dim"),
        rope_size=_int(config, "qk_rope_head_dim"),
        value_size=_int(config, "v_head_dim"),
        is_bert=config.get("model_type") in _BERTS,
        token_types=_int(config, "type_vocab_size"),
    )


def _is_tied(config: Config) -> bool:
    """Say whether there is no output layer apart; an encoder has none, or in training only, and then it is tied."""
    kind, told = config.get("model_type"), config.get("tie_word_embeddings")
    return kind in _WITHOUT_CACHE or (told if isinstance(told, bool) else kind in _TIED)


def _kv_heads(config: Config, layers: int, heads: int, kinds: Sequence[object]) -> tuple[int, ...]:
    each = config.get("num_key_value_heads") or config.get("num_kv_heads")
    if isinstance(each, list):
        if len(each) != layers or not all(type(one) is int and 0 <= one <= _SIZE_MAX for one in each):
            raise ArtifactInvalidError(
                f"The file 'config.json' has {layers} layers and {len(each)} numbers of KV heads."
            )
        return tuple(each)
    count = _int(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    if not count:
        count = 1 if config.get("multi_query") is True else heads
    return tuple(0 if kinds and kinds[layer] in ("linear_attention", "mamba") else count for layer in range(layers))


def _window(config: Config, layers: int, kinds: Sequence[object]) -> tuple[int, tuple[bool, ...]]:
    """Return the window and which layers have it; where that is not said, none: to count too much is safe."""
    window = _int(config, "sliding_window", most=_TOKENS_MAX)
    if not window or config.get("use_sliding_window") is False:
        return 0, ()
    if kinds:
        return window, tuple(kind == "sliding_attention" for kind in kinds)
    if every := _int(config, "sliding_window_pattern", most=LAYERS_MAX):
        return window, tuple(layer % every != every - 1 for layer in range(layers))
    if config.get("model_type") == "gemma2":
        return window, tuple(layer % 2 == 0 for layer in range(layers))
    return (window, (True,) * layers) if config.get("model_type") in _ALL_WINDOWED else (0, ())


def _state_bytes(config: Config, layers: int) -> int:
    """Return what layers of linear attention keep of a sequence, in 32 bits."""
    keys = _int(config, "linear_num_key_heads") * _int(config, "linear_key_head_dim")
    value_heads, value_size = _int(config, "linear_num_value_heads"), _int(config, "linear_value_head_dim")
    state = value_heads * value_size * _int(config, "linear_key_head_dim")
    convolution = _int(config, "linear_conv_kernel_dim") * (2 * keys + value_heads * value_size)
    return layers * 4 * (state + convolution)


def _mamba_bytes(config: Config, layers: int) -> int:
    """Return what a Mamba, all of whose layers are recurrent, keeps of a sequence, in 32 bits."""
    if config.get("model_type") not in ("mamba", "falcon_mamba"):
        return 0
    return layers * 4 * _int(config, "intermediate_size") * (_int(config, "state_size") + _int(config, "conv_kernel"))


def _int(config: Config, *names: str, most: int = _SIZE_MAX) -> int:
    """Return the first of ``names`` that is set, 0 without."""
    for name in names:
        value = config.get(name)
        if type(value) is int and value:
            if not 0 < value <= most:
                raise ArtifactInvalidError(f"The configuration says that '{name}' is {value}, which cannot be.")
            return value
    return 0


def _text(value: object, characters: int = 256) -> str:
    return plain_text(value.encode("utf-8", "replace"), characters) if isinstance(value, str) else ""
