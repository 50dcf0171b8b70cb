"""``modelyard down``: stop the platform of a data directory and wait until all of it is gone."""

import os
import signal
import time

import click

from modelyard import compose
from modelyard.cli.exits import Failure
from modelyard.cli.http import data_dir_option, data_directory
from modelyard.cli.output import remark
from modelyard.cli.running import is_alive, is_locked, read_running
from modelyard.clock import SystemClock


@click.command(
    "down",
    epilog="\b\nExample:\n  modelyard down\n  modelyard down --data-dir ./yard --timeout 10",
    short_help="Stop the platform that runs in the data directory.",
)
@data_dir_option
@click.option("--timeout", "timeout_s", type=float, default=120.0, show_default=True, help="Seconds to wait.")
def command(*, data_dir: str | None, timeout_s: float) -> None:
    """Stop the platform that runs in the data directory; running requests are finished first."""
    data = data_directory(data_dir)
    running = read_running(data)
    if not is_locked(data):
        if running is not None:
            # Its supervisor was killed: what it could not stop is stopped now.
            compose.stop_engines(data, grace_s=10.0)
            data.running.unlink(missing_ok=True)
        remark(f"Nothing runs in {data.root}.")
        return
    if running is None:
        raise Failure(f"A platform is starting in {data.root}. Try again in a second.")
    is_supervised = is_alive(running.pid)
    for pid in [running.pid] if is_supervised else running.planes:
        if is_alive(pid):
            os.kill(pid, signal.SIGTERM)
    clock = SystemClock()
    give_up_s = clock.monotonic_s() + timeout_s
    while is_locked(data):
        if clock.monotonic_s() > give_up_s:
            raise Failure(f"Process {running.pid} still runs after {timeout_s:.0f} s. See the logs in {data.logs}.")
        time.sleep(0.05)
    if not is_supervised:
        compose.stop_engines(data, grace_s=10.0)
        data.running.unlink(missing_ok=True)
    remark(f"Stopped the platform in {data.root}.")
