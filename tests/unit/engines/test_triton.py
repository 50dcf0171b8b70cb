"""Triton takes ONNX models whose configuration can run nothing; its repository is planted under the callers' name."""

from pathlib import Path

import msgspec
import pytest
from tests.support.models import field
from tests.support.triton import config_text, doubling_onnx

from modelyard.engines import EngineLoad, LaunchSpec
from modelyard.engines.guard import Plan
from modelyard.engines.triton import TritonEngine
from modelyard.engines.triton_config import check, parse, scalar, write
from modelyard.engines.triton_repository import Plant, plant
from modelyard.formats import ArtifactInvalidError

RECORDED = Path(__file__).parents[2] / "fixtures" / "recorded"


def spec(**changes: object) -> LaunchSpec:
    plain = LaunchSpec(
        "r-1", "acme/tiny", Path("/models/m.onnx"), "127.0.0.1", 4711, "very-secret", 8, 0, 2, {}, Path("/r")
    )
    return msgspec.structs.replace(plain, **changes)


def folder(root: Path, config: str, **files: bytes) -> Path:
    place = root / "model"
    for name, content in {"config.pbtxt": config.encode(), "1/model.onnx": doubling_onnx(), **files}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


def test_it_is_called_like_this() -> None:
    command = TritonEngine(("/opt/tritonserver",)).command(spec(options={"batch_max": 4, "batch_delay_us": 100}))
    at = command.argv.index("--")
    plan = msgspec.json.decode(command.argv[at - 1], type=Plan)
    assert command.argv[at + 3 : at + 5] == ("-m", "modelyard.engines.triton_repository")
    order = msgspec.json.decode(command.argv[at + 5], type=Plant)
    assert order == Plant("/models/m.onnx", "acme__tiny", "/r/engine/repository", 4, 100, 1, is_on_gpu=False)
    assert command.argv[at + 6 :] == (
        "--", "/opt/tritonserver", "--model-repository=/r/engine/repository", "--model-control-mode=none",
        "--http-address=127.0.0.1", "--http-port=@http@", "--allow-grpc=false",
        "--metrics-address=127.0.0.1", "--metrics-port=@metrics@", "--strict-readiness=true", "--exit-on-error=true",
        "--exit-timeout-secs=25", "--pinned-memory-pool-byte-size=268435456",
    )  # fmt: skip
    assert plan.ports == ("http", "metrics")
    assert "very-secret" not in " ".join(command.argv)
    on_gpu = TritonEngine().command(spec(accelerators=(1,), accelerator_kind="h100"))
    assert msgspec.json.decode(on_gpu.argv[on_gpu.argv.index("--") + 5], type=Plant).is_on_gpu


def test_the_page_is_read_as_recorded_and_what_it_lacks_is_none() -> None:
    engine = TritonEngine()
    page = (RECORDED / "triton-2.51.prom").read_text()
    assert engine.read_load(page) == EngineLoad(waiting=0)
    busy = page.replace('count{model="dbl",version="1"} 0', 'count{model="dbl",version="1"} 7')
    assert engine.read_load(busy).waiting == 7
    assert engine.read_load("") == EngineLoad()


def test_options_are_checked_and_memory_grows_with_instances() -> None:
    engine = TritonEngine()
    one = engine.settings({}, artifact_bytes=100_000_000)
    two = engine.settings({"instances": 2}, artifact_bytes=100_000_000)
    assert two.memory_bytes - one.memory_bytes == 200_000_000
    for wrong in ({"no_such_option": 1}, {"slots": 0}, {"batch_max": "8"}, {"instances": 65}):
        with pytest.raises(ValueError, match=f"'{next(iter(wrong))}'"):
            engine.settings(wrong, artifact_bytes=0)


def test_an_onnx_file_and_a_folder_as_triton_has_it_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "anything.bin"
    file.write_bytes(doubling_onnx())
    TritonEngine().check_artifact(file)
    TritonEngine().check_artifact(folder(tmp_path, config_text()))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"backend": '"python"'}, "backend 'python'.*code"),
        ({"platform": '"tensorrt_plan"', "backend": '""'}, "backend 'tensorrt_plan'"),
        ({"runtime": '"evil.so"'}, "'runtime'"),
        ({"model_operations": '{ op_library_filename: ["evil.so"] }'}, "'model_operations'"),
        ({"model_repository_agents": '{ agents { name: "x" } }'}, "'model_repository_agents'"),
        ({"model_warmup": '[ { inputs { key: "x" value { input_data_file: "/etc/passwd" } } } ]'}, "'model_warmup'"),
        ({"ensemble_scheduling": "{ step [ ] }"}, "'ensemble_scheduling'"),
        ({"default_model_filename": '"../../other/model.onnx"'}, "plain name"),
        ({"parameters": '{ key: "EXECUTION_ENV_PATH" value: { string_value: "/x" } }'}, "'EXECUTION_ENV_PATH'"),
        (
            {
                "optimization": "{ execution_accelerators { gpu_execution_accelerator : [ { name : "
                '"tensorrt" parameters { key: "trt_engine_cache_path" value: "/x" } } ] } }'
            },
            "'trt_engine_cache_path'",
        ),
    ],
)  # fmt: skip
def test_a_configuration_that_could_run_or_read_something_is_refused(
    more: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactInvalidError, match=said):
        TritonEngine().check_artifact(folder(tmp_path, config_text(**more)))


