"""Processes are known by pid and start time, and orphans find a parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.waiting import eventually

from modelyard.fleet import processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_process_is_alive_under_its_own_start_time_only(sleeper: subprocess.Popen[bytes]) -> None:
    started = processes.start_time(sleeper.pid)
    assert started > 0
    assert processes.is_alive(sleeper.pid, started)
    assert not processes.is_alive(sleeper.pid, started - 1)
    assert not processes.is_alive(0, started)


def test_a_zombie_is_not_alive_but_holds_its_pid(sleeper: subprocess.Popen[bytes]) -> None:
    started = processes.start_time(sleeper.pid)
    sleeper.kill()
    eventually(lambda: not processes.is_alive(sleeper.pid, started), 20, "it is dead before it is reaped")
    assert processes.is_free_or(sleeper.pid, started)
    assert not processes.is_free_or(sleeper.pid, started + 1)
    sleeper.wait()
    assert processes.start_time(sleeper.pid) == 0


def test_a_process_is_found_by_its_environment() -> None:
    name = f"TEST_MARK_{os.getpid()}"
    with subprocess.Popen(["sleep", "60"], env={name: "here", "OTHER": "x"}) as process:
        try:
            assert (
                eventually(lambda: processes.find_by_environment({name: "here", "OTHER": "x"}), 20, "found")
                == process.pid
            )
            assert processes.find_by_environment({name: "here", "OTHER": "y"}) == 0
        finally:
            process.kill()


def test_a_group_that_is_gone_takes_no_signal(sleeper: subprocess.Popen[bytes]) -> None:
    assert processes.signal_group(sleeper.pid, signal.SIGTERM)
    sleeper.wait()
    assert not processes.signal_group(sleeper.pid, signal.SIGTERM)


_CHILD_OF_A_PARENT_THAT_DIES = """
import os, subprocess, sys
child = 'import os, sys, time; from modelyard.fleet import processes; processes.die_with_parent(int(sys.argv[1])); '
child += 'print(os.getpid(), flush=True); time.sleep(60)'
process = subprocess.Popen([sys.executable, '-c', child, str(os.getpid())], stdout=subprocess.PIPE)
print(process.stdout.readline().decode().strip(), flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_a_child_that_asked_for_it_dies_with_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _CHILD_OF_A_PARENT_THAT_DIES], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        started = processes.start_time(child)
        assert processes.is_alive(child, started)
        parent.kill()
        eventually(lambda: not processes.is_alive(child, started), 20, "the child died with its parent")


_SUBREAPER = """
import os, subprocess
from modelyard.fleet import processes
processes.become_subreaper()
middle = subprocess.Popen(['sh', '-c', 'sleep 0.1 & echo $!'], stdout=subprocess.PIPE)
orphan = int(middle.stdout.read())
middle.wait()
print(orphan == os.waitpid(-1, 0)[0])
"""


def test_orphans_of_a_subreaper_become_its_children() -> None:
    done = subprocess.run([sys.executable, "-c", _SUBREAPER], capture_output=True, check=True, timeout=60)
    assert done.stdout.split() == [b"True"]
