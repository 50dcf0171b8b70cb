"""The worker's own measurements, and what it may open."""

import asyncio
import resource
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import eventually_async

from modelyard.clock import SystemClock
from modelyard.config import GatewayConfig
from modelyard.gateway.clockwork import connections_limit, raise_file_limit, sweep
from modelyard.policy.overload import Level, OverloadState


class Worker:
    """A gateway with nothing to do; ``looks`` counts how often each of its parts was looked at."""

    def __init__(self, connections: int) -> None:
        self.looks = {"requests": 0, "control": 0, "pool": 0, "connections": 0}
        self.settings = GatewayConfig(loading_comment_s=0.02)
        self.clock = SystemClock()
        self.overload = OverloadState()
        self.control = SimpleNamespace(check_time=lambda _: self.look("control"))
        self.pool = SimpleNamespace(close_old=lambda _: self.look("pool"))
        self.connections = {self.connection() for _ in range(connections)}

    def connection(self) -> Any:
        class Connection:
            check_time = staticmethod(lambda _: self.look("connections"))

        return Connection()

    def check_time(self, now_s: float) -> None:
        self.look("requests")

    def look(self, what: str) -> None:
        self.looks[what] += 1


@pytest.mark.parametrize(("connections", "level"), [(1, Level.NORMAL), (8, Level.SHED_BATCH), (10, Level.REFUSE)])
async def test_a_sweep_looks_at_everything_and_judges_the_worker(connections: int, level: Level) -> None:
    worker: Any = Worker(connections)
    task = asyncio.create_task(sweep(worker, connections_max=10))
    await eventually_async(lambda: worker.looks["connections"] > connections, 20, "looked twice")
    await eventually_async(lambda: worker.overload.level == level, 20, "judged")
    assert all(worker.looks.values())
    assert worker.looks["requests"] >= worker.looks["connections"] / connections
    worker.connections.clear()
    await eventually_async(lambda: worker.overload.level == Level.NORMAL, 20, "calm again")
    task.cancel()


def test_the_file_limit_is_raised_as_far_as_it_goes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        may_open = raise_file_limit()
        assert may_open == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert may_open > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_clients_may_have_two_fifths_of_the_files_unless_it_is_said_otherwise() -> None:
    assert connections_limit(GatewayConfig(), 20_000) == 8000
    assert connections_limit(GatewayConfig(), 1) == 1
    assert connections_limit(GatewayConfig(connections_max=7), 20_000) == 7
