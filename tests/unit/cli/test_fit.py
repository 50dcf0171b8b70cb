"""``modelyard fit`` without a platform: files and configurations of this machine."""

import json
from pathlib import Path

import pytest
from tests.support.models import onnx, onnx_tensor, tiny_gguf
from tests.support.shapes import BGE_LARGE, DEEPSEEK_V3, LLAMA_3_70B

from modelyard.cli.fit import best_rows
from modelyard.cli.main import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_70B))
    return file


def advised(capsys: pytest.CaptureFixture[str], file: Path, *line: str) -> str:
    code = main(["fit", str(file), "--data-dir", str(file.parent / "nothing"), *line])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return shown.out


def test_a_configuration_of_a_model_that_is_not_here_is_enough(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--gpu", "h100", "--gpu", "l4", "--context", "2048", "--concurrency", "1")
    text = advised(capsys, config, *words)
    assert advised(capsys, config.parent, *words).partition("\n")[2] == text.partition("\n")[2], "so is its folder"
    assert "Parameters  70.55 B\n" in text
    assert "KV cache    320 KiB a token\n" in text
    assert "\nbf16       vllm    2 x h100" in text
    assert "\nint4       vllm    1 x h100" in text
    assert "\nTake " in text
    assert "Do not quantise for math or code that must be exact" in text


def test_json_has_every_combination_and_the_table_the_best_of_each(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = json.loads(advised(capsys, config, "--gpu", "H100", "--json"))
    assert {row["count"] for row in answer["rows"]} == {1, 2, 4, 8}
    best = best_rows(answer["rows"])
    assert len({(row["precision"], row["kind"]) for row in best}) == len(best)
    assert all(row["fits"] for row in best)
    assert answer["recommended"] == best[0]
    every = advised(capsys, config, "--gpu", "h100", "--all")
    assert "needs 152.7 GiB of each, 72.0 GiB are usable" in every


def test_what_forbids_to_quantise_and_what_is_too_slow_is_told(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Take bf16 on 4 x h100" in advised(capsys, config, "--gpu", "h100", "--purpose", "math")
    slow = advised(capsys, config, "--gpu", "l4", "--itl-ms", "1")
    assert "No recommendation: nothing that fits meets the target" in slow


def test_texts_are_as_long_as_the_model_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BGE_LARGE))
    text = advised(capsys, file)
    assert "Load        16 at once, 512 tokens each\n" in text
    assert "rounded from the 32 bits" in text
    assert main(["fit", str(file), "--data-dir", str(tmp_path / "nothing"), "--context", "4096"]) == 2
    assert "--context: the model takes 512 tokens at most" in capsys.readouterr().err


def test_a_file_is_advised_on_for_this_machines_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = advised(capsys, tiny_gguf(tmp_path / "tiny.gguf"), "--gpu", "cpu", "--context", "64", "--output-tokens", "8")
    assert "1 x cpu" in text


def test_an_onnx_model_is_for_the_cpu_and_nothing_is_told_of_tokens_that_it_does_not_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(onnx(onnx_tensor("w", [16, 16], bytes(1024))))
    text = advised(capsys, file)
    assert "1 x cpu: of 1 that fit" in text
    assert "h100" not in text
    assert "TTFT MS" in text
    assert not any(word in text for word in ("TOK/S", "ITL MS", "of them the answer"))
    assert "ONNX models run on CPUs" in advised(capsys, file, "--gpu", "h100")


def test_mixtures_are_shown_with_what_computes_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DEEPSEEK_V3))
    text = advised(capsys, file)
    assert "671 B, of which 37.6 B compute a token" in text
    assert "quantised already (fp8)" in text


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        (["./nothing.gguf"], 3, "There is no file './nothing.gguf'."),
        (["CONFIG", "--gpu", "abacus"], 2, "Nothing is known of 'abacus'. Known: a10, "),
        (["CONFIG", "--context", "100", "--output-tokens", "100"], 2, "--output-tokens are a part of --context"),
        (["CONFIG", "--fleet"], 6, "No platform runs in"),
        (["name-of-a-model"], 6, "No platform runs in"),
        (["EMPTY"], 1, "does not say how large its model is"),
    ],
)
def test_faults_are_told_in_a_line(
    config: Path, capsys: pytest.CaptureFixture[str], line: list[str], code: int, told: str
) -> None:
    empty = config.parent / "empty.json"
    empty.write_text("{}")
    given = [{"CONFIG": str(config), "EMPTY": str(empty)}.get(word, word) for word in line]
    assert main(["fit", *given, "--data-dir", str(config.parent / "nothing")]) == code
    assert told in capsys.readouterr().err
