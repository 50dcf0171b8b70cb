"""From the keys of a GGUF header to facts: llama.cpp's names for a model's shape."""

from collections.abc import Callable
from typing import NamedTuple

from modelyard.domain.attention import Attention
from modelyard.domain.facts import ModelFacts
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.ggml import MIXTURES
from modelyard.formats.parameters import Shape, with_experts

Value = int | float | str | bool | tuple[int | float | bool, ...]

LAYERS_MAX = 512
"""llama.cpp's own arrays have so many places (``LLAMA_MAX_LAYERS``), and it has written beyond them."""
_SIZE_MAX = 1 << 24
_TOKENS_MAX = 1 << 31


class Tensors(NamedTuple):
    """All tensors of a file together."""

    shapes: dict[str, tuple[int, ...]]
    """Dims by name, as GGUF has them: the fastest first."""
    parameters: int
    weights_bytes: int
    main_type: str
    adapter_rank: int


def _is_size(value: Value, most: int = _SIZE_MAX) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_sizes(value: Value) -> bool:
    return _is_size(value) or (isinstance(value, tuple) and all(_is_size(item) for item in value))


def _is_flags(value: Value) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(item, bool) or _is_size(item, 1) for item in value)
    return _is_size(value, LAYERS_MAX)


KINDS: dict[str, Callable[[Value], bool]] = {
    "text": lambda value: isinstance(value, str),
    "template": lambda value: isinstance(value, str),
    "size": _is_size,
    "sizes": _is_sizes,
    "tokens": lambda value: _is_size(value, _TOKENS_MAX),
    "layers": lambda value: _is_size(value, LAYERS_MAX),
    "flags": _is_flags,
    "flag": lambda value: isinstance(value, bool),
}
"""What the values of known keys must be: a number where an array belongs has crashed engines."""

_GENERAL = {
    "general.architecture": "text",
    "general.name": "text",
    "general.license": "text",
    "general.type": "text",
    "general.alignment": "size",
    "general.file_type": "size",
    "general.base_model.0.name": "text",
    "general.base_model.0.repo_url": "text",
    "tokenizer.ggml.model": "text",
    "tokenizer.chat_template": "template",
    "adapter.type": "text",
    "split.count": "size",
}
_OF_ARCHITECTURE = {
    "block_count": "layers",
    "context_length": "tokens",
    "embedding_length": "size",
    "vocab_size": "size",
    "attention.head_count": "sizes",
    "attention.head_count_kv": "sizes",
    "attention.key_length": "size",
    "attention.value_length": "size",
    "attention.key_length_mla": "size",
    "attention.kv_lora_rank": "size",
    "attention.sliding_window": "tokens",
    "attention.sliding_window_pattern": "flags",
    "attention.causal": "flag",
    "rope.dimension_count": "size",
    "expert_count": "size",
    "expert_used_count": "size",
    "expert_feed_forward_length": "size",
    "feed_forward_length": "sizes",
    "leading_dense_block_count": "layers",
    "ssm.conv_kernel": "size",
    "ssm.inner_size": "size",
    "ssm.state_size": "size",
    "ssm.group_count": "size",
}

_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4}
"""Each so manieth layer looks at all tokens, the others have a window. Files of these do not say so themselves; of
others with a window every layer is counted as if it kept all, which is never too little."""


def kind_of(key: str) -> str:
    """Return which of ``KINDS`` the value of ``key`` must be, "" when it is of no interest."""
    return _GENERAL.get(key) or _OF_ARCHITECTURE.get(key.partition(".")[2], "")


def facts_from(values: dict[str, Value], tokens: int, tensors: Tensors) -> ModelFacts:
    """Return the facts of a file with these keys, ``tokens`` in its vocabulary and these tensors."""
    architecture = _text(values, "general.architecture")
    if not architecture:
        raise ArtifactInvalidError("The GGUF file names no architecture, so it is no model.")
    if (parts := _number(values, "split.count")) > 1:
        raise ArtifactInvalidError(
            f"The artifact is one of {parts} parts of a split GGUF file. Join them: llama-gguf-split --merge FIRST OUT."
        )
    own = {name: value for key, value in values.items() if (name := key.removeprefix(f"{architecture}.")) != key}
    is_adapter = _text(values, "general.type") == "adapter" or "adapter.type" in values or tensors.adapter_rank > 0
    facts = ModelFacts(
        format="gguf",
        architecture=architecture,
        name=_text(values, "general.name"),
        licence=_text(values, "general.license"),
        parameters=tensors.parameters,
        weights_bytes=tensors.weights_bytes,
        quantisation=MIXTURES.get(_number(values, "general.file_type", -1), tensors.main_type),
        tokenizer=_text(values, "tokenizer.ggml.model"),
        chat_template=_text(values, "tokenizer.chat_template"),
        vocabulary=tokens or _number(own, "vocab_size"),
        is_adapter=is_adapter,
        adapter_base=_base(values) if is_adapter else "",
        adapter_rank=tensors.adapter_rank,
    )
    return facts if is_adapter else _with_shape(facts, own)


