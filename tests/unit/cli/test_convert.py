"""``modelyard models convert``: what is said when it cannot be, and that a folder is made whole or not at all."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from modelyard.cli import convert
from modelyard.cli.exits import Exit, Failure


def run(*arguments: object) -> None:
    CliRunner().invoke(convert.command, [str(one) for one in arguments], catch_exceptions=False, standalone_mode=False)


def test_a_source_that_is_not_there_is_told(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra 'convert'")
    with pytest.raises(Failure, match="no file") as told:
        run(tmp_path / "none.gguf", tmp_path / "out")
    assert told.value.exit_code is Exit.NOT_FOUND


def test_nothing_that_is_there_is_written_over(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra 'convert'")
    source, place = tmp_path / "m.gguf", tmp_path / "out"
    source.write_bytes(b"GGUF")
    place.mkdir()
    with pytest.raises(Failure, match="is there already"):
        run(source, place)


def test_a_file_that_is_no_model_leaves_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra 'convert'")
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(Failure, match="truncated"):
        run(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_a_missing_package_is_told_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Failure, match=r"pip install 'modelyard\[convert\]'"):
        run(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize(("form", "is_noted"), [("onnx", False), ("onnx-int8", True)])
def test_a_bert_becomes_a_graph_with_what_belongs_to_it_and_a_warning_where_answers_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, *, is_noted: bool
) -> None:
    pytest.importorskip("onnx", reason="needs the extra 'convert'")
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    from tests.support.smallmodels import tiny_bert

    source = tiny_bert(tmp_path / "bert", "BertModel")
    place = tmp_path / "out"
    told = CliRunner().invoke(convert.command, [str(source), str(place), "--to", form], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    assert {"model.onnx", "config.json", "tokenizer.json"} <= {file.name for file in place.iterdir()}
    assert f"modelyard deploy {place} --engine onnx --name NAME" in told.stdout
    assert ("Note: 8-bit weights change the answers" in told.stderr) is is_noted
    assert "WARNING" not in told.stderr + capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "form", "told"),
    [
        ("model.onnx", "onnx", "it has ONNX already: deploy it as it is"),
        ("pytorch_model.bin", "onnx-int8", "no .safetensors file; save the model with safe_serialization=True"),
        ("model.safetensors", "hf", "'--to onnx' the folder of a BERT"),
    ],
)
def test_a_folder_that_is_not_for_a_form_is_told_what_it_is_for(
    tmp_path: Path, name: str, form: str, told: str
) -> None:
    pytest.importorskip("onnx", reason="needs the extra 'convert'")
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    source = tmp_path / "bert"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / name).write_bytes(b"x")
    with pytest.raises(Failure) as refused:
        run(source, tmp_path / "out", "--to", form)
    assert told in str(refused.value)
    assert [one.name for one in tmp_path.iterdir()] == ["bert"]


def test_help_says_what_each_form_is_for() -> None:
    told = CliRunner().invoke(convert.command, ["--help"]).output
    assert all(f"{form}: " in told for form in convert.FORMS)


def test_a_file_that_a_form_does_not_convert_is_told(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="needs the extra 'convert'")
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(Failure, match="converts a folder with config"):
        run(source, tmp_path / "out", "--to", "onnx")
    assert list(tmp_path.iterdir()) == [source]
