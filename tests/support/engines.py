"""A running engine, most often a simulated one, asked over its own port and past the gateway."""

import http.client
import json
from typing import Any

from tests.support.yard import EngineProcess, Yard

PREEMPTIONS = "vllm:num_preemptions_total"


def secret_of(yard: Yard, engine: EngineProcess) -> str:
    """Return what the engine wants to be asked with."""
    (row,) = yard.query(f"SELECT secret FROM replicas WHERE replica_id = '{engine.replica_id}'")
    return str(row["secret"])


def plan(yard: Yard, engine: EngineProcess, directive: str, *, contains: str = "") -> None:
    """Let every later request (whose prompt contains a text) suffer; "" ends what was planned before."""
    planned = [{"directive": directive, "times": 0, "contains": contains}] if directive else []
    _ask(yard, engine, "POST", "/sim/faults", planned)


def samples_of(yard: Yard, engine: EngineProcess) -> dict[str, float]:
    """Return the metrics of an engine by name, without labels."""
    found: dict[str, float] = {}
    for line in _ask(yard, engine, "GET", "/metrics").decode().splitlines():
        series, _, value = line.rpartition(" ")
        if not line.startswith("#"):
            found[series.partition("{")[0]] = float(value)
    return found


def names_in(yard: Yard, engine: EngineProcess) -> list[str]:
    """Return what an engine serves, by its own names."""
    return [str(one["id"]) for one in json.loads(_ask(yard, engine, "GET", "/v1/models"))["data"]]


def probes_of(yard: Yard, engine: EngineProcess, event: str = "begin") -> list[dict[str, Any]]:
    """Return the journal's records of the gateway's own requests to an engine."""
    return [r for r in _records(yard, engine) if r["rid"].startswith("side-") and r["event"] == event]


def requests_of(yard: Yard, engine: EngineProcess) -> list[str]:
    """Return the ids of callers' requests that an engine began, in their order."""
    return [str(r["rid"]) for r in _records(yard, engine) if r["rid"].startswith("req_") and r["event"] == "begin"]


def _records(yard: Yard, engine: EngineProcess) -> list[dict[str, Any]]:
    return [record for record in yard.journal() if record["pid"] == engine.pid]


def _ask(yard: Yard, engine: EngineProcess, method: str, path: str, body: object = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=20)
    try:
        headers = {"Authorization": f"Bearer {secret_of(yard, engine)}", "Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, f"{method} {path}: {answer.status} {text[:200]!r}"
        return text
    finally:
        connection.close()
