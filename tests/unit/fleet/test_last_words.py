"""What a replica said last, and how its end is told."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import eventually_async

from modelyard.clock import SystemClock
from modelyard.engines import EngineCommand
from modelyard.fleet import Observed, StartOrder, memory_kills
from modelyard.fleet.local import LocalFleet, stop_all
from modelyard.fleet.logs import last_lines
from modelyard.fleet.memory_kills import DYING_S_MAX, Kills, KillWatch

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

    return await eventually_async(look, 40, "it has ended")


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
        assert (await fleet.observe())[0].is_running
        (tmp_path / "r-1" / "go").touch()
        replica = await outcome(fleet)
    finally:
        stop_all(tmp_path, 0.0)
    assert replica.is_out_of_memory
    assert replica.exit_reason == "killed by the kernel: out of memory"


def test_a_process_that_is_looked_at_while_it_is_being_killed_was_killed_for_memory(tmp_path: Path) -> None:
    page = tmp_path / "memory.events"

    def look(count: int) -> Kills:
        page.write_text(f"oom_kill {count}\n")
        return Kills(page, count)

    watch = KillWatch(look(3), 0.0)
    watch.look(look(3), 1.0)
    watch.look(look(4), 2.0)
    assert watch.has_risen(), "it was counted, and had not ended"
    watch.look(look(4), DYING_S_MAX + 1)
    assert watch.has_risen()
    watch.look(look(4), 2 * DYING_S_MAX + 2)
    assert not watch.has_risen(), "that was another process of the group, a while ago"


async def test_a_replica_that_somebody_killed_is_not_out_of_memory(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path, SystemClock())
    await begin(fleet, "sleep", "60")
    (running,) = await fleet.observe()
    os.kill(running.pid, signal.SIGKILL)
    replica = await outcome(fleet)
    assert (replica.exit_reason, replica.is_out_of_memory) == ("killed by SIGKILL", False)


async def test_a_replica_that_kills_itself_is_not_out_of_memory_though_others_are(tmp_path: Path, cgroup: Path) -> None:
    """vLLM ends its own processes with SIGKILL; that the kernel killed a stranger since it started says nothing."""
    fleet = LocalFleet(tmp_path, SystemClock())
    await begin(fleet, "sh", "-c", "while ! test -e go; do sleep 0.01; done; kill -9 $$")
    (running,) = await fleet.observe()
    hungry = f"open({str(cgroup / 'cgroup.procs')!r}, 'w').write('0')\nx = b'1' * 300_000_000"
    command = [sys.executable, "-c", hungry]
    stranger = await asyncio.to_thread(subprocess.run, command, timeout=60, check=False)
    assert stranger.returncode == -signal.SIGKILL
    assert running.is_running
    (tmp_path / "r-1" / "go").touch()
    replica = await outcome(fleet)
    assert (replica.exit_reason, replica.is_out_of_memory) == ("killed by SIGKILL", False)


@pytest.mark.parametrize(
    ("line", "page"),
    [
        ("4:memory:/a/b", "memory/a/b/memory.oom_control"),
        ("4:cpu,memory:/of-the-host", "memory/memory.oom_control"),
        ("0::/a/b", "a/b/memory.events.local"),
        ("0::/old", "old/memory.events"),
        ("0::/", "memory.events.local"),
    ],
)
def test_the_nearest_count_of_the_kernel_is_read(
    line: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old and new control groups, in containers and out of them."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    monkeypatch.setattr(memory_kills, "_PROC", proc)
    monkeypatch.setattr(memory_kills, "_GROUPS", groups)
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text(f"9:name=systemd:/x\n{line}\n")
    (proc / "vmstat").write_text("nr_free_pages 1\noom_kill 18\n")
    assert memory_kills.kills_around(7) == (proc / "vmstat", 18)
    file = groups / page
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("oom 5\noom_kill 2\n")
    kills = memory_kills.kills_around(7)
    assert kills == (file, 2)
    (proc / "vmstat").write_text("oom_kill 19\n")
    assert not kills.has_risen()
    file.write_text("oom_kill_disable 0\noom_kill 3\n")
    assert kills.has_risen()
