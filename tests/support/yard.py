"""A whole platform for a test: ``modelyard up`` as real processes in a temporary folder.

The yard is a black box with windows: its public API, its ledger (SQLite file),
its engines' token journals, its metrics page and its process tree. Timeouts
are scaled down through the environment, as an operator would set them. What a
test starts ends with the test: ``stop`` fails if any process is left.
"""

import contextlib
import http.client
import json
import os
import signal
import sqlite3
import ssl
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from modelyard.metering.delivery import undelivered
from modelyard.metering.journal import read_records
from modelyard.stores import JournalPosition
from tests.support import processes
from tests.support.ledger import Row, as_row
from tests.support.waiting import eventually

START_S = 60.0
"""Longest start; two busy cores are slow."""

STOP_S = 60.0
"""Longest stop: planes are waited for one kind after the other, for up to twenty seconds each."""

CONTEXT = 16_384
"""Tokens of context of a simulated model, so that no default output limit comes near it."""

SETTINGS: dict[str, object] = {
    "gateway.queue_wait_s": 10,
    "gateway.load_wait_s": 45,
    "gateway.first_token_timeout_s": 15,
    "gateway.token_timeout_s": 10,
    "gateway.total_timeout_s": 60,
    "gateway.drain_timeout_s": 3,
    "gateway.loading_comment_s": 0.3,
    "gateway.journal_sync_s": 0.01,
    "gateway.mark_tokens": 8,
    "gateway.mark_s": 0.2,
    "control.pass_interval_s": 0.1,
    "control.delivery_interval_s": 0.05,
    "control.replica_grace_s": 1,
    "control.drain_timeout_s": 2,
    "control.crash_backoff_s": 0.1,
    "control.crash_backoff_max_s": 1,
    "control.hang_timeout_s": 10,
    "prices.*.input": 150,
    "prices.*.cached_input": 75,
    "prices.*.output": 600,
}
"""Every pause at a fraction of its default, and a price for every model so that cost is never trivially 0."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the public API."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine, from the fleet's own record."""

    replica_id: str
    pid: int
    port: int
    folder: Path


