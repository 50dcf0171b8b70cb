"""Measure the control plane: ``python -m bench.control [--endpoints 2000] [--quick] [--json] [--baseline FILE]``.

A real platform (controller, one gateway worker, simulated replicas with real
sockets, each on an accelerator of a declared node) with thousands of endpoints,
half of them with a replica, half asleep. Goals: a reconcile round < 1 s, also
while all replicas start at once, a change at the gateway < 200 ms (p99), an
idle controller < 15 % of a core.
"""

import argparse
import json
import os
import shutil
import signal
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import processes, tools
from bench.control import platform as platforms
from bench.control import tables
from bench.control.platform import Platform
from modelyard.config import DataDirectory

Figures = dict[str, float]
VISIBLE_WITHIN_S = 20.0
RAMP_PAUSE_S = 0.2
"""Pause between two looks at the ramp, each with a management call."""


def main() -> None:
    """Parse the command line, run, print."""
    options = _arguments()
    tools.BUILD.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="control-", dir=tools.BUILD))
    data = DataDirectory(root)
    awake = options.endpoints // 2
    platforms.fill(data, awake, options.endpoints - awake)
    running = platforms.start(data, {})
    try:
        figures = measure(running, awake, options)
        figures |= tables.measure(data)
    finally:
        running.stop()
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        baseline = json.loads(options.baseline.read_text()) if options.baseline else {}
        print(_table(figures, baseline))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.control", description=__doc__.split("\n")[0])
    parser.add_argument("--endpoints", type=int, default=2000, help="half of them with a replica, half asleep")
    parser.add_argument("--rounds", type=int, default=50, help="changes of each kind")
    parser.add_argument("--idle-s", type=float, default=20.0, help="how long the idle platform is watched")
    parser.add_argument("--quick", action="store_true", help="200 endpoints, 10 changes, 5 s idle")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--baseline", type=Path, help="figures of an earlier run (--json), for a column beside")
    parser.add_argument("--keep", action="store_true", help="keep logs and data directory in .cache/bench")
    options = parser.parse_args()
    if options.quick:
        options.endpoints, options.rounds, options.idle_s = 200, 10, 5.0
    return options


def measure(running: Platform, awake: int, options: argparse.Namespace) -> Figures:
    """Return all figures of a running platform."""
    control, gateway = running.pid_of("control"), running.pid_of("gateway")
    figures = _ramp(running, awake, control)
    host = running.host_pid()
    time.sleep(2)
    figures |= _idle({"controller": control, "gateway": gateway, "host": host}, options.idle_s)
    before = processes.cpu_ns([control])
    figures |= _changes(running, options.rounds)
    figures["controller CPU per change, ms"] = (processes.cpu_ns([control]) - before) / options.rounds / 4e6
    figures |= _wakes(running, awake, min(options.rounds, options.endpoints - awake))
    figures |= _rounds(running, "")
    for name, pid in (("controller", control), ("gateway", gateway), ("host", host)):
        figures[f"{name} RSS, MB"] = processes.resident_kb([pid]) / 1024
    figures["host RSS per replica, KB"] = processes.resident_kb([host]) / awake
    figures |= _restart(running, control)
    return figures


def _ramp(running: Platform, awake: int, control: int) -> Figures:
    """Wait until all replicas are ready; return how long that took, and what it did to rounds and calls meanwhile."""
    began, before = time.monotonic(), processes.cpu_ns([control])
    calls: list[float] = []
    while running.ready_replicas() < awake:
        if time.monotonic() - began > platforms.RAMP_S:
            raise TimeoutError(f"not all replicas were ready within {platforms.RAMP_S:g} s")
        asked = time.monotonic()
        status, made = running.call("POST", "/v1/keys", {"name": f"ramp-{len(calls)}", "scopes": ["inference"]})
        assert status == 201, made
        calls.append(time.monotonic() - asked)
        time.sleep(RAMP_PAUSE_S)
    figures: Figures = {
        "all replicas ready, s": time.monotonic() - began,
        "controller CPU until then, s": (processes.cpu_ns([control]) - before) / 1e9,
    }
    if calls:
        figures |= {f"new key while they start {name}, ms": value for name, value in _points(calls).items()}
    return figures | _rounds(running, " while they start")


