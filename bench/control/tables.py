"""What a routing table costs: to build, encode, decode and apply, whole and after one change."""

import asyncio
import gc
import time
from collections.abc import Callable

import msgspec

from modelyard.config import DataDirectory, GatewayConfig
from modelyard.control.table import TablePublisher
from modelyard.domain.routing_table import RoutingTable
from modelyard.engines.simulated import SimulatedEngine
from modelyard.gateway.catalog import Catalog
from modelyard.stores.sql import SqlControlStore, open_database

REPEATS = 7


class _Nobody:
    """A feed that nobody follows."""

    async def publish(self, table: RoutingTable) -> None:
        """Take it."""


def measure(data: DataDirectory) -> dict[str, float]:
    """Return the figures for what is stored under ``data``."""
    return asyncio.run(_measure(data))


async def _measure(data: DataDirectory) -> dict[str, float]:
    store = SqlControlStore(open_database(f"sqlite:///{data.database}", timeout_s=30))
    try:
        publisher = TablePublisher(store=store, engines={"simulated": SimulatedEngine()}, prices={}, feed=_Nobody())  # type: ignore[arg-type]
        build_s = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            await publisher.refresh()
            build_s.append(time.perf_counter() - began)
        table = publisher.table
    finally:
        await store.close()
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RoutingTable)
    frame = encoder.encode(table)
    catalog: Catalog = Catalog(  # type: ignore[type-arg]
        worker=0, settings=GatewayConfig(), deliver=lambda waiter, load: True, chance=lambda: 0.5
    )
    revision = iter(range(10**6, 10**7))

    def take(new: RoutingTable) -> Callable[[], None]:
        return lambda: catalog.take(msgspec.structs.replace(new, revision=next(revision)), now_s=1.0)

    decoded = [decoder.decode(frame) for _ in range(2)]
    take(decoded[0])()
    return {
        "table, KB": len(frame) / 1024,
        "table built first, ms": 1000 * build_s[0],
        "table built again, ms": 1000 * sorted(build_s[1:])[len(build_s) // 2 - 1],
        "table encoded, ms": _ms(lambda: encoder.encode(table)),
        "table decoded, ms": _ms(lambda: decoder.decode(frame)),
        "table applied, ms": _ms(take(decoded[0]), take(decoded[1])),
        "table applied after one change, ms": _ms(take(_changed(decoded[0])), take(decoded[0])),
    }


def _changed(table: RoutingTable) -> RoutingTable:
    """Return the table with one endpoint that differs, as a gateway has it after a change."""
    first, *rest = table.endpoints
    return msgspec.structs.replace(table, endpoints=(msgspec.structs.replace(first, failure="x"), *rest))


def _ms(*works: Callable[[], object]) -> float:
    """Return the median time of one of ``works``, which take turns."""
    seconds = []
    gc.collect()
    for _ in range(REPEATS):
        for work in works:
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
    return 1000 * sorted(seconds)[len(seconds) // 2]
