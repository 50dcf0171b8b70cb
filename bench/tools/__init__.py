"""The native tools of the benchmarks: a load generator and a fake engine in C, built on first use.

They are C because the thing measured is a proxy of a few ten microseconds: a
load generator in Python would cost more than what it measures.
"""

import http.client
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.processes import is_listening

HERE = Path(__file__).parent
BUILD = HERE.parent.parent / ".cache" / "bench"
"""Binaries and scratch data: on a real disk, since the journal is part of what is measured, and ignored by git."""

CHAT_BODY = HERE / "chat.json"
STREAM_BODY = HERE / "stream.json"
BIG_BODY = BUILD / "big.json"
BIG_BODY_BYTES = 284_000


def fail(why: str) -> "SystemExit":
    """Return the exit of a benchmark that cannot run here."""
    print(f"bench: {why}", file=sys.stderr)
    return SystemExit(2)


def build() -> None:
    """Compile what is older than its source, and write the big body."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in ("load", "fakeup"):
        source, binary = HERE / f"{name}.c", BUILD / name
        if binary.exists() and binary.stat().st_mtime >= source.stat().st_mtime:
            continue
        if compiler is None:
            raise fail("no C compiler found; install one (Debian: apt install gcc libc6-dev)")
        subprocess.run([compiler, "-O2", "-o", str(binary), str(source)], check=True)
    if not BIG_BODY.exists():
        BIG_BODY.write_bytes(_big_body())


def _big_body() -> bytes:
    """Return a chat request of about 284 KB: long prompts are where hashing and decoding show."""
    sentence = 'The quick brown fox jumps over the lazy dog; it said "hello" twice.\n'
    body = json.loads(CHAT_BODY.read_bytes())
    body["messages"][1]["content"] = sentence * (BIG_BODY_BYTES // (len(sentence) + 3))
    return json.dumps(body, separators=(",", ":")).encode()


@dataclass(slots=True)
class FakeEngine:
    """A running ``fakeup``."""

    port: int
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, port: int, pin: list[str]) -> "FakeEngine":
        """Start it on ``port`` under the ``taskset`` prefix ``pin``."""
        return cls(port, subprocess.Popen([*pin, str(BUILD / "fakeup"), "-p", str(port)]))

    def is_listening(self) -> bool:
        """Say whether it has started."""
        return is_listening(self.port)

    def set(self, *, tokens: int = 100, interval_us: int = 20_000, delay_us: int = 0) -> dict[str, int]:
        """Set tokens a stream, pause between them and delay of plain answers; return its counters."""
        return self._control(f"/ctl?n={tokens}&i={interval_us}&d={delay_us}")

    def counters(self) -> dict[str, int]:
        """Return its counters: requests, done, aborted, active, chunks."""
        return self._control("/ctl")

    def _control(self, path: str) -> dict[str, int]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            found: dict[str, int] = json.loads(connection.getresponse().read())
            return found
        finally:
            connection.close()

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def load_command(  # one argument a flag of the tool
    port: int,
    key: str,
    body: Path,
    *,
    mode: str,
    connections: int,
    seconds: float,
    rate: float,
    headers: Sequence[str] = (),
) -> list[str]:
    """Return the command line of one run of the load generator."""
    base = [str(BUILD / "load"), "-p", str(port), "-b", str(body), "-m", mode]
    base += [word for header in headers for word in ("-H", header)]
    return [*base, "-c", str(connections), "-d", f"{seconds:g}", "-r", f"{rate:g}", *(["-k", key] if key else [])]


def parse_load(output: bytes) -> dict[str, Any]:
    """Return what the load generator printed."""
    found: dict[str, Any] = json.loads(output)
    return found
