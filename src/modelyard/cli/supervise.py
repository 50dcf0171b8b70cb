"""The supervisor of ``modelyard up``: one process that owns the port and the planes.

It binds the port itself and hands the listening socket down, so that a gateway
worker that dies never loses the port: connections wait in the kernel until its
successor takes them. A plane that dies is started again; when the supervisor
is asked to stop, the gateways drain first, then the controller books what they
wrote, then the engines stop. A rolling restart is in ``rolling.py``. Nothing outlives it: planes are told by the
kernel when it dies, and the next ``up`` finds engines that were left over.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from modelyard import compose
from modelyard.cli.output import remark
from modelyard.cli.running import Running, write_running
from modelyard.clock import Clock
from modelyard.config import Config, DataDirectory
from modelyard.errors import StartupError
from modelyard.fleet.processes import become_subreaper

READY_TIMEOUT_S = 60.0
CONTROL_STOP_S = 20.0
BATCH_STOP_S = 8.0
"""What works on batches ends first, while there is a gateway to finish what is under way."""
MARGIN_S = 5.0
"""What a plane gets beyond its own time-out before it is killed."""
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
CALM_S = 30.0
"""A plane that ran this long has no past: its pause starts anew."""
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for a stop."""


@dataclass(slots=True)
class Plane:
    """One supervised process. ``pause_s`` is waited before its next start, which is at ``due_s``.

    ``log`` gets what it says outside of its log proper: why it could not start, or a crash of the interpreter.
    ``worker`` is the number of a gateway. One that ``is_relieved`` finishes its requests and is not started again.
    """

    name: str
    kind: str
    arguments: list[str]
    descriptors: tuple[int, ...]
    log: Path
    first_pause_s: float
    worker: int | None = None
    is_relieved: bool = False
    log_start: int = 0
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    pause_s: float = 0.0
    due_s: float | None = 0.0


