"""Expected speed of a model on accelerators: a roofline, not a measurement.

A step of decoding reads the weights that it needs and the KV cache of all sequences, and computes one token for each:
it takes the longer of both. A prompt computes all of its tokens at once. What engines reach of the data sheet are the
shares below. They are of vLLM 0.19 (LLMServingSim's runs, ``reference``: Llama-3.1-8B on an RTX 4090 0.63 to 0.76 of
the bandwidth, Qwen3-32B on an RTX PRO 6000 0.64 to 0.88; ``tests/unit/policy/test_roofline.py`` checks one of them).
"""

import msgspec

from modelyard.domain.attention import kv_bytes
from modelyard.domain.facts import ModelFacts
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


class Pace(msgspec.Struct, frozen=True):
    """What the accelerators of one replica reach together: bytes read and operations computed in a second."""

    bytes_s: float
    operations_s: float


def pace_of(facts: ModelFacts, precision: Precision | None, kind: Kind, count: int) -> Pace:
    """Return what ``count`` accelerators of ``kind`` reach on a model in ``precision``."""
    is_gguf = precision.is_gguf if precision else facts.format == "gguf"
    together = 1.0 if is_gguf else count * (TENSOR_SHARE_LINKED if kind.link_gb_s else TENSOR_SHARE_PCIE)[count]
    own = Arithmetic.FP8 if facts.quantisation == "fp8" else Arithmetic.SIXTEEN
    share = GGUF_COMPUTE_SHARE if is_gguf else COMPUTE_SHARE
    return Pace(
        kind.bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE * together, _operations(kind, precision, own) * share * together
    )


def decoding_s(facts: ModelFacts, weights: Weights, pace: Pace, batch: float, context: int) -> tuple[float, float]:
    """Return the seconds in which a step of ``batch`` requests reads, and computes; it takes the longer of both.

    ``context`` are the tokens that each holds, a mean.
    """
    read_s = (weights.read_bytes(batch) + batch * kv_bytes(facts, context)) / pace.bytes_s
    computed_s = batch * (2 * weights.active + _attention_operations(facts, context)) / pace.operations_s
    return read_s, computed_s


def prompt_s(facts: ModelFacts, weights: Weights, pace: Pace, tokens: int) -> float:
    """Return the seconds that one prompt takes."""
    computed_s = tokens * (2 * weights.active + _attention_operations(facts, tokens // 2)) / pace.operations_s
    return max(computed_s, weights.read_bytes(tokens) / pace.bytes_s)


def speed(
    facts: ModelFacts, weights: Weights, precision: Precision | None, kind: Kind, count: int, load: Load
) -> Speed:
    """Return the speed of one replica on ``count`` accelerators of ``kind``."""
    pace = pace_of(facts, precision, kind, count)
    batch = load.concurrency
    read_s, computed_s = decoding_s(facts, weights, pace, batch, load.input_tokens + load.output_tokens // 2)
    step_s, own_s = max(read_s, computed_s), prompt_s(facts, weights, pace, load.input_tokens)
    # While a request is answered, every other one is admitted once: prompts and steps share the accelerators.
    whole_s = load.output_tokens * step_s + batch * own_s
    return Speed(
        output_tokens_s=batch * load.output_tokens / whole_s,
        total_tokens_s=batch * load.context / whole_s,
        itl_ms=1000 * whole_s / load.output_tokens,
        ttft_ms=1000 * (own_s + step_s),
        bound=_bound(read_s, computed_s, load.output_tokens * step_s, batch * own_s),
    )


def _bound(read_s: float, computed_s: float, steps_s: float, prompts_s: float) -> str:
    if prompts_s > steps_s:
        return "prompts"
    return "memory" if read_s >= computed_s else "compute"


def _operations(kind: Kind, precision: Precision | None, own: Arithmetic) -> float:
    arithmetic = precision.arithmetic if precision else own
    tops = {Arithmetic.FP8: kind.tops_fp8, Arithmetic.INT8: kind.tops_int8}.get(arithmetic, kind.tops_16)
    return (tops or kind.tops_16) * 1e12


def _attention_operations(facts: ModelFacts, tokens: int) -> float:
    """Return what a token's look at ``tokens`` before it computes: products with all keys and all values."""
    return 4.0 * facts.layers * facts.heads * facts.head_size * tokens


def _outer_parameters(facts: ModelFacts) -> int:
    """Return the parameters of embeddings and output layer, as if the two were apart."""
    return 2 * facts.vocabulary * facts.embedding_size