def _rounds(running: Platform, when: str) -> Figures:
    """Return what the controller says of its last rounds and passes."""
    told = running.call("GET", "/v1/status")[1]["reconcile"]
    figures = {f"round{when} {name}, ms": 1000 * told[f"{name}_s"] for name in ("p50", "p99", "max", "largest")}
    figures[f"passes needed in the largest round{when}"] = told["largest_passes"]
    return figures | {f"needed to passed{when} {name}, ms": 1000 * told[f"pass_{name}_s"] for name in ("p50", "p99")}


def _idle(pids: dict[str, int], seconds: float) -> Figures:
    """Return the share of a core that each process takes while nothing happens."""
    before = {name: processes.cpu_ns([pid]) for name, pid in pids.items()}
    time.sleep(seconds)
    return {
        f"{name} idle, % of a core": (processes.cpu_ns([pid]) - before[name]) / seconds / 1e7
        for name, pid in pids.items()
    }


def _changes(running: Platform, rounds: int) -> Figures:
    """Return how long it takes from a call to what it changes at the gateway."""
    _add_release(running)
    found: dict[str, list[float]] = {"new key": [], "weight": [], "new endpoint": [], "deleted endpoint": []}
    for number in range(rounds):
        found["new key"].append(_new_key(running, number))
        found["weight"].append(_weight(running, number))
        found["new endpoint"].append(_new_endpoint(running, number))
        found["deleted endpoint"].append(_deleted_endpoint(running, number))
        time.sleep(0.05)
    return {
        f"{name} to effect {point}, ms": value
        for name, seconds in found.items()
        for point, value in _points(seconds).items()
    }


def _points(seconds: list[float]) -> Figures:
    seconds = sorted(seconds)
    return {"p50": 1000 * statistics.median(seconds), "p99": 1000 * seconds[int(len(seconds) * 0.99)]}


def _until(is_true: Callable[[], bool], began: float, what: str) -> float:
    """Return the seconds since ``began`` at which ``is_true`` was seen first."""
    while not is_true():
        if time.monotonic() - began > VISIBLE_WITHIN_S:
            raise TimeoutError(f"{what} was not seen within {VISIBLE_WITHIN_S:g} s")
    return time.monotonic() - began


def _new_key(running: Platform, number: int) -> float:
    began = time.monotonic()
    status, made = running.call("POST", "/v1/keys", {"name": f"bench-{number}", "scopes": ["inference"]})
    assert status == 201, made
    return _until(lambda: running.call("GET", "/v1/models/awake-0", key=made["key"])[0] != 401, began, "a key")


def _add_release(running: Platform) -> None:
    """Give an endpoint a second version whose answers differ: vectors of another length."""
    order = {"version": "v2", "framework": "simulated", "options": {"embedding_dimensions": 8}, "weight": 0}
    status, made = running.call("POST", "/v1/endpoints/awake-0/releases", order)
    assert status == 202, made
    assert running.call("PATCH", "/v1/endpoints/awake-0", {"releases": [{"version": "v2", "weight": 50}]})[0] == 200
    lengths: set[int] = set()

    def has_both() -> bool:
        lengths.add(_dimensions(running))
        return len(lengths) == 2

    processes.wait_until(has_both, "both releases answering", timeout_s=60)


def _dimensions(running: Platform) -> int:
    status, answer = running.call("POST", "/v1/embeddings", {"model": "awake-0", "input": "x"})
    return len(answer["data"][0]["embedding"]) if status == 200 else 0


def _weight(running: Platform, number: int) -> float:
    """Move all but one percent to the other release, until ten answers in a row come from there."""
    weight, wanted = (99, 8) if number % 2 else (1, 64)
    change = {"releases": [{"version": "v2", "weight": weight}]}
    began = time.monotonic()
    assert running.call("PATCH", "/v1/endpoints/awake-0", change)[0] == 200
    while True:
        first = time.monotonic() - began
        if sum(_dimensions(running) == wanted for _ in range(10)) >= 8:
            return first
        if first > VISIBLE_WITHIN_S:
            raise TimeoutError("a weight was not seen")


