"""Modelyard's router in the routing benchmark: the gateway's own dispatcher, fed in virtual time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.routing.engine import BATCH_MAX, BLOCK_TOKENS, Gauges, Request
from modelyard.domain.routing_table import ReplicaRoute
from modelyard.policy.dispatch import Dispatcher, DispatchRules, Verdict
from modelyard.policy.job import NEVER_S, Job
from modelyard.policy.replica_load import ReplicaLoad
from modelyard.policy.routing import EngineModel


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in the dispatcher's line."""

    request: Request
    job: Job
    failed_on: Sequence[ReplicaLoad] = ()

    def turned_away(self, verdict: Verdict) -> None:
        raise AssertionError(f"the line has places for all, and yet {verdict}")


class Modelyard:
    """Least predicted added seconds; of the engine it knows the size of a block, its speed it learns."""

    name = "modelyard: added seconds"

    def __init__(self, replicas: int, chance: random.Random, *, slots: int = BATCH_MAX) -> None:
        self.dispatcher: Dispatcher[Waiter] = Dispatcher(
            "ep_bench",
            rules=DispatchRules(places=1_000_000, bytes_max=1 << 50),
            deliver=self.deliver,
            chance=chance.random,
        )
        self.dispatcher.model = EngineModel(block_tokens=BLOCK_TOKENS)
        routes = [(ReplicaRoute(f"rep_{index}", "127.0.0.1", 1 + index, "", slots), slots) for index in range(replicas)]
        self.dispatcher.update([("ver_bench", 100, 0, routes)], now_s=0.0)
        self.jobs: dict[int, tuple[Job, ReplicaLoad]] = {}
        self.granted: list[tuple[Request, int]] = []

    def pick(self, request: Request, now_s: float) -> int | None:
        job = Job(
            "ten_bench",
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            output_max=request.output_tokens,
            prefix=request.blocks,
        )
        found = self.dispatcher.arrive(Waiter(request, job), now_s=now_s, deadline_s=NEVER_S)
        if isinstance(found, ReplicaLoad):
            return self.note(request, job, found)
        assert found is Verdict.WAIT, f"a request was refused: {found}"
        return None

    def note(self, request: Request, job: Job, replica: ReplicaLoad) -> int:
        self.jobs[request.number] = (job, replica)
        return replica.route.port - 1

    def deliver(self, waiter: Waiter, replica: ReplicaLoad) -> bool:
        self.granted.append((waiter.request, self.note(waiter.request, waiter.job, replica)))
        return True

    def begun(self, request: Request, index: int, now_s: float) -> None:
        job, replica = self.jobs[request.number]
        self.dispatcher.began(replica, job, now_s=now_s)

    def done(self, request: Request, index: int, now_s: float) -> list[tuple[Request, int]]:
        job, replica = self.jobs.pop(request.number)
        self.dispatcher.finish(
            replica, job, now_s=now_s, prompt_tokens=request.prompt_tokens, output_tokens=request.output_tokens
        )
        granted, self.granted = self.granted, []
        return granted

    def polled(self, gauges: list[Gauges], now_s: float) -> None:
        """All load comes from here, so the gauges have nothing to add to the dispatcher's own counts."""
