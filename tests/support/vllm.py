"""vLLM for tests, and models for it: a lane of its own, since it takes 3.5 GB and minutes.

Without ``MODELYARD_TEST_VLLM=1`` its tests are skipped; ``make test-vllm`` sets
it, after it has made vLLM's environment (``tools/vllm_venv.py``).
"""

import json
import os
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tools.smollm import ModelMissing, model_file
from tools.vllm_venv import command, folder, python

from tests.support.waiting import eventually
from tests.support.yard import Yard

VARIABLE = "MODELYARD_TEST_VLLM"
IS_ON = os.environ.get(VARIABLE) == "1"
READY_S = 600.0
"""Longest start: three processes that each import torch, on a machine with other work."""
lane = pytest.mark.skipif(not IS_ON, reason="vLLM takes 3.5 GB and minutes; run it with: make test-vllm")
COMMAND = str(folder() / "bin" / "vllm")
SETTINGS: dict[str, object] = {
    "engines.vllm": COMMAND,
    "gateway.queue_wait_s": 300,
    "gateway.load_wait_s": READY_S,
    "gateway.first_token_timeout_s": 300,
    "gateway.token_timeout_s": 300,
    "gateway.total_timeout_s": 600,
    "control.hang_timeout_s": 120,
    "control.drain_timeout_s": 120,
    "fleet.threads": 2,
}
"""A platform for it, on a machine where it is slow."""

_SCRIPT_S = 600


def vllm_command() -> Path:
    """Return vLLM's command; in its lane it must be there."""
    return command()


def deploy(yard: Yard, name: str, folder: Path, options: Mapping[str, object]) -> None:
    """Deploy a folder for all tenants and wait until its one replica serves; the test fails as soon as it ends."""
    vllm_command()
    order = {
        "model_name": name,
        "framework": "vllm",
        "model_artifact": f"file://{folder}",
        "options": dict(options),
        "hardware": {"min_replicas": 1, "max_replicas": 1},
        "shared": True,
    }
    reply = yard.call("POST", "/v1/models/deploy", order, within_s=60)
    assert reply.status == 202, reply.body

    def is_ready() -> bool:
        events = yard.get(f"/v1/endpoints/{name}")["events"]
        if failed := [event for event in events if event["kind"] == "replica_failed"]:
            pytest.fail(f"vLLM ended: {failed[0]}")
        return yard.ready_replicas(name) > 0

    assert eventually(is_ready, READY_S, "vLLM is ready")


def run_inside(script: str, *arguments: str) -> Any:
    """Run a script under vLLM's interpreter; return the JSON of its last line."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.environ.get("HOME", "/tmp"),
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [str(python()), "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SCRIPT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def converted_smollm(place: Path) -> Path:
    """Convert SmolLM2 into the new folder ``place`` with the command line; return it."""
    from click.testing import CliRunner

    from modelyard.cli.convert import command as convert

    try:
        source = model_file()
    except ModelMissing as error:
        pytest.skip(str(error))
    done = CliRunner().invoke(convert, [str(source), str(place)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return place


def tiny_llama(place: Path, like: Path, *, seed: int = 7, classes: tuple[str, ...] = ()) -> Path:
    """Write a random Llama with four heads, so that two can share it, and the tokenizer of the folder ``like``.

    With ``classes`` it tells those of a text instead of writing.
    """
    import numpy as np

    from modelyard.formats.convert.safetensors_writer import Tensor, write

    hidden, inner, layers, heads = 128, 256, 2, 4
    config = json.loads((like / "config.json").read_text("utf-8"))
    config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": hidden // heads}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{one}_proj.weight": (hidden, hidden) for one in "qkvo"}
        shapes |= {f"{name}.mlp.{one}_proj.weight": (inner, hidden) for one in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{name}.{one}_layernorm.weight": (hidden,) for one in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    if classes:
        shapes["score.weight"] = (len(classes), hidden)
        config |= {"architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0}
        config |= {"id2label": dict(enumerate(classes)), "label2id": {name: at for at, name in enumerate(classes)}}
    chance = np.random.default_rng(seed)

    def rows(shape: tuple[int, ...]) -> list[Any]:
        if len(shape) == 1:
            return [np.ones((1, *shape), np.float32)]
        return [chance.normal(0.0, 0.2, shape).astype(np.float32)]

    place.mkdir(parents=True)
    tensors = [Tensor(name, shape, partial(rows, shape)) for name, shape in shapes.items()]
    write(tensors, place, lambda count: None)
    (place / "config.json").write_text(json.dumps(config), "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (place / name).write_bytes((like / name).read_bytes())
    return place
