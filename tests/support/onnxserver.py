"""A running server of the engine ``onnx``, started as its own command says, asked past the gateway."""

import http.client
import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from modelyard.engines import EngineLoad, Guest, LaunchSpec, Options
from modelyard.engines.onnx import OnnxEngine
from modelyard.fleet.ports import free_port
from tests.support.waiting import eventually

ENGINE = OnnxEngine()
SECRET = "the-replica-secret"
MAIN = "acme/main"


class OnnxServer:
    """A process with one model; use as a context manager."""

    def __init__(self, artifact: Path, log: Path, options: Options | None = None, *, memory_bytes: int = 0) -> None:
        self.port = free_port(())
        settings = ENGINE.settings(options or {}, artifact_bytes=0)
        spec = LaunchSpec(
            replica_id="r-1",
            model_name=MAIN,
            artifact=artifact,
            host="127.0.0.1",
            port=self.port,
            secret=SECRET,
            slots=settings.slots,
            context_length=settings.context_length,
            threads=2,
            options=options or {},
            work_dir=log.parent,
            memory_bytes=memory_bytes,
        )
        self._command = ENGINE.command(spec)
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        eventually(self.is_ready, 60, f"the server is ready; its log: {self._log}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def start(self) -> None:
        """Start the process."""
        environment = {**os.environ, **self._command.env}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command.argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def is_ready(self) -> bool:
        """Say whether it is; fails when it has ended."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(self._log.read_text())
        return self.ask("GET", "/health", secret="")[0] == 200

    def ask(self, method: str, path: str, body: object = None, *, secret: str = SECRET) -> tuple[int, Any]:
        """Return status and answer of a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            headers = {"Content-Type": "application/json"}
            if secret:
                headers["Authorization"] = f"Bearer {secret}"
            raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            connection.request(method, path, raw, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith("{") else text
        finally:
            connection.close()

    def post(self, path: str, body: dict[str, Any], model: str = MAIN) -> dict[str, Any]:
        """Return the answer of a request that succeeds."""
        status, answer = self.ask("POST", path, body if path.startswith("/v2") else {"model": model, **body})
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found

    def refusal(self, path: str, body: dict[str, Any], model: str = MAIN) -> tuple[int, str, str]:
        """Return status, code and message of a request that fails."""
        status, answer = self.ask("POST", path, body if path.startswith("/v2") else {"model": model, **body})
        assert status >= 400, answer
        return status, answer["error"]["code"], answer["error"]["message"]

    def load(self, name: str, artifact: Path, options: Options | None = None) -> tuple[int, Any]:
        """Take in a guest."""
        call = ENGINE.load_guest(Guest(name, artifact, options or {}))
        return self.ask("POST", call.path, call.body)

    def unload(self, name: str) -> tuple[int, Any]:
        """Forget a guest."""
        call = ENGINE.unload_guest(name)
        return self.ask("POST", call.path, call.body)

    def models(self) -> dict[str, dict[str, Any]]:
        """Return all models by name."""
        return {one["id"]: one for one in self.ask("GET", "/v1/models")[1]["data"]}

    def page(self) -> str:
        """Return the metrics."""
        return str(self.ask("GET", ENGINE.load_path)[1])

    def engine_load(self) -> EngineLoad:
        """Return what the platform reads of them."""
        return ENGINE.read_load(self.page())

    def sample(self, series: str) -> float:
        """Return a value of the metrics by its whole name with labels."""
        for line in self.page().splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        return 0.0
