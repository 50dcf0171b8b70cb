"""The rolling restart of ``modelyard up``: new processes, nothing cut, nothing refused.

Each gateway worker is relieved in turn. The next one starts beside it on the
very same listening socket, so a connection that waits there is taken by either
and lost by none; only when it serves is the older one told, which then takes no
new connections and goes on until its last answer. At no time is there no
worker. A worker that does not come up ends the restart, and the older ones
stay. Then the controller stops, and the next one starts; callers of
the management API wait at the gateway meanwhile. What works on batches comes
last: the next one goes on where it was.

The supervisor itself stays; it has no part in serving, and changes with the
next ``up``.
"""

import contextlib
import os
import signal
import string
from typing import TYPE_CHECKING

from modelyard.cli.output import remark

if TYPE_CHECKING:
    from modelyard.cli.supervise import Plane, Supervisor

READY_TIMEOUT_S = 60.0
CONTROL_STOP_S = 20.0
PAUSE_S = 0.1


def roll(supervisor: "Supervisor") -> str:
    """Replace all planes of a running platform; return why that failed, empty when it did not."""
    remark("Restarting: each new process serves before the old one leaves.")
    for old in [plane for plane in supervisor.planes if plane.worker is not None and not plane.is_relieved]:
        if trouble := _relieve(supervisor, old):
            return trouble
    if trouble := _renew_control(supervisor):
        return trouble
    _renew_batches(supervisor)
    leaving = sum(plane.is_relieved for plane in supervisor.planes)
    remark("Restarted." + (f" {leaving} old workers finish their requests." if leaving else ""))
    return ""


def _relieve(supervisor: "Supervisor", old: "Plane") -> str:
    assert old.worker is not None, "only gateways are relieved"
    new = supervisor.gateway(old.worker, _free_name(supervisor, old.worker))
    arguments, descriptors = new.arguments, new.descriptors
    ready, told = os.pipe()
    try:
        new.arguments = [*arguments, "--ready-fd", str(told)]
        new.descriptors = (*descriptors, told)
        new.is_relieved = True  # until it serves, it is not to be started again
        supervisor.planes.append(new)
        supervisor.spawn(new)
        os.close(told)
        trouble = _until_ready(supervisor, new, ready)
    finally:
        os.close(ready)
    # Should it be started again one day, it relieves nobody.
    new.arguments, new.descriptors = arguments, descriptors
    if trouble:
        _signal(new, signal.SIGKILL)
        return trouble
    new.is_relieved = False
    old.is_relieved = True
    old.due_s = None
    if old.process is None:
        supervisor.planes.remove(old)  # it had crashed, and was to be started again
    _signal(old, signal.SIGUSR1)
    return ""


def _until_ready(supervisor: "Supervisor", new: "Plane", ready: int) -> str:
    """Wait for the byte of a worker that serves; return why it did not come."""
    from modelyard.cli.supervise import last_line

    os.set_blocking(ready, False)
    give_up_s = supervisor.clock.monotonic_s() + READY_TIMEOUT_S
    while True:
        supervisor.sleep(PAUSE_S, also=ready)
        if supervisor.stops_asked:
            return "a stop was asked for"
        with contextlib.suppress(BlockingIOError):
            if os.read(ready, 1):
                return ""
        supervisor.revive()
        if new.process is None:
            reason = (last_line(new) or "it ended").removesuffix(".")
            return f"the new {new.name} process did not start: {reason}. The old ones go on."
        if supervisor.clock.monotonic_s() > give_up_s:
            return f"the new {new.name} process was not ready in {READY_TIMEOUT_S:.0f} s. The old ones go on."


def _renew_control(supervisor: "Supervisor") -> str:
    """Stop the controller and start the next one; wait until it answers."""
    from modelyard.cli.supervise import last_line

    (control,) = [plane for plane in supervisor.planes if plane.name == "control"]
    clock = supervisor.clock
    _stop(supervisor, control)
    give_up_s = clock.monotonic_s() + READY_TIMEOUT_S
    supervisor.revive()
    while not supervisor.stops_asked and supervisor.ask("/openapi.json")[0] != 200:
        if clock.monotonic_s() > give_up_s:
            return f"the controller did not come back: {last_line(control) or 'see its log'}"
        supervisor.revive()
        supervisor.sleep(PAUSE_S)
    return ""


def _renew_batches(supervisor: "Supervisor") -> None:
    """Stop what works on batches, one after the other, and start the next: what one leaves, it goes on with."""
    for plane in [plane for plane in supervisor.planes if plane.kind == "batch"]:
        _stop(supervisor, plane)
        supervisor.revive()


def _stop(supervisor: "Supervisor", stopping: "Plane") -> None:
    """Ask a plane to end, wait until it has, and have it started again."""
    clock = supervisor.clock
    _signal(stopping, signal.SIGTERM)
    kill_s = clock.monotonic_s() + CONTROL_STOP_S
    while stopping.process is not None and not supervisor.stops_asked:
        supervisor.sleep(PAUSE_S)
        if clock.monotonic_s() > kill_s:
            _signal(stopping, signal.SIGKILL)
        for plane, _ in supervisor.reap():
            plane.due_s = clock.monotonic_s()  # this one, and what crashed just now


def _signal(plane: "Plane", number: signal.Signals) -> None:
    if plane.process is not None:
        plane.process.send_signal(number)


def _free_name(supervisor: "Supervisor", worker: int) -> str:
    """Return a name that no living process has: its journal, log and place at the feed go by it."""
    taken = {plane.name for plane in supervisor.planes}
    names = (f"gateway-{worker}{letter}" for letter in ("", *string.ascii_lowercase[1:]))
    return next(name for name in names if name not in taken)
