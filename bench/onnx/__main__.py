"""Requests a second, a CPU second, and latencies of the engine ``onnx`` beside raw ONNX Runtime in one process.

The peer has the same model, tokenizer and pooling, and no HTTP, no queue and no
accounting: each of its threads tokenises, runs and pools one text at a time
with all cores. Both get the same texts in the same round, one after the other.
What the client of our server costs is not counted in the CPU of either.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import onnxruntime
from tests.support.onnxserver import MAIN, SECRET, OnnxServer
from tests.support.smallmodels import minilm_onnx, packed_model
from tokenizers import Tokenizer
from yarl import URL

CORES = 2
CONCURRENCIES = (1, 8, 32)
WORDS = (
    "model",
    "server",
    "reads",
    "a",
    "text",
    "and",
    "gives",
    "back",
    "what",
    "it",
    "means",
    "in",
    "numbers",
    "today",
)


class Figures(NamedTuple):
    """What one peer did at one concurrency."""

    per_s: float
    per_cpu_s: float
    p50_ms: float
    p99_ms: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.onnx", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, place, raw, path, body_of in (_minilm(), _magika()):
        with tempfile.TemporaryDirectory() as folder, OnnxServer(place, Path(folder) / "log") as server:
            for concurrency in CONCURRENCIES:
                found: dict[str, list[Figures]] = {"raw ONNX Runtime": [], "engine onnx": []}
                for _ in range(arguments.rounds):
                    found["raw ONNX Runtime"].append(_raw(raw, concurrency, arguments.seconds))
                    ours = asyncio.run(_ours(server, path, body_of, concurrency, arguments.seconds))
                    found["engine onnx"].append(ours)
                for peer, figures in found.items():
                    middle = [statistics.median(column) for column in zip(*figures, strict=True)]
                    rows.append({"model": name, "concurrency": concurrency, "peer": peer, **Figures(*middle)._asdict()})
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print("| model | concurrency | | requests/s | per CPU second | p50 ms | p99 ms |\n|---|---|---|---|---|---|---|")
    for row in rows:
        numbers = f"{row['per_s']:.0f} | {row['per_cpu_s']:.0f} | {row['p50_ms']:.1f} | {row['p99_ms']:.1f}"
        print(f"| {row['model']} | {row['concurrency']} | {row['peer']} | {numbers} |")


Peer = tuple[str, Path, Callable[[], None], str, Callable[[], dict[str, Any]]]


def _texts() -> Callable[[], str]:
    chance = random.Random(5)
    return lambda: " ".join(chance.choices(WORDS, k=chance.randint(6, 40)))


def _minilm() -> Peer:
    folder = minilm_onnx()
    session = _session(folder / "model.onnx")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    for_raw, for_ours = _texts(), _texts()

    def once() -> None:
        ids = np.array([tokenizer.encode(for_raw()).ids], np.int64)
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        vector = session.run(None, feeds)[0][0].mean(axis=0)
        vector /= np.linalg.norm(vector)

    return "MiniLM, 6-40 words", folder, once, "/v1/embeddings", lambda: {"model": MAIN, "input": for_ours()}


def _magika() -> Peer:
    place = packed_model("magika") / "model.onnx"
    session = _session(place)
    data = [byte % 256 for byte in range(2048)]
    array = np.array([data], np.int32)
    tensor = {"name": "bytes", "shape": [1, 2048], "datatype": "INT32", "data": data}

    def once() -> None:
        session.run(None, {"bytes": array})

    return "Magika, 2,048 bytes as tensors", place, once, f"/v2/models/{MAIN}/infer", lambda: {"inputs": [tensor]}


def _session(file: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = CORES
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _raw(once: Callable[[], None], concurrency: int, seconds: float) -> Figures:
    once()
    took: list[float] = []
    cpu, begin = time.process_time(), time.monotonic()

    def work() -> None:
        while time.monotonic() - begin < seconds:
            start = time.monotonic()
            once()
            took.append(time.monotonic() - start)

    with ThreadPoolExecutor(concurrency) as pool:
        for done in [pool.submit(work) for _ in range(concurrency)]:
            done.result()
    return _figures(took, time.monotonic() - begin, time.process_time() - cpu)


async def _ours(
    server: OnnxServer, path: str, body_of: Callable[[], dict[str, Any]], concurrency: int, seconds: float
) -> Figures:
    took: list[float] = []
    url = f"http://127.0.0.1:{server.port}{path.replace(MAIN, MAIN.replace('/', '%2F'))}"
    headers = {"authorization": f"Bearer {SECRET}"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def work(begin: float) -> None:
            while time.monotonic() - begin < seconds:
                raw = json.dumps(body_of()).encode()
                start = time.monotonic()
                async with session.post(URL(url, encoded=True), data=raw) as answer:
                    await answer.read()
                    assert answer.status == 200, await answer.text()
                took.append(time.monotonic() - start)

        cpu, begin = _cpu_s(server), time.monotonic()
        await asyncio.gather(*(work(begin) for _ in range(concurrency)))
        return _figures(took, time.monotonic() - begin, _cpu_s(server) - cpu)


def _cpu_s(server: OnnxServer) -> float:
    assert server.process is not None
    tasks = Path(f"/proc/{server.process.pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def _figures(took: list[float], wall_s: float, cpu_s: float) -> Figures:
    ordered = sorted(took)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000 for share in (0.5, 0.99))
    return Figures(len(took) / wall_s, len(took) / cpu_s, p50, p99)


if __name__ == "__main__":
    main()
