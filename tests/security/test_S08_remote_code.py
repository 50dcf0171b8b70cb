"""S8: a model that brings Python with it is refused, unless an operator who pinned its digest let it through."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import models

from modelyard.formats import ArtifactInvalidError
from modelyard.formats.folder import facts_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
AUTO_MAP = {"AutoModelForCausalLM": "evil.Evil"}


def folder(root: Path, **files: bytes | dict[str, Any]) -> dict[str, Path]:
    """Write a model's folder and return its files; a name has ``__`` for each dot."""
    named: dict[str, bytes | dict[str, Any]] = {
        "config.json": LLAMA,
        "model.safetensors": models.safetensors({"w": ("F32", [2], bytes(8))}),
    }
    named |= {name.replace("__", "."): content for name, content in files.items()}
    found = {}
    for name, content in named.items():
        file = root / name
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        found[name] = file
    return found


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config__json", LLAMA | {"auto_map": AUTO_MAP}),
        ("config__json", LLAMA | {"text_config": {"auto_map": AUTO_MAP}}),
        ("config__json", LLAMA | {"parts": [{"x": {"auto_map": {"AutoModel": "someone/else--evil.Evil"}}}]}),
        ("config__json", b'{"\\u0061uto_map": {"AutoModel": "evil.Evil"}}'),
        ("config__json", b'{"auto_map": null, "auto_map": {"AutoModel": "evil.Evil"}}'),
        ("config__json", LLAMA | {"custom_pipelines": {"text": {"impl": "evil.Evil"}}}),
        ("tokenizer_config__json", {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}),
        ("preprocessor_config__json", {"auto_map": AUTO_MAP}),
        ("generation_config__json", {"auto_map": AUTO_MAP}),
        ("CONFIG2__JSON", {"auto_map": AUTO_MAP}),
        ("modeling_evil__py", b"print(1)\n"),
        ("modeling_evil__PY", b""),
        ("modeling_evil__pyc", b"\xa7\r\r\n" + bytes(12)),
        ("modeling", b"import os\nclass Evil(object):\n    pass\n"),
        ("run__txt", b"#!/usr/bin/python3\n"),
    ],
)
def test_what_brings_code_is_refused_and_the_file_is_named(
    tmp_path: Path, name: str, content: bytes | dict[str, Any]
) -> None:
    files = folder(tmp_path, **{name: content})
    with pytest.raises(ArtifactInvalidError, match=f"'{name.replace('__', '.')}', which is .*could run code|unknown"):
        facts_of(files)


def test_an_operator_who_pinned_the_digest_may_let_code_through(tmp_path: Path) -> None:
    files = folder(tmp_path, config__json=LLAMA | {"auto_map": AUTO_MAP}, modeling_evil__py=b"import os\n")
    assert facts_of(files, may_run_code=True).architecture == "LlamaForCausalLM"


def test_programs_and_archives_never_pass(tmp_path: Path) -> None:
    for content in (b"\x7fELF\x02\x01" + bytes(60), b"\x1f\x8b\x08" + bytes(60)):
        with pytest.raises(ArtifactInvalidError, match=r"'x\.bin', which is a"):
            facts_of(folder(tmp_path, x__bin=content), may_run_code=True)


def test_an_empty_auto_map_and_the_word_in_a_vocabulary_are_fine(tmp_path: Path) -> None:
    files = folder(
        tmp_path,
        config__json=LLAMA | {"auto_map": {}},
        tokenizer__json={"model": {"vocab": {"auto_map": {"x": 1}}}},
        notes__txt=b"about auto_map\n",
    )
    assert facts_of(files).kv_bytes_per_token == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "a/../b", "a\x00b", "a\\b", "", "a/./b", "a\u202eb"])
def test_names_that_are_no_plain_paths_are_refused(tmp_path: Path, name: str) -> None:
    files = folder(tmp_path)
    with pytest.raises(ArtifactInvalidError, match="no plain path"):
        facts_of({**files, name: files["config.json"]})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{" * 90_000, "not valid JSON"),
        (b'{"a":' * 90_000, "not valid JSON"),
        (b"[" + b"{}," * 1_100_000 + b"{}]", "bytes"),
        (b'{"auto_map": [' + b"[]," * 200_000 + b"[]]}", "more than 100,000 values in values"),
        (b'{"num_hidden_layers": 99999999}', "'num_hidden_layers' is 99999999"),
        (b'{"num_hidden_layers": -5}', "'num_hidden_layers' is -5"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "config.json|cannot be"),
        (b'{"num_hidden_layers": 2, "num_key_value_heads": [1]}', "2 layers and 1 numbers"),
        (b'{"num_hidden_layers": 2, "num_key_value_heads": [1, "2"]}', "2 layers and 2 numbers"),
        (b'{"a": NaN}', "not valid JSON"),
        (b"\xff\xfe{}", "config.json"),
    ],
)
def test_configurations_that_lie_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(ArtifactInvalidError, match=said):
        facts_of(folder(tmp_path, config__json=content))
