"""Modelyard's gateway as it runs in production: its own process, every feature on, journal on disk.

Only the controller is replaced, by ``bench.gateway.controller``: it publishes
one routing table with the fake engine as its only replica, because the
controller itself would insist on starting its engines.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from bench.gateway.peers import Target
from bench.processes import free_port, tree, wait_until
from modelyard import compose


class Modelyard:
    """``modelyard up gateway`` behind a routing table with one endpoint."""

    name = "modelyard"

    def __init__(self) -> None:
        self._gateway: subprocess.Popen[bytes] | None = None
        self._controller: subprocess.Popen[bytes] | None = None

    def missing(self) -> str:
        """Always there: it is this package."""
        return ""

    def start(self, upstream_port: int, folder: Path, *, gateway_pin: list[str], other_pin: list[str]) -> Target:
        """Start the bench's controller, then one gateway worker, and wait until it has the table."""
        port = free_port()
        self._controller = subprocess.Popen(
            [*other_pin, sys.executable, "-m", "bench.gateway.controller", str(folder), str(upstream_port)]
        )
        ready = folder / "ready.json"
        wait_until(ready.exists, "the bench controller's table")
        key = json.loads(ready.read_text())["key"]
        with (folder / "gateway.log").open("wb") as log:
            self._gateway = subprocess.Popen(
                [*gateway_pin, *gateway_command(folder, port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**compose.PLANE_ENVIRONMENT, **os.environ},
            )
        wait_until(lambda: is_ready(port), f"a ready gateway (see {folder}/gateway.log and {folder}/logs)")
        return Target(port, key)

    def pids(self) -> list[int]:
        """Return the gateway worker; the controller is not on the path of a request."""
        assert self._gateway is not None, "not started"
        return tree(self._gateway.pid)

    def stop(self) -> None:
        """End both."""
        for process in (self._gateway, self._controller):
            if process is not None:
                process.terminate()
                process.wait(timeout=40)


def is_ready(port: int) -> bool:
    """Say whether the gateway has its routing table."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def gateway_command(folder: Path, port: int) -> list[str]:
    """Return the command that ``modelyard up`` itself uses for one gateway worker."""
    return [
        *(sys.executable, "-m", "modelyard", "up", "gateway", "--worker", "0"),
        *("--data-dir", str(folder), "--port", str(port)),
    ]
