"""An endpoint with two releases: shares of traffic, copies that nobody gets, and callers who stay on one release."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import CONTEXT, Yard

OPTIONS = {"slots": 16, "ttft_ms": 1, "itl_ms": 1, "context_length": CONTEXT}
SEEN: list[Any] = []


def journal(yard: Yard, name: str) -> Path:
    return yard.folder / "tokens" / f"{name}.jsonl"


def begun(file: Path) -> list[str]:
    """Return the ids of the requests that an engine took, in their order."""
    if not file.exists():
        return []
    records = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
    return list(dict.fromkeys(str(record["rid"]) for record in records))


def add_release(yard: Yard, endpoint: str, name: str, **share: object) -> None:
    order = {
        "framework": "simulated",
        "version": name,
        "options": {**OPTIONS, "journal": str(journal(yard, f"{endpoint}-{name}"))},
        **share,
    }
    reply = yard.call("POST", f"/v1/endpoints/{endpoint}/releases", order)
    assert reply.status == 202, reply.body
    series = f'modelyard_replicas{{model="{endpoint}"}} 2.0'
    eventually(lambda: series in yard.call("GET", "/metrics").body.decode(), 60, f"the gateway has both of {endpoint}")


async def serve(yard: Yard, bodies: list[dict[str, Any]]) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        for body in bodies:
            load.start(body)
        await load.finish(30)
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
        SEEN.extend(load.exchanges)


async def test_a_shadow_gets_a_copy_of_every_request_and_nobody_gets_its_answers(yard: Yard) -> None:
    yard.deploy("mirror", options=OPTIONS)
    add_release(yard, "mirror", "next", shadow=100)
    before = len(SEEN)
    await serve(yard, [chat("mirror", f"hello {number}", stream=number % 2 == 0) for number in range(10)])
    asked = {exchange.request_id for exchange in SEEN[before:]}
    file = journal(yard, "mirror-next")

    def copies() -> list[str]:
        return [rid for rid in begun(file) if rid.startswith("side-")]

    eventually(lambda: len(copies()) >= 10, 30, "ten copies")
    assert len(copies()) == 10
    assert not [rid for rid in begun(file) if rid.startswith("req_")], "it answers nobody"
    assert asked <= set(begun(journal(yard, "mirror")))
    rows = check_ledger(yard, SEEN)
    assert asked <= set(rows), "billed once each"
    (answering,) = {rows[str(rid)].replica_id for rid in asked}
    shadow = [one["model_id"] for one in yard.get("/v1/endpoints/mirror")["releases"] if one["shadow"]]
    assert {yard.row_of(rid)["model_id"] for rid in asked}.isdisjoint(shadow), answering

    def counted() -> list[str]:
        page = yard.call("GET", "/metrics").body.decode()
        return [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith("modelyard_shadowed_total{")]

    eventually(lambda: counted() == ["10.0"], 20, "all copies are counted, once they have ended")


async def test_a_shadow_that_dies_is_nobodys_trouble(yard: Yard) -> None:
    (shadow,) = [one for one in yard.engines("mirror") if "next" in _journal_of(yard, one.pid)]
    async with Load(yard.port, yard.admin_key) as load:
        yard.kill(shadow.pid)
        for number in range(6):
            load.start(chat("mirror", f"again {number}"))
        await load.finish(30)
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
        SEEN.extend(load.exchanges)
    assert yard.get("/v1/endpoints/mirror")["failure"] == ""
    eventually(lambda: yard.ready_replicas("mirror") == 2, 60, "the shadow is started anew")
    check_ledger(yard, SEEN)


async def test_sticky_users_stay_on_one_release_and_spread_over_both(yard: Yard) -> None:
    yard.deploy("pair", options=OPTIONS)
    add_release(yard, "pair", "v2", weight=50)
    reply = yard.call("PATCH", "/v1/endpoints/pair", {"serving": {"sticky": "user"}})
    assert reply.json()["serving"]["sticky"] == "user"
    users = [f"user-{number}" for number in range(40)]
    before = len(SEEN)
    for start in (*range(0, 40, 10),) * 3:  # ten at once: a full release would pass them on to the other
        await serve(yard, [chat("pair", f"I am {user}", user=user) for user in users[start : start + 10]])
    check_ledger(yard, SEEN)
    where: dict[str, set[str]] = {}
    for number, exchange in enumerate(SEEN[before:]):
        where.setdefault(users[number % 40], set()).add(yard.row_of(exchange.request_id)["model_id"])
    assert all(len(versions) == 1 for versions in where.values()), where
    counts = Counter(next(iter(versions)) for versions in where.values())
    # Each user falls on either side by a hash: of 40, fewer than 8 on one is a chance of 1 in 30,000.
    assert len(counts) == 2
    assert min(counts.values()) >= 8, counts


async def test_a_release_gets_its_share_and_leaves_without_losing_a_request(yard: Yard) -> None:
    yard.deploy("canary", options=OPTIONS)
    add_release(yard, "canary", "v2", weight=30)
    before = len(SEEN)
    for start in range(0, 100, 10):  # ten at once: a full release would pass them on to the other
        # All of one user: it is not sticky, so that its requests are shared out like all others.
        await serve(yard, [chat("canary", f"hello {number}", user="one") for number in range(start, start + 10)])
    versions = {one["version"]: one["model_id"] for one in yard.get("/v1/endpoints/canary")["releases"]}
    check_ledger(yard, SEEN)
    counts = Counter(yard.row_of(exchange.request_id)["model_id"] for exchange in SEEN[before:])
    assert 12 <= counts[versions["v2"]] <= 50, counts
    async with Load(yard.port, yard.admin_key) as load:
        for number in range(30):
            load.start(chat("canary", f"[[sim: tokens=30 slow=10]] {number}", stream=True))
            if number == 15:
                reply = yard.call("DELETE", "/v1/endpoints/canary/releases/v2")
                assert reply.status == 202, reply.body
            await asyncio.sleep(0)
        await load.finish(30)
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
        SEEN.extend(load.exchanges)
    eventually(lambda: len(yard.engines("canary")) == 1, 40, "the replica of v2 is gone")
    (left,) = yard.get("/v1/endpoints/canary")["releases"]
    assert (left["version"], left["weight"]) == ("v1", 100)
    check_ledger(yard, SEEN)


async def test_all_traffic_moves_to_a_release_that_was_not_running_and_nobody_notices(yard: Yard) -> None:
    yard.deploy("move", options=OPTIONS)
    (old,) = yard.engines("move")
    options = {**OPTIONS, "load_s": 3.0, "journal": str(journal(yard, "move-v2"))}
    order = {"framework": "simulated", "version": "v2", "options": options}
    assert yard.call("POST", "/v1/endpoints/move/releases", order).status == 202
    reply = yard.call("PATCH", "/v1/endpoints/move", {"releases": [{"version": "v2", "weight": 100}]})
    assert [release["weight"] for release in reply.json()["releases"]] == [0, 100]

    def has_moved() -> bool:
        return [engine.pid for engine in yard.engines("move")] != [old.pid] and len(yard.engines("move")) == 1

    async with Load(yard.port, yard.admin_key) as load:
        outcomes: set[Outcome | None] = set()

        async def is_answered_until_then() -> bool:
            outcomes.add((await load.send(chat("move", f"hello {len(load.exchanges)}"))).outcome)
            return has_moved()

        await eventually_async(is_answered_until_then, 60, "all has moved")
        outcomes.add((await load.send(chat("move", "hello again"))).outcome)
        assert outcomes == {Outcome.COMPLETE}
        SEEN.extend(load.exchanges)
    check_ledger(yard, SEEN)
    assert yard.row_of(load.exchanges[0].request_id)["replica_id"] == old.replica_id, "nobody waits for the load"
    assert yard.row_of(load.exchanges[-1].request_id)["replica_id"] != old.replica_id


@pytest.mark.parametrize("share", [{"weight": 10}, {"shadow": 10}])
async def test_a_release_that_cannot_start_keeps_nobody_from_the_other(yard: Yard, share: dict[str, int]) -> None:
    name = "broken-" + next(iter(share))
    yard.deploy(name, options=OPTIONS)
    order = {"framework": "simulated", "version": "bad", "options": {"fail_load": True}, **share}
    assert yard.call("POST", f"/v1/endpoints/{name}/releases", order).status == 202
    kinds = ("replica_failed",)

    def crashes() -> int:
        events = yard.get(f"/v1/endpoints/{name}/events?limit=200")["data"]
        return sum(event["kind"] in kinds for event in events)

    eventually(lambda: crashes() >= 3, 60, "three crashes of the bad version")
    await serve(yard, [chat(name, f"hello {number}") for number in range(20)])
    assert yard.get(f"/v1/endpoints/{name}")["failure"] == ""
    check_ledger(yard, SEEN)


def _journal_of(yard: Yard, pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
