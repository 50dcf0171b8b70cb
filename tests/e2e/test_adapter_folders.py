"""A tenant without a file of the host uploads an adapter's folder, deploys it by the command line, and calls it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import safetensors
from tests.support.yard import Yard

CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "org/base",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with Yard(tmp_path_factory.mktemp("folders")) as yard:
        yard.deploy("base", options={"max_adapters": 4}, shared=True)
        yield yard


def adapter(folder: Path, *, seed: int = 1, tensors: Sequence[str] = ("lora_A.weight", "lora_B.weight")) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    (folder / "README.md").write_text("# An adapter\n")
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    content = {f"{module}.{name}": ("F32", [4, 4], bytes([seed]) * 64) for name in tensors}
    (folder / "adapter_model.safetensors").write_bytes(safetensors(content))
    return folder


def tenant_key(yard: Yard, name: str) -> str:
    tenant = yard.call("POST", "/v1/tenants", {"name": name}).json()["id"]
    return yard.new_key(name=name, tenant_id=tenant, scopes=["manage", "inference"])


def modelyard(yard: Yard, key: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MODELYARD")}
    environment |= {"MODELYARD_URL": yard.url, "MODELYARD_API_KEY": key}
    command = [sys.executable, "-m", "modelyard", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)


def test_a_folder_is_deployed_as_an_adapter_and_answers(yard: Yard, tmp_path: Path) -> None:
    key = tenant_key(yard, "uploader")
    folder = adapter(tmp_path / "my-bot")
    done = modelyard(yard, key, "deploy", str(folder), "--base", "base@v1", "--name", "my-bot", "--wait")
    assert done.returncode == 0, done.stderr
    assert "'my-bot' is ready" in done.stdout
    body = {"model": "my-bot", "messages": [{"role": "user", "content": "Hello"}]}
    assert yard.call("POST", "/v1/chat/completions", body, key=key).status == 200
    shown = modelyard(yard, key, "endpoints", "my-bot")
    assert "Host:" in shown.stdout.replace("Host ", "Host:"), shown.stdout
    assert "SEAT" in shown.stdout
    versions = modelyard(yard, key, "models", "versions", "my-bot", "--json")
    (version,) = json.loads(versions.stdout)["data"] if "data" in versions.stdout else json.loads(versions.stdout)
    assert version["base"] == "base@v1"
    assert [file["path"] for file in version["files"]] == ["adapter_config.json", "adapter_model.safetensors"]
    assert version["facts"]["is_adapter"]
    loaded = [record for record in yard.journal() if record["event"] == "adapter_loaded"]
    assert loaded[-1]["model"].startswith("my-bot@")
    # The endpoint's own file says the same, and changes nothing.
    again = modelyard(yard, key, "endpoints", "rm", "my-bot")
    assert again.returncode == 0, again.stderr


def test_a_folder_that_another_tenant_sent_is_not_ones_own(yard: Yard, tmp_path: Path) -> None:
    owner, other = tenant_key(yard, "sender"), tenant_key(yard, "thief")
    done = modelyard(yard, owner, "models", "upload", str(adapter(tmp_path / "own", seed=2)), "-q")
    assert done.returncode == 0, done.stderr
    uri = done.stdout.strip()
    order: dict[str, Any] = {"model_name": "stolen", "model_artifact": uri, "base": "base@v1"}
    reply = yard.call("POST", "/v1/models/deploy", order, key=other)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "model_artifact")
    digests = [one["digest"] for one in yard.call("GET", "/v1/uploads/artifacts", key=owner).json()["data"]]
    folder = {"name": "stolen", "files": [{"path": "adapter_config.json", "digest": digests[0]}]}
    reply = yard.call("POST", "/v1/uploads/folders", folder, key=other)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "files")
    assert yard.call("POST", "/v1/models/deploy", order, key=owner).status == 202


def test_a_model_is_no_adapter_and_an_adapter_no_model(yard: Yard, tmp_path: Path) -> None:
    key = tenant_key(yard, "mixed-up")
    plain = adapter(tmp_path / "plain", seed=3, tensors=["weight"])
    (plain / "adapter_config.json").rename(plain / "config.json")
    uri = modelyard(yard, key, "models", "upload", str(plain), "-q").stdout.strip()
    assert uri.startswith("upload:sha256:")
    reply = yard.call(
        "POST", "/v1/models/deploy", {"model_name": "x", "model_artifact": uri, "base": "base@v1"}, key=key
    )
    assert reply.status == 400
    assert "it is no LoRA adapter" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("name", "content"), [("run.py", b"import os\n"), ("weights.safetensors", b"\x80\x04pickled")])
def test_what_could_run_code_makes_no_folder(yard: Yard, tmp_path: Path, name: str, content: bytes) -> None:
    key = tenant_key(yard, f"coder-{name}")
    folder = adapter(tmp_path / "bad", seed=4)
    (folder / name).write_bytes(content)
    files = []
    for file in sorted(folder.iterdir()):
        done = modelyard(yard, key, "models", "upload", str(file), "--json")
        if done.returncode == 0:
            files.append({"path": file.name, "digest": json.loads(done.stdout)["digest"]})
    if len(files) == len(list(folder.iterdir())):
        reply = yard.call("POST", "/v1/uploads/folders", {"name": "bad", "files": files}, key=key)
        assert reply.status == 400, reply.body
        assert name in reply.json()["error"]["message"]
    else:
        assert name not in {file["path"] for file in files}, "it is refused as a file already"


def test_mistakes_of_a_tenant_are_told_alone_and_a_forgotten_base_is_known(yard: Yard, tmp_path: Path) -> None:
    key = tenant_key(yard, "mistaken")
    folder = str(adapter(tmp_path / "a1", seed=4))
    for more in ([], ["--dry-run"]):
        wrong = modelyard(yard, key, "deploy", folder, "--base", "bse@v1", "--name", "e1", *more)
        assert wrong.returncode == 2
        assert (
            "made. base: there is no version 'bse@v1' of yours, nor a shared one; did you mean 'base@v1'?"
            in wrong.stderr
        )
        assert "scope 'admin'" not in wrong.stderr
    for more in (["--name", "e2"], ["--on", "base"]):
        forgotten = modelyard(yard, key, "deploy", folder, *more)
        assert forgotten.returncode == 2
        assert "a1 is a LoRA adapter (rank 4, for org/base); give --base NAME@VERSION." in forgotten.stderr
    assert modelyard(yard, key, "deploy", folder, "--base", "base@v1", "--name", "base").returncode == 0
    again = modelyard(yard, key, "deploy", folder, "--base", "base@v1", "--name", "other", "--wait")
    assert again.returncode == 0, "an own adapter named like the shared base does not hide it: " + again.stderr
