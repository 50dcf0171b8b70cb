"""What nobody names goes after its time; what runs, or has no other source, never does."""

import os
from pathlib import Path

import pytest
from tests.support.artifacts import accept, digest_of, files_in, ignore, open_store

from modelyard.clock import ManualClock, SystemClock
from modelyard.config import ControlConfig
from modelyard.control.artifacts import ArtifactStore
from modelyard.control.artifacts.sweep import Sweep
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Endpoint, Release, Scaling
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.tenants import PLATFORM, Tenant
from modelyard.stores import ControlStore
from modelyard.stores.sql import SqlControlStore, open_database

TTL_S = 3600.0


@pytest.fixture
def artifacts(root: Path) -> ArtifactStore:
    return open_store(root)


@pytest.fixture
async def store(tmp_path: Path):
    opened = SqlControlStore(open_database(f"sqlite:///{tmp_path / 'c.sqlite'}", timeout_s=5))
    await opened.add_tenant(Tenant(id=PLATFORM, name=PLATFORM, created_at=1))
    yield opened
    await opened.close()


def sweep_of(artifacts: ArtifactStore, store: ControlStore, *, later_s: float = 0.0, bytes_max: int = 0) -> Sweep:
    clock = ManualClock(start_s=SystemClock().unix_s() + later_s)
    settings = ControlConfig(artifact_ttl_s=TTL_S, artifact_cache_bytes=bytes_max)
    return Sweep(artifacts.contents, store, settings, clock)


async def fetched(artifacts: ArtifactStore, tmp_path: Path, name: str, size: int = 1000) -> Artifact:
    file = tmp_path / f"{name}.gguf"
    file.write_bytes((name.encode() * size)[:size])
    return await artifacts.fetch(Artifact(file.as_uri()), accept, ignore)


async def name_it(store: ControlStore, artifact: Artifact, id: str, *, runs: bool = False) -> None:
    version = ModelVersion(id, PLATFORM, id, "v1", "simulated", artifact, {}, 1)
    endpoint = Endpoint(f"ep-{id}", PLATFORM, id, (Release(id),), Scaling(), created_at=1)
    await store.add_deployment(version, endpoint)
    if runs:
        replica = Replica(
            id=f"rep-{id}", endpoint_id=endpoint.id, version_id=id, ordinal=0, generation=0,
            state=ReplicaState.READY, state_since=1.0,
        )  # fmt: skip
        await store.put_replica(replica)


async def test_only_what_is_named_stays_after_its_time(
    artifacts: ArtifactStore, store: ControlStore, tmp_path: Path, root: Path
) -> None:
    kept, orphan = await fetched(artifacts, tmp_path, "a"), await fetched(artifacts, tmp_path, "b")
    await name_it(store, kept, "ver-1")
    assert await sweep_of(artifacts, store).sweep() == []
    assert await sweep_of(artifacts, store, later_s=TTL_S - 60).sweep() == []
    gone = await sweep_of(artifacts, store, later_s=TTL_S + 60).sweep()
    assert gone == [artifacts.contents.file(orphan.digest)]
    assert files_in(root) == [artifacts.contents.file(kept.digest)]
    assert artifacts.path(orphan) is None


async def test_leftovers_go_after_their_time_and_a_note_never_outlives_its_draft(
    artifacts: ArtifactStore, store: ControlStore, root: Path
) -> None:
    for folder, name in (("incoming", "x"), ("incoming", "x.json"), ("incoming", "busy"), ("quarantine", "y.0")):
        (artifacts.contents.folder(folder) / name).write_bytes(b"half")
    tree = artifacts.contents.folder("incoming") / "tree-z.0"
    tree.mkdir()
    (tree / "file").write_bytes(b"x")
    artifacts.contents.busy.add("busy")
    gone = await sweep_of(artifacts, store, later_s=TTL_S + 60).sweep()
    assert len(gone) == 4
    assert files_in(root) == [root / "incoming" / "busy"]
    assert gone[0].name == "x.json"


async def test_folder_and_its_files_stay_together(
    artifacts: ArtifactStore, store: ControlStore, tmp_path: Path, root: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"w" * 100)
    (model / "config.json").write_text("{}")
    artifact = await artifacts.fetch(Artifact(str(model)), accept, ignore)
    await name_it(store, artifact, "ver-1")
    await sweep_of(artifacts, store, later_s=TTL_S + 60).sweep()
    assert artifacts.path(artifact) is not None
    await sweep_of(artifacts, store, later_s=TTL_S + 60, bytes_max=50).sweep()
    assert files_in(root, "trees") == [], "no folder without its files"
    assert not artifacts.contents.file(digest_of(b"w" * 100)).exists()
    assert artifacts.path(artifact) is None
    assert await artifacts.fetch(artifact, accept, ignore) == artifact


async def test_above_the_limit_the_unused_longest_goes_first_but_never_what_is_needed(
    artifacts: ArtifactStore, store: ControlStore, tmp_path: Path
) -> None:
    made = {name: await fetched(artifacts, tmp_path, name) for name in ("old", "runs", "new")}
    upload = artifacts.contents.folder("incoming") / "u"
    upload.write_bytes(b"uploaded" * 125)
    made["upload"] = await artifacts.adopt(upload, "u")
    for number, (name, artifact) in enumerate(made.items()):
        await name_it(store, artifact, f"ver-{name}", runs=name == "runs")
        file = artifacts.contents.file(artifact.digest)
        os.utime(file, ns=(number * 10**9, file.stat().st_mtime_ns))
    artifacts.note_use(made["new"], SystemClock().unix_s())
    assert await sweep_of(artifacts, store, bytes_max=4000).sweep() == []
    assert await sweep_of(artifacts, store, bytes_max=3500).sweep() == [artifacts.contents.file(made["old"].digest)]
    assert await sweep_of(artifacts, store, bytes_max=1).sweep() == [], "just used, running, or without a source"
    later = sweep_of(artifacts, store, later_s=TTL_S, bytes_max=1)
    assert await later.sweep() == [artifacts.contents.file(made["new"].digest)]
    for name in ("runs", "upload"):
        assert artifacts.path(made[name]) is not None
    assert await artifacts.fetch(made["old"], accept, ignore) == made["old"], "it can be had again"
