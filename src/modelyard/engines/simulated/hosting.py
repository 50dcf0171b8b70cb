"""What is said between the fleet of simulated replicas and the process that hosts them (``host.py``).

One connection to the host's unix socket, one call: a line of JSON each way.
"""

from pathlib import Path
from typing import Literal

import msgspec

ENGINE_MODULE = "modelyard.engines.simulated"
HOST_MODULE = "modelyard.engines.simulated.host"
STOP_WAIT_S = 0.25
"""Longest that one ``stop`` waits for the end."""


class HostCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call. ``argv`` and ``secret`` are for ``start``: the engine's own command line.

    ``stop`` asks a replica to end as SIGTERM does and waits a moment, ``kill`` ends it; ``list`` only looks.
    """

    op: Literal["start", "stop", "kill", "forget", "list"]
    replica_id: str = ""
    argv: tuple[str, ...] = ()
    secret: str = ""
    log: str = ""


class HostAnswer(msgspec.Struct, frozen=True):
    """``replicas`` has the exit reason of each (asked for), empty while it runs; ``error``: it cannot be started."""

    pid: int
    replicas: dict[str, str] = {}
    error: str = ""


def socket_of(root: Path) -> Path:
    """Return the host's socket, beside the replicas' folders."""
    return root / ".host.sock"


def identity_of(root: Path) -> Path:
    """Return the file that says which process the host is."""
    return root / ".host.json"


class HostIdentity(msgspec.Struct, frozen=True):
    """``.host.json``."""

    pid: int
    start_time: int
    boot_id: str


def read_identity(root: Path) -> HostIdentity | None:
    """Return who the host is or was, None where there never was one."""
    try:
        return msgspec.json.decode(identity_of(root).read_bytes(), type=HostIdentity)
    except (OSError, msgspec.MsgspecError):
        return None
