"""F19: Kafka is away for an hour, and the sender is killed meanwhile: each event is there once, the disk is bounded."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from tests.conformance.backends import open_fresh
from tests.support.journals import intent_of, named, settle_of, write_run
from tests.support.kafka import MockKafka, mock_kafka
from tests.support.waiting import eventually_async

from modelyard.clock import ManualClock
from modelyard.config.books import KafkaConfig
from modelyard.domain.books import Gap
from modelyard.metering.booking import booked
from modelyard.metering.delivery import Delivery
from modelyard.metering.events import UsageEvents
from modelyard.metering.journal import segments
from modelyard.metering.settlements import Follower
from modelyard.stores import SinkError
from modelyard.stores import kafka as kafka_store
from modelyard.stores.kafka import KafkaSink
from modelyard.stores.sql import SqlBookStore, SqlUsageStore, open_database

TOPIC = "modelyard.usage"
WITHIN_S = 30.0
HOUR_S = 3600.0
UNKNOWN_TOPIC = 3
"""How a broker says that it has no such topic."""

SENDER = """
import asyncio, sys
from tests.faults.test_F19_kafka_away import Sender
async def main():
    sender = Sender.on(sys.argv[1], sys.argv[2])
    running = asyncio.create_task(sender.events.run())
    while sender.events.status().behind_since is None:
        await asyncio.sleep(0.01)
    print("behind", flush=True)
    await running
