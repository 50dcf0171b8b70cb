"""Arrivals to replay: public rates by ten minutes, a public trace of requests, and generated ones.

ServeGen's rates are of 422 production clients (alibaba/ServeGen, Apache-2.0), fourteen days; the Azure trace is one
hour of one service (Azure/AzurePublicDataset, CC-BY 4.0). Neither is in this repository.
"""

import ast
import math
import random
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from modelyard.sim import traces as sim_traces

SLOT_S = 600


def servegen(folder: Path) -> list[tuple[str, list[float]]]:
    """Return name and requests/s by ten minutes of each client."""
    with zipfile.ZipFile(folder / "servegen_rates_10min.npz") as archive:
        (rows, columns), rates = _numbers(archive.read("rate.npy"))
        (_,), names = _numbers(archive.read("names.npy"))
    return [(str(names[row]), [float(x) for x in rates[row * columns : (row + 1) * columns]]) for row in range(rows)]


def _numbers(page: bytes) -> tuple[tuple[int, ...], list[float] | list[str]]:
    """Read a numpy file of version 1, C order, of floats (f4) or text (U)."""
    if page[:8] != b"\x93NUMPY\x01\x00":
        raise ValueError("not a numpy file of version 1.0")
    (length,) = struct.unpack_from("<H", page, 8)
    header = ast.literal_eval(page[10 : 10 + length].decode("ascii"))
    shape, kind, body = header["shape"], header["descr"], page[10 + length :]
    number = math.prod(shape)
    if kind == "<f4":
        return shape, list(struct.unpack_from(f"<{number}f", body))
    width = 4 * int(kind[2:])
    return shape, [body[at * width : (at + 1) * width].decode("utf-32-le").rstrip("\0") for at in range(number)]


def azure(folder: Path, name: str) -> list[float]:
    """Return the moments of the requests of one Azure service, in seconds from the first."""
    return [one.at_s for one in sim_traces.azure(folder / f"azure_llm_2023_{name}.csv")]


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