def test_what_a_gpu_machine_would_be_told_passes(tmp_path: Path) -> None:
    more = {
        "instance_group": "[ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] } ]",
        "dynamic_batching": "{ preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }",
        "optimization": '{ execution_accelerators { gpu_execution_accelerator : [ { name : "tensorrt" '
        'parameters { key: "precision_mode" value: "FP16" } parameters { key: "max_workspace_size_bytes" '
        'value: "1073741824" } } ] } }',
        "parameters": '{ key: "intra_op_thread_count" value: { string_value: "0" } }',
        "version_policy": "{ latest { num_versions: 1 } }",
    }
    TritonEngine().check_artifact(folder(tmp_path, "# made by hand\n" + config_text(**more)))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"1/model.py": b"import os\n"}, "could run code"),
        ({"1/weights.bin": b"PK\x03\x04zip"}, "could run code"),
        ({"1/lib.so": b"\x7fELF"}, "script"),
        ({"2/model.onnx": b"2~" + b"a" * 126}, "2/model.onnx' is no ONNX file: it is text"),
        ({"config.pbtxt": b"\xff\xfe\x00"}, "no text"),
        ({"config.pbtxt": b"backend: "}, "ends in the middle"),
        ({"config.pbtxt": b"name: \x01"}, "character 6"),
        ({"config.pbtxt": b"input " + b"{ a " * 40}, "levels deep"),
        ({"config.pbtxt": b"#" * 300_000}, "the most is"),
        ({"config.pbtxt": b"input [ " * 50_000}, "more than|the most is"),
    ],
)
def test_what_is_broken_or_harmful_is_refused(files: dict[str, bytes], said: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactInvalidError, match=said):
        TritonEngine().check_artifact(folder(tmp_path, config_text(), **files))


def test_a_folder_without_a_model_or_a_configuration_says_what_is_missing(tmp_path: Path) -> None:
    place = folder(tmp_path, config_text())
    (place / "1" / "model.onnx").rename(place / "1" / "other.onnx")
    with pytest.raises(ArtifactInvalidError, match=r"like 1/model\.onnx"):
        TritonEngine().check_artifact(place)
    (place / "config.pbtxt").unlink()
    with pytest.raises(ArtifactInvalidError, match=r"lacks config\.pbtxt"):
        TritonEngine().check_artifact(place)
    file = tmp_path / "weights"
    file.write_bytes(field(9, b"no model") * 3)
    with pytest.raises(ArtifactInvalidError, match="takes an ONNX file"):
        TritonEngine().check_artifact(file)


def test_a_configuration_survives_reading_and_writing() -> None:
    text = (
        'name: "a"  # a comment, with "quotes"\nmax_batch_size: 8\n'
        'input [ { name: "x", data_type: TYPE_FP32; dims: [ -1, 4 ] }, { name: "z" dims: 1 } ]\n'
        "version_policy: < latest < num_versions: 2 > >\n"
    )
    fields = parse(text)
    check(fields)
    assert scalar(fields, "name") == "a"
    assert [name for name, _ in fields] == ["name", "max_batch_size", "input", "input", "version_policy"]
    assert fields[2][1] == [("name", '"x"'), ("data_type", "TYPE_FP32"), ("dims", "-1"), ("dims", "4")]
    assert parse(write(fields)) == fields


def test_the_repository_has_the_callers_name_and_links_to_the_artifact(tmp_path: Path) -> None:
    place = folder(tmp_path, config_text(), **{"2/model.onnx": doubling_onnx(), "labels.txt": b"cat\ndog\n"})
    order = Plant(str(place), "doubling", str(tmp_path / "repository"), 0, 0, 1, is_on_gpu=False)
    for _ in range(2):  # a second start makes it anew
        found = plant(order)
        assert {entry.name for entry in found.iterdir()} == {"1", "2", "labels.txt", "config.pbtxt"}
    assert (found / "2" / "model.onnx").read_bytes() == doubling_onnx()
    assert "as_its_maker_called_it" not in (found / "config.pbtxt").read_text()
    assert scalar(parse((found / "config.pbtxt").read_text()), "backend") == "onnxruntime"
    assert (place / "config.pbtxt").exists(), "what is linked to is not touched"


def test_a_bare_file_gets_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    file.write_bytes(doubling_onnx())
    for batch_max, is_on_gpu, kind in ((16, True, "KIND_GPU"), (0, False, "KIND_CPU")):
        found = plant(Plant(str(file), "m", str(tmp_path / "repository"), batch_max, 500, 2, is_on_gpu=is_on_gpu))
        text = (found / "config.pbtxt").read_text()
        assert f"kind: {kind}" in text
        assert ("max_queue_delay_microseconds: 500" in text) is bool(batch_max)
        assert (found / "1" / "model.onnx").resolve() == file
