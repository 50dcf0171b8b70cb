"""What a model file says of itself: read from its header, never from its name."""

import msgspec


class TensorFacts(msgspec.Struct, frozen=True):
    """An input or an output of a graph, as the Open Inference Protocol describes it; -1 is a size of any value."""

    name: str
    datatype: str
    shape: tuple[int, ...] = ()


class ModelFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything that memory, admission and people need to know of a model; 0 and "" are not known.

    ``kv_bytes_per_token`` is of one sequence with a cache of 16 bits: 2 x layers x KV heads x head size x 2 bytes for
    plain attention (``DESIGN.md`` section 12), less for latent attention, 0 where nothing is kept between tokens. It is
    what a token takes at first; ``kv_bytes`` in ``domain/attention.py`` has the whole of a sequence.
    """

    format: str = ""
    """``gguf``, ``safetensors`` or ``onnx``."""
    architecture: str = ""
    name: str = ""
    licence: str = ""
    parameters: int = 0
    active_parameters: int = 0
    """Those that compute one token, of a mixture of experts; 0: all of them, or not known."""
    experts: int = 0
    """Of each layer that has some."""
    experts_used: int = 0
    """That a token is sent to."""
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    embedding_size: int = 0
    vocabulary: int = 0
    context_length: int = 0
    quantisation: str = ""
    """As its makers call it: ``Q4_K_M``, ``F16``, ``BF16``, ``I8``, ``awq``."""
    tokenizer: str = ""
    """Its kind: ``gpt2``, ``llama``, ``bert``."""
    chat_template: str = ""
    """The template's text, cut to 16 KiB."""
    weights_bytes: int = 0
    """Bytes of all tensors: what an engine holds in memory before the first request."""
    kv_bytes_per_token: int = 0
    kv_is_latent: bool = False
    """The cache has one vector a token for all heads (latent attention): it cannot be divided among accelerators."""
    sliding_window: int = 0
    """Tokens that its layers with a sliding window keep; 0: no layer has one."""
    kv_window_bytes_per_token: int = 0
    """The part of ``kv_bytes_per_token`` that is of those layers: beyond the window a sequence needs no more of it."""
    state_bytes: int = 0
    """Bytes of each sequence whatever its length, of recurrent layers; at most so many."""
    is_adapter: bool = False
    """It is a LoRA adapter: nothing without its base."""
    adapter_base: str = ""
    """What the adapter says it was trained on, in its maker's words."""
    adapter_rank: int = 0
    inputs: tuple[TensorFacts, ...] = ()
    """What an ONNX graph takes, and in ``outputs`` what it gives."""
    outputs: tuple[TensorFacts, ...] = ()
