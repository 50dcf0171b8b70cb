"""Which precision on which accelerators: what fits, how fast it is by the roofline, what it costs, and what to take.

Memory is that of one replica on ``count`` accelerators: its share of the weights, the KV cache of all sequences at
their full context by the model's own attention (windows, latent attention, recurrent state), activations and what an
engine takes besides. ``vLLM 0.19`` with Llama-3.1-8B on an RTX 4090 kept 41,408 tokens of cache at 0.9 of the memory;
this comes to the same within 3 % (``tests/unit/policy/test_fit.py``).
"""

import math
from collections.abc import Iterable, Sequence

import msgspec

from modelyard.domain.attention import kv_bytes
from modelyard.domain.facts import ModelFacts
from modelyard.policy.hardware import COUNTS, CPU, Offer
from modelyard.policy.precisions import BF16, FP16, PRECISIONS, Arithmetic, Precision, Purpose, why_not
from modelyard.policy.roofline import Load, Speed, speed, weights_of

MEMORY_SHARE = 0.9
"""Of an accelerator's memory that an engine takes: vLLM's ``--gpu-memory-utilization``."""
OVERHEAD_BYTES = 875 * 1024**2
"""Of each accelerator: its context, libraries, graphs and buffers to talk to the others."""
STEP_TOKENS = 2048
"""Tokens that a step computes at most: vLLM's ``--max-num-batched-tokens``."""
ACTIVATION_WIDTHS = 12
"""Hidden vectors of 16 bits that a token has at once: residual, norm, queries, keys and values, and the inner layer."""
CONTEXT = 4096
"""Tokens of a request where nobody says more, and the model can take as many."""
SPARE_SHARE = 0.03
"""Of the usable memory: what these sums are good to. With less left, a replica may not start."""
SMALL_PARAMETERS = 1_000_000_000
"""Up to so many a CPU is taken though there are GPUs."""
CPU_ITL_MS = 250.0
"""A CPU that takes longer for a token is slower than people read: it is not taken unless asked to by a target."""
_F16, _F32 = frozenset({"F16", "float16"}), frozenset({"F32", "float32"})
_PLAIN = frozenset({"", "BF16", "bfloat16"}) | _F16 | _F32
_MAKES_TEXT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
AS_IT_IS = "as it is"


class Targets(msgspec.Struct, frozen=True):
    """What must be met; 0: nothing."""

    itl_ms: float = 0.0
    ttft_ms: float = 0.0


ANY = Targets()


class Memory(msgspec.Struct, frozen=True):
    """Bytes of each accelerator of a replica."""

    weights_bytes: int
    kv_bytes: int
    activations_bytes: int
    overhead_bytes: int
    usable_bytes: int

    @property
    def needed_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_bytes + self.activations_bytes + self.overhead_bytes

    @property
    def spare_bytes(self) -> int:
        """What is left."""
        return self.usable_bytes - self.needed_bytes


class Row(msgspec.Struct, frozen=True):
    """One precision on one kind and number of accelerators."""

    precision: str
    engine: str
    kind: str
    count: int
    memory: Memory
    fits: bool
    kv_tokens_max: int
    """Tokens that the cache holds beside the weights."""
    speed: Speed
    usd_per_hour: float
    """Of all its accelerators."""
    usd_per_million_output: float
    usd_per_million_total: float
    meets_targets: bool
    """Of a CPU also: it is fast enough to be used, and the model is small or there is nothing else."""
    is_tight: bool
    """It fits, with less to spare than these sums are good to."""
    is_allowed: bool
    """What the model is for allows the precision."""
    is_in_fleet: bool
    quality: str
    note: str = ""
    """Why it does not fit, or is not recommended."""


class Advice(msgspec.Struct, frozen=True):
    """All rows, the one to take, and why."""

    rows: tuple[Row, ...]
    recommended: Row | None
    reason: str
    rules: tuple[str, ...] = ()
    """When not to quantise, as far as that is of this model."""


def is_quantised(facts: ModelFacts) -> bool:
    """Say whether the weights have been given fewer bits already."""
    return facts.quantisation not in _PLAIN


def purpose_of(facts: ModelFacts, asked: Purpose) -> Purpose:
    """Return what the model is for: one that keeps nothing between tokens makes vectors or classes."""
    return Purpose.EMBEDDINGS if asked is Purpose.GENERAL and is_encoder(facts) else asked


def is_encoder(facts: ModelFacts) -> bool:
    """Say whether it makes vectors or classes: it keeps nothing between tokens, and does not say that it makes text."""
    keeps = facts.kv_bytes_per_token or facts.state_bytes
    return bool(facts.layers or facts.heads) and not keeps and not facts.architecture.endswith(_MAKES_TEXT)


