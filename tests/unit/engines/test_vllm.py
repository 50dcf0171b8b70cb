"""vLLM's adapter without vLLM: the command, the sums, the pages and the guard before its paths."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelyard.domain.facts import ModelFacts
from modelyard.engines import EngineLoad, Guest, GuestKind, LaunchSpec, Options
from modelyard.engines.inside_vllm import modelyard_guard
from modelyard.engines.vllm import VllmEngine
from modelyard.formats import ArtifactInvalidError

RECORDED = Path(__file__).resolve().parents[2] / "fixtures" / "recorded"
LLAMA_8B = ModelFacts(
    format="safetensors",
    layers=32,
    heads=32,
    kv_heads=8,
    head_size=128,
    embedding_size=4096,
    weights_bytes=16_060_522_496,
    kv_bytes_per_token=131_072,
    context_length=131_072,
)
ENGINE = VllmEngine(("/opt/vllm/bin/vllm",))


def spec(options: Options, **fields: Any) -> LaunchSpec:
    return LaunchSpec(
        "r-1", "acme/llama", Path("/models/llama"), "127.0.0.1", 9000, "hush", 8, 4096, 4, options, Path("/run/r-1"),
        **fields,
    )  # fmt: skip


def flags(options: Options, **fields: Any) -> dict[str, str]:
    """Return the flags of a command with their values."""
    argv = ENGINE.command(spec(options, **fields)).argv
    return {
        word: (after if not after.startswith("--") else "")
        for word, after in zip(argv, (*argv[1:], "--"), strict=True)
        if word.startswith("--")
    }


def test_the_command_serves_the_folder_under_its_name_on_its_address_and_keeps_the_secret() -> None:
    command = ENGINE.command(spec({}))
    assert command.argv[:3] == ("/opt/vllm/bin/vllm", "serve", "/models/llama")
    found = flags({})
    assert (found["--served-model-name"], found["--host"], found["--port"]) == ("acme/llama", "127.0.0.1", "9000")
    assert (found["--max-num-seqs"], found["--max-model-len"]) == ("8", "4096")
    assert found["--middleware"] == "modelyard_guard.Guard"
    assert "--enable-prompt-tokens-details" in found
    assert "--no-trust-remote-code" in found
    assert "hush" not in " ".join(command.argv)
    assert command.env["ENGINE_SECRET"] == "hush"
    assert command.env["HF_HUB_OFFLINE"] == "1"
    guard = Path(command.env["PYTHONPATH"])
    assert (guard / "modelyard_guard.py").is_file()
    assert {file.suffix for file in guard.iterdir() if file.is_file()} == {".py"}


def test_no_option_lets_a_model_run_its_own_code() -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        ENGINE.settings({"trust_remote_code": True}, artifact_bytes=1)


def test_a_cpu_gets_its_threads_unbound_and_a_gpu_nothing_of_it() -> None:
    on_cpu = ENGINE.command(spec({"tensor_parallel": 2}))
    assert on_cpu.env["OMP_WAIT_POLICY"] == "passive"
    assert on_cpu.env["OMP_NUM_THREADS"] == "2", "each of two workers has half of four"
    assert on_cpu.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "--enforce-eager" in on_cpu.argv
    on_gpu = ENGINE.command(spec({}, accelerators=(0, 1), accelerator_kind="h100"))
    assert not {name for name in on_gpu.env if name.startswith(("OMP", "VLLM_CPU"))}
    assert "--enforce-eager" not in on_gpu.argv
    assert on_gpu.argv[on_gpu.argv.index("--tensor-parallel-size") + 1] == "2", "all that it was given"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_loras": 4}, {"--enable-lora": "", "--max-loras": "4", "--max-cpu-loras": "32"}),
        ({"max_loras": 40, "max_lora_rank": 64}, {"--max-cpu-loras": "160", "--max-lora-rank": "64"}),
        ({"prefix_caching": False}, {"--no-enable-prefix-caching": ""}),
        ({"quantization": "fp8", "kv_type": "fp8"}, {"--quantization": "fp8", "--kv-cache-dtype": "fp8"}),
        ({"max_queued": 12}, {"--max-num-queued-reqs": "12"}),
        ({"max_batched_tokens": 512}, {"--max-num-batched-tokens": "512"}),
        ({"block_size": 32, "kv_blocks": 40}, {"--num-gpu-blocks-override": "40", "--block-size": "32"}),
        ({"task": "embed"}, {"--runner": "pooling", "--convert": "embed"}),
        ({"tool_parser": "hermes"}, {"--enable-auto-tool-choice": "", "--tool-call-parser": "hermes"}),
        ({"scheduling": "priority"}, {"--scheduling-policy": "priority"}),
        ({"pipeline_parallel": 2}, {"--pipeline-parallel-size": "2"}),
        ({"seed": 3, "dtype": "float16"}, {"--seed": "3", "--dtype": "float16"}),
    ],
)  # fmt: skip
def test_options_become_flags(options: Options, expected: dict[str, str]) -> None:
    found = flags(options)
    assert {name: found.get(name) for name in expected} == expected


def test_speculation_is_told_as_json() -> None:
    ngram = json.loads(flags({"speculative": "ngram", "speculative_tokens": 3})["--speculative-config"])
    assert ngram == {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    draft = json.loads(flags({"speculative": "draft", "draft_folder": "small"})["--speculative-config"])
    assert draft["model"] == "/models/llama/small"


def test_gpus_get_an_exact_cache_or_a_share() -> None:
    exact = flags({}, accelerators=(0, 1), accelerator_kind="h100", kv_cache_bytes=8 * 1024**3)
    assert exact["--kv-cache-memory-bytes"] == str(4 * 1024**3), "of each of the two"
    assert float(exact["--gpu-memory-utilization"]) < 0.1, "vLLM wants 92 % of each free else, also for an exact cache"
    share = flags({"gpu_memory": 0.8}, accelerators=(0,), accelerator_kind="h100", kv_cache_bytes=1)
    assert share["--gpu-memory-utilization"] == "0.8"
    assert "--kv-cache-memory-bytes" not in share


@pytest.mark.parametrize("task", ["generate", "embed", "classify", "score"])
@pytest.mark.parametrize("kind", ["cpu", "h100"])
def test_what_only_reads_gets_an_exact_cache_too_and_not_nearly_all_memory(task: str, kind: str) -> None:
    settings = ENGINE.settings({"task": task, "slots": 1}, artifact_bytes=1, facts=LLAMA_8B)
    assert settings.kv_tokens == 4096 + 256
    size = settings.kv_tokens * settings.kv_bytes_per_token
    found = flags({"task": task, "slots": 1}, accelerator_kind=kind, kv_cache_bytes=size)
    assert found["--kv-cache-memory-bytes"] == str(size)


def test_an_encoder_has_no_cache() -> None:
    encoder = msgspec.structs.replace(LLAMA_8B, kv_bytes_per_token=0)
    assert ENGINE.settings({"task": "embed"}, artifact_bytes=1, facts=encoder).kv_tokens == 0
    on_gpu = flags({"task": "embed"}, accelerators=(0,), accelerator_kind="h100")
    assert float(on_gpu["--gpu-memory-utilization"]) < 0.1


def test_sleep_is_offered_where_it_is_asked_for() -> None:
    assert ENGINE.sleep({}) is None
    assert ENGINE.wake({}) is None
    asleep = ENGINE.sleep({"sleep": True})
    assert asleep is not None
    assert asleep.path.partition("?")[0] in modelyard_guard.OPEN_WITH_SECRET
    on_gpu = ENGINE.command(spec({"sleep": True}, accelerators=(0,), accelerator_kind="h100"))
    assert on_gpu.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "--enable-sleep-mode" in on_gpu.argv
    assert "VLLM_SERVER_DEV_MODE" not in ENGINE.command(spec({})).env


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"kv_blocks": 8}, "kv_blocks"),
        ({"lookup_min": 8}, "lookup_min"),
        ({"speculative": "draft"}, "draft_folder"),
        ({"draft_folder": "../else"}, "draft_folder"),
        ({"tensor_parallel": 3}, "tensor_parallel"),
        ({"context_length": 200_000}, "context_length"),
        ({"tool_parser": "../x.py"}, "tool_parser"),
        ({"gpu_memory": 1.5}, "gpu_memory"),
        ({"sleep": True, "task": "embed"}, "sleep"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(options: Options, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'"):
        ENGINE.settings(options, artifact_bytes=1, facts=LLAMA_8B)


def test_memory_is_weights_and_a_cache_of_half_of_what_all_slots_could_use() -> None:
    found = ENGINE.settings({"slots": 16, "context_length": 4096}, artifact_bytes=1, facts=LLAMA_8B)
    assert found.kv_tokens == 16 * 4096 // 2
    assert found.kv_bytes_per_token == 131_072
    assert 23 < found.memory_bytes / 1e9 < 24
    one = ENGINE.settings({"slots": 1, "context_length": 4096}, artifact_bytes=1, facts=LLAMA_8B)
    assert one.kv_tokens == 4096 + 256, "one at full context always fits, with a block to spare"
    wide = ENGINE.settings({"slots": 1, "dtype": "float32"}, artifact_bytes=1, facts=LLAMA_8B)
    assert (wide.kv_tokens, wide.kv_bytes_per_token) == (4096 + 256, 262_144)
    halved = ENGINE.settings({"slots": 16, "context_length": 4096, "kv_type": "fp8"}, artifact_bytes=1, facts=LLAMA_8B)
    assert (halved.kv_tokens, halved.kv_bytes_per_token) == (found.kv_tokens, 65_536)
    blocks = ENGINE.settings({"kv_blocks": 100, "block_size": 16}, artifact_bytes=1, facts=LLAMA_8B)
    assert blocks.kv_tokens == 1600


def test_guests_are_adapters_and_as_many_as_it_holds() -> None:
    assert ENGINE.guests is GuestKind.ADAPTER
    assert ENGINE.guests_max({}) == 0
    assert ENGINE.guests_max({"max_loras": 4, "loras_held": 100}) == 100
    call = ENGINE.load_guest(Guest("cust-a@0123", Path("/adapters/a")))
    assert (call.path, call.body) == (modelyard_guard.LOAD, {"lora_name": "cust-a@0123", "lora_path": "/adapters/a"})
    assert ENGINE.unload_guest("cust-a@0123").path == modelyard_guard.UNLOAD
    page = json.dumps({"data": [{"id": "base", "parent": None}, {"id": "cust-a@0123", "parent": "base"}]})
    assert ENGINE.read_guests(page) == {"cust-a@0123"}
    assert ENGINE.read_guests("no JSON") == frozenset()


def test_recorded_pages_are_read() -> None:
    idle = ENGINE.read_load((RECORDED / "vllm-0.32-idle.prom").read_text())
    assert (idle.running, idle.waiting, idle.kv_usage, idle.is_sleeping) == (0, 0, 0.0, False)
    busy = ENGINE.read_load((RECORDED / "vllm-0.32-ngram-after-load.prom").read_text())
    assert (busy.draft_tokens_total, busy.accepted_tokens_total) == (607, 496)
    assert (busy.prompt_tokens_total, busy.generation_tokens_total) == (453, 723)
    assert (busy.prefix_queries_total, busy.prefix_hits_total, busy.preemptions_total) == (453, 0, 0)
    assert (idle.iterations_total, busy.iterations_total) == (8, 105)
    # Two ranks of one engine take their steps together.
    page = "".join(f'vllm:iteration_tokens_total_count{{engine="{rank}"}} {40 + rank}\n' for rank in (0, 1))
    assert ENGINE.read_load(page).iterations_total == 41


def test_names_of_older_versions_are_read_too() -> None:
    page = 'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\nvllm:gpu_prefix_cache_hits_total 3\n'
    assert ENGINE.read_load(page) == EngineLoad(kv_usage=0.25, prefix_hits_total=3)
    asleep = 'vllm:engine_sleep_state{sleep_state="awake"} 0\nvllm:engine_sleep_state{sleep_state="discard_all"} 1\n'
    assert ENGINE.read_load(asleep).is_sleeping is True


def test_a_missing_command_is_told_with_the_fix() -> None:
    assert "engines.vllm" in VllmEngine(("/no/such/vllm",)).missing()
    assert VllmEngine(("sh",)).missing() == ""


def test_files_and_folders_without_configuration_are_refused_with_the_fix(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ArtifactInvalidError, match="modelyard models convert"):
        ENGINE.check_artifact(file)


# --- the guard, as vLLM calls it -------------------------------------------------------------


class Inner:
    """Stands for vLLM: notes what came through and answers as told."""

    def __init__(self, status: int = 200, *bodies: bytes) -> None:
        self.status = status
        self.bodies = bodies or (b"{}",)
        self.paths: list[str] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.paths.append(scope.get("path", scope["type"]))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for number, body in enumerate(self.bodies, 1):
            await send({"type": "http.response.body", "body": body, "more_body": number < len(self.bodies)})


async def passed(
    inner: Inner, path: str, monkeypatch: pytest.MonkeyPatch, *, secret: str | None = "hush", kind: str = "http"
) -> tuple[int, bytes]:
    monkeypatch.setenv(modelyard_guard.SECRET_VARIABLE, "hush")
    return await asked(modelyard_guard.Guard(inner), path, secret=secret, kind=kind)


async def asked(
    guard: modelyard_guard.Guard, path: str, *, secret: str | None = "hush", kind: str = "http"
) -> tuple[int, bytes]:
    headers = [] if secret is None else [(b"authorization", f"Bearer {secret}".encode())]
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    await guard({"type": kind, "path": path, "method": "GET", "headers": headers}, receive, send)
    if kind != "http":
        return int(sent[0]["code"]), b""
    return int(sent[0]["status"]), b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/tokenize", "/sleep", "/collective_rpc", "/", "/health/"])
@pytest.mark.parametrize("secret", [None, "", "wrong", "hus", "hush "])
async def test_nothing_but_readiness_passes_without_the_secret(
    path: str, secret: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Inner()
    status, body = await passed(inner, path, monkeypatch, secret=secret)
    assert (status, inner.paths) == (401, [])
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert (await passed(inner, "/health", monkeypatch, secret=None))[0] == 200


@pytest.mark.parametrize("path", ["/collective_rpc", "/server_info", "/docs", "/v1/responses", "/invocations"])
async def test_what_the_platform_does_not_use_does_not_exist(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Inner()
    assert (await passed(inner, path, monkeypatch))[0] == 404
    assert inner.paths == []


async def test_every_route_of_the_engine_and_its_pages_pass_with_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (*ENGINE.routes, ENGINE.load_path, ENGINE.ready_path, "/v1/models", "/wake_up"):
        assert (await passed(Inner(), path, monkeypatch))[0] == 200, path


async def test_classes_are_asked_for_where_vllm_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ``/v1/score`` and ``/v1/rerank``, but no ``/v1/classify``."""
    inner = Inner()
    for path in ("/v1/classify", "/v1/score"):
        assert (await passed(inner, path, monkeypatch))[0] == 200
    assert inner.paths == ["/classify", "/v1/score"]
    assert (await passed(inner, "/v1/classify", monkeypatch, secret="wrong"))[0] == 401


