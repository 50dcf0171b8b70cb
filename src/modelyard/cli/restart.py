"""``modelyard restart``: new processes for a running platform, with no request lost."""

import os
import signal
import time

import click

from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import data_dir_option, data_directory
from modelyard.cli.output import remark
from modelyard.cli.running import is_alive, read_running
from modelyard.clock import SystemClock


@click.command(
    "restart",
    epilog="\b\nExample:\n  modelyard restart\n  modelyard restart --data-dir ./yard",
    short_help="Restart the running platform without losing a request.",
)
@data_dir_option
@click.option("--timeout", "timeout_s", type=float, default=120.0, show_default=True, help="Seconds to wait.")
def command(*, data_dir: str | None, timeout_s: float) -> None:
    """Restart the platform that runs in the data directory, one process after another.

    New settings of the --config file, a new certificate and new code take
    effect; running streams go on in the old processes until they end. Host,
    port and the number of workers stay.
    """
    data = data_directory(data_dir)
    running = read_running(data)
    if running is None or not is_alive(running.pid):
        raise Failure(f"No platform runs in {data.root}. Start it with 'modelyard up'.", Exit.UNAVAILABLE)
    if running.restarts < 0:
        raise Failure("This platform is of a version that cannot restart so. Use 'modelyard down' and 'modelyard up'.")
    os.kill(running.pid, signal.SIGUSR1)
    clock = SystemClock()
    give_up_s = clock.monotonic_s() + timeout_s
    while True:
        now = read_running(data)
        if now is None or not is_alive(running.pid):
            raise Failure(f"The platform in {data.root} was stopped meanwhile.", Exit.UNAVAILABLE)
        if now.restarts > running.restarts:
            break
        if clock.monotonic_s() > give_up_s:
            raise Failure(f"Not restarted after {timeout_s:.0f} s. See the logs in {data.logs}.")
        time.sleep(0.05)
    if now.trouble:
        raise Failure(f"Not restarted: {now.trouble}")
    remark(f"Restarted the platform in {data.root}.")
