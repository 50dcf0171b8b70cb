"""Models of a hub: pinned to a commit, checked against its digests, without what could run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.artifacts import HERE, accept, digest_of, files_in, ignore, open_store
from tests.support.hub import COMMIT, put_model
from tests.support.origin import Origin, origin

from modelyard.config import FetchConfig
from modelyard.control.artifacts import ArtifactError, ArtifactStore
from modelyard.control.artifacts.sources.hf import place_of
from modelyard.domain.catalog import Artifact

WEIGHTS = b"\x10\0\0\0\0\0\0\0{}" + bytes(range(256)) * 800
GGUF = b"GGUF" + bytes(range(256)) * 900
REPO = "org/tiny-model"
FILES = {
    "README.md": b"# words",
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"",
    "vocab.txt": b"a\nb",
    "requirements.txt": b"evil",
    "1_Pooling/config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"\x80\x02 pickle",
    "modeling_tiny.py": b"import os",
    "onnx/model.onnx": b"\x08 onnx",
    "odd name.json": b"{}",
}


@pytest.fixture
def hub() -> Iterator[Origin]:
    with origin() as running:
        yield running


@pytest.fixture
def store(tmp_path: Path, hub: Origin) -> ArtifactStore:
    config = FetchConfig(private_networks=HERE, hf_endpoint=hub.url, hf_token="the-token", part_bytes=64 * 1024)
    return open_store(tmp_path / "artifacts", config)


async def got(store: ArtifactStore, uri: str) -> Artifact:
    return await store.fetch(Artifact(uri), accept, ignore)


async def test_folder_of_a_model_is_taken_without_what_could_run(store: ArtifactStore, hub: Origin) -> None:
    put_model(hub, REPO, FILES, page=3)
    artifact = await got(store, f"hf://{REPO}")
    expected = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    assert [file.path for file in artifact.files] == ["1_Pooling/config.json", *expected]
    tree = store.path(artifact)
    assert tree is not None
    assert (tree / "model.safetensors").read_bytes() == WEIGHTS
    asked = " ".join(seen.path for seen in hub.seen)
    assert "pytorch_model" not in asked
    assert ".py" not in asked


async def test_revision_is_pinned_to_its_commit(store: ArtifactStore, hub: Origin) -> None:
    put_model(hub, REPO, FILES, revision="v1.0")
    listing = await store.sources.source(f"hf://{REPO}@v1.0").list()
    assert listing.uri == f"hf://{REPO}@{COMMIT}"
    first = await got(store, listing.uri)
    put_model(hub, REPO, {**FILES, "config.json": b'{"new": 1}'}, revision="v1.0", commit="b2" * 20)
    assert (await got(store, listing.uri)).digest == first.digest


async def test_one_file_is_one_file_and_fetched_in_parts(store: ArtifactStore, hub: Origin) -> None:
    put_model(hub, REPO, {"q4.gguf": GGUF, "q8.gguf": GGUF + b"8"})
    artifact = await got(store, f"hf://{REPO}@main/q4.gguf")
    assert (artifact.digest, artifact.files) == (digest_of(GGUF), ())
    assert sum("/cdn/" in seen.path for seen in hub.seen) == -(-len(GGUF) // (64 * 1024))


async def test_only_gguf_of_a_model_needs_no_name_and_several_are_listed(store: ArtifactStore, hub: Origin) -> None:
    put_model(hub, REPO, {"q4.gguf": GGUF, "README.md": b""})
    listing = await store.sources.source(f"hf://{REPO}").list()
    assert (listing.uri, listing.is_folder) == (f"hf://{REPO}@{COMMIT}/q4.gguf", False)
    put_model(hub, REPO, {"q4.gguf": GGUF, "q8.gguf": GGUF})
    with pytest.raises(ArtifactError, match=r"2 GGUF files; name one: q4\.gguf, q8\.gguf"):
        await got(store, f"hf://{REPO}")


async def test_subfolder_is_a_folder(store: ArtifactStore, hub: Origin) -> None:
    put_model(hub, REPO, {**FILES, "onnx/config.json": b"{}"})
    artifact = await got(store, f"hf://{REPO}@main/onnx/")
    assert [file.path for file in artifact.files] == ["config.json", "model.onnx"]


async def test_weights_with_other_bytes_than_the_hub_promises_are_corrupt(
    store: ArtifactStore, hub: Origin, tmp_path: Path
) -> None:
    put_model(hub, REPO, {"q4.gguf": GGUF})
    hub.files[f"/cdn/{digest_of(GGUF)[7:]}"].content = GGUF[:-1] + b"!"
    with pytest.raises(ArtifactError, match="artifact_corrupt"):
        await got(store, f"hf://{REPO}")
    assert files_in(tmp_path / "artifacts", "sha256") == []


async def test_what_is_here_by_its_digest_is_not_fetched(store: ArtifactStore, hub: Origin) -> None:
    put_model(hub, REPO, {"q4.gguf": GGUF})
    put_model(hub, "org/copy", {"other.gguf": GGUF})
    await got(store, f"hf://{REPO}")
    before = sum("/cdn/" in seen.path for seen in hub.seen)
    assert (await got(store, "hf://org/copy")).digest == digest_of(GGUF)
    assert sum("/cdn/" in seen.path for seen in hub.seen) == before


async def test_token_goes_to_the_hub_and_to_no_other_host(store: ArtifactStore, hub: Origin) -> None:
    put_model(hub, REPO, {"q4.gguf": GGUF})
    away = f"http://cdn.example:{hub.port}/cdn/{digest_of(GGUF)[7:]}"
    hub.files[f"/{REPO}/resolve/{COMMIT}/q4.gguf"].redirect = away
    assert (await got(store, f"hf://{REPO}")).digest == digest_of(GGUF)
    for seen in hub.seen:
        is_away = seen.headers["host"].startswith("cdn.example")
        assert is_away == seen.path.startswith("/cdn/")
        assert seen.headers.get("authorization") == (None if is_away else "Bearer the-token")


@pytest.mark.parametrize("answer", [b"[]", b"{", b'{"sha": "../../x"}', b'{"sha": 5}', b"[" * 100_000])
async def test_nonsense_of_a_hub_is_an_error(store: ArtifactStore, hub: Origin, answer: bytes) -> None:
    hub.put(f"/api/models/{REPO}/revision/main", answer)
    with pytest.raises(ArtifactError):
        await got(store, f"hf://{REPO}")


async def test_list_that_goes_on_elsewhere_is_refused(store: ArtifactStore, hub: Origin) -> None:
    put_model(hub, REPO, FILES)
    hub.put(
        f"/api/models/{REPO}/tree/{COMMIT}?recursive=true",
        json.dumps([]).encode(),
        headers={"Link": '<http://169.254.169.254/x>; rel="next"'},
    )
    with pytest.raises(ArtifactError, match="another host"):
        await got(store, f"hf://{REPO}")


@pytest.mark.parametrize("path", ["../../etc/passwd.json", "/etc/x.json", "a\\b.json", "a/../b.json", "a\u202eb.json"])
async def test_names_that_mean_more_than_a_name_are_not_taken(store: ArtifactStore, hub: Origin, path: str) -> None:
    put_model(hub, REPO, {"model.safetensors": WEIGHTS})
    tree = hub.files[f"/api/models/{REPO}/tree/{COMMIT}?recursive=true"]
    tree.content = json.dumps([*json.loads(tree.content), {"type": "file", "path": path, "size": 2}]).encode()
    assert [file.path for file in (await got(store, f"hf://{REPO}")).files] == ["model.safetensors"]


@pytest.mark.parametrize(
    "uri",
    [
        "hf://",
        "hf://org",
        "hf://org/name@",
        "hf://org/../x",
        "hf://org/name@main/../x",
        "hf://org/name?x",
        "hf://a/b@c/d#e",
    ],
)
def test_what_names_no_model_is_refused(uri: str) -> None:
    with pytest.raises(ArtifactError, match="hf://org/name"):
        place_of(uri)


def test_revision_may_be_quoted() -> None:
    assert place_of("hf://org/name@refs%2Fpr%2F1/a.gguf") == ("org/name", "refs/pr/1", "a.gguf")
