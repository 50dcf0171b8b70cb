"""Arrivals to replay: public rates by ten minutes, a public trace of requests, and generated ones.

The Azure trace is one hour of one service (Azure/AzurePublicDataset, CC-BY 4.0). It is not in this repository, nor are
ServeGen's rates, which ``modelyard.sim.rates`` reads.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from modelyard.sim import arrival_files
from modelyard.sim.rates import SLOT_S


def azure(folder: Path, name: str) -> list[float]:
    """Return the moments of the requests of one Azure service, in seconds from the first."""
    return [one.at_s for one in arrival_files.azure(folder / f"azure_llm_2023_{name}.csv")]


def bursts(hours: float, *, calm: float, storm: float, chance: random.Random) -> list[float]:
    """Return Poisson arrivals whose rate jumps between ``calm`` and ``storm`` requests/s, twice an hour."""
    moments: list[float] = []
    at_s, end_s = 0.0, hours * 3600
    while at_s < end_s:
        for rate, mean_s in ((calm, 1500.0), (storm, 300.0)):
            until_s = min(at_s + chance.expovariate(1 / mean_s), end_s)
            moments += poisson(at_s, until_s, rate, chance)
            at_s = until_s
    return moments


def by_rates(rates: list[float], chance: random.Random, *, factor: float = 1.0) -> list[float]:
    """Return Poisson arrivals with a rate for each ten minutes."""
    moments: list[float] = []
    for slot, rate in enumerate(rates):
        moments += poisson(slot * SLOT_S, (slot + 1) * SLOT_S, rate * factor, chance)
    return moments


def office(weeks: int, chance: random.Random) -> list[float]:
    """Return the rates of an office's week by ten minutes: nine to five, a lunch, quiet days off."""
    rates = []
    for slot in range(weeks * 1008):
        day, hour = slot // 144 % 7, slot % 144 / 6
        is_open = day < 5 and 9 <= hour < 17 and not 12 <= hour < 12.5
        rates.append(chance.uniform(0.05, 0.5) if is_open and chance.random() < 0.9 else 0.0)
    return rates


def poisson(begin_s: float, end_s: float, rate: float, chance: random.Random) -> Iterator[float]:
    """Yield Poisson arrivals of ``rate`` between two moments."""
    at_s = begin_s
    while rate > 0:
        at_s += chance.expovariate(rate)
        if at_s >= end_s:
            return
        yield at_s
