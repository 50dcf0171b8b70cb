"""A real object store for tests: SeaweedFS with an S3 gateway that checks signatures, on loopback."""

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from modelyard.config import S3Config
from modelyard.fleet.ports import free_port
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key-of-the-store"
START_S = 60.0
TRIES = 3


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A running store."""

    port: int
    filer_port: int

    @property
    def config(self) -> S3Config:
        """What reads from it."""
        endpoint = f"http://127.0.0.1:{self.port}"
        return S3Config(endpoint=endpoint, access_key=ACCESS_KEY, secret_key=SECRET_KEY)

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Store objects, past S3."""
        for key, content in objects.items():
            connection = http.client.HTTPConnection("127.0.0.1", self.filer_port, timeout=20)
            connection.request("PUT", f"/buckets/{bucket}/{key}", body=content)
            status = connection.getresponse().status
            connection.close()
            assert status in (200, 201), f"put {bucket}/{key}: {status}"


@contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """Run a store; the test is skipped where there is none."""
    found = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "seaweed.py")], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip((found.stderr.strip().splitlines() or ["no SeaweedFS"])[-1])
    keys = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
    (folder / "s3.json").write_text(
        json.dumps({"identities": [{"name": "a", "credentials": [keys], "actions": ["Read", "List"]}]})
    )
    process, store = _started(found.stdout.strip(), folder)
    try:
        yield store
    finally:
        process.kill()
        process.wait(10)


def _started(program: str, folder: Path) -> "tuple[subprocess.Popen[bytes], ObjectStore]":
    """Start the store; with other ports where somebody took one of them before it did."""
    names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    told = ""
    for tries_left in reversed(range(TRIES)):
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        command = [program, "-logtostderr", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += ["-filer", "-s3", f"-s3.config={folder / 's3.json'}", "-volume.max=64"]
        command += ["-master.volumeSizeLimitMB=512", *(f"-{name}={port}" for name, port in ports.items())]
        with (folder / "weed.log").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
        store = ObjectStore(ports["s3.port"], ports["filer.port"])
        try:
            if eventually(partial(_answers, process, store), START_S, "the object store takes an object") is True:
                return process, store
        except AssertionError:
            process.kill()
            process.wait(10)
            raise
        told = (folder / "weed.log").read_text()[-2000:]
        if not tries_left or "address already in use" not in told:
            break
    raise AssertionError(told)


def _answers(process: "subprocess.Popen[bytes]", store: ObjectStore) -> bool | str:
    """Say whether the store takes objects, or that it ended."""
    if process.poll() is not None:
        return "ended"
    store.put("ready", {"probe": b"x"})
    with socket.create_connection(("127.0.0.1", store.port), 1):
        return True


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        found.append(free_port(found))
    return found
