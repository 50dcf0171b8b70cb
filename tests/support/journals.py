"""Journals as gateway workers write them, without gateways."""

from collections.abc import Iterable
from pathlib import Path

from modelyard.clock import Clock
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.metering.journal import Journal

PRICE = Price(input=150_000_000, cached_input=75_000_000, output=600_000_000)


def named(prefix: str, count: int, first: int = 0) -> list[str]:
    return [f"{prefix}-{number:06}" for number in range(first, first + count)]


def intent_of(rid: str, at: float, *, tenant: str = "ten-a", model: str = "smol", version: str = "ver-1") -> Intent:
    return Intent(rid, at, tenant, "key-1", "ep-1", model, version, "/v1/chat/completions", False, 9, 99, PRICE)


def settle_of(
    rid: str,
    at: float,
    *,
    prompt: int = 10,
    completion: int = 20,
    status: UsageStatus = UsageStatus.SUCCESS,
    replica: str = "rep-1",
    attempts: int = 1,
    is_estimated: bool = False,
) -> Settle:
    return Settle(
        rid, at, prompt, 2, completion, status, 200, "", 5.0, 50.0, replica, attempts, is_estimated=is_estimated
    )


def write_run(
    root: Path,
    worker: str,
    requests: Iterable[str],
    clock: Clock,
    *,
    settled: bool = True,
    pairs: Iterable[tuple[Intent, Settle]] = (),
) -> Path:
    """Write one more segment, as a worker's run from start to end does; return it."""
    journal = Journal(root / worker, sync_s=0.01, clock=clock, soon=lambda flush: flush())
    for rid in requests:
        journal.begin(intent_of(rid, clock.unix_s()), lambda is_written: None)
        if settled:
            journal.settle(settle_of(rid, clock.unix_s()), lambda: None)
    for intent, settle in pairs:
        journal.begin(intent, lambda is_written: None)
        journal.settle(settle, lambda: None)
    journal.close()
    return sorted((root / worker).glob("*.journal"))[-1]
