"""``s3://`` against a real object store that checks signatures."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.artifacts import HERE, accept, digest_of, ignore, open_sources
from tests.support.objects import ObjectStore, object_store

from modelyard.clock import SystemClock
from modelyard.config import FetchConfig
from modelyard.control.artifacts import ArtifactError, ArtifactStore, Sources
from modelyard.domain.catalog import Artifact

GGUF = b"GGUF" + bytes(range(251)) * 2000
WEIGHTS = b"\x10\0\0\0\0\0\0\0{}" + bytes(range(256)) * 800


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("seaweed")) as running:
        running.put(
            "models",
            {
                "a/model%20one%2B.gguf": GGUF,
                "llama/model.safetensors": WEIGHTS,
                "llama/config.json": b"{}",
                "llama/sub/tokenizer.json": b"{}",
                "llama/evil.py": b"import os",
                "llama/pytorch_model.bin": b"PK",
                "llama2/config.json": b"{}",
                **{f"many/part-{number:04}.safetensors": b"%d" % number for number in range(3)},
            },
        )
        yield running


@pytest.fixture
def store(objects: ObjectStore, tmp_path: Path) -> ArtifactStore:
    config = FetchConfig(private_networks=HERE, s3=objects.config, part_bytes=64 * 1024)
    return ArtifactStore(tmp_path / "artifacts", _sources(config))


def _sources(config: FetchConfig) -> Sources:
    return open_sources(config, now_s=SystemClock().unix_s)  # a signature holds for minutes


async def got(store: ArtifactStore, uri: str) -> Artifact:
    return await store.fetch(Artifact(uri), accept, ignore)


async def test_object_is_fetched_in_signed_parts(store: ArtifactStore) -> None:
    artifact = await got(store, "s3://models/a/model one+.gguf")
    assert (artifact.digest, artifact.size_bytes) == (digest_of(GGUF), len(GGUF))


async def test_prefix_is_the_folder_of_a_model(store: ArtifactStore) -> None:
    artifact = await got(store, "s3://models/llama/")
    assert [file.path for file in artifact.files] == ["config.json", "model.safetensors", "sub/tokenizer.json"]
    tree = store.path(artifact)
    assert tree is not None
    assert (tree / "model.safetensors").read_bytes() == WEIGHTS


async def test_wrong_secret_is_refused_and_never_told(objects: ObjectStore, tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(objects.config, secret_key="another-secret")
    store = ArtifactStore(tmp_path, _sources(FetchConfig(private_networks=HERE, s3=wrong)))
    with pytest.raises(ArtifactError, match="answers 403") as failed:
        await got(store, "s3://models/llama/")
    assert "another-secret" not in str(failed.value)
    assert "another-secret" not in repr(wrong)


@pytest.mark.parametrize("uri", ["s3://models/none.gguf", "s3://models/none/", "s3://nothing/x.gguf"])
async def test_what_is_not_there_is_told(store: ArtifactStore, uri: str) -> None:
    with pytest.raises(ArtifactError, match=r"404|holds no|403"):
        await got(store, uri)
