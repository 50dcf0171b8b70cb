"""Measure gateways side by side: ``python -m bench.gateway [--rounds 5] [--seconds 2] [--json]``.

The gateways are pinned to one core, the load generator and the fake engine to
another. All are up at once; in each round every (gateway, cell) pair runs once,
in shuffled order. The figure is CPU per request or chunk as a ratio to nginx in
the same round, and the table shows the median of these ratios: minutes on a
shared machine differ by half, ratios within a round do not.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import processes, tools
from bench.gateway.cells import ROUND_CELLS, Bench
from bench.gateway.floor import Floor
from bench.gateway.install import install
from bench.gateway.modelyard_peer import Modelyard
from bench.gateway.others import LiteLLM, Portkey, SglangRouter, Smg, VllmRouter
from bench.gateway.peers import Bare, Nginx, Peer
from bench.gateway.report import Figures, as_json, table

PEERS: tuple[type[Peer], ...] = (Bare, Floor, Nginx, Modelyard, VllmRouter, SglangRouter, Smg, Portkey, LiteLLM)


def main() -> None:
    """Parse the command line, run, print."""
    options = _arguments()
    if options.install:
        install(options.install)
        return
    tools.build()
    peers = _chosen(options.peers)
    gateway_pin, load_pin = processes.pins(options.gateway_core, options.load_core)
    scratch = Path(tempfile.mkdtemp(prefix="gateway-", dir=tools.BUILD))
    engine = tools.FakeEngine.start(processes.free_port(), load_pin)
    bench = Bench(engine, load_pin)
    try:
        processes.wait_until(engine.is_listening, "the fake engine listening")
        for peer in peers:
            folder = scratch / peer.name.split()[0]
            folder.mkdir()
            bench.targets[peer.name] = peer.start(engine.port, folder, gateway_pin=gateway_pin, other_pin=load_pin)
        figures = _measure(bench, peers, options)
    finally:
        for peer in peers:
            peer.stop()
        engine.stop()
        if not options.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        print(json.dumps(as_json(figures), indent=1))
    else:
        print(table(figures))
        print(f"\nCPU of each gateway's processes, median of {options.rounds} rounds of {options.seconds:g} s a cell.")
        print("Machine:", _machine())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one cell")
    parser.add_argument("--streams", type=int, default=1000, help="open streams of the memory figure")
    parser.add_argument("--install", default="", metavar="NAMES", help="install other gateways (or all), and end")
    parser.add_argument("--peers", default="", help="comma-separated names; default all that are installed")
    parser.add_argument("--cells", default="", help="comma-separated of json,chunk,big,rate; default all")
    parser.add_argument("--quick", action="store_true", help="leave out memory and cancellation")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON instead of the table")
    parser.add_argument("--seed", type=int, default=0, help="order of the cells")
    parser.add_argument("--gateway-core", type=int, default=0)
    parser.add_argument("--load-core", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep logs and data directories in .cache/bench")
    return parser.parse_args()


def _chosen(names: str) -> list[Peer]:
    wanted = [name for name in names.split(",") if name]
    peers: list[Peer] = []
    for kind in PEERS:
        peer = kind()
        if wanted and not any(peer.name.startswith(name) for name in wanted):
            continue
        if reason := peer.missing():
            print(f"bench: {peer.name} left out: {reason}", file=sys.stderr)
            continue
        peers.append(peer)
    if not peers:
        raise tools.fail(f"no gateway to measure among {', '.join(kind().name for kind in PEERS)}")
    return peers


def _measure(bench: Bench, peers: list[Peer], options: argparse.Namespace) -> list[Figures]:
    figures = {peer.name: Figures(peer.name) for peer in peers}
    order = random.Random(options.seed)
    wanted = [cell for cell in ROUND_CELLS if not options.cells or cell.name in options.cells.split(",")]
    for peer in peers:  # connections, lazy imports and caches are not what is measured
        for cell in wanted:
            bench.load(peer, cell, 1.5 if bench.targets[peer.name].is_slow else 0.3)
    once = [] if options.quick else peers
    for peer in once:  # first, while their memory has no free blocks left from other cells
        _once(figures[peer.name], peer, idle_stream_kb=lambda peer: bench.idle_stream_kb(peer, options.streams))
    for number in range(options.rounds):
        cells = [(peer, cell) for peer in peers for cell in wanted if bench.can(peer, cell)]
        order.shuffle(cells)
        for peer, cell in cells:
            found = bench.load(peer, cell, options.seconds)
            figures[peer.name].rounds.setdefault(cell.name, []).append(found)
        print(f"bench: round {number + 1} of {options.rounds} done", file=sys.stderr)
    for peer in once:  # last, since some go on with what their clients left behind, and are busy for long
        _once(
            figures[peer.name],
            peer,
            cancelled_before=lambda peer: bench.cancelled_share(peer, before_first_byte=True),
            cancelled_in=lambda peer: bench.cancelled_share(peer, before_first_byte=False),
            stalled_client_kb=bench.stalled_client_kb,
        )
    return list(figures.values())


def _once(figures: Figures, peer: Peer, **taken: Callable[[Peer], float]) -> None:
    if not peer.pids():
        return
    for name, take in taken.items():
        try:
            figures.once[name] = take(peer)
        except TimeoutError as error:  # a gateway that cannot do it gets no figure, and the others theirs
            print(f"bench: {peer.name}: no {name}: {error}", file=sys.stderr)


def _machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown CPU",
    )
    return f"{model}, {os.cpu_count()} cores, Linux {os.uname().release}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    main()
