"""``modelyard models inspect``: a path is read here, without a platform; a name asks the registry."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import Tensor, field, gguf, llama, safetensors, tiny_gguf

from modelyard.cli.exits import Refused
from modelyard.cli.http import Platform
from modelyard.cli.main import main

THERE = ["--url", "http://x", "--key", "k"]
VERSION: dict[str, Any] = {
    "id": "ver-1",
    "name": "org/smol",
    "version": "v2",
    "framework": "llamacpp",
    "status": "active",
    "artifact_path": "file:///models/smol.gguf",
    "artifact_digest": "sha256:abc",
    "artifact_size": 98_362_432,
    "memory_required": 400 * 1024 * 1024,
    "base_id": "ver-0",
    "parent_id": "ver-p",
    "created_at": 0,
    "facts": {"format": "gguf", "heads": 9, "kv_heads": 3, "kv_bytes_per_token": 23_040, "context_length": 8192},
    "files": [{"path": "config.json", "size_bytes": 10, "digest": "sha256:def"}],
}


def shown(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(["models", "inspect", *line]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_the_tensors_of_an_onnx_graph_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = field(2, field(1, field(2, "batch")) + field(1, field(1, 512)))
    ends = b"".join(
        field(number, field(1, name) + field(2, field(1, field(1, 1) + shape)))
        for number, name in ((11, "audio"), (12, "speech"))
    )
    (tmp_path / "vad.onnx").write_bytes(field(1, 9) + field(7, ends) + field(8, field(2, 17)))
    assert main(["models", "inspect", str(tmp_path / "vad.onnx")]) == 0, capsys.readouterr().err
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["input", "audio", "FP32", "[any,", "512]"] in lines
    assert ["output", "speech", "FP32", "[any,", "512]"] in lines


def test_a_file_is_read_without_a_platform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny_gguf(tmp_path / "tiny.gguf")
    text = shown(capsys, str(file), "--data-dir", str(tmp_path / "nothing"))
    assert "Architecture   llama\n" in text
    assert "Heads          4, 2 of them of keys and values\n" in text
    assert "Weights        128 bytes\n" in text
    assert "KV cache       256 bytes a token at 16 bits; 4,194,304 tokens in 1 GiB\n" in text
    assert "Whole context  256 KiB of cache\n" in text
    assert text.endswith("Chat template\n{{ messages }}\n")
    read = json.loads(shown(capsys, str(file), "--json"))
    assert read["facts"]["parameters"] == 32
    assert (read["artifact_size"], read["kv_tokens_per_gib"]) == (file.stat().st_size, 2**22)


def test_windows_states_and_adapters_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model"
    window = {"llama.attention.sliding_window": 64, "llama.attention.sliding_window_pattern": [True, False]}
    state = {"llama.ssm.inner_size": 128, "llama.ssm.state_size": 16}
    file.write_bytes(gguf(llama() | window | state))
    text = shown(capsys, str(file))
    assert "64 tokens, for 128 bytes of a token's cache" in text
    assert "16 KiB a sequence, at most" in text
    lora = {"general.architecture": "llama", "general.type": "adapter", "general.base_model.0.name": "Smol"}
    file.write_bytes(gguf(lora, [Tensor("q.lora_a", (64, 8))]))
    assert "Adapter       LoRA of rank 8, for Smol\n" in shown(capsys, str(file))


def test_a_folder_is_read_whole_but_for_what_is_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hook.py").write_text("import os\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "notes.txt").write_text("fine")
    (tmp_path / "model.safetensors").write_bytes(safetensors({"w": ("BF16", [1000, 2000], bytes(4_000_000))}))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}))
    text = shown(capsys, str(tmp_path))
    assert "Architecture  LlamaForCausalLM" in text
    assert "Parameters    2 M (2,000,000)" in text
    (tmp_path / "sub" / "model.py").write_text("import os\n")
    assert main(["models", "inspect", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "artifact_invalid: The artifact has the file 'sub/model.py', which is a script" in error


def test_a_link_that_leads_out_of_a_folder_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors({"w": ("BF16", [1], bytes(2))}))
    (folder / "tokenizer.json").symlink_to("/etc/passwd")
    assert main(["models", "inspect", str(folder)]) == 1
    assert "tokenizer.json is a link that leads out of the folder" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    (folder / "same.safetensors").symlink_to("model.safetensors")
    assert "safetensors" in shown(capsys, str(folder))


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (b"PK\x03\x04", 1, "artifact_invalid: The artifact is no model: it is a zip file"),
        (b"GGUF", 1, "artifact_invalid: The artifact is a truncated GGUF file. Fetch it again."),
        (None, 3, "There is no file"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, code: int, said: str
) -> None:
    file = tmp_path / "model.gguf"
    if content is not None:
        file.write_bytes(content)
    assert main(["models", "inspect", str(file)]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_name_asks_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def get(_platform: Platform, path: str, **_query: object) -> Any:
        asked.append(path)
        if path == "/v1/registry/models":
            return {"data": [VERSION], "has_more": False}
        if path.endswith("/org/smol"):
            return VERSION
        raise Refused("There is no such model.", status=404, code="model_not_found")

    monkeypatch.setattr(Platform, "get", get)
    text = shown(capsys, "org/smol", *THERE)
    assert asked == ["/v1/registry/models/org/smol"]
    for line in ("Model                org/smol v2", "Digest               sha256:abc", "After                ver-p"):
        assert line in text
    assert "22.5 KiB a token at 16 bits; 46,603 tokens in 1 GiB" in text
    assert "config.json  10 bytes  sha256:def" in text
    assert json.loads(shown(capsys, "org/smol", "--json", *THERE))["base_id"] == "ver-0"
    assert main(["models", "inspect", "org/smal", *THERE]) == 3
    assert "Did you mean 'org/smol'?" in capsys.readouterr().err