def _new_endpoint(running: Platform, number: int) -> float:
    order = {
        "model_name": f"new-{number}",
        "framework": "simulated",
        "hardware": {"min_replicas": 0, "max_replicas": 1},
        "scaling": {"scale_to_zero": True},
    }
    began = time.monotonic()
    status, made = running.call("POST", "/v1/models/deploy", order)
    assert status == 202, made
    return _until(lambda: running.call("GET", f"/v1/models/new-{number}")[0] == 200, began, "an endpoint")


def _deleted_endpoint(running: Platform, number: int) -> float:
    began = time.monotonic()
    assert running.call("DELETE", f"/v1/endpoints/new-{number}")[0] == 202
    return _until(lambda: running.call("GET", f"/v1/models/new-{number}")[0] == 404, began, "a deletion")


def _wakes(running: Platform, awake: int, rounds: int) -> Figures:
    """Return the time from a request for a sleeping endpoint to the start of its replica, and to its answer."""
    starts, answers = [], []
    for number in range(awake, awake + rounds):
        name, began_unix, began = f"asleep-{number}", time.time(), time.monotonic()
        asked = threading.Thread(target=_ask, args=(running, name))
        asked.start()
        asked.join(60)
        answers.append(time.monotonic() - began)
        starts.append(_started_at(running, f"ep-{number:012x}") - began_unix)
    return {f"request to StartReplica {point}, ms": value for point, value in _points(starts).items()} | {
        f"request to a woken answer {point}, ms": value for point, value in _points(answers).items()
    }


def _ask(running: Platform, name: str) -> None:
    status, answer = running.call("POST", "/v1/embeddings", {"model": name, "input": "x"}, within_s=60)
    assert status == 200, answer


def _started_at(running: Platform, endpoint_id: str) -> float:
    with sqlite3.connect(f"file:{running.data.database}?mode=ro", uri=True, timeout=10) as database:
        row: Any = database.execute(
            "SELECT min(started_at) FROM replicas WHERE endpoint_id = ?", (endpoint_id,)
        ).fetchone()
    return float(row[0])


def _restart(running: Platform, control: int) -> Figures:
    """Kill the controller; return the first round of the next one, which looks at everything."""
    os.kill(control, signal.SIGKILL)
    processes.wait_until(lambda: _new_rounds(running, control) > 1, "a new controller", timeout_s=60)
    status = running.call("GET", "/v1/status")
    while status[1]["reconcile"]["oldest_pass_s"] > 0:
        time.sleep(RAMP_PAUSE_S)
        status = running.call("GET", "/v1/status")
    rounds = running.call("GET", "/v1/status")[1]["reconcile"]
    return {
        "first round after a restart, ms": 1000 * rounds["largest_s"],
        "passes it finds needed": rounds["largest_passes"],
        "until the last of them is done, ms": 1000 * rounds["pass_max_s"],
    }


def _new_rounds(running: Platform, old: int) -> int:
    try:
        if running.pid_of("control") == old:
            return 0
        status, page = running.call("GET", "/v1/status")
        return int(page["reconcile"]["rounds"]) if status == 200 else 0
    except (OSError, LookupError):
        return 0


def _table(figures: Figures, baseline: Figures) -> str:
    if not baseline:
        return "\n".join(["| figure | now |", "|---|---:|", *(f"| {k} | {v:.4g} |" for k, v in figures.items())])
    lines = ["| figure | before | now | before ÷ now |", "|---|---:|---:|---:|"]
    for name, value in figures.items():
        before = baseline.get(name)
        shown = ("", "") if before is None else (f"{before:.4g}", f"{before / value:.3g}" if value else "")
        lines.append(f"| {name} | {shown[0]} | {value:.4g} | {shown[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
