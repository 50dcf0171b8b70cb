"""The models of a simulated fleet: their shapes, where they run, and how fast, all by the production's own sums.

``policy/fit.py`` says what fits where and what to take, ``policy/roofline.py`` how fast it is, ``policy/admission.py``
what a request reserves of the KV cache. What is ours here is only which models there are.
"""

import math
from functools import cache

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.policy.admission import reservation
from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.fit import MEMORY_SHARE, Row, Targets, advise, cheapest
from modelyard.policy.hardware import KINDS, Offer
from modelyard.policy.job import Job
from modelyard.policy.precisions import BF16, FP16, PRECISIONS, Purpose
from modelyard.policy.roofline import Load, Speed, speed, weights_of

_SMALL_BATCH = 8
"""Texts that an encoder takes at once."""
_SEQUENCES_MOST = 256
"""vLLM's ``--max-num-seqs`` on large accelerators."""
_P90 = math.log(10)
"""Of exponential lengths, in means: what admission reserves for an answer."""
_OUTPUT_MAX = 4096
KV_SHARE = DispatchRules().kv_share_max
SHARED_MOST = 0.5
"""What needs no more of an accelerator's memory may share it, unless it is busy enough to use one alone."""
_TARGETS = Targets(itl_ms=100.0, ttft_ms=1000.0)


def _llm(name: str, billions: float, layers: int, heads: int, width: int, vocabulary: int) -> ModelFacts:
    parameters, head_size, kv_heads = round(billions * 1e9), 128, 8
    return ModelFacts(
        format="safetensors",
        architecture="LlamaForCausalLM",
        name=name,
        parameters=parameters,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        embedding_size=width,
        vocabulary=vocabulary,
        context_length=131_072,
        quantisation="BF16",
        weights_bytes=2 * parameters,
        kv_bytes_per_token=2 * layers * kv_heads * head_size * 2,
    )


def _encoder(name: str, millions: float, layers: int, heads: int, width: int) -> ModelFacts:
    parameters = round(millions * 1e6)
    return ModelFacts(
        format="safetensors", architecture="XLMRobertaModel", name=name, parameters=parameters, layers=layers,
        heads=heads, kv_heads=heads, head_size=width // heads, embedding_size=width, vocabulary=250_002,
        context_length=8192, quantisation="BF16", weights_bytes=2 * parameters,
    )  # fmt: skip


MODELS: dict[str, ModelFacts] = {
    facts.name: facts
    for facts in (
        _llm("llama-3.2-3b", 3.21, 28, 24, 3072, 128_256),
        _llm("llama-3.1-8b", 8.03, 32, 32, 4096, 128_256),
        _llm("qwen3-32b", 32.8, 64, 64, 5120, 151_936),
        _llm("llama-3.3-70b", 70.6, 80, 64, 8192, 128_256),
        _llm("mistral-large-2", 122.6, 88, 96, 12_288, 32_768),
        _encoder("bge-m3", 568, 24, 16, 1024),
        _encoder("bge-large", 335, 24, 16, 1024),
    )
}
"""Shapes as their makers' ``config.json`` has them."""
MIX: tuple[tuple[str, float], ...] = (
    ("llama-3.2-3b", 0.2),
    ("llama-3.1-8b", 0.5),
    ("qwen3-32b", 0.18),
    ("llama-3.3-70b", 0.11),
    ("mistral-large-2", 0.01),
)
"""LLMs by share: an assumption, most are of 8B."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One model as it runs: a replica's place, and how long ``batch`` requests at once take.

    A request takes ``fixed_s + batch * shared_s`` from its prompt to its end, and its prompt ``prompt_s`` alone.
    """

    name: str
    kind: str
    precision: str
    accelerators: int
    memory_bytes: int
    """Of each accelerator that is held."""
    weights_bytes: int
    slots: int
    fixed_s: float
    shared_s: float
    prompt_s: float
    step_s: float
    """From one token to the next, at half of the slots."""
    completion_tokens: float
    is_llm: bool = True
    is_static: bool = False
    is_shared: bool = False
    """Others may be on its accelerator."""

    @property
    def requests_s(self) -> float:
        """What one replica serves with all slots taken."""
        return self.slots / (self.fixed_s + self.slots * self.shared_s)


class NoRoomError(ValueError):
    """A model fits none of the nodes."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On what terms a model runs.

    ``is_busy``: it serves much, so that the price of a token decides; else the price of an hour, since it mostly waits.
    ``is_exact``: it must keep its bits. ``static_batch``: requests that start and end together, 0: continuous batching.
    """

    prompt_tokens: int
    completion_tokens: int
    kinds: tuple[tuple[str, int], ...]
    """Accelerators that there are, with the most of each on a node."""
    prices: tuple[tuple[str, float], ...] = ()
    """Dollars for an hour of one, where they are not those of ``policy/hardware.py``."""
    is_busy: bool = False
    is_exact: bool = False
    quantised: bool = True
    static_batch: int = 0
    packing: bool = True


