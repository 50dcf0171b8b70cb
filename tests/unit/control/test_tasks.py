"""One task a key, and what comes after it."""

import asyncio

from modelyard.control.tasks import KeyedTasks


async def test_what_comes_after_a_task_finds_its_key_free_whether_it_failed_or_not() -> None:
    found: list[frozenset[str]] = []

    async def fail() -> None:
        raise LookupError("on purpose")

    async def succeed() -> None: ...

    async with asyncio.TaskGroup() as group:
        tasks = KeyedTasks(group, after=lambda: found.append(tasks.keys()))
        assert tasks.spawn("a", fail)
        assert not tasks.spawn("a", succeed)
        assert tasks.spawn("b", succeed)
    assert found == [frozenset({"b"}), frozenset()]