@dataclass(slots=True)
class Supervisor:
    """Starts planes, watches them, stops them."""

    config: Config
    data: DataDirectory
    lock: IO[bytes]
    listeners: list[socket.socket]
    url: str
    plane_options: list[str]
    clock: Clock
    planes: list[Plane] = field(default_factory=list)
    stops_asked: int = 0
    restarts_asked: int = 0
    restarts_done: int = 0
    trouble: str = ""
    _wakeup: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)

    def start(self) -> None:
        """Start all planes and wait until the platform answers.

        Raises:
            StartupError: a plane ended, or it took too long.
        """
        become_subreaper()
        self._watch_signals()
        self.planes = [self._plane("control", "control", [], (), BACKOFF_FIRST_S)]
        self.planes += [self.gateway(worker, f"gateway-{worker}") for worker in range(len(self.listeners))]
        for plane in self.planes:
            self.spawn(plane)
        self._note(is_ready=False)
        give_up_s = self.clock.monotonic_s() + READY_TIMEOUT_S
        while not self.stops_asked and not self._is_ready():
            for plane, reason in self.reap():
                raise StartupError(f"The {plane.name} process did not start: {last_line(plane) or reason}")
            if self.clock.monotonic_s() > give_up_s:
                raise StartupError(f"Not ready after {READY_TIMEOUT_S:.0f} s. See the logs in {self.data.logs}.")
            self.sleep(0.02)
        # Nobody waits for them to be there, so they do not hold up who does.
        for number in range(self.config.batch.workers if not self.stops_asked else 0):
            plane = self._plane(f"batch-{number}", "batch", ["--name", f"batch-{number}"], (), BACKOFF_FIRST_S)
            self.planes.append(plane)
            self.spawn(plane)
        self._note(is_ready=True)

    def watch(self) -> None:
        """Keep the planes running until a stop is asked for."""
        while not self.stops_asked:
            if self.restarts_asked > self.restarts_done:
                self._restart()
            waits_s = self.revive()
            if self.restarts_asked == self.restarts_done:
                self.sleep(waits_s)

    def revive(self) -> float | None:
        """Start again what ended, or plan it; return the seconds until the next start is due, None if there is none."""
        for plane, reason in self.reap():
            self._plan_restart(plane, reason)
        now_s = self.clock.monotonic_s()
        due = [plane for plane in self.planes if plane.due_s is not None]
        for plane in due:
            if plane.due_s is not None and plane.due_s <= now_s:
                self.spawn(plane)
                self._note(is_ready=True)
        waits = [plane.due_s - now_s for plane in due if plane.due_s is not None]
        return max(0.0, min(waits)) if waits else None

    def _restart(self) -> None:
        from modelyard.cli.rolling import roll

        asked = self.restarts_asked
        self.trouble = roll(self)
        self.restarts_done = asked
        if self.trouble:
            remark(f"Not restarted: {self.trouble}")
        self._note(is_ready=True)

    def stop(self) -> None:
        """Stop everything in order; a second request to stop kills what is left."""
        for listener in self.listeners:
            listener.close()
        self._stop_planes(self._of_kind("batch"), BATCH_STOP_S)
        self._stop_planes(self._of_kind("gateway"), self.config.gateway.drain_timeout_s + MARGIN_S)
        self._stop_planes(self._of_kind("control"), CONTROL_STOP_S)
        is_forced = self.stops_asked > 1
        compose.stop_engines(self.data, grace_s=0.0 if is_forced else self.config.control.replica_grace_s)
        # Python gives handled signals back to the kernel when it exits: one that comes then would kill us (code -2).
        for number in _STOPPING:
            signal.signal(number, signal.SIG_IGN)
        self.reap()
        self.data.running.unlink(missing_ok=True)
        signal.set_wakeup_fd(-1)
        for end in self._wakeup:
            end.close()

    def _is_ready(self) -> bool:
        """Say whether every worker serves and follows the controller.

        A gateway serves from its last table before the controller is there, so that is asked too.
        """
        workers = len(self.listeners)
        # Often enough to meet every worker: the kernel deals connections out at random, one in N to each.
        asks = 1 if workers == 1 else 8 * workers
        if not all(self.ask(path)[0] == 200 for path in ("/healthz", *["/readyz"] * asks, "/openapi.json")):
            return False
        try:
            status, body = self.ask("/v1/status", key=self.data.admin_key.read_text("utf-8").strip())
            return status != 200 or len(msgspec.json.decode(body, type=_Followers).gateways) >= workers
        except (OSError, msgspec.DecodeError):
            return True  # the operator keeps the key elsewhere

    def ask(self, path: str, *, key: str = "") -> tuple[int, bytes]:
        """Return status and body of GET ``path`` of the platform, (0, b"") without an answer."""
        return ask(self.url, path, key=key, certificate=self._certificate)

    @property
    def _certificate(self) -> str:
        file = self.config.gateway.tls_certificate
        return str(Path(file).absolute()) if file else ""

    # --- processes ---

    def _of_kind(self, kind: str) -> list[Plane]:
        return [plane for plane in self.planes if plane.kind == kind]

    def _plane(
        self, name: str, kind: str, options: list[str], descriptors: tuple[int, ...], first_pause_s: float
    ) -> Plane:
        arguments = [sys.executable, "-m", "modelyard", "up", kind, *self.plane_options, *options]
        arguments += ["--supervisor", str(os.getpid())]
        return Plane(name, kind, arguments, descriptors, self.data.logs / f"{name}.err", first_pause_s)

    def gateway(self, worker: int, name: str) -> Plane:
        """Return a gateway worker, not started yet; it listens on the socket of its number."""
        descriptor = self.listeners[worker].fileno()
        options = ["--worker", str(worker), "--name", name, "--listen-fd", str(descriptor)]
        # A gateway's first restart is at once: callers are waiting in its socket.
        plane = self._plane(name, "gateway", options, (descriptor,), 0.0)
        plane.worker = worker
        return plane

    def spawn(self, plane: Plane) -> None:
        """Start the process of a plane."""
        with plane.log.open("ab") as log:
            plane.log_start = log.tell()
            # Its own process group: Ctrl-C in a terminal reaches the supervisor only, which stops planes in order.
            # The lock goes along, so that it is free only when the last plane is gone.
            plane.process = subprocess.Popen(
                plane.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self.lock.fileno(), *plane.descriptors),
                env={**compose.PLANE_ENVIRONMENT, **os.environ},
                process_group=0,
            )
        plane.started_s = self.clock.monotonic_s()
        plane.due_s = None

    def _plan_restart(self, plane: Plane, reason: str) -> None:
        now_s = self.clock.monotonic_s()
        if now_s - plane.started_s > CALM_S:
            plane.pause_s = plane.first_pause_s
        plane.due_s = now_s + plane.pause_s
        remark(f"The {plane.name} process {reason}; starting it again. Its log: {plane.log.with_suffix('.log')}")
        plane.pause_s = min(max(plane.pause_s * 2, BACKOFF_FIRST_S), BACKOFF_MAX_S)

    def reap(self) -> list[tuple[Plane, str]]:
        """Collect every child that ended, orphaned engines too.

        Returns the planes among them that should still run, with the reason.
        """
        ended: list[tuple[Plane, str]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            for plane in list(self.planes):
                if plane.process is not None and plane.process.pid == pid:
                    code = os.waitstatus_to_exitcode(status)
                    plane.process.returncode = code  # Popen must not wait for it again
                    plane.process = None
                    if plane.is_relieved:
                        self.planes.remove(plane)
                    else:
                        ended.append((plane, _end(code)))

    def _stop_planes(self, planes: list[Plane], limit_s: float) -> None:
        give_up_s = self.clock.monotonic_s() + limit_s
        for plane in planes:
            if plane.process is not None:
                plane.process.send_signal(signal.SIGTERM)
        while any(plane.process is not None for plane in planes):
            self.reap()
            left_s = give_up_s - self.clock.monotonic_s()
            if left_s <= 0 or self.stops_asked > 1:
                for plane in planes:
                    if plane.process is not None:
                        plane.process.kill()
            if any(plane.process is not None for plane in planes):
                self.sleep(max(0.05, min(left_s, 1.0)))

    def _note(self, *, is_ready: bool) -> None:
        pids = [plane.process.pid for plane in self.planes if plane.process is not None]
        note = Running(
            os.getpid(), self.url if is_ready else "", pids, self.restarts_done, self.trouble, self._certificate
        )
        write_running(self.data, note)

    # --- signals ---

    def _watch_signals(self) -> None:
        for end in self._wakeup:
            end.settimeout(0)
        signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _STOPPING:
            signal.signal(number, self._ask_to_stop)
        signal.signal(signal.SIGUSR1, self._ask_to_restart)

    def _ask_to_stop(self, *_: object) -> None:
        self.stops_asked += 1

    def _ask_to_restart(self, *_: object) -> None:
        self.restarts_asked += 1

    def sleep(self, limit_s: float | None, also: int | None = None) -> None:
        """Wait for a signal (a stop, a restart, a child that ended), at most ``limit_s``, or for bytes on ``also``."""
        waited = [self._wakeup[0].fileno(), *([] if also is None else [also])]
        readable, _, _ = select.select(waited, [], [], limit_s)
        if waited[0] in readable:
            self._wakeup[0].recv(4096)


class _Followers(msgspec.Struct):
    """What matters of the platform's status."""

    gateways: list[msgspec.Raw]


def ask(url: str, path: str, *, key: str = "", certificate: str = "") -> tuple[int, bytes]:
    """Return status and body of GET ``path``, (0, b"") without an answer in half a second.

    A bare socket: an HTTP library would cost more to load than all of the start.
    """
    address = url.partition("://")[2]
    host, _, port = address.rpartition(":")
    request = f"GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
    if key:
        request += f"authorization: Bearer {key}\r\n"
    answer = b""
    try:
        with _connect(host.strip("[]"), int(port), certificate) as connection:
            connection.sendall(f"{request}\r\n".encode())
            while piece := connection.recv(65_536):
                answer += piece
    except OSError:
        return 0, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12]
    return int(status) if status.isdigit() else 0, body


def _connect(host: str, port: int, certificate: str) -> socket.socket:
    plain = socket.create_connection((host, port), timeout=0.5)
    if not certificate:
        return plain
    from modelyard.gateway.tls import trusting

    with plain:  # a failed handshake leaves it open
        return trusting(certificate).wrap_socket(plain)


def _end(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def last_line(plane: Plane) -> str:
    """Return what a plane said last since its start, without the word that ``main`` puts before it."""
    try:
        lines = plane.log.read_bytes()[plane.log_start :].decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("Error: ") if lines else ""
