"""A simulated engine as a process of its own, without the platform around it."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from modelyard.clock import SystemClock
from modelyard.engines import LaunchSpec
from modelyard.engines.simulated import SimulatedEngine
from modelyard.fleet.local import LocalFleet
from tests.support.waiting import eventually

SECRET = "s"
CHAT = "/v1/chat/completions"
ENGINE = SimulatedEngine()


@dataclass(slots=True)
class Sim:
    """A simulated engine and its journal."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path

    @contextmanager
    def open(self, body: object, *, path: str, rid: str) -> Iterator[HTTPConnection]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            headers = {"authorization": f"Bearer {SECRET}", "x-request-id": rid}
            connection.request("POST", path, json.dumps(body), headers)
            yield connection

    @contextmanager
    def send(self, body: object, *, path: str = CHAT, rid: str = "req_1") -> Iterator[HTTPResponse]:
        with self.open(body, path=path, rid=rid) as connection, connection.getresponse() as response:
            yield response

    def chat(self, text: str, *, rid: str = "req_1", **more: Any) -> AbstractContextManager[HTTPResponse]:
        return self.send({"messages": [{"role": "user", "content": text}], **more}, rid=rid)

    def stream(self, text: str, *, rid: str = "req_1") -> bytes:
        """Return all bytes of a stream that ends well."""
        with self.chat(text, rid=rid, stream=True, stream_options={"include_usage": True}) as response:
            assert response.status == 200
            return response.read()

    def get(self, path: str) -> tuple[int, bytes]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", path, headers={"authorization": f"Bearer {SECRET}"})
            with connection.getresponse() as response:
                return response.status, response.read()

    def records(self, rid: str = "req_1") -> list[dict[str, Any]]:
        lines = (self.folder / "tokens.jsonl").read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["rid"] == rid]

    def last(self, rid: str = "req_1") -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            return next((record for record in self.records(rid) if record["event"] in ("end", "abort")), None)

        found = eventually(look, 20, f"{rid} has ended")
        assert found is not None
        return found

    def running(self) -> int | None:
        return ENGINE.read_load(self.get("/metrics")[1].decode()).running


def launch(folder: Path, *, model_name: str = "m", port: int = 0, **options: Any) -> Sim:
    """Start one; ``port`` 0 is any that is free."""
    port = port or asyncio.run(LocalFleet(folder / "ports", SystemClock()).reserve("r-1")).port
    options = {"ttft_ms": 1, "itl_ms": 1, **options}
    settings = ENGINE.settings(options, artifact_bytes=0)
    command = ENGINE.command(
        LaunchSpec(
            replica_id="r-1",
            model_name=model_name,
            artifact=None,
            host="127.0.0.1",
            port=port,
            secret=SECRET,
            slots=settings.slots,
            context_length=settings.context_length,
            threads=1,
            options=options,
            work_dir=folder,
        )
    )
    process = subprocess.Popen(command.argv, env=command.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return Sim(process, port, folder)


def ready(sim: Sim) -> Sim:
    eventually(lambda: sim.get("/health")[0] == 200, 30, "ready")
    return sim


def end(sim: Sim) -> None:
    with sim.process:
        sim.process.kill()
