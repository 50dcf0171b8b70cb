"""Modelyard's gateway as it runs in production: its own processes, every feature on, journal on disk.

Only the controller is replaced, by ``bench.gateway.controller``: it publishes
one routing table with fake engines as its replicas, because the controller
itself would insist on starting its engines.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from bench.gateway.peers import Target
from bench.processes import free_port, tree, wait_until
from modelyard import compose
from modelyard.policy.leases import START_S


class Modelyard:
    """``modelyard up gateway`` behind a routing table with one endpoint; other benchmarks take several workers."""

    def __init__(self, name: str = "modelyard", *, workers: int = 1, options: Sequence[str] = ()) -> None:
        """``options`` are of the bench's controller."""
        self.name = name
        self._workers = workers
        self._options = list(options)
        self._gateways: list[subprocess.Popen[bytes]] = []
        self._controller: subprocess.Popen[bytes] | None = None
        self.keys: dict[str, str] = {}
        """A key of a tenant of each plan."""

    def missing(self) -> str:
        """Always there: it is this package."""
        return ""

    def start(self, upstream_port: int, folder: Path, *, gateway_pin: list[str], other_pin: list[str]) -> Target:
        """Start it before one engine."""
        return self.start_before([upstream_port], folder, gateway_pin=gateway_pin, other_pin=other_pin)

    def start_before(
        self, upstream_ports: Sequence[int], folder: Path, *, gateway_pin: list[str], other_pin: list[str]
    ) -> Target:
        """Start the bench's controller, then the gateway's workers, and wait until all have the table."""
        port = free_port()
        command = [sys.executable, "-m", "bench.gateway.controller", str(folder), *map(str, upstream_ports)]
        command += ["--workers", str(self._workers), *self._options]
        self._controller = subprocess.Popen([*other_pin, *command])
        ready = folder / "ready.json"
        wait_until(ready.exists, "the bench controller's table")
        self.keys = json.loads(ready.read_text())
        for worker in range(self._workers):
            with (folder / f"gateway-{worker}.log").open("wb") as log:
                self._gateways.append(
                    subprocess.Popen(
                        [*gateway_pin, *gateway_command(folder, port, worker, self._workers)],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**compose.PLANE_ENVIRONMENT, **os.environ},
                    )
                )
        # The kernel deals connections out at random, so ask often enough to meet every worker.
        for _ in range(1 if self._workers == 1 else 8 * self._workers):
            wait_until(lambda: is_ready(port), f"a ready gateway (see {folder}/gateway-*.log and {folder}/logs)")
        if self._workers > 1:
            time.sleep(2 * START_S)  # a worker that just began has no share of any limit yet
        return Target(port, self.keys["standard"])

    def pids(self) -> list[int]:
        """Return the gateway's workers; the controller is not on the path of a request."""
        return [pid for gateway in self._gateways for pid in tree(gateway.pid)]

    def stop(self) -> None:
        """End all: the workers drain first."""
        processes = [*self._gateways, *([self._controller] if self._controller else [])]
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=60)
        self._gateways, self._controller = [], None


def is_ready(port: int) -> bool:
    """Say whether the gateway has its routing table."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def gateway_command(folder: Path, port: int, worker: int, workers: int) -> list[str]:
    """Return the command that ``modelyard up`` itself uses for one gateway worker."""
    return [
        *(sys.executable, "-m", "modelyard", "up", "gateway", "--worker", str(worker), "--name", f"gateway-{worker}"),
        *("--data-dir", str(folder), "--port", str(port), "--workers", str(workers)),
    ]
