"""What a process tree costs: CPU nanoseconds and resident memory, read from /proc.

CPU comes from ``schedstat`` (nanoseconds, per thread), never from ``stat``,
whose ticks of 10 ms are longer than a hundred requests.
"""

import http.client
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PROC = Path("/proc")


def pins(gateway_core: int, load_core: int) -> tuple[list[str], list[str]]:
    """Return the ``taskset`` prefixes of gateways and of all else; empty where there are no two cores."""
    taskset = shutil.which("taskset")
    if taskset is None or not {gateway_core, load_core} <= os.sched_getaffinity(0):
        print("bench: not pinned (taskset or the second core is missing): figures are rougher", file=sys.stderr)
        return [], []
    return [taskset, "-c", str(gateway_core)], [taskset, "-c", str(load_core)]


def tree(root: int) -> list[int]:
    """Return ``root`` and all its descendants."""
    parents: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


def cpu_ns(pids: Iterable[int]) -> int:
    """Return the CPU time of all threads of ``pids`` so far."""
    total = 0
    for pid in pids:
        try:
            threads = list((PROC / str(pid) / "task").iterdir())
        except OSError:
            continue
        for thread in threads:
            try:
                total += int((thread / "schedstat").read_text().split()[0])
            except OSError:
                continue
    return total


def resident_kb(pids: Iterable[int]) -> int:
    """Return resident memory, shared pages counted once per process."""
    total = 0
    for pid in pids:
        try:
            status = (PROC / str(pid) / "status").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    return total


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(is_true: Callable[[], bool], what: str, *, timeout_s: float = 20.0) -> None:
    """Poll until ``is_true``, or raise ``TimeoutError`` naming ``what``."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {timeout_s:g} s")
        time.sleep(0.02)


def is_listening(port: int) -> bool:
    """Say whether something accepts connections on ``port``."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_answering(port: int, path: str) -> bool:
    """Say whether ``GET path`` on ``port`` is answered with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_quiet(pids: Iterable[int], *, timeout_s: float = 10.0) -> None:
    """Return once ``pids`` use less than a tenth of a core, or after ``timeout_s``."""
    pids = list(pids)
    deadline = time.monotonic() + timeout_s
    before = cpu_ns(pids)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        after = cpu_ns(pids)
        if after - before < 10_000_000:
            return
        before = after
