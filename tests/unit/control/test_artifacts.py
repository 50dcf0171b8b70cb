"""Artifacts come in whole, checked and once, or not at all."""

import asyncio
import hashlib
import os
import threading
from pathlib import Path

import pytest
from tests.support.waiting import eventually_async

from modelyard.control.artifacts import CHUNK_BYTES, ArtifactError, ArtifactStore, local_path
from modelyard.domain.catalog import Artifact
from modelyard.domain.endpoints import Stage

CONTENT = b"GGUF" + bytes(range(256)) * 9000
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


def check(file: Path) -> None:
    with file.open("rb") as reader:
        if reader.read(4) != b"GGUF":
            raise ValueError("it is no GGUF file")


def ignore(stage: Stage, done: int, whole: int) -> None:
    pass


@pytest.fixture
def artifacts(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "a model.gguf"
    file.write_bytes(CONTENT)
    return file


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "artifacts").rglob("*") if path.is_file())


async def test_file_is_kept_under_its_digest(tmp_path: Path, artifacts: ArtifactStore, model: Path) -> None:
    seen: list[tuple[Stage, int, int]] = []
    got = await artifacts.fetch(Artifact(model.as_uri()), "ver-1", check, lambda *step: seen.append(step))
    assert got == Artifact(model.as_uri(), DIGEST, len(CONTENT))
    kept = artifacts.path(got)
    assert kept is not None
    assert kept.read_bytes() == CONTENT
    assert files(tmp_path) == [kept]
    assert seen[0] == (Stage.DOWNLOADING, CHUNK_BYTES, len(CONTENT))
    assert seen[-1] == (Stage.VERIFYING, len(CONTENT), len(CONTENT))


async def test_same_content_is_kept_once(tmp_path: Path, artifacts: ArtifactStore, model: Path) -> None:
    for name in ("ver-1", "ver-2"):
        await artifacts.fetch(Artifact(str(model)), name, check, ignore)
    assert len(files(tmp_path)) == 1


async def test_content_that_the_engine_does_not_load_is_refused(tmp_path: Path, artifacts: ArtifactStore) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4 pretends by its name")
    with pytest.raises(ArtifactError, match="it is no GGUF file"):
        await artifacts.fetch(Artifact(str(tmp_path / "x.gguf")), "ver-1", check, ignore)
    assert files(tmp_path) == []


async def test_other_digest_than_expected_is_refused(tmp_path: Path, artifacts: ArtifactStore, model: Path) -> None:
    with pytest.raises(ArtifactError, match="expected was sha256:00"):
        await artifacts.fetch(Artifact(str(model), "sha256:" + "0" * 64), "ver-1", check, ignore)
    assert files(tmp_path) == []


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
async def test_what_is_no_readable_file_is_refused_at_once(tmp_path: Path, artifacts: ArtifactStore, kind: str) -> None:
    path = tmp_path / "model"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ArtifactError, match=r"No such file|not a regular file"):
        async with asyncio.timeout(10):
            await artifacts.fetch(Artifact(str(path)), "ver-1", check, ignore)


@pytest.mark.parametrize("uri", ["s3://bucket/model", "https://host/model", "hf://a/b", "relative/model", ""])
def test_other_places_are_refused_with_what_is_supported(uri: str) -> None:
    with pytest.raises(ArtifactError, match=r"supported are file://|has no artifact"):
        local_path(uri)


def test_both_spellings_of_a_local_file_are_one_path() -> None:
    assert local_path("file:///a/b%20c") == local_path("/a/b c") == Path("/a/b c")


async def test_cancelled_fetch_leaves_nothing(tmp_path: Path, artifacts: ArtifactStore, model: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(stage: Stage, done: int, whole: int) -> None:
        begun.set()
        go_on.wait(10)

    fetching = asyncio.get_running_loop().create_task(artifacts.fetch(Artifact(str(model)), "ver-1", check, hold))
    await eventually_async(begun.is_set, 10, "the copy has begun")
    fetching.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert files(tmp_path) == []


async def test_leftovers_of_a_killed_controller_are_cleared(tmp_path: Path, artifacts: ArtifactStore) -> None:
    artifacts.clear_leftovers()
    (tmp_path / "artifacts" / "incoming" / "ver-9").write_bytes(b"half")
    artifacts.clear_leftovers()
    assert files(tmp_path) == []


async def test_half_a_file_under_a_digest_is_not_taken_for_the_artifact(artifacts: ArtifactStore, model: Path) -> None:
    got = await artifacts.fetch(Artifact(str(model)), "ver-1", check, ignore)
    assert artifacts.path(Artifact(got.uri, got.digest, got.size_bytes + 1)) is None
    assert artifacts.path(Artifact(got.uri, "sha256:../../etc", 1)) is None


async def test_a_whole_file_is_taken_over_without_a_copy(tmp_path: Path, artifacts: ArtifactStore) -> None:
    for _ in range(2):
        draft = tmp_path / "draft"
        draft.write_bytes(CONTENT)
        inode = draft.stat().st_ino
        got = await artifacts.adopt(draft, DIGEST)
        assert got == Artifact(f"upload:{DIGEST}", DIGEST, len(CONTENT))
        assert not draft.exists()
    kept = artifacts.path(got)
    assert kept is not None
    assert (kept.read_bytes(), kept.stat().st_mode & 0o777) == (CONTENT, 0o400)
    assert kept.stat().st_ino != inode, "the first one stays"
    with pytest.raises(ArtifactError):
        await artifacts.adopt(tmp_path / "none", "x")