@dataclass(slots=True)
class Yard:
    """One platform; ``with Yard(folder) as yard:`` starts and stops it."""

    folder: Path
    settings: Mapping[str, object] = field(default_factory=dict)
    url: str = ""
    admin_key: str = ""
    options: tuple[str, ...] = ()
    """More of the command line of ``up``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More of the environment of ``up`` and all that it starts."""
    process: subprocess.Popen[bytes] | None = None

    # --- life -------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, failed: type[BaseException] | None, *rest: object) -> None:
        """Stop; a failing test keeps its own failure."""
        if failed is None:
            self.stop()
        else:
            with contextlib.suppress(AssertionError):
                self.stop()

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.folder / "data"

    def start(self) -> None:
        """Start ``modelyard up`` and wait until it is ready."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MODELYARD")}
        for name, value in {**SETTINGS, **self.settings}.items():
            environment["MODELYARD__" + name.upper().replace(".", "__")] = str(value)
        environment.update(self.environment)
        command = [sys.executable, "-m", "modelyard", "up", "--port", "0", "--data-dir", str(self.data)]
        command += self.options
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        try:
            self.url = eventually(self._read_url, START_S, "modelyard up says its URL")
            self.admin_key = (self.data / "secrets" / "admin-key").read_text().strip()
            eventually(lambda: self.call("GET", "/readyz", key="").status == 200, START_S, "readyz is 200")
        except AssertionError as error:
            with contextlib.suppress(AssertionError):
                self.stop()
            raise AssertionError(f"{error}\n--- output of up:\n{self.output.read_text()[-3000:]}") from error

    def stop(self) -> None:
        """End everything with SIGINT, as Ctrl-C does, and insist that nothing is left."""
        process, self.process = self.process, None
        if process is None:
            return
        processes.send_signal(process.pid, signal.SIGINT)
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(STOP_S)
        if code is None:
            process.kill()
            process.wait(5)
        left = processes.touching(self.data)
        commands = [" ".join(processes.command_of(pid)) for pid in left]
        for pid in left:
            processes.send_signal(pid, signal.SIGKILL)
        assert code is not None, f"modelyard up did not stop in {STOP_S:g} s:\n{self.output.read_text()[-2000:]}"
        assert not left, f"processes are left after modelyard up: {commands}"
        assert code in (0, 130), f"modelyard up ended with {code}:\n{self.output.read_text()[-2000:]}"

    @property
    def output(self) -> Path:
        """What ``modelyard up`` printed."""
        return self.folder / "up.log"

    def _read_url(self) -> str:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"modelyard up ended with {self.process.returncode}:\n{self.output.read_text()[-3000:]}")
        record = json.loads((self.data / "run" / "up.json").read_text() or "{}")
        return str(record.get("url", ""))

    # --- the public API ----------------------------------------------------------

    @property
    def port(self) -> int:
        """The public port."""
        return urllib.parse.urlsplit(self.url).port or 80

    def call(
        self, method: str, path: str, body: object = None, *, key: str | None = None, within_s: float = 10.0
    ) -> Reply:
        """Make one management call; ``key=""`` sends none, None the admin key."""
        headers = {}
        if key != "":
            headers["Authorization"] = f"Bearer {key or self.admin_key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = self._connection(within_s)
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
            answer = connection.getresponse()
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def _connection(self, within_s: float) -> http.client.HTTPConnection:
        certificate = self.settings.get("gateway.tls_certificate")
        if not certificate:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=within_s)
        trust = ssl.create_default_context(cafile=str(certificate))
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=within_s, context=trust)

    def get(self, path: str) -> Any:
        """GET with the admin key; anything but 200 fails."""
        reply = self.call("GET", path)
        assert reply.status == 200, f"GET {path}: {reply.status} {reply.body[:300]!r}"
        return reply.json()

    def deploy(
        self,
        name: str = "sim",
        *,
        options: Mapping[str, object] | None = None,
        replicas: int = 1,
        scaling: Mapping[str, object] | None = None,
        shared: bool = False,
        wait: bool = True,
    ) -> str:
        """Deploy a simulated model and wait until its replicas are ready; return the endpoint id."""
        journal = self.folder / "tokens" / f"{name}.jsonl"  # beside the data: it outlives the replicas' own folders
        journal.parent.mkdir(exist_ok=True)
        order: dict[str, Any] = {
            "model_name": name,
            "framework": "simulated",
            "options": {"context_length": CONTEXT, "journal": str(journal), **(options or {})},
            "hardware": {"min_replicas": replicas, "max_replicas": replicas},
        }
        if shared:
            order["shared"] = True
        if scaling is not None:
            order["scaling"] = dict(scaling)
        reply = self.call("POST", "/v1/models/deploy", order)
        assert reply.status == 202, f"deploy: {reply.status} {reply.body!r}"
        endpoint_id = str(reply.json()["endpoint_id"])
        if wait:
            self.wait_ready(name, replicas)
        return endpoint_id

    def wait_ready(self, name: str, replicas: int = 1, within_s: float = 60.0) -> None:
        """Wait until the gateway routes to this many replicas of an endpoint, by asking the API and the engines."""
        eventually(lambda: self.ready_replicas(name) >= replicas, within_s, f"{replicas} ready replicas of {name}")

        def are_routed() -> bool:
            """The API tells what is stored; the table that gateways route by is pushed a moment after."""
            return self.routed_replicas(name) >= replicas or self.ready_replicas(name) < replicas  # it sleeps again

        eventually(are_routed, within_s, f"{replicas} replicas of {name} are routed to")

    def ready_replicas(self, name: str) -> int:
        """Return how many replicas of an endpoint are ready."""
        endpoint = self.get(f"/v1/endpoints/{name}")
        return sum(1 for replica in endpoint["replicas"] if replica["state"] == "ready")

    def routed_replicas(self, name: str) -> int:
        """Return how many replicas of an endpoint the gateway knows; of several workers, the one that knows least."""
        samples = self.samples("modelyard_replicas")
        return int(min((value for labels, value in samples if f'model="{name}"' in labels), default=0))

    def times_ready(self, name: str) -> int:
        """Return how often a replica of an endpoint has become ready so far."""
        events = self.get(f"/v1/endpoints/{name}/events?limit=200")["data"]
        return sum(1 for event in events if event["kind"] == "replica_ready")

    def wait_asleep(self, name: str, within_s: float = 60.0) -> None:
        """Wait until an endpoint that scales to zero was ready and nothing of it runs any more.

        It was ready by its events: with a short idle time it may be so for less than it takes to look.
        """

        def sleeps() -> bool:
            return self.times_ready(name) > 0 and self.ready_replicas(name) == 0 and not self.engines(name)

        eventually(sleeps, within_s, f"{name} was ready and sleeps")

    def new_key(self, *, name: str = "test", **fields: object) -> str:
        """Create an inference key of the platform's own tenant; ``limits={…}`` bounds it."""
        reply = self.call("POST", "/v1/keys", {"name": name, "scopes": ["inference"], **fields})
        assert reply.status in (200, 201), f"new key: {reply.status} {reply.body!r}"
        return str(reply.json()["key"])

    def new_tenant(self, name: str, **fields: object) -> str:
        """Create a tenant (``plan="priority"`` …); return an inference key of it."""
        reply = self.call("POST", "/v1/tenants", {"name": name, **fields})
        assert reply.status == 201, f"new tenant: {reply.status} {reply.body!r}"
        return self.new_key(name=name, tenant_id=reply.json()["id"])

    # --- windows -------------------------------------------------------------------

    def query(self, statement: str) -> list[dict[str, Any]]:
        """Read from the control database, past the API."""
        location = f"file:{self.data / 'control.sqlite'}?mode=ro"
        with contextlib.closing(sqlite3.connect(location, uri=True, timeout=30)) as database:
            database.row_factory = sqlite3.Row
            return [dict(record) for record in database.execute(statement)]

    def rows(self) -> list[Row]:
        """Return the whole ledger."""
        return [as_row(record) for record in self.query("SELECT * FROM inference_requests")]

    def row_of(self, request_id: str | None, within_s: float = 20.0) -> dict[str, Any]:
        """Wait for one ledger row and return all of it."""
        statement = f"SELECT * FROM inference_requests WHERE request_id = '{request_id}'"
        return eventually(lambda: self.query(statement), within_s, f"a ledger row for {request_id}")[0]

    def open_requests(self) -> int:
        """Return how many intents are not settled."""
        return int(self.query("SELECT count(*) AS n FROM usage_open")[0]["n"])

    def is_booked(self) -> bool:
        """Say whether all that gateways wrote down is in the ledger, and settled: rows come after answers."""
        read = {str(row["source"]): JournalPosition(**row) for row in self.query("SELECT * FROM journal_positions")}
        # Of a gateway that was killed an unfinished record may stay, which nobody reads.
        tails = undelivered(self.data / "journal", read)
        return not any(read_records(tail.path, tail.offset)[0] for tail in tails) and self.open_requests() == 0

    def rolled_up(self) -> dict[str, int]:
        """Return the totals of the hourly roll-ups, which bills are made from."""
        wanted = ("requests", "prompt_tokens", "completion_tokens", "cost_nanousd")
        sums = ", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in wanted)
        return dict(self.query(f"SELECT {sums} FROM usage_rollup_hourly")[0])

    def journal(self) -> Iterator[dict[str, Any]]:
        """Yield every record of every engine's journal, dead ones too; a torn last line is skipped."""
        for file in sorted((self.folder / "tokens").glob("*.jsonl")):
            for line in file.read_bytes().split(b"\n")[:-1]:
                yield json.loads(line)

    def generated(self) -> dict[str, dict[str, int]]:
        """Return how many tokens each engine (by pid) made for each request id; 0 for one that it only began."""
        made: dict[str, dict[str, int]] = {}
        for record in self.journal():
            rid = str(record["rid"])
            if rid.startswith("req_"):  # others are the controller's own probes
                of_engine, engine = made.setdefault(rid, {}), str(record["pid"])
                of_engine[engine] = of_engine.get(engine, 0) + (record["event"] == "token")
        return made

    def events_of(self, request_id: str | None, event: str = "") -> list[dict[str, Any]]:
        """Return the engines' journal records of one request (and kind)."""
        return [r for r in self.journal() if r["rid"] == request_id and event in ("", r["event"])]

    def samples(self, name: str) -> list[tuple[str, float]]:
        """Return the labels, as they are written, and the value of each series of a metric; gateways answer live."""
        reply = self.call("GET", "/metrics")
        assert reply.status == 200, f"/metrics: {reply.status}"
        lines = [line.rpartition(" ") for line in reply.body.decode().splitlines() if not line.startswith("#")]
        return [(series, float(value)) for series, _, value in lines if series.partition("{")[0] == name]

    def gauges(self) -> dict[str, float]:
        """Return the gauges that must be 0 at rest: in flight and queued."""
        reply = self.call("GET", "/metrics")
        assert reply.status == 200, f"/metrics: {reply.status}"
        found: dict[str, float] = {}
        for line in reply.body.decode().splitlines():
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            if not line.startswith("#") and any(word in name for word in ("in_flight", "queued", "queue_depth")):
                found[series] = float(value)
        return found

    # --- processes -------------------------------------------------------------------

    def plane_pids(self, plane: str) -> list[int]:
        """Return the pids of ``gateway`` workers or of ``control``."""
        assert self.process is not None
        found = processes.descendants_of(self.process.pid)
        planes = [pid for pid in found if f"\0up\0{plane}\0" in "\0".join(["", *processes.command_of(pid), ""])]
        # What a plane starts looks like itself until it has become something else.
        forks = {child for pid in planes for child in processes.children_of(pid)}
        return [pid for pid in planes if pid not in forks and processes.is_alive(pid)]

    def engines(self, name: str | None = None) -> list[EngineProcess]:
        """Return the living engines (of an endpoint), from the fleet's records."""
        wanted = None
        if name is not None:
            wanted = {replica["id"] for replica in self.get(f"/v1/endpoints/{name}")["replicas"]}
        found = []
        for file in sorted((self.data / "replicas").glob("*/process.json")):
            if wanted is not None and file.parent.name not in wanted:
                continue
            with contextlib.suppress(OSError, ValueError, KeyError):
                record = json.loads(file.read_text())
                pid, port = int(record["pid"]), int(record.get("port", 0))
                if processes.is_alive(pid):
                    found.append(EngineProcess(file.parent.name, pid, port, file.parent))
        return found

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Signal one process of this yard; any other is refused."""
        assert self.process is not None
        assert pid in {self.process.pid, *processes.descendants_of(self.process.pid)}, f"{pid} is not of this yard"
        processes.send_signal(pid, number)

    def kill(self, pid: int) -> None:
        """``kill -9`` one process of this yard."""
        self.signal(pid, signal.SIGKILL)
