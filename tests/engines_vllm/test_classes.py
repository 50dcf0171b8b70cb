"""A classifier in vLLM, deployed by the platform and asked on the platform's own route."""

import json
from pathlib import Path

import pytest
from tests.support.vllm import SETTINGS, converted_smollm, deploy, lane, run_inside, tiny_llama
from tests.support.yard import Yard

pytestmark = [lane, pytest.mark.timeout(900)]
__all__ = ["SETTINGS"]
CLASSES = ("good", "bad", "neither")
TEXTS = ["What a fine day!", "I want my money back.", "It is twelve o'clock."]
TRANSFORMERS = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder, texts = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
found = []
for text in texts:
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        found.append({"probs": model(ids).logits[0].softmax(-1).tolist(), "tokens": ids.shape[1]})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    return tiny_llama(root / "tiny", converted_smollm(root / "smollm"), classes=CLASSES)


def test_classes_are_those_of_transformers(yard: Yard, folder: Path) -> None:
    expected = run_inside(TRANSFORMERS, str(folder), json.dumps(TEXTS))
    deploy(yard, "mood", folder, {"task": "classify", "slots": 4, "context_length": 256, "dtype": "float32"})
    answer = yard.call("POST", "/v1/classify", {"model": "mood", "input": TEXTS}, within_s=120)
    assert answer.status == 200, answer.body
    body = answer.json()
    for found, theirs in zip(body["data"], expected, strict=True):
        assert found["probs"] == pytest.approx(theirs["probs"], abs=1e-3)
        assert found["label"] == CLASSES[theirs["probs"].index(max(theirs["probs"]))]
    row = yard.row_of(answer.headers["x-request-id"])
    assert row["prompt_tokens"] == body["usage"]["prompt_tokens"] == sum(one["tokens"] for one in expected)
    refused = yard.call(
        "POST", "/v1/chat/completions", {"model": "mood", "messages": [{"role": "user", "content": "x"}]}
    )
    assert refused.status == 400
    print(f"classes: {[(one['label'], round(max(one['probs']), 3)) for one in body['data']]}")
