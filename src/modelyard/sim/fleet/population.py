"""Who there is: endpoints with the traffic of a production client each, and the deployments that serve them.

Every endpoint has the rates of one ServeGen client, moved by up to a day and multiplied by a lognormal factor, so that
all together come to the scenario's rate. Clients of a trace that covers one day only are left out: said again every
day they would be foreseen perfectly. The same seed gives the same endpoints whatever measures are taken.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelyard.sim.fleet.models import MIX, Profile, Terms, profile
from modelyard.sim.fleet.scenario import Scenario, Traffic
from modelyard.sim.rates import Client

DAYS_LEAST = 7
"""A client's trace has to cover more than so many days; how often it asks does not matter."""
DAY = 144
_BASES = MIX[:-1]
"""The largest is nobody's shared base."""
_SMALL = ("bge-m3", "bge-large")
_PROMPT, _COMPLETION = 1024.0, 256.0
"""Of clients that do not say, and of clients' means that are not numbers."""
_SMALL_TOKENS = (512, 1)
_LEADING_SHARE = 0.5
"""Share of a replica's capacity from which the price of a token matters more than that of an hour."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Deployment:
    """What has replicas of its own: an endpoint, or a base with its guests."""

    name: str
    profile: Profile
    mean_rate: float
    guests: int = 0

    @property
    def is_host(self) -> bool:
        """Whether its requests are those of guests."""
        return self.guests > 0


@dataclass(frozen=True, slots=True)
class Population:
    """Endpoints as columns, and deployments. ``rates`` and ``bursts`` (squared CV) are of clients by ten minutes."""

    client: Ints
    shift: Ints
    factor: Floats
    deployment: Ints
    is_pooled: NDArray[np.bool_]
    rates: Floats
    bursts: Floats
    deployments: tuple[Deployment, ...]

    @property
    def endpoints(self) -> int:
        """How many there are."""
        return len(self.client)

    def rate(self, slot: int) -> Floats:
        """Return the requests/s of every endpoint in a slot of ten minutes, counted from the trace's begin."""
        at = (slot + self.shift) % self.rates.shape[1]
        found: Floats = self.rates[self.client, at] * self.factor
        return found

    def burst(self, slot: int) -> Floats:
        """Return the variance of counts over their mean."""
        at = (slot + self.shift) % self.rates.shape[1]
        found: Floats = self.bursts[self.client, at]
        return found


def usable(clients: Sequence[Client]) -> list[Client]:
    """Return those whose trace covers enough days."""
    return [one for one in clients if one.family == "language" or one.days > DAYS_LEAST]


