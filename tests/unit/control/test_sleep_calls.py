"""A call to sleep or to wake counts once the engine itself says the same, and is made once at a time."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.support.towns import endpoint, replica

from modelyard.clock import ManualClock
from modelyard.control.dormitory import Able
from modelyard.control.engine_calls import EngineCallError
from modelyard.control.sleep_calls import SAY_S, WAKE_MIN_S, SleepCalls
from modelyard.control.tasks import KeyedTasks
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.engines import EngineCall, EngineLoad

ABLE = Able(EngineCall("/sleep", timeout_s=120), EngineCall("/wake_up", timeout_s=120), 0)
ASLEEP, AWAKE, SILENT = EngineLoad(is_sleeping=True), EngineLoad(is_sleeping=False), None


class Engine:
    def __init__(self, *says: EngineLoad | None, error: str = "") -> None:
        self.clock = ManualClock()
        self.says = list(says)
        self.error = error
        self.made: list[EngineCall] = []

    async def make(self, _: Replica, call: EngineCall) -> None:
        self.made.append(call)
        if self.error:
            raise EngineCallError(self.error)

    async def ask(self, _: str) -> EngineLoad | None:
        self.clock.advance(SAY_S / 2)
        return self.says.pop(0) if len(self.says) > 1 else self.says[0]


def one(state: ReplicaState) -> Replica:
    return msgspec.structs.replace(replica(endpoint("one")), state=state)


async def told(engine: Engine, state: ReplicaState) -> str | None:
    record = one(state)
    async with asyncio.TaskGroup() as group:
        observer = cast("Any", SimpleNamespace(ask=engine.ask))
        calls = SleepCalls(observer, KeyedTasks(group), engine.clock, cast("Any", engine))
        calls.begin(record, ABLE)
        calls.begin(record, ABLE)
        assert calls.told(record) is None, "it is under way"
    assert calls.told(msgspec.structs.replace(record, state_since=9.0)) is None, "it was for another record"
    found = calls.told(record)
    return None if found is None else found.error


STORIES = {
    "it sleeps": (ReplicaState.FALLING_ASLEEP, (ASLEEP,), ""),
    "it takes too long to say so": (ReplicaState.FALLING_ASLEEP, (AWAKE, SILENT, ASLEEP), "does not answer"),
    "it says nothing of sleep": (ReplicaState.FALLING_ASLEEP, (EngineLoad(),), ""),
    "it stays awake": (ReplicaState.FALLING_ASLEEP, (AWAKE,), "says that it is awake"),
    "it wakes": (ReplicaState.WAKING, (ASLEEP, AWAKE), ""),
    "it sleeps on": (ReplicaState.WAKING, (ASLEEP,), "says that it sleeps"),
    "it is gone": (ReplicaState.WAKING, (SILENT,), "does not answer"),
}


@pytest.mark.parametrize("story", STORIES)
async def test_what_the_engine_says_decides(story: str) -> None:
    state, says, error = STORIES[story]
    engine = Engine(*says)
    found = await told(engine, state)
    assert found is not None
    assert (error in found) if error else found == ""
    assert [call.path for call in engine.made] == ["/sleep" if state is ReplicaState.FALLING_ASLEEP else "/wake_up"]


async def test_callers_wait_for_a_wake_up_no_longer_than_for_another_replica() -> None:
    engine = Engine(AWAKE, error="it cannot be reached")
    assert await told(engine, ReplicaState.WAKING) == "it cannot be reached"
    assert engine.made[0].timeout_s == WAKE_MIN_S
