"""What guests cost a gateway: ``python -m bench.seats [--guests 500] [--replicas 4] [--rounds 5] [--json]``.

A host with ``--replicas`` replicas and ``--guests`` guest endpoints with a seat on each of them. Microseconds of CPU,
the best of the rounds, beside the same endpoint without guests; one request is ``arrive``, ``began``, ``succeeded`` and
``finish``. Where lines wait, as many endpoints have a request in line as it says, and each slot that falls free goes to
one of them.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from modelyard.config import GatewayConfig
from modelyard.domain.endpoints import Progress, Stage
from modelyard.domain.routing_table import EndpointRoute, ReleaseRoute, ReplicaRoute, RoutingTable
from modelyard.domain.usage import Price
from modelyard.gateway.catalog import Catalog
from modelyard.policy.dispatch import Dispatcher, ReplicaLoad, Verdict
from modelyard.policy.job import Job

SLOTS = 8
REQUESTS = 2000
NEVER_S = 1e9


class Waiter:
    """A request of an endpoint."""

    failed_on = ()

    def __init__(self, dispatcher: "Dispatcher[Waiter]") -> None:
        self.dispatcher = dispatcher
        self.job = Job(dispatcher.endpoint_id, prompt_tokens=100, output_tokens=50, output_max=50)

    def turned_away(self, verdict: Verdict) -> None:
        """Nobody is: the lines are long enough."""


class Yard:
    """A gateway's catalog, and what was delivered from its lines."""

    def __init__(self, guests: int, replicas: int) -> None:
        self.delivered: list[tuple[Waiter, ReplicaLoad]] = []
        self.catalog: Catalog[Waiter] = Catalog(
            worker=0, settings=GatewayConfig(), deliver=self._deliver, chance=lambda: 0.5
        )
        self.tables = [table(guests, replicas, revision) for revision in (1, 2)]
        self.take_s = _cpu_s(lambda: self.catalog.take(self.tables[0], now_s=0.0))
        self.again_s = _cpu_s(lambda: self.catalog.take(self.tables[1], now_s=0.0))
        self.host, *self.guests = [state.dispatcher for state in self.catalog.endpoints]

    def _deliver(self, waiter: Waiter, replica: ReplicaLoad) -> bool:
        self.delivered.append((waiter, replica))
        return True

    def start(self, dispatcher: "Dispatcher[Waiter]") -> tuple[Waiter, ReplicaLoad] | None:
        """Send a request; None: it waits."""
        waiter = Waiter(dispatcher)
        got = dispatcher.arrive(waiter, now_s=0.0, deadline_s=NEVER_S)
        return (waiter, got) if isinstance(got, ReplicaLoad) else None

    def finish(self, waiter: Waiter, replica: ReplicaLoad) -> None:
        """Have it answered."""
        waiter.dispatcher.began(replica, waiter.job, now_s=0.0)
        waiter.dispatcher.succeeded(replica)
        waiter.dispatcher.finish(replica, waiter.job, now_s=0.0, prompt_tokens=100, output_tokens=50)

    def alone_us(self, dispatcher: "Dispatcher[Waiter]") -> float:
        """Return the cost of a request that nobody waits beside."""

        def work() -> None:
            for _ in range(REQUESTS):
                started = self.start(dispatcher)
                assert started is not None, "a slot was lost"
                self.finish(*started)

        return _cpu_s(work) / REQUESTS * 1e6

    def crowded_us(self, lines: int) -> float:
        """Return the cost of a request that waited, where ``lines`` endpoints always have one in line."""
        running = [started for _ in range(1000) if (started := self.start(self.host)) is not None]
        for waiter in list(self.host.line):
            self.host.leave(waiter, now_s=0.0)
        for guest in self.guests[:lines]:
            assert self.start(guest) is None, "it should wait"

        def work() -> None:
            for _ in range(REQUESTS):
                self.finish(*running.pop(0))
                ((waiter, replica),) = self.delivered
                self.delivered.clear()
                running.append((waiter, replica))
                assert self.start(waiter.dispatcher) is None, "it should wait"

        cost_us = _cpu_s(work) / REQUESTS * 1e6
        for guest in self.guests:
            for waiter in list(guest.line):
                guest.leave(waiter, now_s=0.0)
        for one in running:
            self.finish(*one)
        return cost_us


def table(guests: int, replicas: int, revision: int) -> RoutingTable:
    """Return a routing table; of two revisions all endpoints are other objects of the same content."""
    own = tuple(ReplicaRoute(f"rep-{n}", "h", n + 1, "s", SLOTS) for n in range(replicas))
    endpoints = [_endpoint("host", own)]
    for guest in range(guests):
        name = f"guest-{guest}"
        seats = tuple(
            ReplicaRoute(f"rep-{n}/{name}@1", "h", n + 1, "s", SLOTS, model_name=f"{name}@1", seat_of=f"rep-{n}")
            for n in range(replicas)
        )
        endpoints.append(_endpoint(name, seats))
    return RoutingTable("e", revision, (), (), tuple(endpoints))


def _endpoint(name: str, replicas: tuple[ReplicaRoute, ...]) -> EndpointRoute:
    releases = (ReleaseRoute("v", 100, replicas),)
    return EndpointRoute(
        id=name,
        tenant_id="t",
        name=name,
        is_shared=False,
        created_at=0,
        releases=releases,
        routes=frozenset({"/v1/chat/completions"}),
        engine_extras=frozenset(),
        context_length=0,
        price=Price(1, 1, 1),
        progress=Progress(Stage.READY),
    )


def _cpu_s(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measured(guests: int, replicas: int) -> dict[str, float]:
    """Return one round: what was done, and its cost in microseconds."""
    without, yard = Yard(0, replicas), Yard(guests, replicas)
    found = {
        f"table with {guests} guests, first": yard.take_s * 1e6,
        f"table with {guests} guests, again": yard.again_s * 1e6,
        "request, no guests": without.alone_us(without.host),
        "request to the host": yard.alone_us(yard.host),
        "request to a guest": yard.alone_us(yard.guests[0]),
    }
    for lines in (1, 5, 50, guests):
        found[f"request, {lines} of {guests} lines wait"] = yard.crowded_us(lines)
    return found


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guests", type=int, default=500)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", dest="is_json")
    given: Any = parser.parse_args()
    rounds = [measured(given.guests, given.replicas) for _ in range(given.rounds)]
    best = {name: min(one[name] for one in rounds) for name in rounds[0]}
    if given.is_json:
        print(json.dumps(best))
        return
    base = best["request, no guests"]
    print(f"{'':40}{'µs':>10}{'of no guests':>14}")
    for name, cost in best.items():
        print(f"{name:40}{cost:10,.1f}{f'{cost / base:.2f}' if name.startswith('request') else '':>14}")


if __name__ == "__main__":
    main()
