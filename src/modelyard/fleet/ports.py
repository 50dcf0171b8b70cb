"""Ports for replicas of this machine."""

import contextlib
import random
import socket
from collections.abc import Collection
from pathlib import Path

from modelyard.fleet import FleetError

HOST = "127.0.0.1"
_PORT_FIRST = 20_000
_PORT_TRIES = 200


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

    The engine binds it a moment later; a port of that range could go to any connection of the machine in between.
    """
    chance = random.SystemRandom()
    for _ in range(_PORT_TRIES):
        port = chance.randrange(_PORT_FIRST, _outgoing_first())
        if port not in taken and is_free(port):
            return port
    raise FleetError(f"No free port between {_PORT_FIRST} and {_outgoing_first()} for a replica.")


def _outgoing_first() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 0
    return first if first >= _PORT_FIRST + 1000 else 65_536
