"""What the engine says without a process: artifacts, memory, routes, calls for guests."""

import json
from pathlib import Path

import pytest
from tests.support import models

from modelyard.domain.facts import ModelFacts, TensorFacts
from modelyard.engines import Guest
from modelyard.engines.onnx import OnnxEngine
from modelyard.engines.onnx.artifact import ends_in_scores, read_artifact
from modelyard.engines.onnx.options import OnnxOptions
from modelyard.formats import ArtifactInvalidError

ENGINE = OnnxEngine()


def folder(place: Path, **files: bytes) -> Path:
    for name, content in ({"model__onnx": models.onnx(models.onnx_tensor("w", [1], bytes(4)))} | files).items():
        file = place / name.replace("___", "/").replace("__", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return place


def test_a_file_and_a_folder_are_accepted(tmp_path: Path) -> None:
    place = folder(tmp_path, config__json=b'{"architectures": ["BertModel"]}', vocab__txt=b"a\nb\n")
    ENGINE.check_artifact(place)
    ENGINE.check_artifact(place / "model.onnx")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"custom_ops__so": b"\x7fELF"}, "libraries of operators"),
        ({"run__py": b"import os"}, "script"),
        ({"config__json": b'{"auto_map": {"AutoModel": "x.Y"}}'}, "auto_map"),
        ({"config__json": b'{"id2label": {"0": "a", "2": "b"}}'}, "id2label"),
        ({"model__onnx": models.onnx(models.onnx_tensor("w", [1], location="../../etc/passwd"))}, "no plain path"),
        ({"model__onnx": models.onnx(models.onnx_tensor("w", [1], location="gone.bin"))}, "not there"),
        ({"model__onnx": b"PK\x03\x04" + bytes(30)}, "zip"),
    ],
)
def test_what_could_harm_is_refused(tmp_path: Path, files: dict[str, bytes], reason: str) -> None:
    place = folder(tmp_path, config__json=files.pop("config__json", b"{}"), **files)
    with pytest.raises(ArtifactInvalidError, match=reason):
        ENGINE.check_artifact(place)


@pytest.mark.parametrize("options", [OnnxOptions(), OnnxOptions(file="notes.txt")])
def test_a_graph_that_begins_as_a_text_is_not_loaded_unread(tmp_path: Path, options: OnnxOptions) -> None:
    said = b"2~" + b"a" * 126  # ModelProto.doc_string, which may be said again and again
    graph = said * 600 + models.onnx(models.onnx_tensor("w", [1], location="../secret"))
    place = folder(tmp_path, notes__txt=graph, model__onnx=graph, other__onnx=models.onnx())
    with pytest.raises(ArtifactInvalidError, match=f"'{options.file or 'model.onnx'}' is no ONNX file: it is text"):
        read_artifact(place, options)


