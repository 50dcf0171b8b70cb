"""The simulated engine sleeps and wakes by vLLM's calls, and does no work meanwhile."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest
from tests.support.simulated import ENGINE, SECRET, Sim, end, launch, ready
from tests.support.waiting import eventually


def call(engine: Sim, path: str) -> int:
    connection = HTTPConnection("127.0.0.1", engine.port, timeout=10)
    try:
        connection.request("POST", path, b"{}", {"authorization": f"Bearer {SECRET}"})
        return connection.getresponse().status
    finally:
        connection.close()


def is_sleeping(engine: Sim) -> bool | None:
    return ENGINE.read_load(engine.get("/metrics")[1].decode()).is_sleeping


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sim]:
    sim = launch(tmp_path, **getattr(request, "param", {"sleep": True}))
    try:
        yield ready(sim)
    finally:
        end(sim)


def asked(engine: Sim) -> int:
    with engine.chat("hello") as response:
        return response.status


def test_it_sleeps_and_wakes_as_often_as_it_is_told(engine: Sim) -> None:
    sleep, wake = ENGINE.sleep({"sleep": True}), ENGINE.wake({"sleep": True})
    assert sleep is not None
    assert wake is not None
    assert (is_sleeping(engine), asked(engine)) == (False, 200)
    for _ in range(2):
        assert call(engine, sleep.path) == 200
        assert (is_sleeping(engine), asked(engine), engine.get("/health")[0]) == (True, 500, 200)
    for _ in range(2):
        assert call(engine, wake.path) == 200
        assert (is_sleeping(engine), asked(engine)) == (False, 200)


def test_it_falls_asleep_once_what_runs_has_ended(engine: Sim) -> None:
    with ThreadPoolExecutor(1) as beside:
        answer = beside.submit(engine.stream, "[[sim: tokens=60 slow=10]] go on")
        eventually(lambda: engine.running() == 1, 10, "it runs")
        assert call(engine, "/sleep?level=1&mode=wait") == 200
        assert answer.result(10).rstrip().endswith(b"[DONE]")
    assert is_sleeping(engine)


@pytest.mark.parametrize("engine", [{"sleep": True, "fail_wake": True}], indirect=True)
def test_one_that_is_to_fail_never_wakes(engine: Sim) -> None:
    assert call(engine, "/sleep") == 200
    assert call(engine, "/wake_up") == 500
    assert is_sleeping(engine)


@pytest.mark.parametrize("engine", [{}], indirect=True)
def test_without_the_option_it_knows_nothing_of_sleep(engine: Sim) -> None:
    assert (ENGINE.sleep({}), ENGINE.wake({})) == (None, None)
    assert (is_sleeping(engine), call(engine, "/sleep"), call(engine, "/wake_up")) == (None, 404, 404)
