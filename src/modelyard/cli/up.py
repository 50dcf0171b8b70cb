"""``modelyard up``: everything, or one plane.

Without an argument it prepares the data directory, the lock and the port, and
hands over to the supervisor. ``up control``, ``up gateway`` and ``up batch`` run one
plane in this process: that is what the supervisor starts, and what one runs by hand on
separate machines.
"""

import logging
import os
import shlex
import socket
import time
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from modelyard import __version__, compose
from modelyard.cli.exits import Exit
from modelyard.cli.http import data_dir_option, data_directory
from modelyard.cli.output import remark
from modelyard.cli.ports import listener_name
from modelyard.cli.running import is_alive, open_lock, read_running, take_lock
from modelyard.clock import SystemClock
from modelyard.config import Config, DataDirectory, GatewayConfig, load
from modelyard.errors import StartupError

_SOCKET_PATH_MAX = 107
"""What the kernel takes as the path of a unix socket."""
_LEFTOVER_S = 60.0
"""Longest wait for planes of an earlier run whose supervisor was killed: they are draining."""


class _Options(msgspec.Struct, frozen=True):
    """The command line of ``up``."""

    plane: str | None
    port: int | None
    host: str | None
    workers: int | None
    data_dir: str | None
    config: str | None
    log_level: str
    simulate: bool
    worker: int
    name: str
    ready_fd: int | None
    listen_fd: int | None
    supervisor: int | None

    def settings(self) -> Config:
        """Return the configuration with this command line on top."""
        given = {"host": self.host, "port": self.port, "workers": self.workers}
        overrides = {"gateway": {name: value for name, value in given.items() if value is not None}}
        return load(Path(self.config) if self.config else None, os.environ, overrides)


