"""llama.cpp gets GGUF files only, its flags are rendered without the secret, and its page is read as recorded."""

from pathlib import Path

import msgspec
import pytest
from tests.support.models import gguf, llama, safetensors, tiny_gguf

from modelyard.domain.facts import ModelFacts
from modelyard.engines import EngineLoad, Guest, GuestKind, LaunchSpec, Settings
from modelyard.engines.llamacpp import LlamaCppEngine
from modelyard.engines.llamacpp.front import arguments_of
from modelyard.engines.llamacpp.server import read_arguments
from modelyard.engines.pages import read_samples
from modelyard.engines.simulated import SimulatedEngine

RECORDED = Path(__file__).parents[2] / "fixtures" / "recorded"
LLAMA_8B = ModelFacts(
    format="gguf", layers=32, heads=32, context_length=8192, weights_bytes=4_900_000_000, kv_bytes_per_token=128 * 1024
)

SMOL = ModelFacts(
    format="gguf",
    architecture="llama",
    layers=30,
    heads=9,
    embedding_size=576,
    context_length=8192,
    weights_bytes=96_576_768,
    kv_bytes_per_token=23_040,
)


def spec(tmp_path: Path, **options: str | int | bool) -> LaunchSpec:
    return LaunchSpec(
        replica_id="r-1",
        model_name="acme/tiny",
        artifact=tmp_path / "model.gguf",
        host="127.0.0.1",
        port=4711,
        secret="very-secret",
        slots=3,
        context_length=1024,
        threads=2,
        options=dict(options),
        work_dir=tmp_path,
    )


