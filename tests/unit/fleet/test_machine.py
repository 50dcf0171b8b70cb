"""This machine among the declared nodes; a driver that hangs costs one bounded wait and no second one at a time."""

import asyncio
import threading
from pathlib import Path

import pytest

from modelyard.domain.nodes import Accelerator, Node
from modelyard.fleet import machine
from modelyard.fleet.accelerators import Found
from modelyard.fleet.declared import Declared
from modelyard.fleet.machine import Machine, weights_in

CPU = Found((Accelerator(0, "cpu", 100),), {0: 7})


async def test_the_local_node_has_what_was_found_and_what_was_declared_of_it() -> None:
    other = Node("gpu-0", (Accelerator(0, "h100", 5),), is_simulated=True)
    declared = Declared((other,), Node("local", (), pool="desk", price_nanousd=3))
    here, there = await Machine(declared, cached=lambda: {"sha256:x": 4, "sha256:y": 5}, look=lambda **_: CPU).nodes()
    assert here.node == Node("local", CPU.accelerators, pool="desk", price_nanousd=3)
    assert (here.cached, here.cache_used_bytes, here.used_bytes) == ({"sha256:x", "sha256:y"}, 9, {0: 7})
    assert (here.is_ready, there.node, there.is_ready) == (True, other, True)


async def test_while_a_driver_hangs_the_last_look_stands_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LOOK_TIMEOUT_S", 0.05)
    go, looks = threading.Event(), []

    def look(**_: object) -> Found:
        looks.append(1)
        if len(looks) == 2:
            go.wait(30)
        return CPU

    local = Machine(look=look)
    try:
        assert (await local.nodes())[0].reason == ""
        for _ in range(3):
            [hung] = await local.nodes()
            assert "the driver does not answer" in hung.reason
            assert hung.node.accelerators == CPU.accelerators
        assert len(looks) == 2, "no second look begins while one hangs"
    finally:
        go.set()
    monkeypatch.setattr(machine, "LOOK_TIMEOUT_S", 30.0)
    assert (await local.nodes())[0].reason == ""


async def test_those_who_ask_at_the_same_time_share_a_look() -> None:
    looks: list[int] = []

    def look(**_: object) -> Found:
        looks.append(1)
        return CPU

    local = Machine(look=look)
    answers = await asyncio.gather(*(local.nodes() for _ in range(5)))
    assert all(answer == answers[0] for answer in answers)
    assert len(looks) == 1


async def test_before_the_first_look_ends_the_machine_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LOOK_TIMEOUT_S", 0.05)
    go = threading.Event()

    def look(**_: object) -> Found:
        go.wait(30)
        return CPU

    local = Machine(look=look)
    try:
        assert not (await local.nodes())[0].is_ready
    finally:
        go.set()
        monkeypatch.setattr(machine, "LOOK_TIMEOUT_S", 30.0)
        await local.close()


def test_the_weights_of_a_folder_are_the_complete_ones(tmp_path: Path) -> None:
    assert weights_in(tmp_path) == {}
    (tmp_path / "sha256").mkdir()
    (tmp_path / "sha256" / ("a" * 64)).write_bytes(b"1234")
    (tmp_path / "sha256" / "half").write_bytes(b"12")
    assert weights_in(tmp_path) == {"sha256:" + "a" * 64: 4}
