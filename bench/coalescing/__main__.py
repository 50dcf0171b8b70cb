"""Measure coalescing of tokens: ``python -m bench.coalescing [--rounds 5] [--seconds 2] [--quick] [--json]``.

The gateway's CPU per relayed token where an endpoint's ``coalesce_ms`` is 0
(every token as it comes), 20 and 40, at a token every 5 ms a stream and flat
out, as a ratio to 0 ms in the same round; and what it costs in latency. Flat
out, reads of the engine hold many tokens anyway, whatever is set.
"""

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path

from bench import processes, tools
from bench.gateway.cells import Bench, Cell
from bench.gateway.modelyard_peer import Modelyard
from bench.gateway.report import Figures

HOLD_MS = (0, 20, 40)
CELLS = (
    Cell("paced", tools.STREAM_BODY, "stream", 20, "chunks", tokens=400, interval_us=5_000),
    Cell("flat", tools.STREAM_BODY, "stream", 20, "chunks", tokens=2_000, interval_us=0),
)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.coalescing", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one cell")
    parser.add_argument("--quick", action="store_true", help="one round of 1 s a cell")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 1.0
    tools.build()
    gateway_pin, load_pin = processes.pins(0, 1)
    scratch = Path(tempfile.mkdtemp(prefix="coalescing-", dir=tools.BUILD))
    engine = tools.FakeEngine.start(processes.free_port(), load_pin)
    bench = Bench(engine, load_pin)
    peers = [Modelyard(f"{hold_ms} ms", options=["--coalesce-ms", str(hold_ms)]) for hold_ms in HOLD_MS]
    try:
        processes.wait_until(engine.is_listening, "the fake engine listening")
        for peer in peers:
            folder = scratch / peer.name.replace(" ", "")
            folder.mkdir()
            bench.targets[peer.name] = peer.start(engine.port, folder, gateway_pin=gateway_pin, other_pin=load_pin)
        figures = _measure(bench, peers, options)
    finally:
        for peer in peers:
            peer.stop()
        engine.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps({one.name: one.rounds for one in figures}, indent=1) if options.json else _table(figures))


def _measure(bench: Bench, peers: list[Modelyard], options: argparse.Namespace) -> list[Figures]:
    figures = {peer.name: Figures(peer.name) for peer in peers}
    order = random.Random(0)
    runs = [(peer, cell) for peer in peers for cell in CELLS]
    for peer, cell in runs:
        bench.load(peer, cell, 0.3)
    for _ in range(options.rounds):
        order.shuffle(runs)
        for peer, cell in runs:
            figures[peer.name].rounds.setdefault(cell.name, []).append(bench.load(peer, cell, options.seconds))
    return list(figures.values())


def _table(figures: list[Figures]) -> str:
    lines = [
        "| coalesce_ms | µs a token, one each 5 ms | × 0 ms | relay p50 / p99 ms | flat out, µs | × 0 ms | failed |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in figures:
        paced, flat = (
            f"{one.cpu_us(cell) or 0:.1f} | {one.ratio(cell, figures[0]) or 0:.2f}" for cell in ("paced", "flat")
        )
        relay = " / ".join(f"{(one.middle('paced', name) or 0) / 1000:.1f}" for name in ("relay_p50", "relay_p99"))
        lines.append(f"| {one.name} | {paced} | {relay} | {flat} | {one.failed()} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
