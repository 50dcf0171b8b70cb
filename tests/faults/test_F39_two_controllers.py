"""F39: two control planes over one database. At most one acts; who was replaced while it slept does nothing."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support import processes
from tests.support.waiting import eventually
from tests.support.yard import SETTINGS, Yard

LEASE_S = 4.0


@contextlib.contextmanager
def another_controller(yard: Yard) -> Iterator[int]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MODELYARD")}
    for name, value in {**SETTINGS, **yard.settings}.items():
        environment["MODELYARD__" + name.upper().replace(".", "__")] = str(value)
    command = [sys.executable, "-m", "modelyard", "up", "control", "--data-dir", str(yard.data)]
    with (yard.folder / "second.log").open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def leader_of(yard: Yard) -> tuple[int, int]:
    """Return the epoch and the pid of who leads."""
    (row,) = yard.query("SELECT holder, epoch FROM controller_leases")
    holder = str(row["holder"])
    return int(row["epoch"]), int(holder.split("/")[-2]) if holder else 0


def test_one_controller_acts_and_a_replaced_one_stands_down(tmp_path: Path) -> None:
    with Yard(tmp_path, {"control.lease_s": LEASE_S}) as yard:
        yard.deploy("sim")
        (first,) = yard.plane_pids("control")
        assert leader_of(yard) == (1, first)
        with another_controller(yard) as second:
            log = yard.data / "logs" / "control.log"
            eventually(lambda: "leads (epoch 1)" in log.read_text(), 30, "the second controller waits")
            assert leader_of(yard) == (1, first), "while the first lives, nothing changes"

            yard.signal(first, signal.SIGSTOP)
            eventually(lambda: leader_of(yard) == (2, second), 30, "the second leads")
            changed = {"hardware": {"min_replicas": 2, "max_replicas": 2}}
            eventually(
                lambda: yard.call("PATCH", "/v1/endpoints/sim", changed).status == 200, 60, "the second takes changes"
            )
            yard.wait_ready("sim", 2)
            killed = yard.engines("sim")[0]
            processes.send_signal(killed.pid, signal.SIGKILL)
            eventually(
                lambda: killed.pid not in {one.pid for one in yard.engines("sim")} and len(yard.engines("sim")) == 2,
                30,
                "the second replaces what died",
            )

            yard.signal(first, signal.SIGCONT)
            eventually(lambda: not processes.is_alive(first), 30, "the first stands down")
            assert leader_of(yard) == (2, second)
            yard.wait_ready("sim", 2)
            assert len(yard.engines("sim")) == 2, "nobody started a replica twice"
            started = yard.query("SELECT replica_id FROM endpoint_events WHERE kind = 'replica_started'")
            assert len(started) == len({row["replica_id"] for row in started}) == 3
        # The second resigned; the one that the supervisor started anew takes over at once.
        eventually(lambda: leader_of(yard)[0] == 3, 30, "a third epoch")
        eventually(lambda: yard.call("GET", "/v1/endpoints/sim").status == 200, 30, "it answers")
        assert len(yard.engines("sim")) == 2