def populate(scenario: Scenario, clients: Sequence[Client], chance: random.Random) -> Population:
    """Return the endpoints and deployments of a scenario.

    Raises:
        ValueError: no client covers enough days.
    """
    traffic = scenario.traffic
    known = usable(clients)
    if not known:
        raise ValueError(f"no client of the trace covers more than {DAYS_LEAST} days")
    number = traffic.endpoints
    rates = np.array([one.rates for one in known], dtype=np.float64)
    bursts = np.clip(np.array([one.spreads for one in known], dtype=np.float64), 1.0, traffic.burst_most) ** 2
    client = np.array([chance.randrange(len(known)) for _ in range(number)], dtype=np.int64)
    shift = np.array([chance.randrange(DAY) for _ in range(number)], dtype=np.int64)
    factor = np.array([chance.lognormvariate(0.0, traffic.spread) for _ in range(number)])
    means = rates.mean(axis=1)[client]
    factor *= traffic.rate * number / Traffic().endpoints / max(float((means * factor).sum()), 1e-9)
    kinds = [_kind(traffic, chance) for _ in range(number)]
    deployment, deployments = _deploy(scenario, known, client, means * factor, kinds)
    is_pooled = np.array([kind.base >= 0 for kind in kinds])
    return Population(client, shift, factor, deployment, is_pooled, rates, bursts, tuple(deployments))


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an endpoint is: its model, and the shared base that it is an adapter of, -1 for none."""

    model: str
    base: int
    is_exact: bool


def base_models(bases: int) -> list[str]:
    """Return the models of the shared bases, by the mix; the first is the most popular."""
    total = sum(share for _, share in _BASES)
    at = [(order + 0.5) / bases for order in range(bases)]
    edges, found = 0.0, []
    for name, share in _BASES:
        begin, edges = edges, edges + share / total
        found += [(place, name) for place in at if begin <= place < edges]
    # Popularity has nothing to do with size: bases are spread over the ranks by the golden ratio.
    order = sorted(range(len(found)), key=lambda rank: rank * 0.618034 % 1)
    return [found[rank][1] for rank in order]


def _kind(traffic: Traffic, chance: random.Random) -> _Kind:
    drawn, is_exact = chance.random(), chance.random() < traffic.share_exact
    rank, small, size = chance.random(), chance.choice(_SMALL), chance.random()
    if drawn < traffic.share_pooled:
        weights = [1 / (base + 1) for base in range(traffic.bases)]
        base = _pick(weights, rank)
        return _Kind(base_models(traffic.bases)[base], base, is_exact=False)
    if drawn < traffic.share_pooled + traffic.share_small:
        return _Kind(small, -1, is_exact=True)
    return _Kind(MIX[_pick([share for _, share in MIX], size)][0], -1, is_exact)


def _pick(weights: Sequence[float], at: float) -> int:
    left = at * sum(weights)
    for number, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return number
    return len(weights) - 1


def _deploy(
    scenario: Scenario, clients: Sequence[Client], client: Ints, means: Floats, kinds: Sequence[_Kind]
) -> tuple[Ints, list[Deployment]]:
    """Return the deployment of each endpoint, and all of them: hosts first."""
    measures = scenario.measures
    number = len(kinds)
    where = np.zeros(number, dtype=np.int64)
    deployments: list[Deployment] = []
    guests: dict[int, list[int]] = {}
    for endpoint, kind in enumerate(kinds):
        if kind.base >= 0 and measures.pooling:
            guests.setdefault(kind.base, []).append(endpoint)
    for base, members in sorted(guests.items()):
        rate = float(means[members].sum())
        weights = [float(means[one]) for one in members]
        tokens = _tokens([clients[int(client[one])] for one in members], weights)
        found = _profile(scenario, kinds[members[0]], tokens, rate, is_host=True)
        where[members] = len(deployments)
        deployments.append(Deployment(f"base-{base}", found, rate, guests=len(members)))
    for endpoint, kind in enumerate(kinds):
        if kind.base >= 0 and measures.pooling:
            continue
        rate = float(means[endpoint])
        tokens = _tokens([clients[int(client[endpoint])]], [1.0])
        where[endpoint] = len(deployments)
        deployments.append(Deployment(f"endpoint-{endpoint}", _profile(scenario, kind, tokens, rate), rate))
    return where, deployments


def _tokens(clients: Sequence[Client], weights: Sequence[float]) -> tuple[int, int]:
    """Return mean tokens of prompt and answer, in steps of a half octave: profiles are worked out once a step."""
    total = math.fsum(weights) or 1.0
    prompt = math.fsum(w * (one.prompt_tokens or _PROMPT) for one, w in zip(clients, weights, strict=True)) / total
    answer = (
        math.fsum(w * (one.completion_tokens or _COMPLETION) for one, w in zip(clients, weights, strict=True)) / total
    )
    return _step(prompt, 64, 16_384), _step(answer, 16, 2048)


def _step(tokens: float, least: int, most: int) -> int:
    return max(least, min(most, round(2 ** (round(2 * math.log2(max(tokens, 1.0))) / 2))))


def _profile(
    scenario: Scenario, kind: _Kind, tokens: tuple[int, int], rate: float, *, is_host: bool = False
) -> Profile:
    measures = scenario.measures
    kinds = tuple((nodes.kind, nodes.accelerators) for nodes in scenario.nodes)
    prices = tuple((nodes.kind, nodes.price_usd) for nodes in scenario.nodes if nodes.price_usd is not None)
    prompt, answer = _SMALL_TOKENS if kind.model in _SMALL else tokens

    def of(*, is_busy: bool) -> Profile:
        terms = Terms(
            prompt_tokens=prompt,
            completion_tokens=answer,
            kinds=kinds,
            prices=prices,
            is_busy=is_busy,
            is_exact=kind.is_exact,
            quantised=measures.quantised,
            static_batch=0 if measures.continuous else measures.static_batch,
            packing=measures.packing,
        )
        return profile(kind.model, terms)

    cheap = of(is_busy=False)
    return of(is_busy=True) if is_host or rate > _LEADING_SHARE * cheap.requests_s else cheap
