"""A PEFT folder is read whole or refused, and a simulated replica refuses what one that computes would."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import Tensor, gguf, safetensors
from tests.support.peft import peft_adapter

from modelyard.engines.peft_folder import read_folder
from modelyard.engines.simulated.adapters import check_adapter
from modelyard.formats import ArtifactInvalidError

QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
SMOL_WIDTH = 576


def folder(place: Path, tensors: dict[str, list[int]], **config: Any) -> Path:
    place.mkdir()
    (place / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4, **config}))
    content = {name: ("F16", shape, bytes(2 * prod(shape))) for name, shape in tensors.items()}
    (place / "adapter_model.safetensors").write_bytes(safetensors(content))
    return place


def pair(name: str = QUERY, *, size: int = 8) -> dict[str, list[int]]:
    return {f"{name}.lora_A.weight": [2, size], f"{name}.lora_B.weight": [size, 2]}


def test_pairs_are_found_by_their_modules(tmp_path: Path) -> None:
    head = "base_model.model.lm_head"
    read = read_folder(folder(tmp_path / "a", pair() | pair(head, size=16)), engine="x")
    assert {name: (one.a.shape, one.b.shape) for name, one in read.pairs.items()} == {
        "model.layers.0.self_attn.q_proj": ((2, 8), (8, 2)),
        "lm_head": ((2, 16), (16, 2)),
    }
    assert read.config.lora_alpha == 4


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({f"{QUERY}.lora_A.weight": [2, 8]}, "no whole pair lora_A, lora_B for 'model.layers.0"),
        ({f"{QUERY}.lora_A.weight": [2, 8], f"{QUERY}.lora_B.weight": [8, 3]}, "no whole pair"),
        (pair() | {f"{QUERY}.lora_A.default.weight": [2, 8]}, "has lora_A of .* twice"),
        (pair() | {f"{QUERY}.weight": [8, 8]}, "no half of a LoRA pair"),
        ({f"{QUERY}.lora_A.weight": [2], f"{QUERY}.lora_B.weight": [8, 2]}, "type or shape"),
    ],
)
def test_what_is_not_made_of_whole_pairs_is_refused(tmp_path: Path, tensors: dict[str, list[int]], said: str) -> None:
    with pytest.raises(ArtifactInvalidError, match=said):
        read_folder(folder(tmp_path / "a", tensors), engine="x")


def test_what_an_engine_cannot_apply_is_said_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ArtifactInvalidError, match=r"DoRA \(use_dora\), which some engine cannot apply"):
        read_folder(folder(tmp_path / "a", pair(), use_dora=True), engine="some engine")


def test_a_simulated_base_takes_adapters_of_its_width_and_of_any_when_it_has_none(tmp_path: Path) -> None:
    smol = peft_adapter(tmp_path / "smol", 1)
    check_adapter(smol, SMOL_WIDTH)
    check_adapter(smol, 0)
    with pytest.raises(ArtifactInvalidError, match=r"576 wide at .* its base is 64: it is for another base"):
        check_adapter(smol, 64)


@pytest.mark.parametrize(("module", "reads"), [("q_proj", True), ("up_proj", True), ("o_proj", False)])
def test_the_width_is_on_the_side_of_the_hidden_state(tmp_path: Path, module: str, reads: bool) -> None:
    name = f"base_model.model.model.layers.0.x.{module}"
    a, b = ([2, 8], [24, 2]) if reads else ([2, 24], [8, 2])
    made = folder(tmp_path / "a", {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
    check_adapter(made, 8)
    with pytest.raises(ArtifactInvalidError, match="8 wide"):
        check_adapter(made, 24)


def test_files_are_adapters_in_gguf_or_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_adapter(tmp_path / "nothing", 0)
    file = tmp_path / "file"
    keys = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    halves = [Tensor("blk.0.attn_q.weight.lora_a", (8, 2)), Tensor("blk.0.attn_q.weight.lora_b", (2, 8))]
    file.write_bytes(gguf(keys, halves))
    check_adapter(file, 0)
    file.write_bytes(gguf({"general.architecture": "llama"}, [Tensor("blk.0.attn_q.weight", (8, 8))]))
    with pytest.raises(ArtifactInvalidError, match="a whole model"):
        check_adapter(file, 0)
    file.write_bytes(safetensors({f"{QUERY}.lora_A.weight": ("F16", [2, 8], bytes(32))}))
    with pytest.raises(ArtifactInvalidError, match="an adapter as one safetensors file"):
        check_adapter(file, 0)
    file.write_bytes(b"no model at all")
    with pytest.raises(ArtifactInvalidError):
        check_adapter(file, 0)
