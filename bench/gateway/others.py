"""Other people's gateways as peers, each in its leanest configuration that still checks a key where it can.

``install.py`` puts them on the disk. All have one engine, no retries, no
circuit breaker, no logs of requests: what is left is their cost of a request.
"""

import os
import subprocess
from pathlib import Path
from typing import ClassVar

from bench.gateway.install import folder as folder_of
from bench.gateway.install import how_to
from bench.gateway.peers import Target
from bench.processes import free_port, is_answering, tree, wait_until

KEY = "sk-bench-0123456789abcdef0123456789abcdef"
READY_TIMEOUT_S = 180.0
"""LiteLLM imports for most of a minute where the core is shared."""


class Installed:
    """A peer that is one command. Its subclasses say which, and how it is asked whether it is ready."""

    name: str
    package: ClassVar[str]
    program: ClassVar[str]
    """Path below the folder of ``package``."""
    health: ClassVar[str] = "/health"
    is_slow: ClassVar[bool] = False

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def missing(self) -> str:
        """Look for the program."""
        return "" if self._program.exists() else how_to(self.package)

    @property
    def _program(self) -> Path:
        return folder_of(self.package) / self.program

    def command(self, port: int, upstream: str, folder: Path) -> list[str]:
        """Return what follows the program on the command line; may write its files into ``folder``."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Return what is set beside the present environment."""
        return {}

    def extra_headers(self, upstream: str) -> tuple[str, ...]:
        """Return what each request must carry beside the key."""
        return ()

    def start(self, upstream_port: int, folder: Path, *, gateway_pin: list[str], other_pin: list[str]) -> Target:
        """Start it, and wait until it answers."""
        port, upstream = free_port(), f"http://127.0.0.1:{upstream_port}"
        command = [*gateway_pin, str(self._program), *self.command(port, upstream, folder)]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **self.environment()}
            )
        what = f"{self.name} answering (see {folder}/log)"
        wait_until(lambda: is_answering(port, self.health), what, timeout_s=READY_TIMEOUT_S)
        return Target(port, KEY, self.extra_headers(upstream), self.is_slow)

    def pids(self) -> list[int]:
        """Return its process and all that it started."""
        assert self._process is not None, "not started"
        return tree(self._process.pid)

    def stop(self) -> None:
        """End it; a child that its parent leaves behind is ended too."""
        if self._process is None:
            return
        pids = self.pids()
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in pids[1:]:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, 9)


class LiteLLM(Installed):
    """LiteLLM's proxy: one model, the master key as its key check; no database, no callbacks, no network."""

    name = "LiteLLM 1.108"
    package = "litellm"
    program = "bin/litellm"
    health = "/health/liveliness"
    is_slow = True

    def command(self, port: int, upstream: str, folder: Path) -> list[str]:
        """Write its configuration."""
        config = folder / "config.yaml"
        config.write_text(
            "model_list:\n- model_name: fake-model\n  litellm_params:\n    model: openai/fake-model\n"
            f"    api_base: {upstream}/v1\n    api_key: none\n"
            f"general_settings:\n  master_key: {KEY}\n"
            "litellm_settings:\n  num_retries: 0\n  request_timeout: 600\n  telemetry: false\n"
        )
        return ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]

    def environment(self) -> dict[str, str]:
        """Keep it from asking the network for prices and for its database."""
        return {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_DOCS": "True"}


ROUTER = ("--disable-retries", "--disable-circuit-breaker", "--policy", "round_robin")
"""Options that all three of the Rust routers have."""


class VllmRouter(Installed):
    """vllm-router. It checks no key: ``--api-key`` is what it sends to workers."""

    name = "vllm-router 0.1.17"
    package = "vllm-router"
    program = "bin/vllm-router"

    def command(self, port: int, upstream: str, folder: Path) -> list[str]:
        """Return its options."""
        where = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", upstream]
        rest = ["--prometheus-port", str(free_port()), "--log-level", "error", "--max-concurrent-requests", "32768"]
        return [*where, *rest, *ROUTER, "--api-key", KEY]


class SglangRouter(Installed):
    """sglang-router in front of an OpenAI-compatible worker."""

    name = "sglang-router 0.3.2"
    package = "sglang-router"
    program = "bin/python"

    def command(self, port: int, upstream: str, folder: Path) -> list[str]:
        """Return its options."""
        where = ["-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        rest = ["--worker-urls", upstream, "--prometheus-port", str(free_port()), "--log-level", "error"]
        return [*where, *rest, *ROUTER, "--api-key", KEY]


class Smg(Installed):
    """Shepherd model gateway, the successor of sglang-router."""

    name = "smg 1.13"
    package = "smg"
    program = "bin/smg"

    def command(self, port: int, upstream: str, folder: Path) -> list[str]:
        """Return its options."""
        where = ["launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", upstream]
        rest = ["--prometheus-port", str(free_port()), "--log-level", "error", "--max-concurrent-requests", "0"]
        tokens = ["--disable-tokenizer-autoload", "--history-backend", "none"]
        return [*where, *rest, *tokens, *ROUTER, "--api-key", KEY]


class Portkey(Installed):
    """Portkey's open-source gateway. It checks no key and passes it on; headers say where to."""

    name = "Portkey 1.15"
    package = "portkey"
    program = "node_modules/.bin/gateway"
    health = "/"
    is_slow = True

    def command(self, port: int, upstream: str, folder: Path) -> list[str]:
        """Return its options: no console, else it opens one."""
        return [f"--port={port}", "--headless"]

    def environment(self) -> dict[str, str]:
        """Let it talk to this machine."""
        return {"NODE_ENV": "production", "TRUSTED_CUSTOM_HOSTS": "127.0.0.1,localhost"}

    def extra_headers(self, upstream: str) -> tuple[str, ...]:
        """Name the provider and its address."""
        return ("x-portkey-provider: openai", f"x-portkey-custom-host: {upstream}/v1")
