"""An adapter that names another base is doubted, and one whose base only goes by another name is not."""

import msgspec
import pytest

from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.facts import ModelFacts
from modelyard.policy.adapter_bases import doubt_of_base

BASE = ModelVersion(
    "ver-1", "ten-1", "base", "v1", "llamacpp", Artifact("file:///m/smollm2-135m-instruct-q8_0.gguf"), {}, 0,
    facts=ModelFacts(name="Smollm2 135M 8k Lc100K Mix1 Ep2"),
)  # fmt: skip


def doubt(said: str, base: ModelVersion = BASE) -> str:
    return doubt_of_base(ModelFacts(is_adapter=True, adapter_base=said), base)


@pytest.mark.parametrize("said", ["HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2 135M Instruct", "", "/", "./x/base/"])
def test_names_that_agree_or_say_nothing_raise_no_doubt(said: str) -> None:
    assert not doubt(said)


def test_another_model_is_doubted_by_both_names() -> None:
    told = doubt("meta-llama/Llama-3-8B")
    assert "it names the base 'meta-llama/Llama-3-8B', and is loaded onto 'base@v1' (Smollm2 135M" in told


def test_a_short_name_that_somebody_gave_the_base_settles_nothing() -> None:
    assert doubt("meta-llama/Llama-3-8B", msgspec.structs.replace(BASE, name="llama"))
    assert not doubt("meta-llama/Llama-3-8B", msgspec.structs.replace(BASE, name="meta.llama-3-8b"))


def test_a_base_without_a_file_has_no_name_to_compare() -> None:
    assert not doubt("meta-llama/Llama-3-8B", msgspec.structs.replace(BASE, artifact=Artifact(""), facts=ModelFacts()))
