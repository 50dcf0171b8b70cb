"""Public measurements that drive a fleet: request rates of production clients, and how long models take to load.

ServeGen's rates (alibaba/ServeGen at f891d11, Apache-2.0) are of 422 production clients, by ten minutes, fourteen days:
requests a second, the coefficient of variation of the times between them, and mean tokens of prompts and answers. Load
times are those of ServerlessLLM's repository (at 9f50241, Apache-2.0). Both are files that you have, not of this one.
"""

import ast
import csv
import math
import struct
import zipfile
from pathlib import Path

import msgspec

SLOT_S = 600
"""A rate holds for ten minutes."""
RATES_FILE = "servegen_rates_10min.npz"
LOADS_FILE = "serverlessllm_loading_times.csv"


class Client(msgspec.Struct, frozen=True):
    """One production client. ``rates`` are requests/s by ten minutes, ``spreads`` the CV of the times between them.

    Tokens are means of a request, 0 where the trace does not say.
    """

    name: str
    rates: tuple[float, ...]
    spreads: tuple[float, ...]
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0

    @property
    def family(self) -> str:
        """What it was a client of: ``language``, ``reason`` or ``multimodal``."""
        return self.name.partition("/")[0]

    @property
    def mean_rate(self) -> float:
        """Requests a second over all of it."""
        return math.fsum(self.rates) / max(len(self.rates), 1)

    @property
    def days(self) -> int:
        """On how many days it sent anything."""
        day = 86_400 // SLOT_S
        return sum(any(self.rates[at : at + day]) for at in range(0, len(self.rates), day))


def servegen(folder: Path) -> list[Client]:
    """Return the clients of the file in ``folder``, in its order.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not what it should be.
    """
    with zipfile.ZipFile(folder / RATES_FILE) as archive:
        (rows, columns), rates = _numbers(archive.read("rate.npy"))
        _, spreads = _numbers(archive.read("cv.npy"))
        _, tokens = _numbers(archive.read("mean_tokens.npy"))
        _, names = _texts(archive.read("names.npy"))
    return [
        Client(
            names[row],
            tuple(rates[row * columns : (row + 1) * columns]),
            tuple(spreads[row * columns : (row + 1) * columns]),
            *(value if value > 0 else 0.0 for value in tokens[2 * row : 2 * row + 2]),
        )
        for row in range(rows)
    ]


class LoadTimes(msgspec.Struct, frozen=True):
    """Mean seconds that a model took to load, by who measured it on what, and the model."""

    machine: str
    loader: str
    """``sllm`` (ServerlessLLM's format) or ``safetensors``."""
    cache: str
    """``random``: from NVMe; ``cached``: from the host's memory; "": not said."""
    model: str
    seconds: float
    samples: int


def load_times(folder: Path) -> list[LoadTimes]:
    """Return the means of the file in ``folder``.

    Raises:
        FileNotFoundError: it is not there.
    """
    sums: dict[tuple[str, str, str, str], list[float]] = {}
    with (folder / LOADS_FILE).open(newline="") as file:
        for row in csv.DictReader(file):
            loader = "safetensors" if "safetensors" in row["file"] else "sllm"
            model = row["model_replica"].rpartition("_")[0]
            sums.setdefault((row["gpu_year"], loader, row["mode"], model), []).append(float(row["loading_s"]))
    return [LoadTimes(*key, math.fsum(found) / len(found), len(found)) for key, found in sorted(sums.items())]


def _header(page: bytes) -> tuple[tuple[int, ...], str, bytes]:
    """Read the head of a numpy file of version 1, C order."""
    if page[:8] != b"\x93NUMPY\x01\x00":
        raise ValueError("not a numpy file of version 1.0")
    (length,) = struct.unpack_from("<H", page, 8)
    header = ast.literal_eval(page[10 : 10 + length].decode("ascii"))
    return header["shape"], header["descr"], page[10 + length :]


def _numbers(page: bytes) -> tuple[tuple[int, ...], list[float]]:
    shape, kind, body = _header(page)
    if kind != "<f4":
        raise ValueError(f"numbers of type {kind}, not <f4")
    return shape, list(struct.unpack_from(f"<{math.prod(shape)}f", body))


def _texts(page: bytes) -> tuple[tuple[int, ...], list[str]]:
    shape, kind, body = _header(page)
    if not kind.startswith("<U"):
        raise ValueError(f"text of type {kind}, not <U…")
    width = 4 * int(kind[2:])
    number = math.prod(shape)
    return shape, [body[at * width : (at + 1) * width].decode("utf-32-le").rstrip("\0") for at in range(number)]
