"""The worker's clockwork: every deadline is looked at a few times a second, and so is the worker itself.

One pass over what is open is far cheaper than a timer a request. How late the
pass wakes is the best measure of whether the process keeps up; with open
connections and memory it makes the ``OverloadState`` that new requests are
judged by (``policy/overload.py``).
"""

import asyncio
import logging
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from modelyard.config import GatewayConfig
from modelyard.policy.overload import Seen, decide

if TYPE_CHECKING:
    from modelyard.gateway.flow import Gateway

PAUSE_S_MAX = 0.25
CONNECTIONS_PAUSE_S = 1.0
"""Pause between two looks at all connections; their limits are seconds, and there may be tens of thousands."""
FILES_MAX = 1_048_576
"""Files are asked for up to this; some systems name no limit at all."""
CONNECTIONS_SHARE = 0.4
"""Share of the open files that clients may have: most requests need a second one for their engine."""

_PAGE_BYTES = resource.getpagesize()
_log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Let this process open as many files as it may; return how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            _log.warning("the limit of open files stays at %d: %s", soft, error)
            return soft
    return wanted


def connections_limit(settings: GatewayConfig, files: int) -> int:
    """Return how many connections of clients are taken by a worker that may open so many files."""
    return settings.connections_max or max(1, int(files * CONNECTIONS_SHARE))


async def sweep(gateway: "Gateway", *, connections_max: int) -> None:
    """Look at every deadline, and at the worker, until cancelled."""
    clock = gateway.clock
    pause_s = _pause_s(gateway.settings)
    memory = _Memory()
    connections_due_s = 0.0
    while True:
        due_s = clock.monotonic_s() + pause_s
        await asyncio.sleep(pause_s)
        now_s = clock.monotonic_s()
        seen = Seen(
            lag_s=max(0.0, now_s - due_s),
            connections=len(gateway.connections),
            connections_max=connections_max,
            memory_bytes=memory.used_bytes(),
            memory_bytes_max=memory.limit_bytes,
        )
        _judge(gateway, seen, now_s)
        gateway.check_time(now_s)
        gateway.control.check_time(now_s)
        gateway.pool.close_old(now_s)
        if now_s >= connections_due_s:
            connections_due_s = now_s + min(CONNECTIONS_PAUSE_S, pause_s * 4)
            for connection in list(gateway.connections):
                connection.check_time(now_s)


def _pause_s(settings: GatewayConfig) -> float:
    shortest_s = min(
        settings.first_token_timeout_s, settings.token_timeout_s, settings.total_timeout_s, settings.loading_comment_s,
        settings.queue_wait_s, settings.load_wait_s, settings.write_stall_timeout_s,
    )  # fmt: skip
    return min(PAUSE_S_MAX, shortest_s / 4)


def _judge(gateway: "Gateway", seen: Seen, now_s: float) -> None:
    before = gateway.overload
    gateway.overload = after = decide(seen, before, now_s=now_s)
    if after.level != before.level:
        _log.warning("overload level %d, was %d: %s", after.level, before.level, after.reason or "calm again")


class _Memory:
    """What this process uses of the memory there is. Linux only; elsewhere the limit is 0, unknown."""

    def __init__(self) -> None:
        self.limit_bytes = _memory_limit_bytes()

    def used_bytes(self) -> int:
        """Return the resident set."""
        if not self.limit_bytes:
            return 0
        with open("/proc/self/statm", "rb") as pages:  # noqa: PTH123 - a kernel file, four times a second
            return int(pages.read().split()[1]) * _PAGE_BYTES


def _memory_limit_bytes() -> int:
    """Return the memory of the machine, or less where the kernel limits this process to less; 0 where nothing tells."""
    try:
        limit = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
        own = Path("/proc/self/cgroup").read_text("ascii").rpartition("::")[2].strip().lstrip("/")
        Path("/proc/self/statm").read_bytes()
    except (OSError, ValueError):
        return 0
    for file in (Path("/sys/fs/cgroup", own, "memory.max"), Path("/sys/fs/cgroup/memory.max")):
        try:
            limit = min(limit, int(file.read_text("ascii")))
        except (OSError, ValueError):
            continue  # no such group, or "max"
    return limit