@click.command(
    "up",
    epilog="\b\nExample:\n  modelyard up\n  modelyard up --simulate --port 9000 --data-dir ./yard",
    short_help="Start the platform on this machine.",
)
@click.argument("plane", required=False, type=click.Choice(["control", "gateway", "batch"]))
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one. [default: 8484]")
@click.option("--host", metavar="ADDRESS", help="Address to listen on. [default: 127.0.0.1]")
@click.option("--workers", type=click.IntRange(1, 64), help="Gateway processes. [default: 1]")
@data_dir_option
@click.option("--config", metavar="FILE", help="Settings in TOML; none are needed.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option("--simulate", is_flag=True, help="Also deploy 'sim', a simulated model that needs no weights.")
@click.option("--worker", type=int, default=0, hidden=True)
@click.option("--name", default="", hidden=True)
@click.option("--ready-fd", type=int, hidden=True)
@click.option("--listen-fd", type=int, hidden=True)
@click.option("--supervisor", type=int, hidden=True)
def command(**given: Any) -> None:
    """Start the platform on this machine; Ctrl-C stops it.

    It needs no settings and no network. All state lives in one data directory.
    With PLANE, only that plane runs, in this process.
    """
    options = msgspec.convert(given, _Options)
    if options.plane is None:
        _run_all(options)
    else:
        _run_plane(options)


def _run_plane(options: _Options) -> None:
    if options.supervisor is not None:
        from modelyard.fleet.processes import die_with_parent

        die_with_parent(options.supervisor)
    data = data_directory(options.data_dir)
    config = options.settings()
    data.create()
    try:
        _serve_plane(options, config, data)
    except StartupError:
        raise
    except Exception:  # boundary: a crash of a whole plane goes to its log with its traceback before it ends
        logging.getLogger("modelyard").exception("the %s process failed", options.plane)
        raise


def _serve_plane(options: _Options, config: Config, data: DataDirectory) -> None:
    if options.plane == "control":
        compose.run_control_plane(config, data, level=options.log_level)
        return
    if options.plane == "batch":
        compose.run_batch_plane(config, data, name=options.name or "batch-0", level=options.log_level)
        return
    if options.listen_fd is not None:
        listener = socket.socket(fileno=options.listen_fd)
    else:
        listener = _bind(config.gateway.host, config.gateway.port, is_shared=True)
    compose.run_gateway_plane(
        config,
        data,
        worker=options.worker,
        listener=listener,
        level=options.log_level,
        name=options.name,
        ready_fd=options.ready_fd,
    )


def _run_all(options: _Options) -> None:
    from modelyard.cli.supervise import Supervisor

    config = options.settings()
    data = data_directory(options.data_dir)
    data.create()
    if len(os.fsencode(data.caller_socket("gateway-10b"))) > _SOCKET_PATH_MAX:
        raise StartupError(f"The path of the data directory {data.root} is too long. Choose a shorter --data-dir.")
    with open_lock(data) as lock:
        _hold(lock, data)
        is_first = not data.admin_key.exists()
        listeners = _listeners(config)
        port = listeners[0].getsockname()[1]
        is_tls = check_edge(config.gateway)
        if not _is_loopback(host := config.gateway.host) and not is_tls:
            remark(
                f"Warning: {host} is reachable from other machines and this port speaks plain HTTP. "
                "Set gateway.tls_certificate and gateway.tls_key, or put a TLS proxy in front of it."
            )
        plane_options = ["--data-dir", str(data.root), "--log-level", options.log_level]
        plane_options += ["--host", host, "--port", str(port), "--workers", str(len(listeners))]
        if options.config:
            plane_options += ["--config", str(Path(options.config).absolute())]
        compose.load_secrets(data)
        supervisor = Supervisor(
            config, data, lock, listeners, _url(host, port, is_tls=is_tls), plane_options, SystemClock()
        )
        try:
            supervisor.start()
            if not supervisor.stops_asked:
                if options.simulate:
                    _deploy_simulated(supervisor.url, data, config.gateway.tls_certificate)
                _welcome(supervisor.url, data, host=host, is_first=is_first)
            supervisor.watch()
            remark("Stopping: running requests are finished first. Ctrl-C again stops at once.")
        finally:
            supervisor.stop()
        remark("Stopped.")
    if supervisor.stops_asked > 1:
        raise click.exceptions.Exit(Exit.INTERRUPTED)


def _hold(lock: IO[bytes], data: DataDirectory) -> None:
    """Take the lock of the data directory, or say who has it."""
    clock = SystemClock()
    give_up_s = clock.monotonic_s() + _LEFTOVER_S
    is_told = False
    while not take_lock(lock):
        running = read_running(data)
        if running is not None and is_alive(running.pid):
            raise StartupError(
                f"Modelyard already runs in {data.root}: process {running.pid}, {running.url or 'starting'}. "
                f"Use it, stop it with 'modelyard down --data-dir {shlex.quote(str(data.root))}', "
                "or choose another --data-dir and --port."
            )
        if clock.monotonic_s() > give_up_s:
            planes = ", ".join(str(pid) for pid in running.planes) if running else "unknown"
            raise StartupError(f"An earlier run in {data.root} does not end (processes {planes}). Kill them and retry.")
        if not is_told:
            remark("Waiting for an earlier run to finish its requests.")
            is_told = True
        time.sleep(0.05)


def _listeners(config: Config) -> list[socket.socket]:
    """Open one listening socket a worker, all on one port."""
    host, port, workers = config.gateway.host, config.gateway.port, config.gateway.workers
    if workers == 1:
        return [_bind(host, port, is_shared=False)]
    # A shared port is never busy for a second program that shares it too, so look without sharing first.
    with _bind(host, port, is_shared=False) as probe:
        port = probe.getsockname()[1]
    return [_bind(host, port, is_shared=True) for _ in range(workers)]


def _bind(host: str, port: int, *, is_shared: bool) -> socket.socket:
    try:
        return compose.open_listener(host, port, is_shared=is_shared)
    except PermissionError as error:
        raise StartupError(f"Port {port} needs more rights than this user has. Choose another with --port.") from error
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == 98:
            owner = listener_name(port)
            taken = f"Port {port} is taken" + (f" by {owner}" if owner else "")
            raise StartupError(f"{taken}. Stop it, or choose another with --port.") from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StartupError(f"Cannot listen on {host}:{port}: {reason}. Check --host and --port.") from error


def _is_loopback(host: str) -> bool:
    return host in {"localhost", "::1"} or host.startswith("127.")


def check_edge(settings: GatewayConfig) -> bool:
    """Say whether the port speaks TLS, after everything of it that could keep a gateway from its start.

    Raises:
        StartupError: a setting is wrong.
    """
    if settings.cors_origins:
        from modelyard.gateway.cors import check_origins

        check_origins(settings.cors_origins)
    if not settings.tls_certificate and not settings.tls_key:
        return False  # most have none, and need not wait for what loads here
    from modelyard.gateway.tls import tls_context

    return tls_context(settings) is not None


def _url(host: str, port: int, *, is_tls: bool) -> str:
    local = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{local}]:{port}" if ":" in local else f"{scheme}://{local}:{port}"


def _deploy_simulated(url: str, data: DataDirectory, certificate: str) -> None:
    from modelyard.cli.http import Platform

    platform = Platform(url, data.admin_key.read_text("utf-8").strip(), certificate)
    if any(endpoint["name"] == "sim" for endpoint in platform.all("/v1/endpoints")):
        return
    platform.post("/v1/models/deploy", {"model_name": "sim", "framework": "simulated"})


def _welcome(url: str, data: DataDirectory, *, host: str, is_first: bool) -> None:
    key_file = shlex.quote(str(data.admin_key))
    is_default = data.root == DataDirectory.default(os.environ)
    down = "modelyard down" + ("" if is_default else f" --data-dir {shlex.quote(str(data.root))}")
    if is_first:
        key = f"{data.admin_key.read_text('utf-8').strip()}  (shown once; kept in {data.admin_key})"
    else:
        key = f"in {data.admin_key}"
    lines = [
        f"Modelyard {__version__} is ready.",
        "",
        f"  API        {url}/v1",
        f"  Console    {url}/console",
        f"  Admin key  {key}",
        "",
        "Try it:",
        f'  curl {url}/v1/models -H "Authorization: Bearer $(cat {key_file})"',
        "",
        f"Stop it with Ctrl-C, or: {down}",
    ]
    print("\n".join(lines), flush=True)
