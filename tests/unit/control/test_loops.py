"""A pass sees what the one before it did, whenever that one began."""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.towns import Town, endpoint

from modelyard.clock import ManualClock
from modelyard.config import Config
from modelyard.control import loops as module
from modelyard.control.loops import Loops, Parts
from modelyard.control.tasks import KeyedTasks
from modelyard.control.world import World


class _Anything:
    """Tools of which nothing is asked here."""

    pressing = endpoint_ids = frozenset[str]()

    def __init__(self) -> None:
        self.memories: dict[str, object] = {}
        self.passed: dict[str, object] = {}

    def __getattr__(self, name: str) -> Any:
        return _Anything()

    def __call__(self, *_: object, **__: object) -> Any:
        return frozenset[str]()


async def test_what_began_while_a_round_looked_is_not_passed_over_with_that_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That look may not show what the pass recorded: a second one would undo it, or give its room away."""
    town, one = Town(), endpoint("one")
    town.settle(one)
    tools = cast("Any", _Anything())
    tools.placer = SimpleNamespace(see=lambda *_: None, claimed_of=lambda _: frozenset(), in_turn=list)
    began: list[str] = []

    async def nothing(*_: object, **__: object) -> list[object]:
        return []

    async with asyncio.TaskGroup() as group:
        passes = KeyedTasks(group)
        store = SimpleNamespace(tenants=nothing)
        publisher = SimpleNamespace(known_to_drain=lambda _: frozenset())
        feed = SimpleNamespace(on_report=lambda _: None, reports=dict)
        parts = Parts(
            *cast(
                "Any", (Config(), store, SimpleNamespace(nodes=nothing), {}, None, feed, publisher, ManualClock(), None)
            )
        )
        loops = Loops(parts)
        loops._world = town.look()

        async def looks(*_: object, **__: object) -> World:
            seen = town.look()
            loops._begin_more(tools, passes)
            while passes.keys():
                await asyncio.sleep(0)
            return seen

        async def runs(endpoint_id: str, _: World, __: object) -> bool:
            began.append(endpoint_id)
            return True

        monkeypatch.setattr(module, "look", looks)
        monkeypatch.setattr(loops, "_pass", runs)
        loops._attention = cast(
            "Any", SimpleNamespace(wanted=lambda *_: {one.id}, passed=lambda *_, **__: None, failed=lambda _: None)
        )
        loops._in_line = deque([one.id])
        await loops._round(tools, KeyedTasks(group), passes)
        await asyncio.sleep(0.01)
        assert began == [one.id]
        await loops._round(tools, KeyedTasks(group), passes)
        await asyncio.sleep(0.01)
        assert began == [one.id, one.id], "the next look shows it"
