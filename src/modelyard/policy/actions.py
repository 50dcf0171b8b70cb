"""What a reconcile pass can do: a closed union, matched exhaustively, each action with its reason.

An action says what is to be true; carrying it out twice, or half, or after a
crash, must do no harm (``control/executor.py`` says in which order it writes).
"""

import msgspec

from modelyard.domain.fleet import Replica


class StartReplica(msgspec.Struct, frozen=True):
    """Start this replica; the record is complete but for its address."""

    replica: Replica
    reason: str


class MarkLoading(msgspec.Struct, frozen=True):
    """Its process runs; wait for it to be ready."""

    replica_id: str
    reason: str


class MarkReady(msgspec.Struct, frozen=True):
    """Route to it (for the first time, or again after a drain that is not wanted any more)."""

    replica_id: str
    reason: str


class MarkFailed(msgspec.Struct, frozen=True):
    """It crashed. ``last_lines`` is the end of what it wrote."""

    replica_id: str
    reason: str
    last_lines: tuple[str, ...] = ()


class MarkEnded(msgspec.Struct, frozen=True):
    """It is gone and that is no crash."""

    replica_id: str
    reason: str


class DrainReplica(msgspec.Struct, frozen=True):
    """Send it nothing new. ``is_eviction``: another endpoint gets its place; ``is_move``: another replica took over."""

    replica_id: str
    reason: str
    is_eviction: bool = False
    is_move: bool = False


class StopReplica(msgspec.Struct, frozen=True):
    """End its process, gracefully."""

    replica_id: str
    reason: str


class KillReplica(msgspec.Struct, frozen=True):
    """It hangs: record the crash and end its process at once."""

    replica_id: str
    reason: str


class ForgetProcess(msgspec.Struct, frozen=True):
    """Drop the fleet's records of a process that ended."""

    replica_id: str
    reason: str


class ForgetReplica(msgspec.Struct, frozen=True):
    """Drop the record of a replica that ended."""

    replica_id: str
    reason: str


class ForgetEndpoint(msgspec.Struct, frozen=True):
    """Nothing is left of a deleted endpoint."""

    reason: str


class Wait(msgspec.Struct, frozen=True):
    """A place is wanted but cannot be started before ``until_s`` (None: until something happens)."""

    version_id: str
    ordinal: int
    until_s: float | None
    reason: str


Action = (
    StartReplica
    | MarkLoading
    | MarkReady
    | MarkFailed
    | MarkEnded
    | DrainReplica
    | StopReplica
    | KillReplica
    | ForgetProcess
    | ForgetReplica
    | ForgetEndpoint
    | Wait
)