asyncio.run(main())
"""


@dataclass
class Sender:
    """A journal, a ledger and the projection to Kafka, as a controller has them."""

    events: UsageEvents
    delivery: Delivery
    books: SqlBookStore
    root: Path
    clock: ManualClock
    database: object = field(repr=False, default=None)

    @classmethod
    def on(
        cls, folder: str, brokers: str, *, spool_bytes_max: int = 1 << 30, options: dict[str, str] | None = None
    ) -> "Sender":
        root = Path(folder) / "journal"
        database = open_database(f"sqlite:///{Path(folder) / 'control.sqlite'}", timeout_s=5.0)
        books, usage, clock = SqlBookStore(database), SqlUsageStore(database), ManualClock(start_s=1.7e9)
        settings = KafkaConfig(brokers=tuple(brokers.split(",")), topic=TOPIC, options=options or {})
        events = UsageEvents(
            root=root,
            books=books,
            usage=usage,
            open_sink=lambda: KafkaSink(settings),
            clock=clock,
            interval_s=0.02,
            spool_bytes_max=spool_bytes_max,
        )
        return cls(events, Delivery(root, usage, 0.02, events.needed), books, root, clock, database)

    def write(self, worker: str, requests: list[str]) -> Path:
        self.clock.advance(1.0)
        return write_run(self.root, worker, requests, self.clock)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.events.run()), asyncio.create_task(self.delivery.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def killed_while_behind(folder: Path, brokers: str) -> None:
    """Run a sender until it waits for acknowledgements, and kill it then."""
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, str(folder), brokers],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    ) as sender:
        try:
            assert sender.stdout is not None
            assert sender.stdout.readline() == "behind\n"
        finally:
            os.kill(sender.pid, signal.SIGKILL)


@pytest.fixture
def kafka() -> Iterator[MockKafka]:
    with mock_kafka() as cluster:
        cluster.add_topic(TOPIC, 3)
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    asyncio.run(open_fresh("sqlite", tmp_path).close())
    return tmp_path


async def test_an_hour_without_kafka_and_a_killed_sender_cost_no_event(kafka: MockKafka, folder: Path) -> None:
    """The sender is another process; it is killed with kill -9 while the broker is down, with events under way."""
    brokers = ",".join(kafka.brokers)
    here = Sender.on(str(folder), brokers)
    before, during, after = named("before", 40), named("during", 400), named("after", 40)
    here.write("gateway-0", before)
    async with here.running():
        await eventually_async(lambda: here.events.status().sent >= len(before), WITHIN_S, "the first are sent")
    kafka.down()
    here.write("gateway-0", during[:200])
    here.write("gateway-1", during[200:])
    await asyncio.to_thread(killed_while_behind, folder, brokers)
    here.clock.advance(HOUR_S)
    again = Sender.on(str(folder), brokers)
    async with again.running():
        await eventually_async(lambda: again.events.status().behind_since is not None, WITHIN_S, "it is behind")
        assert again.events.status().waiting_bytes
        kafka.up()
        again.write("gateway-1", after)
        everything = {*before, *during, *after}
        await eventually_async(lambda: again.events.status().sent >= len(during) + len(after), WITHIN_S, "all are sent")
    found = await asyncio.to_thread(kafka.events, TOPIC, at_least=len(everything))
    by_id = dict(found)
    assert by_id.keys() == everything
    assert all(value["id"] == key and value["type"] == "usage.request" for key, value in by_id.items())
    # Whoever sends again says the same, so one of each id is all there is to keep.
    assert len({(key, str(value)) for key, value in found}) == len(everything)
    rows = {one.request_id: one for one in await again.books.rows_between((0.0, ""), 2e9, limit=1000)}
    assert rows.keys() == everything, "the ledger went on meanwhile"
    assert {
        key: (value["data"]["completion_tokens"], value["data"]["cost_nanousd"]) for key, value in by_id.items()
    } == {rid: (row.completion_tokens, row.cost_nanousd) for rid, row in rows.items()}


async def test_one_process_sends_nothing_twice_through_an_outage(kafka: MockKafka, folder: Path) -> None:
    here = Sender.on(str(folder), ",".join(kafka.brokers))
    wanted = named("a", 300)
    async with here.running():
        here.write("gateway-0", wanted[:100])
        await eventually_async(lambda: here.events.status().sent >= 100, WITHIN_S, "the first are sent")
        kafka.down()
        here.write("gateway-0", wanted[100:200])
        await eventually_async(lambda: here.events.status().behind_since is not None, WITHIN_S, "it is behind")
        here.write("gateway-0", wanted[200:])
        assert here.events.status().alarm == ""
        here.clock.advance(HOUR_S)
        assert "behind for 60 minutes" in here.events.status().alarm
        kafka.up()
        await eventually_async(lambda: here.events.status().sent >= 300, WITHIN_S, "the others are sent")
        await eventually_async(lambda: here.events.status().behind_since is None, WITHIN_S, "it is behind no more")
    found = await asyncio.to_thread(kafka.events, TOPIC, at_least=300)
    assert Counter(key for key, _ in found) == Counter(wanted)


async def test_a_line_of_a_batch_that_was_run_twice_is_told_with_one_charge(kafka: MockKafka, folder: Path) -> None:
    here = Sender.on(str(folder), ",".join(kafka.brokers))
    runs = [
        (msgspec.structs.replace(intent_of(rid, 1.7e9), batch_line="batch_1/7"), settle_of(rid, 1.7e9))
        for rid in ("first", "again")
    ]
    here.clock.advance(1.0)
    write_run(here.root, "gateway-0", [], here.clock, pairs=runs)
    await here.events.drain()
    assert not here.events.status().sent, "which run is charged is the ledger's to say, and it has not read them"
    async with here.running():
        await eventually_async(lambda: here.events.status().sent >= len(runs), WITHIN_S, "both are sent")
    told = {key: value["data"] for key, value in await asyncio.to_thread(kafka.events, TOPIC, at_least=len(runs))}
    rows = {one.request_id: one for one in await here.books.rows_between((0.0, ""), 2e9, limit=9)}
    assert told == {rid: msgspec.to_builtins(row) for rid, row in rows.items()}, "as the ledger has them"
    assert [bool(told[rid]["cost_nanousd"]) for rid in ("first", "again")] == [True, False]


async def test_the_spool_is_bounded_and_what_it_loses_comes_from_the_ledger(
    kafka: MockKafka, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At half of its bound there is an alarm; beyond it old segments go, though never before the ledger has them."""
    here = Sender.on(str(folder), ",".join(kafka.brokers), spool_bytes_max=60_000)
    kafka.down()
    wanted = named("a", 800)
    async with here.running():
        here.write("gateway-0", wanted[:80])
        await eventually_async(lambda: here.events.status().behind_since is not None, WITHIN_S, "it is behind")
        assert here.events.status().alarm == ""
        for start in range(80, 800, 80):
            here.write("gateway-0", wanted[start : start + 80])
        status = await eventually_async(
            lambda: status if (status := here.events.status()).gap_requests and status.alarm else None,
            WITHIN_S,
            "old segments are let go",
        )
        assert "Kafka has been behind" in status.alarm
        await eventually_async(
            lambda: sum(one.stat().st_size for one in segments(here.root / "gateway-0")) <= 60_000,
            WITHIN_S,
            "the disk is given back",
        )
        kafka.up()
        await eventually_async(
            lambda: here.events.status().alarm == "" and here.events.status().sent >= 800, WITHIN_S, "it has caught up"
        )

        async def is_filled() -> bool:
            return await here.books.gaps("kafka") == []

        await eventually_async(is_filled, WITHIN_S, "no gap is left")
    found = await asyncio.to_thread(kafka.events, TOPIC, at_least=800)
    assert {key for key, _ in found} == set(wanted)
    assert len({(key, str(value)) for key, value in found}) == 800, "from the ledger an event reads as from the journal"
    assert any("given up for Kafka" in record.getMessage() for record in caplog.records)


