"""A model over two workers says what it says on one: vLLM's tensor parallel, deployed by the platform."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.vllm import SETTINGS, converted_smollm, deploy, lane, tiny_llama
from tests.support.waiting import eventually
from tests.support.yard import Yard

pytestmark = [lane, pytest.mark.timeout(1300)]
__all__ = ["SETTINGS"]
PROMPT = "A random model says nothing, but always the same."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    return tiny_llama(root / "tiny", converted_smollm(root / "smollm"))


def answer_of(yard: Yard, folder: Path, ways: int) -> tuple[str, list[float]]:
    """Deploy the folder over ``ways`` workers, ask it once through the gateway, and delete it."""
    name = f"tiny-{ways}"
    deploy(yard, name, folder, {"tensor_parallel": ways, "slots": 2, "context_length": 256, "dtype": "float32"})
    body = {"model": name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 1}
    answer = yard.call("POST", "/v1/completions", body, within_s=300)
    assert answer.status == 200, answer.body
    choice: dict[str, Any] = answer.json()["choices"][0]
    assert yard.call("DELETE", f"/v1/endpoints/{name}").status == 202
    eventually(lambda: not yard.engines(), 60, "its processes are gone")
    return choice["text"], [float(value) for value in choice["logprobs"]["token_logprobs"]]


def test_two_workers_say_what_one_says(yard: Yard, folder: Path) -> None:
    text, logprobs = answer_of(yard, folder, 1)
    other_text, others = answer_of(yard, folder, 2)
    far = max(abs(one - other) for one, other in zip(logprobs, others, strict=True))
    print(f"tensor parallel: {len(logprobs)} tokens, logprobs at most {far:.2g} apart")
    assert len(logprobs) == 24
    assert other_text == text
    assert far < 1e-3
