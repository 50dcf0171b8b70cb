"""F18, S20 with two gateway workers: a limit follows its connections, and is never exceeded, whoever is killed."""

import asyncio
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.load import Load
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import Yard

SETTINGS = {"gateway.workers": 2}
BODY: dict[str, Any] = {"model": "sim", "prompt": "hello", "max_tokens": 1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with Yard(tmp_path_factory.mktemp("pair"), SETTINGS) as yard:
        yard.deploy("sim", options={"slots": 64, "ttft_ms": 1, "itl_ms": 1})
        yield yard


def test_one_connection_can_use_a_limit_that_two_workers_share(pair: Yard) -> None:
    key = pair.new_key(limits={"requests_per_minute": 60})
    connection = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=10)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    begun_s, statuses = time.monotonic(), []

    def ask() -> bool:
        connection.request("POST", "/v1/completions", json.dumps(BODY), headers)
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)
        return statuses.count(200) >= 42

    # Its worker's equal part is 30, and refills by one in two seconds: that would take 24.
    eventually(ask, 18, "42 requests through one connection")
    connection.close()
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) <= 60 + (time.monotonic() - begun_s) + 1


async def test_a_storm_at_both_workers_stays_within_the_limit_while_planes_are_killed(pair: Yard) -> None:
    key = pair.new_key(limits={"requests_per_minute": 60, "concurrency": 20})
    passed = 0
    begun_s = time.monotonic()
    async with Load(pair.port, key) as load:
        for turn in range(12):
            for _ in range(20):
                load.start(BODY, path="/v1/completions", label=f"{turn}")
            if turn in (4, 8):
                (control,) = await eventually_async(lambda: pair.plane_pids("control"), 30, "a controller to kill")
                pair.kill(control)
            await load.finish()
            await asyncio.sleep(0.2)
        passed = sum(one.status == 200 for one in load.exchanges)
        assert {one.status for one in load.exchanges} == {200, 429}
    assert 30 <= passed <= 60 + (time.monotonic() - begun_s) + 1


async def test_a_budget_holds_over_both_workers_and_their_lives(pair: Yard) -> None:
    body = BODY | {"prompt": "!" * 1000}
    worst = len(json.dumps(body).encode()) + 1
    key = pair.new_key(limits={"tokens_per_day": 10 * worst})
    async with Load(pair.port, key) as load:

        async def storm() -> bool:
            """Say whether both workers knew the key, and what is spent: until then they let nobody in."""
            asked = [load.start(body, path="/v1/completions") for _ in range(60)]
            await load.finish()
            return all(one.status in {200, 429} for one in asked)

        for turn in range(3):
            await eventually_async(storm, 30, "both workers judge by the budget")
            if turn == 0:
                victim = pair.plane_pids("gateway")[0]
                pair.kill(victim)
                eventually(lambda: len(pair.plane_pids("gateway")) == 2, 30, "both workers")
        spent = sum(one.status == 200 for one in load.exchanges)
    assert 5 <= spent <= 10
    rows = pair.query(f"SELECT * FROM inference_requests WHERE api_key_id = '{key[3:11]}'")
    assert sum(row["total_tokens"] for row in rows) <= 10 * worst
