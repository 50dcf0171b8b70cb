"""Readers of public request traces and of recorded runs; none of their data is part of the package.

* ``azure_llm_2023_{conv,code}.csv``: an hour of two LLM services (Azure/AzurePublicDataset, CC-BY 4.0), which
  ``arrival_files.py`` reads
* ``mooncake_{conversation,synthetic}_trace.jsonl``: prompts with hashes of 512 tokens each (kvcache-ai/Mooncake,
  Apache-2.0)
* ``llmservingsim/*_{meta.json,requests.jsonl}``: real vLLM 0.19, times of 300 requests each (casys-kaist/LLMServingSim,
  MIT)
* ``splitwise/perf_model.csv``: Llama-2-70B and BLOOM-176B on A100 and H100 (Mutinifni/splitwise-sim, MIT)
"""

import csv
import json
from collections.abc import Iterable
from math import isnan
from pathlib import Path

import msgspec

from modelyard.sim.requests import Arrival

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one hash of a Mooncake trace stands for."""


class Served(msgspec.Struct, frozen=True):
    """A request of a recorded run, in seconds on the engine's own clock; ``come_s`` is when its caller sent it."""

    number: int
    prompt_tokens: int
    output_tokens: int
    come_s: float
    first_s: float
    """When its first token was there; not a number where nobody saw that."""
    last_s: float

    @property
    def has_first(self) -> bool:
        """Whether it is known when its first token was there."""
        return not isnan(self.first_s)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_s - self.come_s

    @property
    def tpot_s(self) -> float:
        """Seconds for each token after the first; 0 where there is none."""
        return (self.last_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Recorded(msgspec.Struct, frozen=True):
    """A real engine's run: how it was set, and what became of every request, in order of arrival."""

    name: str
    model: str
    max_num_seqs: int
    chunk_tokens: int
    """vLLM's ``max_num_batched_tokens``."""
    kv_blocks: int
    """Blocks of 16 tokens; 0: not recorded."""
    data_parallel: int
    served: tuple[Served, ...]


class Measured(msgspec.Struct, frozen=True):
    """One measured run of Splitwise: ``batch`` prompts of one size at once, then ``output_tokens`` for each."""

    model: str
    hardware: str
    tensor_parallel: int
    prompt_tokens: int
    batch: int
    output_tokens: int
    prompt_s: float
    """To read all prompts."""
    token_s: float
    """For one token of each after that, a mean."""


def mooncake(lines: Iterable[str]) -> list[Arrival]:
    """Return the requests of a Mooncake trace, in order; their hashes are of whole blocks only."""
    arrivals = []
    for line in lines:
        row = json.loads(line)
        prompt = row["input_length"]
        arrivals.append(
            Arrival(
                at_s=row["timestamp"] / 1000,
                prompt_tokens=prompt,
                output_tokens=max(1, row["output_length"]),
                # The last block of a prompt is seldom whole, and only whole ones are cached.
                blocks=tuple(row["hash_ids"][: prompt // MOONCAKE_BLOCK_TOKENS]),
            )
        )
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return arrivals


def recorded(folder: Path) -> list[Recorded]:
    """Return all runs in a folder of LLMServingSim's recordings, by name."""
    names = sorted(path.name.removesuffix("_meta.json") for path in folder.glob("*_meta.json"))
    return [_recorded(folder, name) for name in names]


def _recorded(folder: Path, name: str) -> Recorded:
    meta = json.loads((folder / f"{name}_meta.json").read_text("utf-8"))
    settings = meta["engine_kwargs"]
    rows = [json.loads(line) for line in (folder / f"{name}_requests.jsonl").read_text("utf-8").splitlines()]
    # Arrivals are on the wall clock, all else on a monotonic one. The fastest hand-over says how far they are apart.
    apart_s = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    served = [
        Served(
            int(row["request_id"].rpartition("-")[2]),
            row["input_toks"],
            row["output_toks"],
            row["arrival_time"] + apart_s,
            row["first_token_ts"],
            row["last_token_ts"],
        )
        for row in rows
    ]
    served.sort(key=lambda one: (one.come_s, one.number))
    begin_s = served[0].come_s
    return Recorded(
        name=name,
        model=meta["model"],
        max_num_seqs=settings["max_num_seqs"],
        chunk_tokens=settings["max_num_batched_tokens"],
        kv_blocks=(meta.get("kv_cache") or {}).get("num_gpu_blocks") or 0,
        data_parallel=settings["data_parallel_size"],
        served=tuple(
            msgspec.structs.replace(
                one, come_s=one.come_s - begin_s, first_s=one.first_s - begin_s, last_s=one.last_s - begin_s
            )
            for one in served
        ),
    )


def splitwise(path: Path) -> list[Measured]:
    """Return Splitwise's measurements; times of the file are in milliseconds."""
    with path.open(newline="") as file:
        return [
            Measured(
                row["model"],
                row["hardware"],
                int(row["tensor_parallel"]),
                int(row["prompt_size"]),
                int(row["batch_size"]),
                int(row["token_size"]),
                float(row["prompt_time"]) / 1000,
                float(row["token_time"]) / 1000,
            )
            for row in csv.DictReader(file)
        ]