def load_of(facts: ModelFacts, context: int, output_tokens: int, concurrency: int) -> Load:
    """Return what is asked at once; ``context`` 0: ``CONTEXT``, or the model's own where that is shorter."""
    if not context:
        context = max(2, min(CONTEXT, facts.context_length or CONTEXT))
        output_tokens = min(output_tokens, context // 2)
    return Load(concurrency, context - output_tokens, output_tokens)


def too_long(facts: ModelFacts, context: int) -> str:
    """Return why the model cannot take ``context`` tokens, "" where it can or does not say."""
    if not 0 < facts.context_length < context:
        return ""
    return f"the model takes {facts.context_length:,} tokens at most, by its own header; {context:,} are asked for"


def advise(
    facts: ModelFacts,
    offers: Sequence[Offer],
    load: Load,
    *,
    targets: Targets = ANY,
    purpose: Purpose = Purpose.GENERAL,
    is_fixed: bool = False,
) -> Advice:
    """Return what can be had of ``offers``. ``is_fixed``: the weights stay as they are."""
    purpose = purpose_of(facts, purpose)
    if facts.format == "onnx" or (facts.format == "gguf" and not is_fixed):  # our engines of both compute on CPUs
        offers = [offer for offer in offers if offer.kind.name == CPU]
        if not offers:
            what = f"{facts.format.upper()} models run on CPUs; ask for the kind 'cpu'"
            return Advice((), None, what, _rules(facts, purpose))
    precisions = [None] if is_fixed else _precisions(facts)
    is_alone = all(offer.kind.name == CPU for offer in offers)
    rows = [
        _row(facts, _named(facts, precision, offer), offer, count, load, targets, purpose, is_alone=is_alone)
        for precision in precisions
        for offer in offers
        for count in _counts(offer)
        if _can(precision, offer) and _divides(facts, precision, count)
    ]
    recommended = cheapest(rows)
    return Advice(tuple(rows), recommended, _reason(recommended, rows, targets), _rules(facts, purpose))


def cheapest(rows: Iterable[Row], *, is_tight_fine: bool = False) -> Row | None:
    """Return the cheapest by output token of those that fit, meet the targets and are allowed; None without.

    What is tight comes last, unless ``is_tight_fine``: not all requests are at their full length at once.
    """
    able = [row for row in rows if row.fits and row.meets_targets and row.is_allowed]
    # Without prices the fewest accelerators win, then the fastest.
    return min(
        able,
        key=lambda row: (
            row.is_tight and not is_tight_fine,
            row.usd_per_million_output,
            row.count,
            -row.speed.output_tokens_s,
        ),
        default=None,
    )


def _named(facts: ModelFacts, precision: Precision | None, offer: Offer) -> Precision | None:
    """Return ``precision``; of 16 bits those that the model was trained in and the accelerator has."""
    if precision is not BF16:
        return precision
    if facts.quantisation in _F32:
        rounded = "rounded from the 32 bits that it was trained in"
        return msgspec.structs.replace(BF16 if offer.kind.has_bf16 else FP16, quality=rounded)
    if facts.quantisation in _F16:
        return FP16
    if offer.kind.has_bf16:
        return BF16
    warned = f"as trained, but in FP16: a {offer.kind.name} has no BF16, and numbers beyond 65,504 overflow"
    return msgspec.structs.replace(FP16, quality=warned)


def _precisions(facts: ModelFacts) -> list[Precision | None]:
    if is_quantised(facts):
        return [None]
    if facts.format == "gguf":
        return [None, *(one for one in PRECISIONS if one.is_gguf)]
    if facts.format == "onnx":
        return [None]
    return list(PRECISIONS)


def _counts(offer: Offer) -> list[int]:
    return [1] if offer.kind.name == CPU else [count for count in COUNTS if count <= offer.count_max]


def _can(precision: Precision | None, offer: Offer) -> bool:
    if precision is None:
        return True
    if offer.kind.name == CPU:
        return precision.is_gguf or precision.is_lossless
    if precision.is_gguf:  # llama.cpp as we bring it computes on CPUs
        return False
    needed = {Arithmetic.FP8: offer.kind.tops_fp8, Arithmetic.INT8: offer.kind.tops_int8}
    return needed.get(precision.arithmetic, 1.0) > 0


def _divides(facts: ModelFacts, precision: Precision | None, count: int) -> bool:
    """Say whether the model can be divided among ``count``: engines give each the same number of heads."""
    is_gguf = precision.is_gguf if precision else facts.format == "gguf"
    return count == 1 or is_gguf or (facts.heads % count == 0 and bool(facts.heads))


def memory_of(facts: ModelFacts, weights_bytes: int, offer: Offer, count: int, load: Load, *, is_gguf: bool) -> Memory:
    """Return the memory that each of ``count`` accelerators needs."""
    cache = load.concurrency * kv_bytes(facts, load.context)
    activations = STEP_TOKENS * facts.embedding_size * ACTIVATION_WIDTHS * 2
    logits = load.concurrency * facts.vocabulary * 4
    is_cpu = offer.kind.name == CPU
    return Memory(
        weights_bytes=math.ceil(weights_bytes / count),
        kv_bytes=math.ceil(cache / _cache_parts(facts, count, is_gguf=is_gguf)),
        activations_bytes=math.ceil(activations / count) + logits,
        overhead_bytes=OVERHEAD_BYTES // 8 if is_cpu else OVERHEAD_BYTES,
        usable_bytes=int(offer.memory_bytes * (1.0 if is_cpu else MEMORY_SHARE)),
    )


def _cache_parts(facts: ModelFacts, count: int, *, is_gguf: bool) -> int:
    """Return into how many parts the cache is divided: a KV head is the least, and a latent vector is in each whole."""
    if is_gguf:
        return count
    return 1 if facts.kv_is_latent else max(1, min(count, facts.kv_heads))


def _row(
    facts: ModelFacts,
    precision: Precision | None,
    offer: Offer,
    count: int,
    load: Load,
    targets: Targets,
    purpose: Purpose,
    *,
    is_alone: bool,
) -> Row:
    is_gguf = precision.is_gguf if precision else facts.format == "gguf"
    weights = weights_of(facts, precision)
    memory = memory_of(facts, weights.total_bytes, offer, count, load, is_gguf=is_gguf)
    free = memory.usable_bytes - memory.needed_bytes + memory.kv_bytes
    tokens = _tokens_in(facts, free * _cache_parts(facts, count, is_gguf=is_gguf))
    found = speed(facts, weights, precision, offer.kind, count, load)
    price = offer.price_nanousd * count
    fits = memory.needed_bytes <= memory.usable_bytes
    is_met = not (0 < targets.itl_ms < found.itl_ms or 0 < targets.ttft_ms < found.ttft_ms)
    unfit = _why_no_cpu(facts, weights.parameters, found, targets, is_alone=is_alone) if offer.kind.name == CPU else ""
    is_tight = fits and memory.spare_bytes < SPARE_SHARE * memory.usable_bytes
    forbidden = "" if precision is None or precision.is_lossless else why_not(purpose)
    return Row(
        precision=precision.name if precision else _own_name(facts),
        engine=_engine(facts, is_gguf=is_gguf),
        kind=offer.kind.name,
        count=count,
        memory=memory,
        fits=fits,
        kv_tokens_max=tokens,
        speed=found,
        usd_per_hour=price / 1e9,
        usd_per_million_output=_per_million(price, found.output_tokens_s),
        usd_per_million_total=_per_million(price, found.total_tokens_s),
        meets_targets=is_met and not unfit,
        is_tight=is_tight,
        is_allowed=not forbidden,
        is_in_fleet=offer.is_in_fleet,
        quality=precision.quality if precision else "as the file has it",
        note=_note(memory, is_met=is_met, is_tight=is_tight, forbidden=forbidden, unfit=unfit),
    )


def _why_no_cpu(facts: ModelFacts, parameters: int, found: Speed, targets: Targets, *, is_alone: bool) -> str:
    """Return why a CPU, whose hours often have no price, is not to be taken; "" where it may be."""
    is_small = facts.format == "onnx" or parameters <= SMALL_PARAMETERS
    if is_small and is_alone:
        return ""
    if not is_small and not is_alone:
        return "too large a model for a CPU where there are GPUs"
    if targets.itl_ms or is_encoder(facts) or found.itl_ms <= CPU_ITL_MS:
        return ""
    return f"too slow to use: {found.itl_ms:,.0f} ms a token"


def _tokens_in(facts: ModelFacts, free_bytes: int) -> int:
    return max(0, free_bytes) // facts.kv_bytes_per_token if facts.kv_bytes_per_token else 0


def _own_name(facts: ModelFacts) -> str:
    return facts.quantisation.lower() if facts.quantisation else AS_IT_IS


def _engine(facts: ModelFacts, *, is_gguf: bool) -> str:
    if is_gguf:
        return "llamacpp"
    return "onnx" if facts.format == "onnx" else "vllm"


def _per_million(price_nanousd: int, tokens_s: float) -> float:
    return price_nanousd / 1e9 / (tokens_s * 3600) * 1e6 if tokens_s else 0.0


def gib(size_bytes: float) -> str:
    """Return bytes as GiB."""
    return f"{size_bytes / 1024**3:.1f} GiB"


def _note(memory: Memory, *, is_met: bool, is_tight: bool, forbidden: str, unfit: str) -> str:
    if memory.needed_bytes > memory.usable_bytes:
        return f"needs {gib(memory.needed_bytes)} of each, {gib(memory.usable_bytes)} are usable"
    if forbidden:
        return f"do not quantise: {forbidden}"
    if not is_met:
        return "slower than the target"
    if unfit:
        return unfit
    return f"tight: only {gib(memory.spare_bytes)} to spare" if is_tight else ""


def _reason(row: Row | None, rows: Sequence[Row], targets: Targets) -> str:
    if row is not None:
        return _reason_for(row, rows, targets)
    if not rows:
        return "there is no accelerator that this model could be divided among"
    if not any(one.fits for one in rows):
        least = min(rows, key=lambda one: one.memory.needed_bytes * one.count)
        return (
            f"nothing fits: the least is {gib(least.memory.needed_bytes * least.count)} ({least.precision} on "
            f"{least.count} x {least.kind}); give fewer concurrent requests, a shorter context or more accelerators"
        )
    if not any(one.fits and one.is_allowed for one in rows):
        return "what fits is quantised, which this purpose does not allow; give more accelerators"
    fast = min((one for one in rows if one.fits and one.is_allowed), key=lambda one: one.speed.itl_ms)
    most = f"{fast.precision} on {fast.count} x {fast.kind} with {fast.speed.itl_ms:,.0f} ms a token"
    if not (targets.itl_ms or targets.ttft_ms):
        return (
            f"nothing that fits is fast enough to use, {CPU_ITL_MS:.0f} ms on a CPU; the fastest is {most}. "
            "Ask for fewer requests at once or a shorter context, or accept it with --itl-ms"
        )
    return f"nothing that fits meets the target; the fastest is {most} and {fast.speed.ttft_ms:.0f} ms to the first"


def _reason_for(row: Row, rows: Sequence[Row], targets: Targets) -> str:
    able = [one for one in rows if one.fits and one.meets_targets and one.is_allowed]
    asked = [
        f"{value:g} ms {what}"
        for value, what in ((targets.itl_ms, "a token"), (targets.ttft_ms, "to the first"))
        if value
    ]
    met = f" and meet {' and '.join(asked)}" if asked else ""
    memory = row.memory
    text = f"of {len(able)} that fit{met} {_merit(row, able)}"
    text += f" ({gib(memory.needed_bytes)} of {gib(memory.usable_bytes)} usable on each)"
    plain = cheapest(one for one in rows if one.precision in (BF16.name, FP16.name, AS_IT_IS))
    if plain is not None and plain is not row and row.usd_per_hour and plain.usd_per_hour:
        times = plain.usd_per_million_output / row.usd_per_million_output if row.usd_per_million_output else 0.0
        text += f"; without quantisation: {plain.count} x {plain.kind}, {times:.1f} times the price"
    if row.is_tight:
        text += (
            f"; it is tight: {gib(memory.spare_bytes)} to spare are less than the {SPARE_SHARE:.0%} that these sums "
            "are good to, so it may not start. Ask for fewer requests at once or a shorter context"
        )
    elif left := sum(one.is_tight for one in able):
        text += f"; {left} of them {'is' if left == 1 else 'are'} too tight, with less than {SPARE_SHARE:.0%} to spare"
    return text


def _merit(row: Row, able: Sequence[Row]) -> str:
    """Return what ``row`` was taken for."""
    rivals = [one for one in able if one.is_tight == row.is_tight]
    if row.usd_per_hour:
        return "it has the lowest price of a token" if len(rivals) > 1 else "it is the only one to take"
    free = [one for one in rivals if not one.usd_per_hour]
    text = f"it costs nothing, as no price is set for a {row.kind}"
    return f"{text}, and of these it has the fewest accelerators and then the highest speed" if len(free) > 1 else text


def _rules(facts: ModelFacts, purpose: Purpose) -> tuple[str, ...]:
    if forbidden := why_not(purpose):
        return (f"Do not quantise: {forbidden}.",)
    if is_quantised(facts):
        return (
            f"These weights are quantised already ({facts.quantisation}); other precisions start from the original.",
        )
    return (
        "Do not quantise for math or code that must be exact, for embeddings, or where answers must be reproducible: "
        "say so with purpose.",
    )
