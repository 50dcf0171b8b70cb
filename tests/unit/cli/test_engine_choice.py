"""Which engine a model gets when none is named, and that help names all that there are."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.support.models import safetensors

from modelyard import compose
from modelyard.cli import deploy, endpoints
from modelyard.cli.engine_choice import ENGINES, engine_for, engine_of_content
from modelyard.cli.exits import Failure
from modelyard.config import Config, DataDirectory

ONNX = bytes([0x08, 0x08, 0x12, 0x02]) + b"me"
"""How an ONNX file begins: its version, and who made it."""


def test_the_engines_that_help_names_are_those_that_there_are(tmp_path: Path) -> None:
    assert set(ENGINES) == set(compose._engines(Config(), DataDirectory(tmp_path)))


@pytest.mark.parametrize("command", [deploy.command, endpoints.add_release], ids=["deploy", "add-release"])
def test_help_names_all_engines(command: click.Command) -> None:
    told = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    assert all(name in told for name in ENGINES)


@pytest.mark.parametrize(("content", "engine"), [(b"GGUF\x03", "llamacpp"), (ONNX, "onnx"), (b"", ""), (b"text", "")])
def test_content_tells_the_engine_and_names_do_not(tmp_path: Path, content: bytes, engine: str) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(content)
    assert engine_of_content(file) == engine


def test_a_folder_with_an_onnx_file_is_for_onnx_and_one_of_safetensors_for_several(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(safetensors({"w": ("BF16", [1], bytes(2))}))
    assert engine_of_content(tmp_path) == ""
    (tmp_path / "model.onnx").write_bytes(ONNX)
    assert engine_of_content(tmp_path) == "onnx"


def test_an_adapter_is_for_the_engine_of_its_base(tmp_path: Path) -> None:
    folder = tmp_path / "a1"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 8}')
    weights = {f"base_model.model.q_proj.lora_{half}.weight": ("F32", [1, 1], bytes(4)) for half in "AB"}
    (folder / "adapter_model.safetensors").write_bytes(safetensors(weights))
    told = r"a1 is a LoRA adapter \(rank 8, for a base that it does not name\); give --base NAME@VERSION\."
    with pytest.raises(Failure, match=told):
        engine_for(folder.as_uri(), folder)
    (folder / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(click.UsageError, match="Give --engine"):
        engine_for(folder.as_uri(), folder)


def test_what_is_elsewhere_is_told_by_its_name() -> None:
    assert engine_for("https://a.example/m.onnx?token=1", None) == "onnx"
    assert engine_for("hf://org/repo/m.GGUF", None) == "llamacpp"
