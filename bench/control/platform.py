"""The platform under test: ``modelyard up`` with simulated replicas, and thousands of endpoints put into its store."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.parse
from dataclasses import dataclass
from typing import Any

from bench import processes
from modelyard.clock import SystemClock
from modelyard.config import DataDirectory
from modelyard.control.bootstrap import ensure_platform
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress, Release, Scaling, Stage
from modelyard.domain.tenants import PLATFORM, Tenant
from modelyard.stores.sql import SqlControlStore, open_database

TENANTS = 100
MEMORY_GIB = 60
"""What a replica needs: one of them on each of the declared accelerators, as models of some size have it."""
SPARE = 256
"""Accelerators beside those of the awake endpoints, for those that are woken."""
NODES = """[[nodes]]
id = "h100"
number = {number}
accelerators = [{{ kind = "h100", count = 8, island = 8 }}]
"""
OPTIONS = {"slots": 4, "memory_gib": MEMORY_GIB}
START_S = 60.0
RAMP_S = 120.0


@dataclass(slots=True)
class Platform:
    """A running platform on ``data``."""

    data: DataDirectory
    process: subprocess.Popen[bytes]
    port: int = 0
    admin_key: str = ""

    def call(self, method: str, path: str, body: object = None, *, key: str = "", within_s: float = 30.0) -> Any:
        """Make one call; return its status and its decoded body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=within_s)
        try:
            headers = {"authorization": f"Bearer {key or self.admin_key}", "content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else None
        finally:
            connection.close()

    def pid_of(self, plane: str) -> int:
        """Return the pid of ``control`` or of the ``gateway`` worker."""
        for pid in processes.tree(self.process.pid):
            words = (processes.PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
            if b"up" in words and plane.encode() in words:
                return pid
        raise LookupError(f"no process of the {plane}")

    def host_pid(self) -> int:
        """Return the process that hosts the simulated replicas."""
        return int(json.loads((self.data.replicas / ".host.json").read_text())["pid"])

    def is_ready(self) -> bool:
        """Say whether it answers."""
        if self.process.poll() is not None:
            raise RuntimeError(f"modelyard up ended with {self.process.returncode}; see {self.data.root}/up.log")
        try:
            record = json.loads(self.data.running.read_text() or "{}")
            self.port = urllib.parse.urlsplit(str(record.get("url", ""))).port or 0
            self.admin_key = self.data.admin_key.read_text().strip()
            return bool(self.port) and self.call("GET", "/v1/status")[0] == 200
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def ready_replicas(self) -> int:
        """Return how many replicas are ready."""
        status, page = self.call("GET", "/v1/status")
        return int((page["replicas"] or {}).get("ready", 0)) if status == 200 else 0

    def stop(self) -> None:
        """Stop all of it."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)


def start(data: DataDirectory, settings: dict[str, object]) -> Platform:
    """Start ``modelyard up`` on ``data`` and wait until it answers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MODELYARD")}
    for name, value in {"fleet.kind": "simulated", "fleet.nodes_file": "nodes.toml", **settings}.items():
        environment["MODELYARD__" + name.upper().replace(".", "__")] = str(value)
    with (data.root / "up.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "modelyard", "up", "--port", "0", "--data-dir", str(data.root)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    platform = Platform(data, process)
    processes.wait_until(platform.is_ready, "modelyard up answering", timeout_s=START_S)
    return platform


def fill(data: DataDirectory, awake: int, asleep: int) -> None:
    """Put the endpoints into the store: shared ones, of many tenants, each of a version of its own."""
    asyncio.run(_fill(data, awake, asleep))
    (data.root / "nodes.toml").write_text(NODES.format(number=-(-(awake + SPARE) // 8)))


async def _fill(data: DataDirectory, awake: int, asleep: int) -> None:
    data.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = SqlControlStore(open_database(f"sqlite:///{data.database}", timeout_s=30))
    try:
        await ensure_platform(store, SystemClock())
        for number in range(TENANTS):
            await store.add_tenant(Tenant(f"ten-{number:05d}", f"tenant-{number}", 1))
        for number in range(awake + asleep):
            await store.add_deployment(*_deployment(number, is_awake=number < awake))
    finally:
        await store.close()


def _deployment(number: int, *, is_awake: bool) -> tuple[ModelVersion, Endpoint]:
    name = f"{'awake' if is_awake else 'asleep'}-{number}"
    # One endpoint is the operator's own, so that the admin key may change its releases.
    owner = PLATFORM if number % 10 == 0 else f"ten-{number % TENANTS:05d}"
    version = ModelVersion(
        f"ver-{number:012x}", owner, name, "v1", "simulated", Artifact(""), OPTIONS, 1, gpu_type="h100"
    )
    endpoint = Endpoint(
        id=f"ep-{number:012x}",
        tenant_id=owner,
        name=name,
        releases=(Release(version.id),),
        scaling=Scaling() if is_awake else Scaling(min_replicas=0, scale_to_zero=True),
        created_at=1,
        is_shared=True,
        status=EndpointStatus.PROVISIONING if is_awake else EndpointStatus.STOPPED,
        progress=Progress(Stage.QUEUED),
    )
    return version, endpoint
