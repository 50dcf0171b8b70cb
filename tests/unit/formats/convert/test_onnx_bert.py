"""What the converter's graphs compute is what the papers' formulas say, for each family and head."""

import json
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="needs the extra 'convert'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
pytest.importorskip("onnx", reason="needs the extra 'convert'")

from tests.support.smallmodels import bert_forward, classifier, converted, tagger, tiny_bert, weights_of  # noqa: E402

from modelyard.formats import ArtifactInvalidError  # noqa: E402
from modelyard.formats.convert import ConvertError, onnx_bert, onnx_bert_int8  # noqa: E402
from modelyard.formats.folder import facts_of  # noqa: E402

IDS = [[2, 13, 15, 3, 0, 0], [2, 4, 5, 6, 7, 3]]
MASK = [[1, 1, 1, 1, 0, 0], [1] * 6]


def run(folder: Path, **more: Any) -> Any:
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    given = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": np.zeros_like(IDS), **more}
    names = {node.name for node in session.get_inputs()}
    return session.run(None, {name: np.array(value, np.int64) for name, value in given.items() if name in names})[0]


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def rewrite(folder: Path, rename: dict[str, str], config: dict[str, Any]) -> None:
    """Give the tensors the names of another family."""
    from safetensors.numpy import save_file

    tensors = {}
    for name, array in weights_of(folder).items():
        new = name
        for old, other in rename.items():
            new = new.replace(old, other)
        tensors[new] = array
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config_of(folder) | config))


def test_hidden_states_are_the_same_with_and_without_padding(tmp_path: Path) -> None:
    source = tiny_bert(tmp_path / "source", "BertModel")
    out = run(converted(source, tmp_path / "out"))
    weights, config = weights_of(source), config_of(source)
    assert out[0, :4] == pytest.approx(bert_forward(weights, config, IDS[0][:4], [0] * 4), abs=2e-5)
    assert out[1] == pytest.approx(bert_forward(weights, config, IDS[1], [0] * 6), abs=2e-5)


def test_heads_are_those_of_their_classes(tmp_path: Path) -> None:
    labels = ["a", "b", "c"]
    for name, head in (("BertForSequenceClassification", classifier), ("BertForTokenClassification", tagger)):
        source = tiny_bert(tmp_path / name, name, labels=labels)
        out = run(converted(source, tmp_path / f"{name}-out"))
        weights = weights_of(source)
        wanted = head(weights, bert_forward(weights, config_of(source), IDS[1], [0] * 6))
        assert out[1] == pytest.approx(wanted, abs=5e-5)


def test_positions_of_roberta_begin_behind_its_padding(tmp_path: Path) -> None:
    source = tiny_bert(tmp_path / "source", "RobertaModel")
    weights, config = dict(weights_of(source)), config_of(source)
    weights["bert.embeddings.position_embeddings.weight"] = weights["bert.embeddings.position_embeddings.weight"][2:]
    wanted = bert_forward(weights, config, IDS[1], [0] * 6)
    rewrite(source, {"bert.": "roberta."}, {"model_type": "roberta", "pad_token_id": 1})
    assert run(converted(source, tmp_path / "out"))[1] == pytest.approx(wanted, abs=2e-5)


def test_distilbert_has_other_names_and_no_types(tmp_path: Path) -> None:
    source = tiny_bert(tmp_path / "source", "DistilBertModel")
    weights, config = dict(weights_of(source)), config_of(source)
    weights["bert.embeddings.token_type_embeddings.weight"] = np.zeros((2, 32), np.float32)
    wanted = bert_forward(weights, config, IDS[1], [0] * 6)
    names = {
        "bert.encoder.layer": "distilbert.transformer.layer", "bert.": "distilbert.",
        "attention.self.query": "attention.q_lin",
        "attention.self.key": "attention.k_lin", "attention.self.value": "attention.v_lin",
        "attention.output.dense": "attention.out_lin", "attention.output.LayerNorm": "sa_layer_norm",
        "intermediate.dense": "ffn.lin1", "output.dense": "ffn.lin2", ".output.LayerNorm": ".output_layer_norm",
        "distildistilbert": "distilbert", "embeddings.token_type_embeddings": "unused.kinds",
    }  # fmt: skip
    rewrite(source, names, {"model_type": "distilbert", "dim": 32, "n_layers": 2, "n_heads": 4, "activation": "gelu"})
    folder = converted(source, tmp_path / "out")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [node.name for node in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert run(folder)[1] == pytest.approx(wanted, abs=2e-5)


def test_weights_of_16_bits_are_read(tmp_path: Path) -> None:
    source = tiny_bert(tmp_path / "source", "BertModel")
    exact = run(converted(source, tmp_path / "exact"))
    header, body, at = {}, b"", 0
    for name, array in weights_of(source).items():
        raw = (np.ascontiguousarray(array).view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [at, at + len(raw)]}
        body, at = body + raw, at + len(raw)
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    half = run(converted(source, tmp_path / "half"))
    assert half != pytest.approx(exact, abs=1e-4)
    cosine = (half[1] * exact[1]).sum() / np.linalg.norm(half[1]) / np.linalg.norm(exact[1])
    assert cosine > 0.99


def test_numbers_of_a_large_model_stand_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_bert(tmp_path / "source", "BertModel")
    whole = run(converted(source, tmp_path / "whole"))
    monkeypatch.setattr(onnx_bert, "ONE_FILE_BYTES", 1)
    folder = converted(source, tmp_path / "split")
    assert (folder / "model.onnx_data").stat().st_size > 10_000
    assert facts_of({file.name: file for file in folder.iterdir()}).weights_bytes > 10_000, "our reader finds them"
    assert run(folder) == pytest.approx(whole, abs=1e-6)


def test_eight_bits_change_the_answers_a_little(tmp_path: Path) -> None:
    source = tiny_bert(tmp_path / "source", "BertModel")
    exact = run(converted(source, tmp_path / "exact"))
    folder = tmp_path / "int8"
    folder.mkdir()
    onnx_bert_int8.convert(source, folder, lambda done, whole: None)
    assert {file.name for file in folder.iterdir()} == {"model.onnx", "config.json", "tokenizer.json"}
    rough = run(folder)
    assert rough != pytest.approx(exact, abs=1e-4)
    cosine = (rough[1] * exact[1]).sum() / np.linalg.norm(rough[1]) / np.linalg.norm(exact[1])
    assert cosine > 0.98


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama"}, "architecture 'llama' is not converted"),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"num_attention_heads": 5}, "do not fit"),
        ({"num_hidden_layers": 3}, "lacks the tensor 'bert.encoder.layer.2"),
        ({"hidden_act": "swish"}, "activation 'swish'"),
        ({"hidden_size": "x"}, "lacks a number"),
    ],
)
def test_what_is_not_converted_is_said(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    source = tiny_bert(tmp_path / "source", "BertModel")
    (source / "config.json").write_text(json.dumps(config_of(source) | config))
    with pytest.raises(ConvertError, match=reason):
        converted(source, tmp_path / "out")


def test_a_file_that_lies_is_refused_before_it_is_read(tmp_path: Path) -> None:
    source = tiny_bert(tmp_path / "source", "BertModel")
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ArtifactInvalidError):
        converted(source, tmp_path / "out")
    with pytest.raises(ConvertError, match="no folder"):
        converted(source / "config.json", tmp_path / "other")
