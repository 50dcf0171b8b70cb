"""SGLang, TensorRT-LLM and TGI up to the wire: options, memory, the rendered command, the page, the artifact."""

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.models import safetensors

from modelyard.domain.facts import ModelFacts
from modelyard.engines import Engine, EngineCall, EngineLoad, Guest, GuestKind, LaunchSpec
from modelyard.engines.gpu_memory import OVERHEAD_BYTES, gpu_memory
from modelyard.engines.guard import Plan
from modelyard.engines.sglang import SglangEngine, SglangOptions
from modelyard.engines.tensorrt_llm import TensorRtLlmEngine, TensorRtLlmOptions
from modelyard.engines.tgi import TgiEngine, TgiOptions
from modelyard.formats import ArtifactInvalidError

FIXTURES = Path(__file__).parents[2] / "fixtures"
ENGINES: dict[str, Engine] = {one.name: one for one in (SglangEngine(), TensorRtLlmEngine(), TgiEngine())}
OPTIONS = {"sglang": SglangOptions, "tensorrt_llm": TensorRtLlmOptions, "tgi": TgiOptions}
LLAMA_8B = ModelFacts(
    format="safetensors", layers=32, heads=32, kv_heads=8, context_length=131_072, quantisation="BF16",
    weights_bytes=16_060_000_000, kv_bytes_per_token=128 * 1024,
)  # fmt: skip
FOLDER = "/r/engine"


def spec(**options: str | int | bool | float) -> LaunchSpec:
    return LaunchSpec(
        replica_id="r-1",
        model_name="acme/tiny",
        artifact=Path("/models/tiny"),
        host="127.0.0.1",
        port=4711,
        secret="very-secret",
        slots=16,
        context_length=4096,
        threads=2,
        options=dict(options),
        work_dir=Path("/r"),
        accelerators=(2, 3),
        accelerator_kind="h100",
    )


def rendered(engine: Engine, **options: str | int | bool | float) -> tuple[Plan, list[str], dict[str, str]]:
    command = engine.command(spec(**options))
    at = command.argv.index("--")
    return msgspec.json.decode(command.argv[at - 1], type=Plan), list(command.argv[at + 1 :]), command.env


def paths_of(plan: Plan) -> set[str]:
    return {f"{route.method} {route.path}" for route in plan.routes}


def test_sglang_is_called_like_this() -> None:
    plan, words, env = rendered(ENGINES["sglang"])
    assert words == [
        "python3", "-m", "sglang.launch_server", "--config", f"{FOLDER}/sglang.yaml",
        "--host", "127.0.0.1", "--port", "@http@", "--model-path", "/models/tiny", "--served-model-name", "acme/tiny",
        "--tp-size", "2", "--context-length", "4096", "--max-running-requests", "16", "--max-total-tokens",
        "65536", "--mem-fraction-static", "0.85",
        "--dtype", "auto", "--kv-cache-dtype", "auto", "--schedule-policy", "fcfs",
        "--enable-metrics", "--enable-cache-report", "--log-level", "info",
    ]  # fmt: skip
    assert plan.files == {"sglang.yaml": "api-key: @key@\n"}
    assert plan.has_key
    assert paths_of(plan) == {
        "GET /health", "GET /metrics", "GET /v1/models", "POST /v1/chat/completions", "POST /v1/completions",
    }  # fmt: skip
    assert env["HF_HUB_OFFLINE"] == "1"


def test_sglang_takes_adapters_in_while_it_runs() -> None:
    engine = ENGINES["sglang"]
    plan, words, _ = rendered(engine, adapters_max=32, adapters_in_batch=4, adapter_rank_max=16)
    assert words[-9:] == [
        "--enable-lora", "--max-loras-per-batch", "4", "--max-loaded-loras", "32", "--max-lora-rank", "16",
        "--lora-target-modules", "all",
    ]  # fmt: skip
    assert {"POST /load_lora_adapter", "POST /unload_lora_adapter"} <= paths_of(plan)
    assert (plan.model, plan.adapter_field) == ("acme/tiny", "lora_path")
    assert engine.guests is GuestKind.ADAPTER
    assert (engine.guests_max({"adapters_max": 32}), engine.guests_max({})) == (32, 0)
    assert engine.load_guest(Guest("a@1f", Path("/adapters/a"))) == EngineCall(
        "/load_lora_adapter", {"lora_name": "a@1f", "lora_path": "/adapters/a"}
    )
    assert engine.unload_guest("a@1f") == EngineCall("/unload_lora_adapter", {"lora_name": "a@1f"})
    models = {
        "data": [{"id": "acme/tiny", "root": "/m"}, {"id": "a@1f", "parent": "acme/tiny"}, {"id": "b@2", "parent": "x"}]
    }
    assert engine.read_guests(json.dumps(models)) == {"a@1f", "b@2"}
    assert engine.read_guests("<html>") == frozenset()