async def test_nothing_is_let_go_that_the_ledger_does_not_have(kafka: MockKafka, folder: Path) -> None:
    """Billing is never shed: while the ledger is behind as well, the journal grows."""
    here = Sender.on(str(folder), ",".join(kafka.brokers), spool_bytes_max=10_000)
    kafka.down()
    for start in range(0, 400, 80):
        here.write("gateway-0", named("a", 80, start))
    task = asyncio.create_task(here.events.run())
    try:
        await eventually_async(lambda: here.events.status().alarm != "", WITHIN_S, "there is an alarm")
        assert here.events.status().gap_requests == 0
        assert len(segments(here.root / "gateway-0")) == 5
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_settlement_finds_its_intent_in_an_older_segment(folder: Path) -> None:
    """A worker that was killed left requests open; its next run writes their settlements without their intents."""
    root = folder / "journal"
    clock = ManualClock(start_s=1.7e9)
    write_run(root, "gateway-0", ["open"], clock, settled=False)
    clock.advance(1.0)
    last = write_run(root, "gateway-0", ["other"], clock)
    follower = Follower(root / "gateway-0", (last.name, 0))
    settled = [booked(*one) for piece in follower.pieces() for one in piece.settled]
    assert [(row.request_id, str(row.status)) for row in settled] == [("open", "interrupted"), ("other", "success")]


async def test_a_topic_that_is_away_is_named_and_costs_no_event_and_no_room(kafka: MockKafka, folder: Path) -> None:
    """The brokers are there and refuse: that, too, is an alarm with its reason, and a spool that is bounded."""
    hurried = {"topic.metadata.propagation.max.ms": "200", "topic.metadata.refresh.interval.ms": "100"}
    brokers = ",".join(kafka.brokers)
    here = Sender.on(str(folder), brokers, spool_bytes_max=60_000, options=hurried)
    kafka.fail_topic(TOPIC, UNKNOWN_TOPIC)
    wanted = named("a", 800)
    async with here.running():
        for start in range(0, 800, 80):
            here.write("gateway-0", wanted[start : start + 80])
        status = await eventually_async(
            lambda: status if (status := here.events.status()).gap_requests else None, WITHIN_S, "old segments go"
        )
        here.clock.advance(HOUR_S)
        alarm = await eventually_async(
            lambda: alarm if "nknown topic" in (alarm := here.events.status().alarm) else "", WITHIN_S, "it says why"
        )
        assert "behind for 6" in alarm
        assert status.sent == 0
        await eventually_async(
            lambda: sum(one.stat().st_size for one in segments(here.root / "gateway-0")) <= 60_000,
            WITHIN_S,
            "the disk is given back while it is away",
        )
        kafka.fail_topic(TOPIC, 0)
        await eventually_async(lambda: here.events.status().alarm == "", WITHIN_S, "it has caught up")
    found = await asyncio.to_thread(kafka.events, TOPIC, at_least=800)
    assert {key for key, _ in found} == set(wanted)


def test_a_client_that_is_full_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would keep the spool from being looked after, and the controller from ending."""
    monkeypatch.setattr(kafka_store, "BUFFER_WAIT_S", 0.2)
    sink = KafkaSink(KafkaConfig(brokers=("127.0.0.1:1",), options={"queue.buffering.max.messages": "5"}))
    with pytest.raises(SinkError, match="client is full"):
        sink.send([(b"key", b"value")] * 10, wait_s=0.1)
    sink.close()


async def test_what_workers_of_one_time_lost_is_sent_once(folder: Path) -> None:
    here = Sender.on(str(folder), "127.0.0.1:1")
    wanted = named("a", 60)
    workers = [f"gateway-{number}" for number in range(4)]
    for number, worker in enumerate(workers):
        here.write(worker, wanted[number * 15 : number * 15 + 15])
    await here.delivery.drain()
    rows = await here.books.rows_between((0.0, ""), 2e9, limit=100)
    since, until = rows[0].created_at, rows[-1].created_at
    for number, worker in enumerate(workers):
        gap = Gap(worker, "1.journal", since + number / 10, until - number / 10, 15)
        await here.books.put_cursor("kafka", worker, "1", 0, gap=gap)
    sent: list[str] = []
    here.events._sink, here.events._cursors = Taking(sent), {}
    await here.events._fill_gaps()
    assert sorted(sent) == sorted(wanted)
    assert await here.books.gaps("kafka") == []


async def test_a_journal_that_was_lost_is_sent_from_its_start(kafka: MockKafka, folder: Path) -> None:
    """Its numbers follow the clock; where that was set back too, they stand before what was sent."""
    here = Sender.on(str(folder), ",".join(kafka.brokers))
    await here.books.put_cursor("kafka", "gateway-0", "9999999999.journal", 77)
    here.write("gateway-0", named("a", 20))
    async with here.running():
        await eventually_async(lambda: here.events.status().sent == 20, WITHIN_S, "they are sent")
        last = segments(here.root / "gateway-0")[-1].name

        async def is_there() -> bool:
            return (await here.books.cursors("kafka"))["gateway-0"][0] == last

        await eventually_async(is_there, WITHIN_S, "and the cursor is in the new one")


class Taking:
    """A sink that takes all and remembers the keys."""

    trouble = ""

    def __init__(self, sent: list[str]) -> None:
        self._sent = sent

    def send(self, events: Sequence[tuple[bytes, bytes]], *, wait_s: float) -> bool:
        self._sent += [key.decode() for key, _ in events]
        return True

    def wait(self, wait_s: float) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held."""
