"""Measure goodput under overload: ``python -m bench.overload [--seconds 60] [--times 3] [--quick] [--json]``.

Two engines with a fixed service time and a fixed number of slots have a known
capacity. Three tenants (plans priority, standard and batch: a quarter, a half
and a quarter of the requests) ask for it once over, then for three times as
much, in an open loop, so that refusals do not slow the callers down. Goals
(F35 in ``reference/faults.md``): goodput at 3 x capacity at least 90 % of that
at 1 x, the priority plan served in 99 % of its requests, refusals answered
within 50 ms, and 5 s after the end all is as before.
"""

import argparse
import http.client
import json
import shutil
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import processes, tools
from bench.gateway.cells import finish_load
from bench.gateway.modelyard_peer import Modelyard

SHARES = {"priority": 0.25, "standard": 0.5, "batch": 0.25}
ENGINES = 2
CONNECTIONS = 1500
"""Of each tenant: more than can be under way and in line together, so that the loop stays open."""


@dataclass(slots=True)
class Phase:
    """One load: what each tenant asked for and got."""

    times: float
    seconds: float
    tenants: dict[str, dict[str, Any]]

    @property
    def goodput(self) -> float:
        """Return good answers a second."""
        return float(sum(one["ok"] for one in self.tenants.values())) / self.seconds

    @property
    def reject_p99_ms(self) -> float:
        """Return the slowest tenant's 99th percentile of the time to a refusal."""
        return max(float(one["reject_p99"]) for one in self.tenants.values()) / 1000

    def success(self, tenant: str) -> float:
        """Return the share of a tenant's answers that are good."""
        one = self.tenants[tenant]
        return float(one["ok"]) / max(1.0, float(one["ok"] + one["bad"] + one["connerr"]))


@dataclass(slots=True)
class Outcome:
    """All phases, and the seconds after the overload until a request was served as if nothing had been."""

    capacity: float
    phases: list[Phase] = field(default_factory=list)
    recovered_s: float = 0.0


def main() -> None:
    """Parse the command line, run, print."""
    options = _arguments()
    tools.build()
    scratch = Path(tempfile.mkdtemp(prefix="overload-", dir=tools.BUILD))
    engines = [tools.FakeEngine.start(processes.free_port(), []) for _ in range(ENGINES)]
    peer = Modelyard(options=["--slots", str(options.slots)])
    outcome = Outcome(capacity=ENGINES * options.slots / options.service_s)
    try:
        for engine in engines:
            processes.wait_until(engine.is_listening, "the fake engines listening")
            engine.set(delay_us=int(options.service_s * 1e6))
        port = peer.start_before([e.port for e in engines], scratch, gateway_pin=[], other_pin=[]).port
        for times in (0.5, 1.0, options.times):
            seconds = 2.0 if times < 1 else options.seconds
            outcome.phases.append(_load(port, peer.keys, outcome.capacity * times, times, seconds))
        outcome.recovered_s = _recovery_s(port, peer.keys["standard"], options.service_s)
    finally:
        peer.stop()
        for engine in engines:
            engine.stop()
        if not options.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    del outcome.phases[0]  # connections and lazy imports
    print(json.dumps(asdict(outcome), indent=1) if options.json else _table(outcome))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each load")
    parser.add_argument("--times", type=float, default=3.0, help="how much more than the capacity is asked for")
    parser.add_argument("--slots", type=int, default=32, help="of each of the two engines")
    parser.add_argument("--service-s", type=float, default=0.25, help="time of an answer")
    parser.add_argument("--quick", action="store_true", help="8 s a load")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep logs and data directory in .cache/bench")
    options = parser.parse_args()
    if options.quick:
        options.seconds = 8.0
    return options


def _load(port: int, keys: dict[str, str], rate: float, times: float, seconds: float) -> Phase:
    """Ask for ``rate`` answers a second, in the shares of the tenants."""
    loads = {}
    for tenant, share in SHARES.items():
        command = tools.load_command(
            port,
            keys[tenant],
            tools.CHAT_BODY,
            mode="rate",
            connections=CONNECTIONS,
            seconds=seconds,
            rate=rate * share,
        )
        loads[tenant] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return Phase(times, seconds, {tenant: finish_load(load) for tenant, load in loads.items()})


def _recovery_s(port: int, key: str, service_s: float) -> float:
    """Ask one request after the other until one is served within half more than its service time."""
    began = time.monotonic()
    while time.monotonic() < began + 60:
        asked = time.monotonic()
        if _is_served(port, key) and time.monotonic() - asked < 1.5 * service_s:
            return asked - began
        time.sleep(0.05)
    return float("inf")


def _is_served(port: int, key: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", tools.CHAT_BODY.read_bytes(), headers)
        return connection.getresponse().status == 200
    finally:
        connection.close()


def _table(outcome: Outcome) -> str:
    lines = [
        "| load | tenant | asked/s | served/s | served | p50 / p99 s | refused/s | refused in p50 / p99 ms | unsent |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for phase in outcome.phases:
        for tenant, one in phase.tenants.items():
            lines.append(
                f"| {phase.times:g} × | {tenant} | {SHARES[tenant] * phase.times * outcome.capacity:.0f}"
                f" | {one['ok'] / phase.seconds:.0f} | {phase.success(tenant):.1%}"
                f" | {one['p50'] / 1e6:.2f} / {one['p99'] / 1e6:.2f} | {one['bad'] / phase.seconds:.0f}"
                f" | {one['reject_p50'] / 1e3:.1f} / {one['reject_p99'] / 1e3:.1f} | {one['unsent']} |"
            )
    once, much = outcome.phases
    return "\n".join(
        [
            *lines,
            "",
            f"Capacity {outcome.capacity:.0f}/s. Goodput {once.goodput:.0f}/s at 1 ×, {much.goodput:.0f}/s at"
            f" {much.times:g} ×: {much.goodput / once.goodput:.2f} of it (goal 0.90).",
            f"Priority served {much.success('priority'):.2%} (goal 99 %); refusals answered within"
            f" {much.reject_p99_ms:.1f} ms, p99 (goal 50); recovered after {outcome.recovered_s:.2f} s (goal 5).",
        ]
    )


if __name__ == "__main__":
    main()
