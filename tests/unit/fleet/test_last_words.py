"""What a replica said last, and how its end is told."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import eventually_async

from modelyard.clock import SystemClock
from modelyard.engines import EngineCommand
from modelyard.fleet import Observed, StartOrder
from modelyard.fleet.local import LocalFleet, stop_all
from modelyard.fleet.logs import last_lines

MEMORY = Path("/sys/fs/cgroup/memory")


async def end_of(folder: Path, *argv: str) -> Observed:
    fleet = LocalFleet(folder, SystemClock())
    await begin(fleet, *argv)
    return await outcome(fleet)


async def begin(fleet: LocalFleet, *argv: str) -> None:
    address = await fleet.reserve("r-1")
    command = EngineCommand(argv=argv, env={})
    await fleet.start(StartOrder("r-1", "ep-1", address.host, address.port, "a-secret", command))


async def outcome(fleet: LocalFleet) -> Observed:
    async def look() -> Observed | None:
        (replica,) = await fleet.observe()
        return None if replica.is_running else replica

    return await eventually_async(look, 20, "it has ended")


async def test_the_last_lines_of_a_crashed_replica_are_kept_plain(tmp_path: Path) -> None:
    script = "echo first; printf '\\033[31mcannot load\\033[0m\\tthe model\\n\\n'; exit 3"
    replica = await end_of(tmp_path, "sh", "-c", script)
    assert replica.exit_reason == "exited with code 3"
    assert replica.last_lines == ("first", "cannot loadthe model")


def test_only_the_end_of_a_long_log_is_read_and_long_lines_are_cut(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)) + "x" * 5000)
    lines = last_lines(log)
    assert len(lines) == 5
    assert lines[-2] == "line 99999"
    assert lines[-1] == "x" * 300
    assert last_lines(tmp_path / "none") == ()


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of the test's own."""
    folder = MEMORY / f"modelyard-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(64 * 1024 * 1024))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error.strerror}")
    yield folder
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return


async def test_a_replica_that_the_kernel_killed_for_memory_says_so(tmp_path: Path, cgroup: Path) -> None:
    """F25: the reason is not a bare SIGKILL."""
    hungry = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nx = b'1' * 300_000_000\ntime.sleep(60)"
    fleet = LocalFleet(tmp_path, SystemClock())
    try:
        await begin(fleet, sys.executable, "-c", hungry)
        (running,) = await fleet.observe()
        (cgroup / "cgroup.procs").write_text(str(running.pid))
        (tmp_path / "r-1" / "go").touch()
        replica = await outcome(fleet)
    finally:
        stop_all(tmp_path, 0.0)
    assert replica.is_out_of_memory
    assert replica.exit_reason == "killed by the kernel: out of memory"


async def test_a_replica_that_somebody_killed_is_not_out_of_memory(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path, SystemClock())
    await begin(fleet, "sleep", "60")
    (running,) = await fleet.observe()
    os.kill(running.pid, signal.SIGKILL)
    replica = await outcome(fleet)
    assert (replica.exit_reason, replica.is_out_of_memory) == ("killed by SIGKILL", False)
