"""How far a fetch is, and how fast: what an earlier try brought says nothing of the pace. When a failed one goes on."""

import asyncio
from pathlib import Path
from typing import cast

import pytest
from tests.support.management import WeighedEngine

from modelyard.clock import ManualClock
from modelyard.config import FetchConfig
from modelyard.control.artifacts import ArtifactStore, Sources
from modelyard.control.supplies import Supplies, SupplyError, _Copying, _fetch_of
from modelyard.control.tasks import KeyedTasks
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Stage
from modelyard.policy.progress import Fetch
from modelyard.stores import ControlStore
from modelyard.web.fetcher import Fetcher


def test_pace_is_that_of_this_try_alone() -> None:
    copying = _Copying(begun_s=0.0)
    assert _fetch_of(copying, 1.0) == Fetch(Stage.DOWNLOADING, 0, None, None)
    copying.progressed(Stage.DOWNLOADING, 500, 1000, 10.0)
    assert _fetch_of(copying, 11.0) == Fetch(Stage.DOWNLOADING, 50, None, None)
    copying.progressed(Stage.DOWNLOADING, 600, 1000, 12.0)
    assert _fetch_of(copying, 12.0) == Fetch(Stage.DOWNLOADING, 60, 8.0, 50.0)


def test_each_stage_has_a_pace_of_its_own() -> None:
    copying = _Copying(begun_s=0.0)
    copying.progressed(Stage.DOWNLOADING, 0, 1000, 0.0)
    copying.progressed(Stage.DOWNLOADING, 1000, 1000, 100.0)
    copying.progressed(Stage.VERIFYING, 0, 1000, 100.0)
    copying.progressed(Stage.VERIFYING, 500, 1000, 101.0)
    assert _fetch_of(copying, 101.0) == Fetch(Stage.VERIFYING, 50, 1.0, 500.0)


async def test_a_failed_fetch_says_when_it_is_tried_again(tmp_path: Path) -> None:
    clock = ManualClock(start_s=3600.0)
    version = ModelVersion(
        "ver-a", "ten-a", "a", "v1", "weighed", Artifact(f"file://{tmp_path}/none.gguf"), options={}, created_at=0
    )
    async with asyncio.TaskGroup() as group:
        tasks = KeyedTasks(group)
        supplies = Supplies(
            store=cast("ControlStore", None),
            engines={"weighed": WeighedEngine()},
            artifacts=ArtifactStore(tmp_path / "store", Sources(Fetcher(), FetchConfig(), now_s=clock.unix_s)),
            tasks=tasks,
            clock=clock,
            pauses_s=(10.0, 60.0),
        )
        assert isinstance(supplies.supply(version), Fetch)
        while tasks.keys():
            await asyncio.sleep(0)
        with pytest.raises(SupplyError, match="none") as failed:
            supplies.supply(version)
        assert failed.value.told == f"{failed.value}; it is tried again at 01:00:10 UTC"
        clock.advance(10.0)
        with pytest.raises(SupplyError) as failed:
            supplies.supply(version)
        assert failed.value.told == f"{failed.value}; it is tried again now"