def test_sglangs_techniques_are_flags() -> None:
    options: dict[str, Any] = {
        "quantisation": "fp8", "kv_type": "fp8_e4m3", "prefix_caching": False, "schedule": "lpm", "tensor_parallel": 4,
        "queue_max": 9, "chunked_prefill_tokens": 2048, "speculative_tokens": 6,
        "tool_parser": "qwen25", "reasoning_parser": "qwen3", "dtype": "bfloat16", "memory_share": 0.7,
    }  # fmt: skip
    words = " ".join(rendered(ENGINES["sglang"], **options)[1])
    for said in (
        "--quantization fp8", "--kv-cache-dtype fp8_e4m3", "--disable-radix-cache", "--schedule-policy lpm",
        "--tp-size 4", "--max-queued-requests 9", "--chunked-prefill-size 2048",
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 6", "--tool-call-parser qwen25",
        "--reasoning-parser qwen3", "--dtype bfloat16", "--mem-fraction-static 0.7",
    ):  # fmt: skip
        assert said in words
    plan, words_of, _ = rendered(ENGINES["sglang"], embedding=True)
    assert "--is-embedding" in words_of
    assert "POST /v1/embeddings" in paths_of(plan)
    assert "POST /v1/chat/completions" not in paths_of(plan)


def test_trtllm_is_called_like_this() -> None:
    plan, words, _ = rendered(ENGINES["tensorrt_llm"])
    assert words == [
        "trtllm-serve", "/models/tiny", "--backend", "pytorch", "--host", "127.0.0.1", "--port", "@http@",
        "--served_model_name", "acme/tiny", "--config", f"{FOLDER}/trtllm.yaml", "--tp_size", "2", "--pp_size", "1",
        "--max_batch_size", "16", "--max_seq_len", "4096", "--max_num_tokens", "8192",
    ]  # fmt: skip
    assert json.loads(plan.files["trtllm.yaml"]) == {
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
        "enable_chunked_prefill": True,
        "trust_remote_code": False,
        "kv_cache_config": {
            "free_gpu_memory_fraction": 0.9,
            "max_tokens": 65_536,
            "enable_block_reuse": True,
            "dtype": "auto",
        },
        "guided_decoding_backend": "xgrammar",
    }
    # Not /metrics: whoever reads it takes what it tells away from everybody else.
    assert paths_of(plan) == {
        "GET /health", "GET /prometheus/metrics", "GET /v1/models", "POST /v1/chat/completions",
    }  # fmt: skip
    assert not plan.has_key


def test_trtllm_serves_completions_only_where_no_prompt_is_kept() -> None:
    engine = ENGINES["tensorrt_llm"]
    assert engine.routes_for({}) == {"/v1/chat/completions"}
    assert engine.routes_for({"prefix_caching": False}) == engine.routes
    plan, words, _ = rendered(engine, prefix_caching=False, pipeline_parallel=2, kv_type="fp8", speculative_tokens=4)
    [completions] = [route for route in plan.routes if route.path == "/v1/completions"]
    assert completions.dropped == ("cache_salt",)
    assert " ".join(words).count("--tp_size 1 --pp_size 2") == 1
    config = json.loads(plan.files["trtllm.yaml"])
    assert config["kv_cache_config"]["dtype"] == "fp8"
    assert config["kv_cache_config"]["enable_block_reuse"] is False
    assert config["speculative_config"]["decoding_type"] == "NGram"


