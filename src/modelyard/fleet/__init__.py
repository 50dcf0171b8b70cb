"""Fleets: where replicas run, one file a kind.

This is the contract. A fleet starts, stops and observes processes; it holds
no opinion on how many there should be. Every call may be repeated at any time
(level-triggered): ``start`` of a running replica and ``stop`` of a gone one
change nothing, and ``observe`` finds what an earlier controller started.
``tests/conformance/test_fleets.py`` holds every fleet to it.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from modelyard.domain.nodes import NodeSeen, Placement
from modelyard.engines import EngineCommand

__all__ = ["Address", "Fence", "Fleet", "FleetError", "NodeSeen", "Observed", "StartOrder"]


class StartOrder(msgspec.Struct, frozen=True):
    """A replica to run. The fleet picks ``host`` and ``port`` before the command is rendered (see ``reserve``)."""

    replica_id: str
    endpoint_id: str
    host: str
    port: int
    secret: str
    command: EngineCommand
    placement: Placement = Placement()
    """Where it was placed; empty: the fleet's own node."""


class Address(msgspec.Struct, frozen=True):
    """Where a replica is to listen, and the folder it may write to."""

    host: str
    port: int
    work_dir: str


class Observed(msgspec.Struct, frozen=True):
    """What the fleet sees of a replica. ``exit_reason`` is ours: ``exited with code 1``, ``killed by SIGKILL``."""

    replica_id: str
    endpoint_id: str
    host: str
    port: int
    secret: str
    is_running: bool
    started_at: float
    exit_reason: str = ""
    pid: int = 0
    is_out_of_memory: bool = False
    """The kernel killed it for want of memory."""
    last_lines: tuple[str, ...] = ()
    """The end of what an ended replica wrote, without colours and control characters."""


@dataclass(slots=True)
class Fence:
    """The epoch of the controller that gives the commands; a fleet obeys no lower one than the highest it saw.

    0 commands where no controller ever led (tests and tools).
    """

    epoch: int = 0


class Fleet(Protocol):
    """Runs replicas."""

    async def reserve(self, replica_id: str) -> Address:
        """Choose where a replica will listen and make its folder; repeatable."""
        ...

    async def start(self, order: StartOrder) -> None:
        """Start the replica, or do nothing when it runs.

        Raises:
            FleetError: the process cannot be started.
        """
        ...

    async def stop(self, replica_id: str, *, grace_s: float) -> None:
        """Ask the replica to end, kill what is left after ``grace_s``; returns when it is gone."""
        ...

    async def forget(self, replica_id: str) -> None:
        """Drop the records of a replica that is gone; its log is kept for ``modelyard logs``."""
        ...

    async def observe(self) -> list[Observed]:
        """Return every replica that was started and not forgotten, running or not."""
        ...

    async def nodes(self) -> list[NodeSeen]:
        """Return every node that replicas may be placed on, ready or not, in an order that stays the same."""
        ...

    def log_lines(self, replica_id: str, *, follow: bool) -> AsyncIterator[str]:
        """Yield the replica's log, oldest line first; with ``follow`` go on until closed."""
        ...


class FleetError(Exception):
    """A replica could not be started; the text says why, in our words."""
