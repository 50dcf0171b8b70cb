"""The terms on which a dispatcher deals with requests: who stands in line, what it is told, and the bounds."""

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec

from modelyard.policy.breaker import Tolerance
from modelyard.policy.job import Job
from modelyard.policy.replica_load import ReplicaLoad


class Verdict(enum.Enum):
    """What ``arrive`` decided when there is no replica to give."""

    WAIT = enum.auto()
    FULL = enum.auto()
    NEVER = enum.auto()
    """No replica could hold it even if it were idle."""


class Waiter(Protocol):
    """Whoever stands in line."""

    @property
    def job(self) -> Job:
        """What the request needs."""
        ...

    @property
    def failed_on(self) -> Sequence[ReplicaLoad]:
        """The replicas that it should not be sent to again."""
        ...

    def turned_away(self, verdict: Verdict) -> None:
        """Take the news that the place in line is lost: to somebody more urgent (``FULL``), or for good."""
        ...


class DispatchRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a dispatcher; ``gateway.*`` of the configuration has the reasons."""

    places: int = 256
    bytes_max: int = 256 * 1024 * 1024
    kv_share_max: float = 0.97
    retry_share_max: float = 0.1
    kept_share_max: float = 1 / 16
    tolerance: Tolerance = Tolerance()