def test_tgi_is_called_like_this() -> None:
    plan, words, env = rendered(ENGINES["tgi"], quantisation="awq", speculative_tokens=3, kv_type="fp8_e5m2")
    assert words == [
        "text-generation-launcher", "--model-id", "acme/tiny", "--hostname", "127.0.0.1", "--port", "@http@",
        "--master-addr", "127.0.0.1", "--master-port", "@master@", "--shard-uds-path", f"{FOLDER}/shard",
        "--num-shard", "2", "--max-concurrent-requests", "16", "--max-total-tokens", "4096",
        "--max-input-tokens", "4095", "--cuda-memory-fraction", "0.9", "--max-batch-total-tokens", "65536",
        "--payload-limit", "67108864",
        "--usage-stats", "off", "--json-output", "--quantize", "awq", "--kv-cache-dtype", "fp8_e5m2",
        "--speculate", "3",
    ]  # fmt: skip
    assert plan.links == {"acme/tiny": "/models/tiny"}
    assert plan.folder == FOLDER
    assert (env["API_KEY"], env["PREFIX_CACHING"]) == ("@key@", "0")


@pytest.mark.parametrize("name", list(ENGINES))
def test_no_secret_and_no_remote_code_is_on_a_command_line(name: str) -> None:
    command = ENGINES[name].command(spec())
    assert not any("very-secret" in word or "@key@" in word.partition("api-key")[0] for word in command.argv[6:])
    assert "very-secret" not in " ".join(command.argv)
    assert not any("trust-remote-code" in word or word == "trust_remote_code" for word in command.argv)
    assert command.env["ENGINE_SECRET"] == "very-secret"


@pytest.mark.parametrize("name", list(ENGINES))
def test_the_operators_words_begin_the_command(name: str) -> None:
    engine = type(ENGINES[name])(("/opt/venv/bin/python", "-m", "their.server"))  # type: ignore[call-arg]
    assert rendered(engine)[1][:3] == ["/opt/venv/bin/python", "-m", "their.server"]
    assert f"engines.{name}" in engine.missing()
    assert "/opt/venv/bin/python" in engine.missing()


@pytest.mark.parametrize(
    ("name", "page", "load"),
    [
        (
            "sglang",
            "sglang.prom",
            EngineLoad(
                running=3, waiting=2, kv_usage=0.28, prompt_tokens_total=128_201, generation_tokens_total=7_557,
                prefix_queries_total=128_201, prefix_hits_total=64_100,
            ),
        ),
        (
            "tensorrt_llm",
            "trtllm.prom",
            EngineLoad(
                running=4, waiting=1, kv_usage=0.375, prompt_tokens_total=5000, generation_tokens_total=900,
                prefix_queries_total=5000, prefix_hits_total=1250, draft_tokens_total=400, accepted_tokens_total=160,
            ),
        ),
        (
            "tgi",
            "tgi.prom",
            EngineLoad(
                running=12, waiting=5, prompt_tokens_total=9120, generation_tokens_total=3040, accepted_tokens_total=700
            ),
        ),
    ],
)  # fmt: skip
def test_the_page_is_read_as_its_source_has_it(name: str, page: str, load: EngineLoad) -> None:
    """These pages are derived from documentation and source: nobody could record them here."""
    text = (FIXTURES / "derived" / page).read_text()
    assert "not recorded" in text
    assert ENGINES[name].read_load(text) == load


@pytest.mark.parametrize("name", list(ENGINES))
def test_what_a_page_does_not_say_is_none_and_never_zero(name: str) -> None:
    assert ENGINES[name].read_load("") == EngineLoad()
    assert ENGINES[name].read_load("some_other_metric 3\n") == EngineLoad()


