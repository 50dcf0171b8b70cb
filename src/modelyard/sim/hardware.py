"""The engine that a model is on given accelerators: four numbers by the roofline, and its cache by the memory left.

A roofline is the longer of reading and computing, an engine of the simulator a sum of four terms
(``policy/engine_model.py``). The sum is fitted to the roofline: to steps of all sizes first, then to prompts. Speeds
are estimates from data sheets; give the engine's own numbers where they are known.
"""

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.policy.engine_model import Speed
from modelyard.policy.fit import is_quantised, memory_of
from modelyard.policy.hardware import CPU, GIB, KINDS, Kind, Offer
from modelyard.policy.precisions import BF16, FP16, PRECISIONS, Precision
from modelyard.policy.roofline import Load, decoding_s, pace_of, prompt_s, weights_of
from modelyard.sim.fitting import Observation, least_squares
from modelyard.sim.tasks import BLOCK_TOKENS

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_CONTEXTS = (256, 1024, 4096)
_PROMPTS = (1024, 2048)
"""Those that fill an iteration: shorter ones are read beside others, so that what they take together decides."""
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
    steps = []
    for batch in _BATCHES:
        for context in _CONTEXTS:
            seconds = max(decoding_s(facts, weights, pace, batch, context))
            steps.append(Observation((1.0, batch, batch * context), seconds, 1 / seconds))
    step_s, request_s, kv_token_s = least_squares(steps)
    prompts = []
    for tokens in _PROMPTS:
        seconds = prompt_s(facts, weights, pace, tokens)
        # A sum has read the weights already: what a prompt adds to that is left.
        rest_s = max(0.0, seconds - step_s - request_s - kv_token_s * tokens)
        prompts.append(Observation((float(tokens),), rest_s, 1 / seconds))
    (prefill_token_s,) = least_squares(prompts)
    return Speed(step_s, request_s, prefill_token_s, kv_token_s)