def _with_shape(facts: ModelFacts, own: dict[str, Value]) -> ModelFacts:
    from msgspec.structs import replace

    layers = _number(own, "block_count")
    embedding = _number(own, "embedding_length")
    heads = _of_layers(own, "attention.head_count", layers, 0)
    kv_heads = _of_layers(own, "attention.head_count_kv", layers, heads)
    heads_max = max(heads, default=0)
    head_size = embedding // heads_max if heads_max else 0
    key_size = _number(own, "attention.key_length", head_size)
    # Of models with latent attention llama.cpp calls the whole latent vector the key.
    latent = key_size if "attention.key_length_mla" in own else 0
    window, windowed = _window(facts.architecture, own, layers)
    is_causal = own.get("attention.causal", True) is not False
    attention = Attention(
        kv_heads=kv_heads if is_causal else (),
        key_size=key_size,
        value_size=_number(own, "attention.value_length", head_size),
        latent_size=latent,
        window=window,
        windowed=windowed,
    )
    shaped = replace(
        attention.on(facts),
        layers=layers,
        heads=heads_max,
        kv_heads=max(kv_heads, default=0),
        head_size=key_size,
        embedding_size=embedding,
        context_length=_number(own, "context_length"),
        state_bytes=_state_bytes(own, layers),
    )
    return with_experts(shaped, _experts(own, layers))


def _experts(own: dict[str, Value], layers: int) -> Shape:
    """Return which part of the inner layers is of experts."""
    return Shape(
        inner=max(_of_layers(own, "feed_forward_length", layers, 0), default=0),
        experts=_number(own, "expert_count"),
        experts_used=_number(own, "expert_used_count"),
        expert_inner=_number(own, "expert_feed_forward_length"),
        dense_layers=_number(own, "leading_dense_block_count"),
    )


def _of_layers(own: dict[str, Value], key: str, layers: int, default: int | tuple[int, ...]) -> tuple[int, ...]:
    value = own.get(key, default)
    if isinstance(value, tuple):
        if len(value) != layers:
            raise ArtifactInvalidError(f"The GGUF file has {layers} layers, but {len(value)} entries in '{key}'.")
        return tuple(int(item) for item in value)
    assert isinstance(value, int), "sizes are numbers or arrays of them"
    return (value,) * layers


def _window(architecture: str, own: dict[str, Value], layers: int) -> tuple[int, tuple[bool, ...]]:
    window = _number(own, "attention.sliding_window")
    pattern = own.get("attention.sliding_window_pattern", _FULL_EVERY.get(architecture, 0))
    if not window or not pattern:
        return 0, ()
    if isinstance(pattern, tuple):
        if len(pattern) != layers:
            raise ArtifactInvalidError(
                f"The GGUF file has {layers} layers, but a pattern of windows for {len(pattern)}."
            )
        return window, tuple(bool(item) for item in pattern)
    assert isinstance(pattern, int), "flags are a number or an array"
    return window, tuple(layer % pattern != pattern - 1 for layer in range(layers))


def _state_bytes(own: dict[str, Value], layers: int) -> int:
    """Return the most that recurrent layers keep of a sequence: as if all layers were recurrent, in 32 bits."""
    inner, state = _number(own, "ssm.inner_size"), _number(own, "ssm.state_size")
    groups, kernel = _number(own, "ssm.group_count"), _number(own, "ssm.conv_kernel")
    if not inner:
        return 0
    return layers * 4 * (max(kernel - 1, 0) * (inner + 2 * groups * state) + state * inner)


def _base(values: dict[str, Value]) -> str:
    return _text(values, "general.base_model.0.name") or _text(values, "general.base_model.0.repo_url")


def _number(values: dict[str, Value], key: str, default: int = 0) -> int:
    value = values.get(key, default)
    assert isinstance(value, int), "KINDS lets only numbers in here"
    return value


def _text(values: dict[str, Value], key: str) -> str:
    value = values.get(key, "")
    assert isinstance(value, str), "KINDS lets only texts in here"
    return value
