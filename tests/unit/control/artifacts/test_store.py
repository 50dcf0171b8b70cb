"""Artifacts come in whole, checked and once, or not at all; what is here is hashed before it is used."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
from tests.support.artifacts import accept, digest_of, files_in, gguf_only, ignore, open_store
from tests.support.waiting import eventually_async

from modelyard.config import FetchConfig
from modelyard.control.artifacts import ArtifactError, ArtifactStore, CorruptError
from modelyard.control.artifacts.sources.local import local_path
from modelyard.domain.catalog import Artifact
from modelyard.domain.endpoints import Stage

CONTENT = b"GGUF" + bytes(range(256)) * 9000
DIGEST = digest_of(CONTENT)


@pytest.fixture
def artifacts(root: Path) -> ArtifactStore:
    return open_store(root)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "a model.gguf"
    file.write_bytes(CONTENT)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    (place / "1_Pooling").mkdir(parents=True)
    (place / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      " + bytes(5000))
    (place / "config.json").write_text("{}")
    (place / "1_Pooling" / "config.json").write_text("{}")
    (place / "modeling.py").write_text("import os")
    (place / "pytorch_model.bin").write_bytes(b"PK\3\4")
    (place / "README.md").write_text("# words")
    return place


# --- one file ------------------------------------------------------------------------------------


async def test_file_is_kept_under_its_digest(root: Path, artifacts: ArtifactStore, model: Path) -> None:
    seen: list[tuple[Stage, int, int]] = []
    got = await artifacts.fetch(Artifact(model.as_uri()), gguf_only, lambda *step: seen.append(step))
    assert got == Artifact(model.as_uri(), DIGEST, len(CONTENT))
    kept = artifacts.path(got)
    assert kept is not None
    assert kept.read_bytes() == CONTENT
    assert files_in(root) == [kept]
    assert seen[0] == (Stage.DOWNLOADING, 0, len(CONTENT))
    assert [done for stage, done, _ in seen if stage is Stage.DOWNLOADING] == sorted(done for _, done, _ in seen[:-1])
    assert seen[-1] == (Stage.VERIFYING, len(CONTENT), len(CONTENT))


async def test_same_content_is_kept_once(root: Path, artifacts: ArtifactStore, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(CONTENT)
    first = await artifacts.fetch(Artifact(str(model)), accept, ignore)
    second = await artifacts.fetch(Artifact(str(other)), accept, ignore)
    assert first.digest == second.digest
    assert len(files_in(root)) == 1
    assert artifacts.path(first) == artifacts.path(second)


async def test_two_fetches_of_one_source_at_once_copy_it_once(
    root: Path, artifacts: ArtifactStore, model: Path
) -> None:
    begun: list[int] = []

    def count(stage: Stage, done: int, whole: int) -> None:
        if stage is Stage.DOWNLOADING and done == 0:
            begun.append(done)

    both = [artifacts.fetch(Artifact(str(model)), accept, count) for _ in range(2)]
    first, second = await asyncio.gather(*both)
    assert first == second
    assert len(begun) == 1
    assert len(files_in(root)) == 1


async def test_content_that_the_engine_does_not_load_is_refused_and_not_fetched_again(
    root: Path, artifacts: ArtifactStore, tmp_path: Path
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"some text that pretends by its name")
    for _ in range(2):
        with pytest.raises(ArtifactError, match="it is no GGUF file"):
            await artifacts.fetch(Artifact(str(file)), gguf_only, ignore)
    assert files_in(root) == []
    file.write_bytes(CONTENT)
    await artifacts.fetch(Artifact(str(file)), gguf_only, ignore)


async def test_other_digest_than_expected_is_refused(root: Path, artifacts: ArtifactStore, model: Path) -> None:
    with pytest.raises(CorruptError, match="expected was sha256:00"):
        await artifacts.fetch(Artifact(str(model), "sha256:" + "0" * 64), accept, ignore)
    assert files_in(root) == []


@pytest.mark.parametrize("kind", ["missing", "pipe"])
async def test_what_is_no_readable_file_is_refused_at_once(tmp_path: Path, artifacts: ArtifactStore, kind: str) -> None:
    path = tmp_path / "model"
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ArtifactError, match=r"No such file|not a regular file"):
        async with asyncio.timeout(10):
            await artifacts.fetch(Artifact(str(path)), accept, ignore)


@pytest.mark.parametrize("uri", ["gopher://host/x", "relative/model", "", "oci://x/y", "file://host/x", "a\nb"])
def test_other_places_are_refused_with_what_is_supported(artifacts: ArtifactStore, uri: str) -> None:
    with pytest.raises(ArtifactError, match=r"supported are|has no artifact|file:///|printable"):
        artifacts.sources.source(uri)


def test_both_spellings_of_a_local_file_are_one_path() -> None:
    assert local_path("file:///a/b%20c") == local_path("/a/b c") == Path("/a/b c")


async def test_cancelled_fetch_shows_nothing_and_is_gone_on_with(
    root: Path, artifacts: ArtifactStore, model: Path
) -> None:
    half = threading.Event()

    def watch(stage: Stage, done: int, whole: int) -> None:
        if done > whole / 2:
            half.set()

    fetching = asyncio.get_running_loop().create_task(artifacts.fetch(Artifact(str(model)), accept, watch))
    await eventually_async(half.is_set, 30, "half of it is here")
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert files_in(root, "sha256") == []
    seen: list[int] = []
    got = await open_store(root).fetch(Artifact(str(model)), accept, lambda _, done, __: seen.append(done))
    assert seen[0] >= 64 * 1024, "what was copied is not copied again"
    assert got.digest == DIGEST
    assert len(files_in(root)) == 1


async def test_too_large_artifact_is_refused(root: Path, model: Path) -> None:
    store = open_store(root, FetchConfig(artifact_bytes_max=1000))
    with pytest.raises(ArtifactError, match="artifact_bytes_max"):
        await store.fetch(Artifact(str(model)), accept, ignore)
    assert files_in(root) == []


@pytest.mark.parametrize(
    "digest", ["sha256:../../etc", "sha256:" + "g" * 64, "md5:x", "sha256:" + "A" * 64, "sha256:" + "a" * 63]
)
def test_what_is_no_digest_is_no_path(artifacts: ArtifactStore, digest: str) -> None:
    assert artifacts.path(Artifact("/x", digest, 1)) is None


# --- a folder ------------------------------------------------------------------------------------


async def test_folder_is_one_path_of_links_without_what_could_run(
    root: Path, artifacts: ArtifactStore, folder: Path
) -> None:
    got = await artifacts.fetch(Artifact(folder.as_uri()), accept, ignore)
    assert [file.path for file in got.files] == ["1_Pooling/config.json", "config.json", "model.safetensors"]
    tree = artifacts.path(got)
    assert tree is not None
    assert files_in(tree) == [tree / "1_Pooling/config.json", tree / "config.json", tree / "model.safetensors"]
    assert (tree / "model.safetensors").stat().st_nlink == 2
    assert len(files_in(root, "sha256")) == 2, "equal files are kept once"
    again = await open_store(root / ".." / "other").fetch(Artifact(folder.as_uri()), accept, ignore)
    assert again.digest == got.digest


async def test_folder_that_its_engine_does_not_load_never_gets_its_name(
    root: Path, artifacts: ArtifactStore, folder: Path
) -> None:
    def refuse(place: Path) -> None:
        assert (place / "config.json").is_file()
        raise ValueError("no such architecture")

    with pytest.raises(ArtifactError, match="no such architecture"):
        await artifacts.fetch(Artifact(str(folder)), refuse, ignore)
    assert not list((root / "trees").glob("*"))
    assert files_in(root, "incoming") == []


async def test_link_out_of_the_folder_is_refused(artifacts: ArtifactStore, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is a link that leads out of the folder"):
        await artifacts.fetch(Artifact(str(folder)), accept, ignore)


async def test_link_inside_the_folder_is_followed(artifacts: ArtifactStore, folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("config.json")
    got = await artifacts.fetch(Artifact(str(folder)), accept, ignore)
    assert "tokenizer.json" in [file.path for file in got.files]


async def test_changed_list_of_files_is_not_the_artifact(artifacts: ArtifactStore, folder: Path) -> None:
    got = await artifacts.fetch(Artifact(str(folder)), accept, ignore)
    (folder / "config.json").write_text('{"a": 1}')
    with pytest.raises(CorruptError):
        await artifacts.fetch(Artifact(str(folder), "sha256:" + "0" * 64), accept, ignore)
    assert artifacts.path(got) is not None


# --- what is here --------------------------------------------------------------------------------


async def test_next_controller_hashes_once_before_the_first_use(
    root: Path, artifacts: ArtifactStore, model: Path
) -> None:
    got = await artifacts.fetch(Artifact(str(model)), accept, ignore)
    model.unlink()  # noqa: ASYNC240
    store = open_store(root)
    assert store.path(got) is None, "not hashed yet"
    stages: list[Stage] = []
    assert await store.fetch(got, accept, lambda stage, *_: stages.append(stage)) == got
    assert set(stages) == {Stage.VERIFYING}
    assert store.path(got) is not None
    stages.clear()
    await store.fetch(got, accept, lambda stage, *_: stages.append(stage))
    assert stages == [], "hashed once"


@pytest.mark.parametrize("harm", ["flip", "truncate", "swap"])
async def test_corrupt_file_is_moved_aside_and_fetched_once_again(
    root: Path, artifacts: ArtifactStore, model: Path, harm: str
) -> None:
    got = await artifacts.fetch(Artifact(str(model)), accept, ignore)
    kept = artifacts.path(got)
    assert kept is not None
    kept.chmod(0o600)
    if harm == "flip":
        with kept.open("r+b") as file:
            file.seek(1000)
            file.write(b"!")
    elif harm == "truncate":
        os.truncate(kept, 100)
    else:
        other = kept.with_suffix(".x")
        other.write_bytes(CONTENT[:-1] + b"!")
        other.replace(kept)
    assert artifacts.path(got) is None, "touched since it was hashed"
    assert await artifacts.fetch(got, accept, ignore) == got
    repaired = artifacts.path(got)
    assert repaired is not None
    assert repaired.read_bytes() == CONTENT
    if harm != "truncate":  # a file of another size is simply replaced
        assert len(files_in(root, "quarantine")) == 1


async def test_corrupt_folder_is_repaired(root: Path, artifacts: ArtifactStore, folder: Path) -> None:
    got = await artifacts.fetch(Artifact(str(folder)), accept, ignore)
    tree = artifacts.path(got)
    assert tree is not None
    weights = tree / "model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(b"\x08" + bytes(5015))
    store = open_store(root)
    assert await store.fetch(got, accept, ignore) == got
    repaired = store.path(got)
    assert repaired is not None
    assert (repaired / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


async def test_corrupt_file_without_its_source_is_told(root: Path, artifacts: ArtifactStore, model: Path) -> None:
    got = await artifacts.fetch(Artifact(str(model)), accept, ignore)
    kept = artifacts.path(got)
    assert kept is not None
    kept.chmod(0o600)
    kept.write_bytes(b"x" * len(CONTENT))
    model.write_bytes(CONTENT[:-1] + b"!")  # noqa: ASYNC240
    with pytest.raises(CorruptError, match=r"^artifact_corrupt: "):
        await artifacts.fetch(got, accept, ignore)
    assert artifacts.path(got) is None
    assert files_in(root, "sha256") == []


# --- what comes from elsewhere ---------------------------------------------------------------------


async def test_upload_is_taken_over(root: Path, artifacts: ArtifactStore) -> None:
    draft = artifacts.contents.folder("incoming") / "upload-1"
    draft.write_bytes(CONTENT)
    got = await artifacts.adopt(draft, "up-1", digest=DIGEST)
    assert got == Artifact("upload:up-1", DIGEST, len(CONTENT))
    assert artifacts.path(got) is not None
    assert len(files_in(root)) == 1
    assert await artifacts.fetch(got, gguf_only, ignore) == got


async def test_upload_of_a_folder_is_taken_over(root: Path, artifacts: ArtifactStore) -> None:
    drafts = {}
    for name in ("model.safetensors", "config.json"):
        drafts[name] = artifacts.contents.folder("incoming") / f"u-{name}"
        drafts[name].write_text("{}" + name)
    got = await artifacts.adopt_files(drafts, "up-1")
    tree = artifacts.path(got)
    assert tree is not None
    assert files_in(tree) == [tree / "config.json", tree / "model.safetensors"]
    assert files_in(root, "incoming") == []
    with pytest.raises(ArtifactError, match="no plain relative path"):
        await artifacts.adopt_files({"../x": tree / "config.json"}, "up-2")


async def test_upload_that_is_a_pickle_or_another_file_than_promised_is_refused(artifacts: ArtifactStore) -> None:
    draft = artifacts.contents.folder("incoming") / "upload-1"
    draft.write_bytes(b"\x80\x04\x95 builtins exec")
    with pytest.raises(ArtifactError, match="pickle"):
        await artifacts.adopt(draft, "up-1")
    draft.write_bytes(CONTENT)
    with pytest.raises(CorruptError):
        await artifacts.adopt(draft, "up-1", digest="sha256:" + "0" * 64)


async def test_damaged_upload_says_that_it_must_be_uploaded_again(artifacts: ArtifactStore) -> None:
    with pytest.raises(CorruptError, match="upload it again"):
        await artifacts.fetch(Artifact("upload:gone", DIGEST, len(CONTENT)), accept, ignore)


async def test_file_that_is_replaced_while_it_is_hashed_is_not_blamed(
    root: Path, artifacts: ArtifactStore, model: Path
) -> None:
    got = await artifacts.fetch(Artifact(str(model)), accept, ignore)
    store = open_store(root)
    file = store.contents.file(got.digest)

    replaced: list[int] = []

    def replace(stage: Stage, done: int, whole: int) -> None:
        if replaced:
            return
        replaced.append(done)
        other = file.with_suffix(".x")
        other.write_bytes(CONTENT)
        other.replace(file)

    assert await store.fetch(got, accept, replace) == got
    assert files_in(root, "quarantine") == []
    assert store.path(got) is not None
