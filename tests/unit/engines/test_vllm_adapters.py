"""What the guard before vLLM looks at: an adapter that vLLM would take, and answer nonsense with, is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import safetensors

from modelyard.engines.inside_vllm import modelyard_guard
from modelyard.engines.inside_vllm.modelyard_adapters import AdapterError, check_adapter, read_base, read_header

QUERY = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, tuple[str, list[int], bytes]]


def tensor(shape: list[int], dtype: str = "F16") -> tuple[str, list[int], bytes]:
    return dtype, shape, bytes(shape[0] * shape[1] * (2 if dtype == "F16" else 1))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base of two files; one of its matrices is packed."""
    place = tmp_path / "base"
    place.mkdir()
    (place / "a.safetensors").write_bytes(safetensors({f"{QUERY}.weight": tensor([8, 6])}))
    packed = {"model.layers.0.mlp.up_proj.weight": tensor([8, 1], "U8")}
    (place / "b.safetensors").write_bytes(safetensors(packed | {"lm_head.weight": tensor([4, 6])}, {"format": "pt"}))
    return place


def adapter(place: Path, *, module: str = QUERY, size_in: int = 6, size_out: int = 8, **config: Any) -> Path:
    place.mkdir()
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}))
    name = f"base_model.model.{module}"
    halves = {f"{name}.lora_A.weight": tensor([2, size_in]), f"{name}.lora_B.weight": tensor([size_out, 2])}
    (place / "adapter_model.safetensors").write_bytes(safetensors(halves))
    return place


def test_one_that_fits_is_taken_and_so_is_what_cannot_be_compared(base: Path, tmp_path: Path) -> None:
    shapes = read_base(base)
    assert shapes == {f"{QUERY}.weight": (8, 6), "lm_head.weight": (4, 6)}
    check_adapter(adapter(tmp_path / "a"), shapes)
    check_adapter(adapter(tmp_path / "packed", module="model.layers.0.mlp.up_proj"), shapes)
    check_adapter(adapter(tmp_path / "other-name", module="language_model.model.layers.0.x", size_in=3), shapes)
    check_adapter(adapter(tmp_path / "ranks", r=1, rank_pattern={"q_proj": 2}), shapes)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"size_in": 4}, r"of \(8, 4\); its base has \(8, 6\): it is for another base"),
        ({"size_out": 4}, "for another base"),
        ({"r": 1}, "rank 2 for .*; 'adapter_config.json' says 1 at most"),
        ({"r": 0}, "rank 0"),
        ({"r": "many"}, "no LoRA configuration"),
        ({"peft_type": "IA3"}, "kind 'IA3'"),
    ],
)
def test_one_that_does_not_fit_is_refused(base: Path, tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(AdapterError, match=said):
        check_adapter(adapter(tmp_path / "a", **fields), read_base(base))


def test_what_is_not_whole_is_refused(base: Path, tmp_path: Path) -> None:
    shapes = read_base(base)
    weights = adapter(tmp_path / "a") / "adapter_model.safetensors"
    whole = weights.read_bytes()
    half = safetensors({f"base_model.model.{QUERY}.lora_A.weight": tensor([2, 6])})
    for content in (b"", whole[:7], whole[:20], whole[:-1], whole + b"x", b"\xff" * 64, half, safetensors({})):
        weights.write_bytes(content)
        with pytest.raises(AdapterError):
            check_adapter(weights.parent, shapes)
    weights.unlink()
    for place, said in ((weights.parent, "no 'adapter_model"), (base / "a.safetensors", "no folder")):
        with pytest.raises(AdapterError, match=said):
            check_adapter(place, shapes)
    weights.write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    with pytest.raises(AdapterError, match="bad header"):
        read_header(weights)


async def load(guard: modelyard_guard.Guard, *bodies: bytes) -> tuple[int, str]:
    """Ask the guard to load with a body in pieces; return its answer."""
    pieces = list(bodies)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": modelyard_guard.LOAD}
    await guard({**scope, "headers": [(b"authorization", b"Bearer hush")]}, receive, send)
    return int(sent[0]["status"]), b"".join(one.get("body", b"") for one in sent).decode()


async def test_the_guard_asks_vllm_only_for_what_fits_and_gives_it_the_whole_order(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(modelyard_guard.SECRET_VARIABLE, "hush")
    monkeypatch.setenv(modelyard_guard.BASE_VARIABLE, str(base))
    orders: list[bytes] = []

    async def vllm(scope: dict[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        orders.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    guard = modelyard_guard.Guard(vllm)
    fits = json.dumps({"lora_name": "a@1", "lora_path": str(adapter(tmp_path / "fits"))}).encode()
    assert (await load(guard, fits[:9], fits[9:]))[0] == 200
    wrong = json.dumps({"lora_name": "b@1", "lora_path": str(adapter(tmp_path / "wrong", size_in=4))}).encode()
    status, told = await load(guard, wrong)
    assert (status, json.loads(told)["error"]["code"]) == (400, "invalid_adapter")
    assert "another base" in told
    for theirs in (b"{}", b"no order", json.dumps({"lora_path": "/not/there"}).encode(), b"[" * 70_000):
        assert (await load(guard, theirs))[0] == 200, "what is no order of this, vLLM refuses itself"
    assert orders[0] == fits
    assert wrong not in orders