def test_a_gguf_file_is_accepted_whatever_its_name(tmp_path: Path) -> None:
    LlamaCppEngine().check_artifact(tiny_gguf(tmp_path / "model.txt"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"\xde\xad\xbe\xef", "unknown kind"),
        (safetensors({"w": ("F32", [1], bytes(4))}), "it is a safetensors file. The engine 'llamacpp' loads GGUF only"),
        (gguf(llama(general__architecture="clip")), "architecture 'clip', which is a part"),
        (b"PK\x03\x04zip", "zip"),
        (b"\x80\x04\x95pickle", "pickle"),
        (b"FUGG", "big-endian"),
        (b"version https://git-lfs", "LFS pointer"),
        (b"<html>404", "web page"),
        (b"GGUF\x03\x00", "truncated"),
        (b"GGUF\x09\x00\x00\x00" + bytes(16), "version 9"),
        (b"GGUF\x03\x00\x00\x00" + bytes(16), "0 tensors"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "tensors"),
    ],
)
def test_any_other_content_is_refused_and_named(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        LlamaCppEngine().check_artifact(file)


def test_the_command_has_all_but_the_secret_in_its_arguments(tmp_path: Path) -> None:
    command = LlamaCppEngine().command(spec(tmp_path, embedding=True, pooling="cls", kv_type="q8_0"))
    assert command.argv[2:] == (
        *("-m", "modelyard.engines.llamacpp.server", "--model", str(tmp_path / "model.gguf")),
        *("--model-name", "acme/tiny", "--host", "127.0.0.1", "--port", "4711", "--threads", "2"),
        *("--slots", "3", "--context-length", "1024", "--kv-type", "q8_0", "--cache-ram-mib", "0"),
        *("--embedding", "--pooling", "cls"),
    )
    assert command.env["ENGINE_SECRET"] == "very-secret"
    assert command.env["OMP_WAIT_POLICY"] == "passive"


def test_with_adapters_a_front_is_started_and_without_none(tmp_path: Path) -> None:
    engine = LlamaCppEngine()
    argv = engine.command(spec(tmp_path, max_adapters=3, max_adapter_rank=8, speculative="ngram")).argv
    assert "modelyard.engines.llamacpp.front" in argv
    own, passed_on = arguments_of(argv[4:])
    assert (own.port, own.work_dir, own.max_adapters, own.max_adapter_rank) == (4711, tmp_path, 3, 8)
    child = read_arguments([*passed_on, "--port", "0"])
    assert (child.model, child.model_name, child.slots) == (tmp_path / "model.gguf", "acme/tiny", 3)
    assert (child.speculative, child.draft_tokens) == ("ngram", 8)
    plain = engine.command(spec(tmp_path)).argv
    assert "modelyard.engines.llamacpp.server" in plain
    assert not any(word.startswith(("--max-adapter", "--spec", "--work")) for word in plain)


def test_threads_spin_only_when_asked_to(tmp_path: Path) -> None:
    assert LlamaCppEngine().command(spec(tmp_path, spin="active")).env["OMP_WAIT_POLICY"] == "active"


def test_guests_are_as_many_as_the_option_says_and_adapters() -> None:
    engine = LlamaCppEngine()
    assert engine.guests is GuestKind.ADAPTER
    assert (engine.guests_max({}), engine.guests_max({"max_adapters": 5})) == (0, 5)
    call = engine.load_guest(Guest("a@1", Path("/somewhere/a")))
    assert (call.path, call.body) == (
        "/v1/load_lora_adapter",
        {"lora_name": "a@1", "lora_path": "/somewhere/a"},
    )
    assert engine.unload_guest("a@1").body == {"lora_name": "a@1"}
    page = '{"object":"list","data":[{"id":"base","parent":null},{"id":"a@1","parent":"base"},{"id":"other"}]}'
    assert engine.read_guests(page) == {"a@1"}


@pytest.mark.parametrize("other", [{"embedding": True}, {"cache_ram_mib": 8}])
def test_what_would_mix_adapters_up_is_refused_beside_them(other: dict[str, bool | int]) -> None:
    engine = LlamaCppEngine()
    engine.settings(dict(other), artifact_bytes=1)
    with pytest.raises(ValueError, match=f"'{next(iter(other))}'"):
        engine.settings({"max_adapters": 1, **other}, artifact_bytes=1)


def test_memory_covers_the_adapters_and_two_processes_while_one_replaces_the_other() -> None:
    def memory(**options: int) -> int:
        return LlamaCppEngine().settings(dict(options), artifact_bytes=98_000_000, facts=SMOL).memory_bytes

    alone, one, two = memory(), memory(max_adapters=1), memory(max_adapters=2)
    weights = SMOL.weights_bytes
    adapter = (two - one) // 2
    assert adapter >= 16 * 30 * 4 * (4 * 576 + 2 * 768 + 3 * (576 + 1536)), "all matrices of SmolLM2 at rank 16"
    assert one == weights + 2 * (alone - weights + adapter) + 48 * 2**20
    assert memory(max_adapters=2, max_adapter_rank=32) - memory(max_adapters=2) == 4 * adapter


def test_what_was_guessed_and_accepted_is_read() -> None:
    page = (RECORDED / "llamacpp.prom").read_text()
    page = page.replace("num_draft_tokens_total 0", "num_draft_tokens_total 8")
    load = LlamaCppEngine().read_load(page.replace("num_accepted_tokens_total 0", "num_accepted_tokens_total 4"))
    assert (load.draft_tokens_total, load.accepted_tokens_total) == (8, 4)


def test_embeddings_are_served_only_when_asked_for() -> None:
    engine = LlamaCppEngine()
    assert engine.routes_for({}) == {"/v1/chat/completions", "/v1/completions"}
    assert engine.routes_for({"embedding": True}) == engine.routes


def test_an_encoder_answers_embeddings_only_and_unknown_models_everything() -> None:
    engine = LlamaCppEngine()
    encoder = msgspec.structs.replace(SMOL, kv_bytes_per_token=0)
    assert engine.routes_of({"embedding": True}, encoder) == {"/v1/embeddings"}
    assert engine.routes_of({}, encoder) == frozenset()
    assert engine.routes_of({"embedding": True}, SMOL) == engine.routes
    assert engine.routes_of({"embedding": True}, ModelFacts()) == engine.routes


def test_a_call_of_a_tool_can_be_demanded_of_models_whose_template_knows_tools() -> None:
    engine = LlamaCppEngine()
    able = msgspec.structs.replace(SMOL, chat_template="{% if tools %}{{ tools }}{% endif %}{{ messages }}")
    assert "tools.required" in engine.extras_of(able)
    assert engine.extras_of(SMOL) == engine.request_extras
    assert "tools.required" in SimulatedEngine().extras_of(ModelFacts())


def test_memory_grows_with_slots_context_and_precision() -> None:
    engine = LlamaCppEngine()

    def memory(**options: str | int) -> int:
        return engine.settings(dict(options), artifact_bytes=98_000_000).memory_bytes

    assert memory(slots=8) > memory() > memory(kv_type="q8_0") > memory(kv_type="q4_0") > 98_000_000
    assert memory(context_length=8192) > memory()
    # Llama-3-8B at 4 bits: 128 KiB a token.
    big = engine.settings({"slots": 1, "context_length": 8192}, artifact_bytes=4_900_000_000).memory_bytes
    assert 5_800_000_000 < big < 6_400_000_000


def test_memory_is_computed_from_the_shape_of_the_model() -> None:
    def settings(facts: ModelFacts, **options: str | int) -> Settings:
        return LlamaCppEngine().settings(dict(options), artifact_bytes=4_910_000_000, facts=facts)

    bare = settings(LLAMA_8B, slots=1, context_length=256).memory_bytes - 256 * 128 * 1024
    full = settings(LLAMA_8B, slots=2, context_length=8192)
    assert full.memory_bytes == bare + 2 * 2**30
    assert (full.weights_bytes, full.kv_bytes_per_token, full.kv_tokens) == (4_900_000_000, 128 * 1024, 16_384)
    eight_bits = settings(LLAMA_8B, slots=2, context_length=8192, kv_type="q8_0")
    assert eight_bits.memory_bytes == bare + 2 * 2**30 * 34 // 64
    assert eight_bits.kv_bytes_per_token == 128 * 1024 * 34 // 64
    assert settings(LLAMA_8B, kv_type="q4_0").kv_bytes_per_token == 128 * 1024 * 18 // 64
    windows = msgspec.structs.replace(LLAMA_8B, sliding_window=1024, kv_window_bytes_per_token=96 * 1024)
    assert settings(windows, slots=1, context_length=8192).memory_bytes == bare + 8192 * 32 * 1024 + 1536 * 96 * 1024
    encoder = msgspec.structs.replace(LLAMA_8B, kv_bytes_per_token=0)
    assert settings(encoder, slots=2, context_length=8192).memory_bytes == bare
    assert settings(encoder).kv_bytes_per_token == 0


def test_facts_that_were_not_read_yet_are_as_none() -> None:
    engine = LlamaCppEngine()
    estimated = engine.settings({}, artifact_bytes=98_000_000)
    assert engine.settings({}, artifact_bytes=98_000_000, facts=ModelFacts()) == estimated
    assert (estimated.weights_bytes, estimated.kv_bytes_per_token) == (98_000_000, 23_040)


def test_a_context_longer_than_the_models_own_is_refused_and_the_default_made_to_fit() -> None:
    engine = LlamaCppEngine()
    with pytest.raises(ValueError, match=r"'context_length' .* 8,193 is more than the model's own 8,192"):
        engine.settings({"context_length": 8193}, artifact_bytes=1, facts=LLAMA_8B)
    assert engine.settings({"context_length": 8192}, artifact_bytes=1, facts=LLAMA_8B).context_length == 8192
    minilm = ModelFacts(format="gguf", heads=12, context_length=512)
    assert engine.settings({}, artifact_bytes=1, facts=minilm).context_length == 512


def test_the_recorded_page_of_llamacpp_is_read() -> None:
    load = LlamaCppEngine().read_load((RECORDED / "llamacpp.prom").read_text())
    assert load == EngineLoad(
        running=0,
        waiting=0,
        kv_usage=None,
        prompt_tokens_total=2,
        generation_tokens_total=8,
        progress_total=8,
        iterations_total=8,
        draft_tokens_total=0,
        accepted_tokens_total=0,
    )


def test_the_recorded_page_of_vllm_is_read_by_its_simulation() -> None:
    load = SimulatedEngine().read_load((RECORDED / "vllm-0.32-idle.prom").read_text())
    assert load == EngineLoad(
        running=0,
        waiting=0,
        kv_usage=0.0,
        prompt_tokens_total=37,
        generation_tokens_total=8,
        progress_total=45,
        is_sleeping=False,
    )


def test_the_simulated_command_has_all_but_the_secret_in_its_arguments(tmp_path: Path) -> None:
    command = SimulatedEngine().command(spec(tmp_path, itl_ms=3, fail_load=True))
    assert command.argv[2:] == (
        *("-m", "modelyard.engines.simulated", "--host", "127.0.0.1", "--port", "4711", "--model-name", "acme/tiny"),
        *(
            "--work-dir",
            str(tmp_path),
            "--context-length",
            "1024",
            "--fail-load",
            "true",
            "--itl-ms",
            "3",
            "--slots",
            "3",
        ),
    )
    assert command.env["ENGINE_SECRET"] == "very-secret"


def test_a_relative_journal_is_refused() -> None:
    with pytest.raises(ValueError, match="'journal'"):
        SimulatedEngine().settings({"journal": "somewhere"}, artifact_bytes=0)


def test_series_of_one_name_add_up_and_what_is_no_number_is_left_out() -> None:
    page = '# HELP a b\n# TYPE a gauge\na{x="1"} 2\na{x="2"} 3.5 1700000000\nb NaN\nc oops\nd 1e3\n'
    assert read_samples(page) == {"a": 5.5, "d": 1000.0}
