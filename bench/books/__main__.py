"""Measure the books: ``python -m bench.books [--requests 200000] [--json]``.

A journal of generated requests, of which a third ended because the client left,
goes to Kafka (librdkafka's own mock cluster on this machine) and into a ledger
on disk. Then both are compared, as ``modelyard reconcile`` does it: the sum
must be the same to the token. The peer of the first two figures is the ledger,
in the same run: a sink that drains slower than the ledger would never catch up.
"""

import argparse
import asyncio
import json
import random
import resource
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path

from tests.support.journals import intent_of, settle_of, write_run
from tests.support.kafka import mock_kafka

from bench import tools
from modelyard.clock import ManualClock
from modelyard.config.books import KafkaConfig
from modelyard.domain.usage import Intent, Settle, UsageStatus
from modelyard.metering.delivery import Delivery
from modelyard.metering.events import UsageEvents
from modelyard.metering.reconcile.journals import journals_and_ledger, rows_and_roll_ups
from modelyard.stores.kafka import KafkaSink
from modelyard.stores.sql import SqlBookStore, SqlUsageStore, open_database

START_S = 1.7e9


def requests_of(count: int, chance: random.Random) -> Iterator[tuple[Intent, Settle]]:
    """Yield requests over a day, and how they ended."""
    for number in range(count):
        rid, at = f"req_{number:024x}", START_S + 10 + number * 80_000 / count
        is_cut = chance.random() < 1 / 3
        settle = settle_of(
            rid,
            at + 2,
            prompt=chance.randrange(4000),
            completion=chance.randrange(900),
            status=UsageStatus.CLIENT_CLOSED if is_cut else UsageStatus.SUCCESS,
            is_estimated=is_cut,
        )
        yield intent_of(rid, at, tenant=f"ten-{number % 50}"), settle


async def timed(work: Awaitable[object]) -> float:
    """Return how long something took."""
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def measure(count: int, folder: Path) -> dict[str, float]:
    """Return requests a second of each way, and what differs."""
    root, clock = folder / "journal", ManualClock(start_s=START_S)
    write_run(root, "gateway-0", [], clock, pairs=requests_of(count, random.Random(1)))
    size = sum(file.stat().st_size for file in root.rglob("*.journal"))
    database = open_database(f"sqlite:///{folder / 'control.sqlite'}", timeout_s=60.0)
    books, usage = SqlBookStore(database), SqlUsageStore(database)
    delivery_s = await timed(Delivery(root, usage, 1.0).drain())
    with mock_kafka() as kafka:
        kafka.add_topic("usage", 6)
        settings = KafkaConfig(brokers=kafka.brokers, topic="usage")
        events = UsageEvents(
            root=root,
            books=books,
            usage=usage,
            open_sink=lambda: KafkaSink(settings),
            clock=clock,
            interval_s=1.0,
            spool_bytes_max=1 << 40,
        )
        kafka_s = await timed(events.drain())
    began = time.perf_counter()
    check = await journals_and_ledger(root, books)
    rolled = await rows_and_roll_ups(books, since=int(START_S), until=int(START_S) + 90_000)
    reconcile_s = time.perf_counter() - began
    await database.close()
    assert check.compared == count
    return {
        "ledger_per_s": count / delivery_s,
        "kafka_per_s": count / kafka_s,
        "kafka_to_ledger": delivery_s / kafka_s,
        "reconcile_per_s": count / reconcile_s,
        "journal_bytes_per_request": size / count,
        "differences": check.found + rolled.found,
        "differing_tokens": check.tokens + rolled.tokens,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    tools.BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="books-", dir=tools.BUILD) as folder:
        found = asyncio.run(measure(asked.requests, Path(folder)))
    if asked.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:28} {value:12,.2f}")


if __name__ == "__main__":
    main()