@cache
def profile(name: str, terms: Terms) -> Profile:
    """Return how ``name`` runs on ``terms``."""
    facts = MODELS[name]
    is_llm = facts.kv_bytes_per_token > 0
    batch = terms.static_batch if is_llm else 0
    row = _chosen(_rows(facts, terms, batch), terms)
    if row is None:
        bits = "" if terms.quantised else " in 16 bits"
        raise NoRoomError(f"no node has the accelerators for {facts.name}{bits}; give larger ones, or more on a node")
    is_shared = terms.packing and not terms.is_busy and _share(row) <= SHARED_MOST
    slots = batch or _SMALL_BATCH
    if is_llm and not batch:
        room = row.memory.kv_bytes // facts.kv_bytes_per_token if is_shared else row.kv_tokens_max
        slots = _slots(room, terms)
    precision = next((one for one in (*PRECISIONS, FP16) if one.name == row.precision), None)
    weights, kind = weights_of(facts, precision), KINDS[row.kind]

    def at(number: int, answer: int = terms.completion_tokens) -> Speed:
        return speed(facts, weights, precision, kind, row.count, Load(number, terms.prompt_tokens, answer))

    def whole_s(number: int) -> float:
        return number * terms.completion_tokens / at(number).output_tokens_s

    shared_s = (whole_s(slots) - whole_s(1)) / max(1, slots - 1)
    fixed_s, prompt_s = whole_s(1) - shared_s, at(1, 1).ttft_ms / 1000
    if batch:
        # Answers of a batch end with its longest, of exponential lengths; prompts are as many as before.
        longest = math.fsum(1 / one for one in range(1, batch + 1))
        fixed_s, shared_s = fixed_s * longest, (shared_s - prompt_s) * longest + prompt_s
    return Profile(
        name=name,
        kind=row.kind,
        precision=row.precision,
        accelerators=row.count,
        memory_bytes=row.memory.needed_bytes if is_shared else kind.memory_bytes,
        weights_bytes=weights.total_bytes,
        slots=slots,
        fixed_s=max(fixed_s, 1e-4),
        shared_s=max(shared_s, 1e-6),
        prompt_s=prompt_s,
        step_s=at(max(slots // 2, 1)).itl_ms / 1000,
        completion_tokens=float(terms.completion_tokens if is_llm else 0),
        is_llm=is_llm,
        is_static=batch > 0,
        is_shared=is_shared,
    )


def _rows(facts: ModelFacts, terms: Terms, static_batch: int) -> list[Row]:
    """Return what the production advises of the accelerators that there are."""
    prices = dict(terms.prices)
    offers = [
        Offer(KINDS[kind], KINDS[kind].memory_bytes, most, round(prices.get(kind, KINDS[kind].price_usd) * 1e9))
        for kind, most in terms.kinds
    ]
    load = Load(static_batch or (32 if terms.is_busy else 16), terms.prompt_tokens, terms.completion_tokens)
    purpose = Purpose.MATH if terms.is_exact else Purpose.GENERAL
    rows = advise(facts, offers, load, targets=_TARGETS, purpose=purpose).rows
    return [row for row in rows if terms.quantised or row.precision in (BF16.name, FP16.name)]


def _share(row: Row) -> float:
    """Return the share of its accelerators that a row needs, by memory; all of them where it needs several."""
    memory = row.memory
    whole = memory.usable_bytes / MEMORY_SHARE
    return memory.needed_bytes / whole if row.count == 1 else 1.0


def _chosen(rows: list[Row], terms: Terms) -> Row | None:
    """Return what its owner takes: of what serves much the cheapest token, else the cheapest hour."""

    def price(row: Row) -> tuple[float, float]:
        share = _share(row) if terms.packing else 1.0
        return row.usd_per_hour * (share if share <= SHARED_MOST else 1.0), row.usd_per_million_output

    if terms.is_busy:
        found = cheapest(rows, is_tight_fine=True)
    else:
        able = [row for row in rows if row.fits and row.meets_targets and row.is_allowed]
        found = min(able, key=price, default=None)
    if found is None:  # no target can be met: what fits and is fastest
        fitting = (row for row in rows if row.fits and row.is_allowed)
        found = min(fitting, key=lambda row: row.speed.itl_ms, default=None)
    return found


def _slots(room: int, terms: Terms) -> int:
    """Return the requests that admission lets onto a replica with ``room`` tokens of cache, by their mean length."""
    output = round(_P90 * terms.completion_tokens)
    expected = Job("", prompt_tokens=terms.prompt_tokens, output_tokens=output, output_max=_OUTPUT_MAX)
    return max(2, min(_SEQUENCES_MOST, int(KV_SHARE * room / reservation(expected))))
