"""S11: what an engine loads is what was verified: no wrong bytes of the right length, no swap after the check."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hub import put_model
from tests.support.origin import Origin, origin
from tests.support.smollm import real_model
from tests.support.waiting import eventually
from tests.support.yard import Yard

GGUF = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(300_000)


@pytest.fixture(scope="module")
def hub() -> Iterator[Origin]:
    with origin() as running:
        yield running


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, hub: Origin) -> Iterator[Yard]:
    settings = {"fetch.private_networks": "127.0.0.1/32", "fetch.hf_endpoint": hub.url, "fetch.hf_token": "hub-secret"}
    with Yard(tmp_path_factory.mktemp("yard"), settings) as running:
        yield running


def stored(yard: Yard) -> list[Path]:
    return list((yard.data / "artifacts" / "sha256").glob("*"))


def failure(yard: Yard, name: str) -> str:
    return str(yard.get(f"/v1/endpoints/{name}")["failure"] or "")


def test_right_length_with_wrong_bytes_never_gets_a_name(yard: Yard, hub: Origin) -> None:
    put_model(hub, "org/model", {"model.gguf": GGUF})
    next(served for path, served in hub.files.items() if path.startswith("/cdn/")).content = GGUF[:-1] + b"!"
    order = {"model_name": "wrong", "framework": "llamacpp", "model_artifact": "hf://org/model"}
    assert yard.call("POST", "/v1/models/deploy", order).status == 202
    assert "artifact_corrupt" in eventually(lambda: failure(yard, "wrong"), 30, "it failed")
    assert stored(yard) == []
    assert yard.engines("wrong") == []


def test_file_that_is_swapped_after_the_check_is_not_loaded(yard: Yard) -> None:
    model = real_model()
    order = {"model_name": "smol", "framework": "llamacpp", "model_artifact": model.as_uri()}
    order["options"] = {"slots": 1, "context_length": 256}  # type: ignore[assignment]
    assert yard.call("POST", "/v1/models/deploy", order).status == 202
    yard.wait_ready("smol", within_s=60)
    (file,) = stored(yard)
    other = file.with_name("swap")
    other.write_bytes(GGUF)
    other.replace(file)
    (engine,) = yard.engines("smol")
    yard.kill(engine.pid)

    def recovered() -> bool:
        running = yard.engines("smol")
        return bool(running) and running[0].pid != engine.pid and yard.ready_replicas("smol") == 1

    eventually(recovered, 60, "another engine runs")
    assert file.read_bytes() == model.read_bytes(), "it was fetched again before the load"


def test_secrets_of_sources_are_nowhere(yard: Yard) -> None:
    shown = [yard.call("GET", path).body for path in ("/v1/endpoints", "/v1/models", "/v1/endpoints/wrong")]
    logs = [file.read_bytes() for file in (yard.data / "logs").glob("*")]
    assert all(b"hub-secret" not in text for text in [*shown, *logs, yard.output.read_bytes()])