def test_safetensors_are_told_how_to_become_onnx(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(models.safetensors({"w": ("F32", [1], bytes(4))}))
    with pytest.raises(ArtifactInvalidError, match="modelyard models convert"):
        ENGINE.check_artifact(file)


def test_of_several_graphs_one_is_named_by_the_option(tmp_path: Path) -> None:
    graph = models.onnx(models.onnx_tensor("w", [1], bytes(4)))
    (tmp_path / "a.onnx").write_bytes(graph)
    (tmp_path / "b.onnx").write_bytes(graph)
    with pytest.raises(ArtifactInvalidError, match="option 'file'"):
        read_artifact(tmp_path, OnnxOptions())
    assert read_artifact(tmp_path, OnnxOptions(file="b.onnx")).model == tmp_path / "b.onnx"
    with pytest.raises(ArtifactInvalidError, match="no file"):
        read_artifact(tmp_path, OnnxOptions(file="../b.onnx"))
    ENGINE.check_artifact(tmp_path)


def test_limits_of_a_text_come_from_the_files(tmp_path: Path) -> None:
    place = folder(
        tmp_path,
        config__json=b'{"max_position_embeddings": 514, "model_type": "roberta", "pad_token_id": 1}',
        sentence_bert_config__json=b'{"max_seq_length": 700}',
        tokenizer_config__json=b'{"model_max_length": 1000000000000000019884624838656}',
    )
    assert read_artifact(place, OnnxOptions()).max_tokens == 512


def test_a_graph_that_ends_in_a_softmax_gives_scores_already(tmp_path: Path) -> None:
    def node(kind: str, given: str, output: str) -> bytes:
        return models.field(1, given) + models.field(2, output) + models.field(4, kind)

    nodes = [
        node("MatMul", "x", "logits"), node("Softmax", "logits", "probs"), node("Cast", "probs", "wide"),
        node("Identity", "wide", "out"), node("Identity", "logits", "raw"), node("Add", "out", "more"),
    ]  # fmt: skip
    file = tmp_path / "m.onnx"
    file.write_bytes(models.onnx(nodes=nodes))
    assert ends_in_scores(file, "probs")
    assert ends_in_scores(file, "out"), "as Paddle's exporter writes it"
    assert not any(ends_in_scores(file, name) for name in ("logits", "raw", "more"))
    assert not ends_in_scores(file, "none")


def test_memory_has_weights_the_process_and_what_guests_were_promised() -> None:
    alone = ENGINE.settings({}, artifact_bytes=90_000_000)
    hosting = ENGINE.settings({"guests": 4, "guests_mib": 256}, artifact_bytes=90_000_000)
    assert alone.memory_bytes > 90_000_000
    assert hosting.memory_bytes == alone.memory_bytes + 256 * 1024 * 1024
    assert (ENGINE.guests_max({}), ENGINE.guests_max({"guests": 4})) == (0, 4)


@pytest.mark.parametrize(
    ("task", "has", "lacks"),
    [
        ("embeddings", "/v1/embeddings", "/v1/classify"),
        ("rerank", "/v1/rerank", "/v1/embeddings"),
        ("token_classify", "/v1/token_classify", "/v1/classify"),
        ("tensors", "/v2/models/{model}/infer", "/v1/embeddings"),
    ],
)
def test_routes_are_those_of_the_task(task: str, has: str, lacks: str) -> None:
    routes = ENGINE.routes_for({"task": task})
    assert has in routes
    assert lacks not in routes


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("BertModel", "/v1/embeddings", "/v1/classify"),
        ("BertForSequenceClassification", "/v1/classify", "/v1/embeddings"),
        ("RobertaForSequenceClassification", "/v1/rerank", "/v1/token_classify"),
        ("BertForTokenClassification", "/v1/token_classify", "/v1/classify"),
        ("ViTForImageClassification", "/v1/classify", "/v1/rerank"),
    ],
)
def test_without_a_task_the_class_of_the_model_rules_routes_out(name: str, has: str, lacks: str) -> None:
    routes = ENGINE.routes_of({}, ModelFacts(format="onnx", architecture=name))
    assert {has, "/v2/models/{model}/infer"} <= routes
    assert lacks not in routes
    assert ENGINE.routes_of({"task": "tensors"}, ModelFacts(architecture=name)) == {"/v2/models/{model}/infer"}


def test_a_model_without_a_class_may_be_asked_everything() -> None:
    assert ENGINE.routes_of({}, ModelFacts(format="onnx")) == ENGINE.routes


def test_the_inputs_of_a_graph_leave_it_tensors_alone() -> None:
    audio = (TensorFacts("input", "FP32", (-1, -1)), TensorFacts("sr", "INT64"))
    assert ENGINE.routes_of({}, ModelFacts(format="onnx", inputs=audio)) == {"/v2/models/{model}/infer"}
    for inputs in (
        (TensorFacts("input_ids", "INT64", (-1, -1)), TensorFacts("attention_mask", "INT64", (-1, -1))),
        (TensorFacts("x", "FP32", (-1, 3, 48, 192)),),
    ):
        assert ENGINE.routes_of({}, ModelFacts(format="onnx", inputs=inputs)) == ENGINE.routes


def test_guests_are_called_and_read() -> None:
    call = ENGINE.load_guest(Guest("a@1", Path("/m"), {"task": "classify"}))
    assert (call.path, call.body) == ("/v1/load_model", {"name": "a@1", "path": "/m", "options": {"task": "classify"}})
    assert ENGINE.unload_guest("a@1").body == {"name": "a@1"}
    page = {"data": [{"id": "main", "is_guest": False}, {"id": "a@1", "is_guest": True}, {"id": "x"}]}
    assert ENGINE.read_guests(json.dumps(page)) == {"a@1"}
    assert ENGINE.read_guests("<html>") == frozenset()
