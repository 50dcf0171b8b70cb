"""Expected speed of a model on accelerators: a roofline, not a measurement.

A step of decoding reads the weights that it needs and the KV cache of all sequences, and computes one token for each:
it takes the longer of both. A prompt computes all of its tokens at once. What engines reach of the data sheet are the
shares below. They are of vLLM 0.19 (LLMServingSim's runs, ``reference``: Llama-3.1-8B on an RTX 4090 0.63 to 0.76 of
the bandwidth, Qwen3-32B on an RTX PRO 6000 0.64 to 0.88; ``tests/unit/policy/test_roofline.py`` checks one of them).
"""

import msgspec

from modelyard.domain.attention import kv_bytes
from modelyard.domain.facts import ModelFacts
from modelyard.policy.engine_model import Speed as Iteration
from modelyard.policy.hardware import Kind
from modelyard.policy.precisions import OWN_BITS, Arithmetic, Precision

BANDWIDTH_SHARE = 0.7
"""Of the memory's bandwidth, while decoding."""
COMPUTE_SHARE = 0.5
"""Of the arithmetic: Splitwise's Llama-2-70B prompts reach 0.43 to 0.67 on two A100 or H100."""
GGUF_COMPUTE_SHARE = 0.3
"""llama.cpp's prompts, which unpack weights first; an assumption."""
TENSOR_SHARE_LINKED = {1: 1.0, 2: 0.9, 4: 0.8, 8: 0.65}
"""What is left when accelerators with NVLink divide each layer: an assumption between ideal and Splitwise's of 2023
(0.62 from two to four)."""
TENSOR_SHARE_PCIE = {1: 1.0, 2: 0.75, 4: 0.55, 8: 0.4}
"""The same over PCIe; an assumption."""
WEIGHT_16 = 2
_BATCH = 32
"""Requests at once, up to which what a mixture of experts reads is taken for a line."""


class Weights(msgspec.Struct, frozen=True):
    """Bytes of a model's weights, and how many of them a batch reads."""

    total_bytes: int
    parameters: int
    active: int
    """Parameters that compute one token."""
    experts: int = 0
    experts_used: int = 0

    def read_bytes(self, batch: float) -> float:
        """Return what one step reads: of a mixture of experts those that any of ``batch`` tokens is sent to."""
        if self.experts <= self.experts_used or self.active >= self.parameters:
            return float(self.total_bytes)
        per_parameter = self.total_bytes / self.parameters
        share = self.experts_used / self.experts
        of_experts = (self.parameters - self.active) / (1 - share)
        met: float = 1 - (1 - share) ** max(batch, 1.0)
        return per_parameter * (self.parameters - of_experts + of_experts * met)


class Load(msgspec.Struct, frozen=True):
    """What is asked at once: ``concurrency`` requests of so many tokens."""

    concurrency: int
    input_tokens: int
    output_tokens: int

    @property
    def context(self) -> int:
        """Tokens of one request at its end."""
        return self.input_tokens + self.output_tokens


class Speed(msgspec.Struct, frozen=True):
    """What to expect at a load."""

    output_tokens_s: float
    total_tokens_s: float
    itl_ms: float
    """Mean time between two tokens of a request, prompts of others in between included."""
    ttft_ms: float
    """From the start of a request's own prompt to its first token, without a queue."""
    bound: str
    """What the time between tokens goes to: ``prompts`` of others, else what a step waits for, ``memory`` or
    ``compute``."""


def weights_of(facts: ModelFacts, precision: Precision | None) -> Weights:
    """Return the weights in ``precision``; None: as they are."""
    parameters = facts.parameters or max(1, round(facts.weights_bytes / WEIGHT_16))
    if precision is None:
        total = facts.weights_bytes or round(parameters * OWN_BITS.get(facts.quantisation, 16.0) / 8)
    elif precision.is_gguf:
        total = round(parameters * precision.bits / 8)
    else:
        kept = 0 if precision.is_lossless else min(_outer_parameters(facts), parameters)
        total = round(kept * WEIGHT_16 + (parameters - kept) * precision.bits / 8)
    active = facts.active_parameters or parameters
    return Weights(total, parameters, min(active, parameters), facts.experts, facts.experts_used)


