"""F23: bytes that are not what they should be reach no engine, and whoever serves goes on serving."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hub import put_model
from tests.support.origin import Origin, origin
from tests.support.smollm import real_model
from tests.support.waiting import eventually
from tests.support.yard import Yard

WITHIN_S = 60.0
GGUF = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(200_000)


@pytest.fixture(scope="module")
def hub() -> Iterator[Origin]:
    with origin() as running:
        yield running


@pytest.fixture
def yard(tmp_path: Path, hub: Origin) -> Iterator[Yard]:
    settings = {"fetch.private_networks": "127.0.0.1/32", "fetch.hf_endpoint": hub.url, "fetch.part_bytes": 65_536}
    with Yard(tmp_path, settings) as running:
        yield running


def answers(yard: Yard, model: str) -> bool:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return yard.call("POST", "/v1/chat/completions", body, within_s=WITHIN_S).status == 200


def stored(yard: Yard, folder: str = "sha256") -> list[Path]:
    return sorted((yard.data / "artifacts" / folder).glob("*"))


def test_version_with_other_bytes_than_promised_is_never_started_and_the_previous_one_serves(
    yard: Yard, hub: Origin
) -> None:
    put_model(hub, "org/model", {"model.gguf": GGUF})
    (weights,) = [served for path, served in hub.files.items() if path.startswith("/cdn/")]
    weights.content = GGUF[:-1] + b"!"
    yard.deploy("sim", options={"ttft_ms": 1, "itl_ms": 1})
    release = {"framework": "llamacpp", "model_artifact": "hf://org/model", "version": "v2", "weight": 10}
    reply = yard.call("POST", "/v1/endpoints/sim/releases", release)
    assert reply.status == 202, reply.body

    def told() -> str:
        reason = str(yard.get("/v1/endpoints/sim")["progress"]["reason"])
        assert "artifact_corrupt" in reason
        return reason

    assert "its source promises sha256:" in eventually(told, WITHIN_S, "the corrupt artifact is told")
    assert all(answers(yard, "sim") for _ in range(40)), "the previous version takes all"
    assert stored(yard) == [], "nothing unverified has a digest for a name"
    versions = {replica["version"] for replica in yard.get("/v1/endpoints/sim")["replicas"] if "version" in replica}
    assert "v2" not in versions
    assert len(yard.engines("sim")) == 1


@pytest.mark.parametrize("harm", ["flip", "truncate"])
def test_stored_file_that_was_harmed_is_found_before_the_load_and_fetched_again(yard: Yard, harm: str) -> None:
    model = real_model()
    order = {"model_name": "smol", "framework": "llamacpp", "model_artifact": model.as_uri()}
    order["options"] = {"slots": 1, "context_length": 256}  # type: ignore[assignment]
    assert yard.call("POST", "/v1/models/deploy", order).status == 202
    yard.wait_ready("smol", within_s=WITHIN_S)
    (file,) = stored(yard)
    yard.stop()
    file.chmod(0o600)
    if harm == "flip":
        with file.open("r+b") as writer:
            writer.seek(50_000_000)
            byte = writer.read(1)
            writer.seek(50_000_000)
            writer.write(bytes([byte[0] ^ 1]))
    else:
        os.truncate(file, 50_000_000)
    yard.start()
    eventually(lambda: answers(yard, "smol"), WITHIN_S, "it serves again")
    assert file.read_bytes() == model.read_bytes()
    if harm == "flip":
        assert len(stored(yard, "quarantine")) == 1
