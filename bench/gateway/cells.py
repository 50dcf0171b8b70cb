"""The cells of the table: what is asked of a gateway, and which number is read off it."""

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import processes, tools
from bench.gateway.peers import Peer, Target


@dataclass(frozen=True, slots=True)
class Cell:
    """One load of some seconds, repeated in every round. ``unit`` is the counter that CPU is divided by."""

    name: str
    body: Path
    mode: str
    connections: int
    unit: str
    rate: float = 0
    tokens: int = 100
    interval_us: int = 20_000


ROUND_CELLS = (
    Cell("json", tools.CHAT_BODY, "closed", 32, "ok"),
    Cell("chunk", tools.STREAM_BODY, "stream", 40, "chunks"),
    Cell("big", tools.BIG_BODY, "closed", 8, "ok"),
    Cell("rate", tools.CHAT_BODY, "rate", 64, "ok", rate=1000),
)


@dataclass(slots=True)
class Bench:
    """The running engine and peers, and where everything is pinned."""

    engine: tools.FakeEngine
    load_pin: list[str]
    targets: dict[str, Target] = field(default_factory=dict)

    def can(self, peer: Peer, cell: Cell) -> bool:
        """Say whether ``cell`` would say something of ``peer``: a rate that it cannot reach does not."""
        return not (cell.rate and self.targets[peer.name].is_slow)

    def load(self, peer: Peer, cell: Cell, seconds: float) -> dict[str, Any]:
        """Run one cell; return the load generator's figures and ``cpu_us`` per unit of the peer's processes."""
        self.engine.set(tokens=cell.tokens, interval_us=cell.interval_us)
        pids = peer.pids()
        connections = max(2, cell.connections // 8) if self.targets[peer.name].is_slow else cell.connections
        before = processes.cpu_ns(pids)
        process = self.start_load(
            peer, cell.body, mode=cell.mode, connections=connections, seconds=seconds, rate=cell.rate
        )
        found = finish_load(process)
        # Streams that the generator left open are still being closed by the gateway: that belongs to them.
        time.sleep(0.05)
        spent = processes.cpu_ns(pids) - before
        units = found[cell.unit]
        found["cpu_us"] = spent / 1000 / units if units else None
        found["failed"] = found["bad"] + found["connerr"] + found["truncated"]
        processes.wait_quiet(pids)  # what a slow one still has to do is not the next one's to pay
        return found

    def start_load(  # one argument a flag of the tool
        self, peer: Peer, body: Path, *, mode: str, connections: int, seconds: float, rate: float = 0
    ) -> subprocess.Popen[bytes]:
        """Start the load generator against ``peer``."""
        target = self.targets[peer.name]
        command = tools.load_command(
            target.port,
            target.key,
            body,
            mode=mode,
            connections=connections,
            seconds=seconds,
            rate=rate or 1000,
            headers=target.headers,
        )
        return subprocess.Popen([*self.load_pin, *command], stdout=subprocess.PIPE)

    def idle_stream_kb(self, peer: Peer, streams: int) -> float:
        """Return the growth of memory per open stream that carries a token every two seconds."""
        self.engine.set(tokens=1000, interval_us=2_000_000)
        streams = streams // 4 if self.targets[peer.name].is_slow else streams
        pids = peer.pids()
        before = processes.resident_kb(pids)
        process = self.start_load(peer, tools.STREAM_BODY, mode="hold", connections=streams, seconds=3, rate=1000)
        try:
            processes.wait_until(lambda: self.engine.counters()["active"] >= streams, f"{streams} open streams")
            time.sleep(2.5)  # one token on each, so that relaying has touched its buffers
            grown = processes.resident_kb(pids) - before
        finally:
            finish_load(process)
        self._wait_idle(peer)
        return grown / streams

    def stalled_client_kb(self, peer: Peer, clients: int = 20) -> float:
        """Return the memory held for each client that asked for a long flat-out stream and never reads."""
        self.engine.set(tokens=200_000, interval_us=0)
        pids = peer.pids()
        before = processes.resident_kb(pids)
        process = self.start_load(peer, tools.STREAM_BODY, mode="slow", connections=clients, seconds=3)
        time.sleep(2.5)
        grown = processes.resident_kb(pids) - before
        finish_load(process)
        self._wait_idle(peer)
        return grown / clients

    def cancelled_share(self, peer: Peer, *, before_first_byte: bool, clients: int = 100) -> float:
        """Return the share of engine requests that end within a second after their clients left."""
        clients = clients // 10 if self.targets[peer.name].is_slow else clients
        if before_first_byte:
            before = self.engine.set(delay_us=60_000_000)["aborted"]
            body = tools.CHAT_BODY
        else:
            before = self.engine.set(tokens=1000, interval_us=100_000)["aborted"]
            body = tools.STREAM_BODY
        finish_load(self.start_load(peer, body, mode="abort", connections=clients, seconds=0.5))
        time.sleep(1.0)
        share = (self.engine.counters()["aborted"] - before) / clients
        self.engine.set(tokens=1, interval_us=0)
        return share

    def _wait_idle(self, peer: Peer) -> None:
        """Let the engine notice that everybody left, so that the next cell starts from nothing."""
        self.engine.set(tokens=1, interval_us=0)
        try:
            processes.wait_until(lambda: self.engine.counters()["active"] == 0, "idle engine", timeout_s=10)
        except TimeoutError as error:
            print(f"bench: warning: {peer.name}: {error}: it keeps streams whose clients are gone", file=sys.stderr)


def finish_load(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait for a load generator and return its figures."""
    output, _ = process.communicate(timeout=120)
    if process.returncode:
        raise RuntimeError(f"the load generator failed with {process.returncode}")
    return tools.parse_load(output)
