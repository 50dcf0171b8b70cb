"""The engine that a model is on given accelerators: four numbers by the roofline, and its cache by the memory left.

A roofline is the longer of reading and computing, an engine of the simulator a sum of four terms
(``policy/engine_model.py``). The sum is fitted to the roofline on a grid of batches and prompts as it is to
measurements (``fitting.fit_measured``). Speeds are estimates from data sheets; give the engine's own numbers where they
are known.
"""

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.policy.engine_model import Speed
from modelyard.policy.fit import is_quantised, memory_of
from modelyard.policy.hardware import CPU, GIB, KINDS, Kind, Offer
from modelyard.policy.precisions import BF16, FP16, PRECISIONS, Precision
from modelyard.policy.roofline import Load, decoding_s, pace_of, prompt_s, weights_of
from modelyard.sim.fitting import fit_measured
from modelyard.sim.tasks import BLOCK_TOKENS
from modelyard.sim.traces import Measured

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_PROMPTS = (128, 512, 2048)
_OUTPUT = 256
_CHUNK_TOKENS = 8192
PRECISION_NAMES = (*(one.name for one in PRECISIONS), FP16.name)


class Place(msgspec.Struct, frozen=True):
    """Where a model runs: ``count`` accelerators of ``kind``; ``memory_gib`` each, 0 as its data sheet says."""

    kind: str
    count: int = 1
    memory_gib: float = 0.0


class Estimate(msgspec.Struct, frozen=True):
    """What is expected of a model there."""

    speed: Speed
    kv_tokens: int


def estimate(facts: ModelFacts, precision: str, place: Place) -> Estimate:
    """Return what to expect of a model in a precision ("": as it is) at a place.

    Raises:
        ValueError: it does not fit, or cannot be there; the message says what would.
    """
    kind = KINDS[place.kind]
    chosen = _precision(facts, precision, kind)
    memory = round(place.memory_gib * GIB) or kind.memory_bytes
    if not memory:
        raise ValueError(f"a {kind.name} has the memory of its machine: say how much, as in memory_gib = 16")
    is_gguf = chosen.is_gguf if chosen else facts.format == "gguf"
    weights, offer = weights_of(facts, chosen), Offer(kind, memory, place.count, 0)
    needed = memory_of(facts, weights.total_bytes, offer, place.count, Load(1, 1, 1), is_gguf=is_gguf)
    free = (needed.usable_bytes - needed.needed_bytes + needed.kv_bytes) * place.count
    tokens = max(0, free) // max(1, facts.kv_bytes_per_token)
    if tokens < 2 * BLOCK_TOKENS:
        bits, most = chosen.name if chosen else "its own bits", needed.usable_bytes * place.count / GIB
        raise ValueError(
            f"{facts.name} takes {weights.total_bytes / GIB:.0f} GiB in {bits}, and {place.count} x {kind.name} have"
            f" {most:.0f} GiB for it: give more of them, a larger kind or fewer bits"
        )
    return Estimate(_fitted(facts, chosen, kind, place.count), tokens)


def _precision(facts: ModelFacts, name: str, kind: Kind) -> Precision | None:
    if is_quantised(facts) or facts.format == "gguf":
        if name:
            raise ValueError(f"{facts.name} is quantised already ({facts.quantisation}): leave precision out")
        return None
    if not name:
        return BF16 if kind.has_bf16 else FP16
    able = [one.name for one in PRECISIONS if one.is_lossless or one.is_gguf == (kind.name == CPU)]
    if name not in (*able, FP16.name):
        raise ValueError(f"{name} cannot run on {kind.name}: choose one of {', '.join(able)}")
    return FP16 if name == FP16.name else next(one for one in PRECISIONS if one.name == name)


def _fitted(facts: ModelFacts, precision: Precision | None, kind: Kind, count: int) -> Speed:
    weights, pace = weights_of(facts, precision), pace_of(facts, precision, kind, count)
    return fit_measured(
        [
            Measured(
                model=facts.name,
                hardware=kind.name,
                tensor_parallel=count,
                prompt_tokens=prompt,
                batch=batch,
                output_tokens=_OUTPUT,
                prompt_s=batch * prompt_s(facts, weights, pace, prompt),
                token_s=max(decoding_s(facts, weights, pace, batch, prompt + _OUTPUT // 2)),
            )
            for batch in _BATCHES
            for prompt in _PROMPTS
            # Nobody reads more at once: longer prompts are several iterations.
            if batch * prompt <= _CHUNK_TOKENS
        ]
    )