@pytest.mark.parametrize("name", list(ENGINES))
def test_options_are_checked_strictly_and_by_name(name: str) -> None:
    engine = ENGINES[name]
    settings = engine.settings({"slots": 4, "context_length": 4096}, artifact_bytes=16_000_000_000)
    assert (settings.slots, settings.context_length, settings.kv_tokens) == (4, 4096, 16_384)
    assert settings.memory_bytes > 16_000_000_000
    for wrong in (
        {"no_such_option": 1}, {"slots": 0}, {"slots": "2"}, {"context_length": 1.5}, {"tensor_parallel": 65},
        {"memory_share": 1.5}, {"kv_type": "int3"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"'{next(iter(wrong))}'"):
            engine.settings(wrong, artifact_bytes=0)
    for field in msgspec.structs.fields(OPTIONS[name]):
        assert field.default is not msgspec.NODEFAULT, "a deploy may leave everything out"


@pytest.mark.parametrize("name", list(ENGINES))
def test_memory_comes_from_the_models_shape(name: str) -> None:
    engine = ENGINES[name]
    options = {"slots": 8, "context_length": 4096, "tensor_parallel": 2}
    exact = engine.settings(options, artifact_bytes=16_100_000_000, facts=LLAMA_8B)
    assert exact.memory_bytes == LLAMA_8B.weights_bytes + 8 * 4096 * 131_072 + 2 * OVERHEAD_BYTES
    assert (exact.weights_bytes, exact.kv_bytes_per_token) == (LLAMA_8B.weights_bytes, 131_072)
    estimated = engine.settings(options, artifact_bytes=16_060_000_000)
    assert engine.settings(options, artifact_bytes=16_060_000_000, facts=ModelFacts()) == estimated
    assert estimated.memory_bytes == pytest.approx(exact.memory_bytes, rel=0.02), "the curve goes through this model"


@pytest.mark.parametrize("name", list(ENGINES))
def test_the_kv_cache_is_as_large_as_the_replica_was_placed_for(name: str) -> None:
    engine = ENGINES[name]
    settings = engine.settings({"kv_tokens": 100_000}, artifact_bytes=0, facts=LLAMA_8B)
    assert settings.kv_tokens == 100_000
    assert settings.memory_bytes == LLAMA_8B.weights_bytes + 100_000 * 131_072 + OVERHEAD_BYTES
    plan, words, _ = rendered(engine, kv_tokens=100_000)
    assert "100000" in [*words, *(f"{part}" for text in plan.files.values() for part in re.findall(r"[0-9]+", text))]


def test_quantising_while_loading_halves_the_weights_of_16_bits_only() -> None:
    engine = ENGINES["sglang"]
    assert engine.settings({"quantisation": "fp8"}, artifact_bytes=1, facts=LLAMA_8B).weights_bytes == 8_030_000_000
    packed = msgspec.structs.replace(LLAMA_8B, quantisation="fp8")
    assert engine.settings({"quantisation": "fp8"}, artifact_bytes=1, facts=packed).weights_bytes == 16_060_000_000


def test_kv_heads_are_copied_beyond_their_number() -> None:
    """8 KV heads on 16 accelerators: each has one, so every head is there twice."""
    parts = {
        parallel: gpu_memory(LLAMA_8B, 0, slots=1, context_length=1000, parallel=parallel) for parallel in (1, 8, 16)
    }
    assert [part.kv_bytes_per_token for part in parts.values()] == [131_072, 131_072, 262_144]
    halved = gpu_memory(LLAMA_8B, 0, slots=1, context_length=1000, parallel=1, kv_share=Fraction(1, 2))
    assert halved.kv_bytes_per_token == 65_536


def hugging_face(folder: Path, **files: str | bytes) -> Path:
    folder.mkdir()
    config = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4})
    content = {
        "config.json": config,
        "model.safetensors": safetensors({"w": ("F32", [1], bytes(4))}),
        **{name.replace("__", "."): text for name, text in files.items()},
    }
    for name, text in content.items():
        if text:
            (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


@pytest.mark.parametrize("name", list(ENGINES))
def test_a_folder_of_safetensors_is_loaded_and_nothing_else(name: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    engine.check_artifact(hugging_face(tmp_path / "good"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    cases: dict[str, tuple[Path, str]] = {
        "file": (file, "loads a folder"),
        "no-config": (hugging_face(tmp_path / "a", config__json=""), "lacks .*config.json"),
        "no-weights": (hugging_face(tmp_path / "b", model__safetensors=""), "no model"),
        "code": (hugging_face(tmp_path / "c", modeling__py="import os\n"), "could run code"),
        "auto_map": (
            hugging_face(tmp_path / "d", config__json=json.dumps({"auto_map": {"AutoModel": "x.Y"}})),
            "could run code",
        ),
        "pickle": (hugging_face(tmp_path / "e", pytorch_model__bin=b"PK\x03\x04zip"), "could run code"),
    }
    for place, said in cases.values():
        with pytest.raises(ArtifactInvalidError, match=said):
            engine.check_artifact(place)


@pytest.mark.parametrize("name", list(ENGINES))
def test_routes_are_a_subset_and_the_name_is_the_key(name: str) -> None:
    assert ENGINES[name].name == name
    assert ENGINES[name].routes_for({}) <= ENGINES[name].routes
