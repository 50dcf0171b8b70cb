"""What ``modelyard models convert`` makes of a GGUF file is the same model: against llama.cpp, and for transformers."""

import http.client
import json
import math
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.smollm import real_model
from tests.support.vllm import converted_smollm, lane, run_inside
from tests.support.waiting import eventually

from modelyard.fleet.ports import free_port

pytestmark = [lane, pytest.mark.timeout(900)]
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "In 1969, Neil Armstrong", "3 + 4 ="]
TEXTS = ["123 a1b2  x\n\n<|im_end|>", "naïve ☃ 한국어 don't", "<|im_start|>user\nHi<|im_end|>\n"]
SECRET = "s"
INSIDE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompts, texts = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder)
model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
found = []
for prompt in prompts:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, -1].float(), -1)
    top = logprobs.topk(5)
    best = {str(i): v for i, v in zip(top.indices.tolist(), top.values.tolist())}
    found.append({"tokens": ids.shape[1], "top": best})
greedy = model.generate(tokenizer(prompts[0], return_tensors="pt").input_ids, max_new_tokens=12, do_sample=False)
chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
print(json.dumps({
    "wrong": [sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")],
    "found": found, "ids": [tokenizer(text).input_ids for text in texts], "greedy": greedy.shape[1], "chat": chat,
    "back": [tokenizer.decode(tokenizer(text).input_ids) for text in texts],
}))
"""


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = converted_smollm(tmp_path_factory.mktemp("converted") / "smollm")
    return dict(run_inside(INSIDE, str(folder), json.dumps(PROMPTS), json.dumps(TEXTS)))


@pytest.fixture(scope="module")
def llamacpp() -> Iterator[str]:
    """Run the GGUF file that was converted, under llama.cpp."""
    port = free_port(())
    argv = [sys.executable, "-m", "modelyard.engines.llamacpp.server", "--model", str(real_model())]
    argv += ["--model-name", "m", "--port", str(port), "--threads", "2"]
    environment = {"ENGINE_SECRET": SECRET, "OMP_WAIT_POLICY": "passive", "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        finally:
            connection.close()

    try:
        eventually(is_ready, 60, "llama.cpp is ready")
        yield url
    finally:
        process.terminate()
        process.wait(20)


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def test_transformers_finds_every_tensor_and_no_other(hf: dict[str, Any]) -> None:
    assert hf["wrong"] == [[], [], []]
    assert hf["greedy"] > hf["found"][0]["tokens"]


def test_its_logprobs_are_those_of_llama_cpp(hf: dict[str, Any], llamacpp: str) -> None:
    for prompt, found in zip(PROMPTS, hf["found"], strict=True):
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": 5, "temperature": 0}
        answer = ask(llamacpp, "/v1/completions", body)
        assert answer["usage"]["prompt_tokens"] == found["tokens"]
        theirs = {
            str(one["id"]): one["logprob"] for one in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        }
        ours = found["top"]
        best = max(theirs, key=lambda token: theirs[token])
        print(f"{prompt!r}: llama.cpp {theirs[best]:.3f}, converted {ours.get(best, math.nan):.3f}")
        assert best in ours
        assert ours[best] == pytest.approx(theirs[best], abs=0.2)
        # Which of two near ones is first, precision decides.
        assert max(ours.values()) - ours[best] < 0.2


def test_its_tokenizer_cuts_texts_as_llama_cpp_does(hf: dict[str, Any], llamacpp: str) -> None:
    for text, ids, back in zip(TEXTS, hf["ids"], hf["back"], strict=True):
        assert ids == ask(llamacpp, "/tokenize", {"content": text, "parse_special": True})["tokens"]
        assert back == text


def test_its_chat_template_is_the_models_own(hf: dict[str, Any], llamacpp: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert hf["chat"] == ask(llamacpp, "/apply-template", body)["prompt"]
