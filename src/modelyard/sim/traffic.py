"""Requests of a made-up kind: steady, bursty, by the hour of a day, or conversations that grow turn by turn.

One seed gives the same requests. When they come, how long prompts and answers are, and how they begin are drawn apart,
so that whoever changes one of these keeps the others. Lengths are distributions as ``modelyard bench`` takes them.
Prompts that begin alike have the same hashes (of ``HASH_TOKENS`` each), which gateways and engines compare.
"""

import math
import random
from collections.abc import Callable, Iterator
from enum import StrEnum

import msgspec

from modelyard.domain.lengths import TOKENS_MAX, Lengths
from modelyard.sim.requests import Arrival

HASH_TOKENS = 256
"""Tokens that a hash of a prompt stands for: as many as the gateway's own (``policy/prefixes.py``)."""
REQUESTS_MAX = 1_000_000
"""Of all tenants together: each takes 2.5 KB for as long as the world runs (measured with 300,000), and 0.1 ms."""
SPAN_MAX_S = 100_000 * 60.0
"""Latest arrival, ten weeks: the controller decides every two seconds, whether anybody comes or not."""
_TOKEN_S = 0.03
"""A turn comes no earlier than the answer before it took at so long a token, and a pause."""


class Pattern(StrEnum):
    """When requests come."""

    POISSON = "poisson"
    """Each for itself."""
    CONSTANT = "constant"
    """All equally far apart."""
    BURSTY = "bursty"
    """Gamma-distributed gaps, ``burstiness`` their coefficient of variation."""
    DIURNAL = "diurnal"
    """Poisson, with a rate that goes from its least to ``peak`` times its mean and back, over ``period_hours``."""
    SESSIONS = "sessions"
    """Conversations: each turn's prompt is what was said before and more."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one tenant. ``rate`` is of requests a second, a mean over ``seconds``."""

    pattern: Pattern = Pattern.POISSON
    rate: float = 1.0
    begin_s: float = 0.0
    seconds: float = 600.0
    burstiness: float = 4.0
    peak: float = 1.8
    period_s: float = 86_400.0
    tenant_id: str = "tenant"
    weight: float = 1.0
    band: int = 1
    input_tokens: Lengths = Lengths("lognormal", 512, 0.6)
    output_tokens: Lengths = Lengths("lognormal", 200, 0.6)
    output_max: int = 0
    """What callers allow; 0: exactly what is generated."""
    shared_prefix_tokens: int = 0
    """With which prompts begin, as a system prompt does."""
    shared_prefixes: int = 1
    """How many such beginnings there are."""
    turns: float = 4.0
    """Of a conversation, a mean."""
    think_s: float = 20.0
    """From an answer to the next turn, a mean."""


class _Chances:
    """What is drawn apart: lengths of prompts, lengths of answers, and all else of a request."""

    def __init__(self, chance: random.Random) -> None:
        self.prompts, self.answers, self.rest = (random.Random(chance.random()) for _ in range(3))


def requests_of(traffic: Traffic, chance: random.Random) -> list[Arrival]:
    """Return the requests, in order."""
    chances = _Chances(chance)
    # Hashes of one traffic must not meet those of another by chance.
    names = [chances.rest.getrandbits(40) << 20 for _ in range(traffic.shared_prefixes)]
    moments = _moments(traffic, random.Random(chance.random()))
    if traffic.pattern is Pattern.SESSIONS:
        found = [turn for at_s in moments for turn in _session(traffic, at_s, names, chances)]
        return sorted(found, key=lambda one: one.at_s)
    beginnings: dict[int, tuple[int, ...]] = {}
    return [_single(traffic, at_s, names, beginnings, chances) for at_s in moments]


def _moments(traffic: Traffic, chance: random.Random) -> Iterator[float]:
    """Yield when requests, or conversations, begin."""
    rate = traffic.rate / traffic.turns if traffic.pattern is Pattern.SESSIONS else traffic.rate
    end_s = traffic.begin_s + traffic.seconds
    gap = _gaps(traffic, rate, chance)
    at_s = traffic.begin_s + gap()
    while at_s < end_s:
        if traffic.pattern is not Pattern.DIURNAL or chance.random() < _share(traffic, at_s - traffic.begin_s):
            yield at_s
        at_s += gap()


def _gaps(traffic: Traffic, rate: float, chance: random.Random) -> Callable[[], float]:
    match traffic.pattern:
        case Pattern.CONSTANT:
            return lambda: 1 / rate
        case Pattern.BURSTY:
            shape = 1 / traffic.burstiness**2
            return lambda: chance.gammavariate(shape, 1 / (rate * shape))
        case Pattern.DIURNAL:
            # As many as at the peak, of which ``_share`` come.
            return lambda: chance.expovariate(rate * traffic.peak)
        case _:
            return lambda: chance.expovariate(rate)


def _share(traffic: Traffic, passed_s: float) -> float:
    """Return the rate as a share of its peak; it begins at its least, as a night does."""
    swing = traffic.peak - 1
    return max(0.0, 1 - swing * math.cos(2 * math.pi * passed_s / traffic.period_s)) / traffic.peak


def _single(
    traffic: Traffic, at_s: float, names: list[int], beginnings: dict[int, tuple[int, ...]], chances: _Chances
) -> Arrival:
    prompt = traffic.shared_prefix_tokens + traffic.input_tokens.draw(chances.prompts)
    output = traffic.output_tokens.draw(chances.answers)
    name = chances.rest.choice(names)
    # One tuple for all that begin so: it may have thousands of parts.
    blocks = beginnings.get(name)
    if blocks is None:
        whole = traffic.shared_prefix_tokens // HASH_TOKENS
        blocks = beginnings[name] = tuple(name + block for block in range(whole))
    return _arrival(traffic, at_s, prompt, output, blocks)


def _session(traffic: Traffic, at_s: float, names: list[int], chances: _Chances) -> Iterator[Arrival]:
    """Yield the turns of one conversation, which ends where no model has the context for it."""
    chance = chances.rest
    own, shared = chance.getrandbits(40) << 20, chance.choice(names)
    whole = traffic.shared_prefix_tokens // HASH_TOKENS
    said = traffic.shared_prefix_tokens
    while True:
        said += traffic.input_tokens.draw(chances.prompts)
        output = traffic.output_tokens.draw(chances.answers)
        blocks = tuple((shared if block < whole else own) + block for block in range(said // HASH_TOKENS))
        yield _arrival(traffic, at_s, said, output, blocks)
        said += output
        # A geometric number of turns has the mean that was asked for.
        if chance.random() >= 1 - 1 / traffic.turns or said > TOKENS_MAX:
            return
        at_s += output * _TOKEN_S + chance.expovariate(1 / traffic.think_s)


def _arrival(traffic: Traffic, at_s: float, prompt: int, output: int, blocks: tuple[int, ...]) -> Arrival:
    return Arrival(
        at_s=at_s,
        prompt_tokens=prompt,
        output_tokens=output,
        output_max=max(traffic.output_max, output) if traffic.output_max else 0,
        tenant_id=traffic.tenant_id,
        weight=traffic.weight,
        band=traffic.band,
        blocks=blocks,
    )
