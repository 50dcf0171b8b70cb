"""Ports for replicas of this machine."""

import contextlib
import errno
import os
import random
import socket
import sys
from collections import deque
from collections.abc import Collection
from pathlib import Path

from modelyard.fleet import FleetError

HOST = "127.0.0.1"
_PORT_FIRST = 20_000
_PORT_TRIES = 200
_CLAIMS_MAX = 32
"""Ports that this process keeps others from: more than there are engines between being given one and listening."""

_claims: deque[int] = deque()
"""Descriptors of the claims, the oldest first."""


def is_free(port: int) -> bool:
    """Say whether nobody listens on ``port``."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier process in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return True
    return False


def free_port(taken: Collection[int]) -> int:
    """Return a port that nobody listens on, from below the range that the kernel gives to outgoing connections.

    The engine binds it a moment later; a port of that range could go to any connection of the machine in between. Of
    two platforms on one machine none is given what the other one was given last.
    """
    chance = random.SystemRandom()
    for _ in range(_PORT_TRIES):
        port = chance.randrange(_PORT_FIRST, _outgoing_first())
        if port not in taken and is_free(port) and _claim(port):
            return port
    raise FleetError(f"No free port between {_PORT_FIRST} and {_outgoing_first()} for a replica.")


def _claim(port: int) -> bool:
    """Claim a port by a name that only one process of a network namespace can have, and that ends with it."""
    if sys.platform != "linux":  # there are no such names
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        try:
            claim.bind(f"\0modelyard-port-{port}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        _claims.append(claim.detach())
    while len(_claims) > _CLAIMS_MAX:
        os.close(_claims.popleft())
    return True


def _outgoing_first() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 0
    return first if first >= _PORT_FIRST + 1000 else 65_536