async def test_websockets_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Inner()
    assert (await passed(inner, "/v1/realtime", monkeypatch, kind="websocket"))[0] == 1008
    assert inner.paths == []


@pytest.mark.parametrize(
    ("path", "status", "bodies", "expected"),
    [
        (modelyard_guard.LOAD, 400, (b"The lora adapter 'a' has already ", b"been loaded."), 200),
        (modelyard_guard.LOAD, 400, (b"both must be provided",), 400),
        (modelyard_guard.LOAD, 404, (b"no adapter there",), 404),
        (modelyard_guard.UNLOAD, 404, (b"The lora adapter 'a' cannot be found.",), 200),
        (modelyard_guard.UNLOAD, 500, (b"broken",), 500),
        (modelyard_guard.LOAD, 200, (b"Success",), 200),
    ],
)
async def test_what_is_so_already_is_done_and_no_error(
    path: str, status: int, bodies: tuple[bytes, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, body = await passed(Inner(status, *bodies), path, monkeypatch)
    assert found == expected
    if found == status:
        assert body == b"".join(bodies)


async def test_no_work_comes_to_an_engine_from_before_it_sleeps_until_it_woke(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Inner()
    monkeypatch.setenv(modelyard_guard.SECRET_VARIABLE, "hush")
    guard = modelyard_guard.Guard(inner)

    async def status(path: str) -> int:
        return (await asked(guard, path))[0]

    for path, told in (("/sleep", 200), ("/v1/chat/completions", 503), ("/metrics", 200), ("/health", 200)):
        assert await status(path) == told, path
    inner.status = 500
    assert (await status("/wake_up"), await status("/v1/chat/completions")) == (500, 503)
    inner.status = 200
    assert (await status("/wake_up"), await status("/v1/chat/completions")) == (200, 200)
    assert inner.paths.count("/v1/chat/completions") == 1


def test_without_a_secret_it_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(modelyard_guard.SECRET_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="ENGINE_SECRET"):
        modelyard_guard.Guard(Inner())
