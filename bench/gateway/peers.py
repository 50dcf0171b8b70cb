"""The gateways that are compared. A new one is a class with these four methods and a line in ``PEERS``.

Each peer proxies ``POST /v1/chat/completions`` to the fake engine on
``upstream_port`` and refuses requests without its key. It is started pinned to
the gateway's core; ``pids`` is every process whose CPU counts as its own.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.processes import free_port, is_listening, tree, wait_until


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send requests, with which key, and what other headers.

    ``is_slow``: a thousandth of the others' pace; it gets fewer connections and streams, so that what is begun and
    not finished when a cell ends does not spoil its figure.
    """

    port: int
    key: str
    headers: tuple[str, ...] = ()
    is_slow: bool = False


class Peer(Protocol):
    """One gateway under test."""

    name: str

    def missing(self) -> str:
        """Return why it cannot run here and how to get it, or ""."""
        ...

    def start(self, upstream_port: int, folder: Path, *, gateway_pin: list[str], other_pin: list[str]) -> Target:
        """Start it before the engine on ``upstream_port``, with its files in ``folder``; return when it is ready."""
        ...

    def pids(self) -> list[int]:
        """Return the processes whose CPU and memory are this gateway's."""
        ...

    def stop(self) -> None:
        """End it and all that it started."""
        ...


class Bare:
    """No gateway: the load generator talks to the engine. Its latencies are the floor of the others."""

    name = "none (bare engine)"

    def missing(self) -> str:
        """Always there."""
        return ""

    def start(self, upstream_port: int, folder: Path, *, gateway_pin: list[str], other_pin: list[str]) -> Target:
        """Return the engine itself."""
        return Target(upstream_port, "")

    def pids(self) -> list[int]:
        """Return nothing: the engine is nobody's gateway."""
        return []

    def stop(self) -> None:
        """Nothing was started."""


NGINX_CONFIG = """
{user}
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
worker_rlimit_nofile 20000;
events {{ worker_connections 9900; }}
http {{
  access_log off;
  tcp_nodelay on;
  keepalive_requests 1000000000;
  client_max_body_size 32m;
  client_body_buffer_size 1m;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  map_hash_bucket_size 128;
  map $http_authorization $is_known {{ default 0; "Bearer {key}" 1; }}
  upstream engine {{
    server 127.0.0.1:{upstream_port};
    keepalive 1024;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      if ($is_known = 0) {{ return 401; }}
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


class Nginx:
    """``proxy_pass`` with a key check by ``map``: no limits, no metering, no body decoded. The reference."""

    name = "nginx"
    key = "sk-bench-0123456789abcdef0123456789abcdef"

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def missing(self) -> str:
        """Look for the binary."""
        return "" if self._binary() else "nginx is not on PATH (Debian: apt install nginx-light)"

    @staticmethod
    def _binary() -> str | None:
        return shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")

    def start(self, upstream_port: int, folder: Path, *, gateway_pin: list[str], other_pin: list[str]) -> Target:
        """Start one worker."""
        port = free_port()
        user = "user root;" if os.geteuid() == 0 else ""
        config = folder / "nginx.conf"
        config.write_text(
            NGINX_CONFIG.format(user=user, folder=folder, key=self.key, upstream_port=upstream_port, port=port)
        )
        binary = self._binary()
        assert binary is not None, "started although missing"
        self._process = subprocess.Popen([*gateway_pin, binary, "-p", str(folder), "-c", str(config)])
        wait_until(lambda: is_listening(port), "nginx listening")
        return Target(port, self.key)

    def pids(self) -> list[int]:
        """Return the master and its worker."""
        assert self._process is not None, "not started"
        return tree(self._process.pid)

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)