def speed(
    facts: ModelFacts, weights: Weights, precision: Precision | None, kind: Kind, count: int, load: Load
) -> Speed:
    """Return the speed of one replica on ``count`` accelerators of ``kind``."""
    bandwidth, compute = _reached(facts, precision, kind, count)
    batch, mean_context = load.concurrency, load.input_tokens + load.output_tokens // 2
    read_s = (weights.read_bytes(batch) + batch * kv_bytes(facts, mean_context)) / bandwidth
    computed_s = batch * (2 * weights.active + _attention_operations(facts, mean_context)) / compute
    step_s = max(read_s, computed_s)
    prompt_s = load.input_tokens * (2 * weights.active + _attention_operations(facts, load.input_tokens // 2)) / compute
    prompt_s = max(prompt_s, weights.read_bytes(load.input_tokens) / bandwidth)
    # While a request is answered, every other one is admitted once: prompts and steps share the accelerators.
    whole_s = load.output_tokens * step_s + batch * prompt_s
    return Speed(
        output_tokens_s=batch * load.output_tokens / whole_s,
        total_tokens_s=batch * load.context / whole_s,
        itl_ms=1000 * whole_s / load.output_tokens,
        ttft_ms=1000 * (prompt_s + step_s),
        bound=_bound(read_s, computed_s, load.output_tokens * step_s, batch * prompt_s),
    )


def iteration(
    facts: ModelFacts, weights: Weights, precision: Precision | None, kind: Kind, count: int, context: int
) -> Iteration:
    """Return the four numbers of an engine's iteration by the same sums; ``context`` are tokens of a usual request.

    What a step waits for is a maximum and here a sum: too slow by what it computes while it reads, which is little as
    long as it decodes.
    """
    bandwidth, compute = _reached(facts, precision, kind, count)
    read_s = weights.read_bytes(1) / bandwidth
    # Of a mixture of experts more are met by a larger batch.
    more_s = (weights.read_bytes(_BATCH) / bandwidth - read_s) / (_BATCH - 1)
    token_s = (2 * weights.active + _attention_operations(facts, context // 2)) / compute
    return Iteration(read_s, token_s + more_s, token_s, kv_bytes(facts, context) / max(context, 1) / bandwidth)


def moved(speed: Iteration, old: Kind, new: Kind, count: int, arithmetic: Arithmetic = Arithmetic.SIXTEEN) -> Iteration:
    """Return a speed that was measured on ``count`` of one kind as it is to be expected on as many of another.

    What waits for memory (the step, tokens held) goes by the bandwidth, what computes (requests, prompts) by the
    arithmetic, both with what is left where layers are divided.
    """
    memory = _together(old, count) * old.bandwidth_gb_s / (_together(new, count) * new.bandwidth_gb_s)
    compute = _together(old, count) * _tops(old, arithmetic) / (_together(new, count) * _tops(new, arithmetic))
    return Iteration(
        speed.step_s * memory, speed.request_s * compute, speed.prefill_token_s * compute, speed.kv_token_s * memory
    )


def _bound(read_s: float, computed_s: float, steps_s: float, prompts_s: float) -> str:
    if prompts_s > steps_s:
        return "prompts"
    return "memory" if read_s >= computed_s else "compute"


def _reached(facts: ModelFacts, precision: Precision | None, kind: Kind, count: int) -> tuple[float, float]:
    """Return the bytes and the operations a second that ``count`` accelerators reach together."""
    is_gguf = precision.is_gguf if precision else facts.format == "gguf"
    together = 1.0 if is_gguf else _together(kind, count)
    own = Arithmetic.FP8 if facts.quantisation == "fp8" else Arithmetic.SIXTEEN
    tops = _tops(kind, precision.arithmetic if precision else own)
    compute = tops * 1e12 * (GGUF_COMPUTE_SHARE if is_gguf else COMPUTE_SHARE) * together
    return kind.bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE * together, compute


def _together(kind: Kind, count: int) -> float:
    return count * (TENSOR_SHARE_LINKED if kind.link_gb_s else TENSOR_SHARE_PCIE)[count]


def _tops(kind: Kind, arithmetic: Arithmetic) -> float:
    tops = {Arithmetic.FP8: kind.tops_fp8, Arithmetic.INT8: kind.tops_int8}.get(arithmetic, kind.tops_16)
    return tops or kind.tops_16


def _attention_operations(facts: ModelFacts, tokens: int) -> float:
    """Return what a token's look at ``tokens`` before it computes: products with all keys and all values."""
    return 4.0 * facts.layers * facts.heads * facts.head_size * tokens


def _outer_parameters(facts: ModelFacts) -> int:
    """Return the parameters of embeddings and output layer, as if the two were apart."""
    return 2 * facts.vocabulary * facts.embedding_size
