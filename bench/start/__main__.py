"""Measure start-up: ``python -m bench.start [--rounds 7] [--json]``.

Wall and CPU seconds of ``modelyard --version`` and ``--help``, and of
``modelyard up`` on a fresh data directory until ``/healthz`` answers 200, all
processes counted, beside ``python -c pass``.
"""

import argparse
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench import processes, tools

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "modelyard --version": [sys.executable, "-m", "modelyard", "--version"],
    "modelyard --help": [sys.executable, "-m", "modelyard", "--help"],
}


def command(argv: list[str]) -> tuple[float, float]:
    """Run to the end; return wall and CPU seconds."""
    started = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise tools.fail(f"{' '.join(argv)} failed with {process.returncode}")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime


def up(folder: Path, path: str) -> tuple[float, float]:
    """Start the platform until ``path`` answers 200; return wall and CPU seconds of all its processes."""
    port = processes.free_port()
    argv = [sys.executable, "-m", "modelyard", "up", "--data-dir", str(folder), "--port", str(port)]
    started = time.perf_counter()
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
    try:
        while not is_ok(port, path):
            if process.poll() is not None or time.perf_counter() - started > 60:
                raise tools.fail(f"modelyard up did not become healthy:\n{Path(log.name).read_text()}")
            time.sleep(0.01)
        wall = time.perf_counter() - started
        return wall, processes.cpu_ns(processes.tree(process.pid)) / 1e9
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def is_ok(port: int, path: str) -> bool:
    """Say whether ``path`` answers 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tools.BUILD.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="start-", dir=tools.BUILD))
    found: dict[str, list[tuple[float, float]]] = {}
    try:
        for number in range(options.rounds):
            for name, argv in COMMANDS.items():
                found.setdefault(name, []).append(command(argv))
            for path in ("/healthz", "/readyz"):
                folder = scratch / f"{number}{path.replace('/', '-')}"
                folder.mkdir()
                found.setdefault(f"modelyard up to {path} 200", []).append(up(folder, path))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    middle = {name: tuple(median(column) for column in zip(*rounds, strict=True)) for name, rounds in found.items()}
    if options.json:
        print(json.dumps({name: {"wall_s": wall, "cpu_s": cpu} for name, (wall, cpu) in middle.items()}))
        return
    bare_wall, bare_cpu = middle["python -c pass"]
    print("| start | wall s | × bare Python | CPU s | × bare Python |\n|---|---:|---:|---:|---:|")
    for name, (wall, cpu) in middle.items():
        print(f"| {name} | {wall:.3f} | {wall / bare_wall:.1f} | {cpu:.3f} | {cpu / bare_cpu:.1f} |")


if __name__ == "__main__":
    main()
