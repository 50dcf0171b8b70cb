"""What is in a model's file or folder, read and judged before ONNX Runtime sees any of it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.engines.onnx.options import OnnxOptions
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.cursor import Cursor, opened
from modelyard.formats.folder import FILES_MAX, facts_of, kind_of_file
from modelyard.formats.onnx import is_plain_path
from modelyard.formats.protobuf import BYTES, fields
from modelyard.formats.sniff import Kind

JSON_BYTES_MAX = 4 * 1024 * 1024
TOKENIZER_BYTES_MAX = 64 * 1024 * 1024
LABELS_MAX = 100_000
_PREFERRED = ("model.onnx", "onnx/model.onnx")
_SCORING = frozenset({"Softmax", "LogSoftmax", "Sigmoid"})
_FORMING = frozenset({"Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"})
"""What leaves numbers as they are; exporters of Paddle and TensorFlow put it behind a softmax."""
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_decode_list = msgspec.json.Decoder(list[dict[str, Any]]).decode


class Artifact(msgspec.Struct, frozen=True):
    """A model as it lies on the disk."""

    model: Path
    facts: ModelFacts
    config: dict[str, Any] = {}
    """``config.json``"""
    pooling: dict[str, Any] = {}
    """``1_Pooling/config.json`` of sentence-transformers"""
    preprocessor: dict[str, Any] = {}
    """``preprocessor_config.json``"""
    modules: tuple[str, ...] = ()
    """Types in ``modules.json`` of sentence-transformers, like ``Normalize``; empty without the file."""
    labels: tuple[str, ...] = ()
    """By the index of the output, from ``id2label``."""
    tokenizer: Path | None = None
    max_tokens: int = 0
    """What the configuration and the tokenizer say; 0: nothing."""

    @property
    def architecture(self) -> str:
        """Return the class that the configuration names."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else ""


def read_artifact(place: Path, options: OnnxOptions, *, is_choice_open: bool = False) -> Artifact:
    """Return what is at ``place``. Blocks. ``is_choice_open``: which of several ONNX files is meant is said later.

    Raises:
        ArtifactInvalidError: it is no ONNX model, or one that must not be loaded; the text is for whoever deploys.
        OSError: it cannot be read.
    """
    files = files_at(place)
    model = _model_of(files, options.file, is_choice_open=is_choice_open)
    _refuse_others(files)
    if (kind := kind_of_file(files[model])) is not Kind.ONNX:
        # One that begins as a text can go on as a graph, and would be loaded though no header of it was read.
        raise ArtifactInvalidError(f"The file '{model[:200]}' is no ONNX file: it is {kind}.")
    facts = facts_of(files)
    config = _json(files, "config.json")
    return Artifact(
        model=files[model],
        facts=facts,
        config=config,
        pooling=_json(files, "1_Pooling/config.json"),
        preprocessor=_json(files, "preprocessor_config.json"),
        modules=_modules(files),
        labels=_labels(config),
        tokenizer=_tokenizer(files),
        max_tokens=_max_tokens(files, config),
    )


def files_at(place: Path) -> dict[str, Path]:
    """Return the files of an artifact by their paths inside of it.

    Raises:
        ArtifactInvalidError: there are too many, or none.
    """
    if not place.is_dir():
        return {"model.onnx": place}
    found: dict[str, Path] = {}
    for folder, _, names in os.walk(place):
        for name in names:
            file = Path(folder, name)
            found[file.relative_to(place).as_posix()] = file
            if len(found) > FILES_MAX:
                raise ArtifactInvalidError(f"The artifact has more than {FILES_MAX:,} files.")
    if not found:
        raise ArtifactInvalidError("The artifact is an empty folder.")
    return found


def ends_in_scores(model: Path, output: str) -> bool:
    """Say whether a softmax or a sigmoid makes ``output``, whatever form is given to it then: it is scores already."""
    scores: set[str] = set()
    with opened(model, "ONNX file") as cursor:
        for number, wire, length in fields(cursor, cursor.size):
            if number == 7 and wire == BYTES:
                for inner, kind, size in fields(cursor, cursor.at + length):
                    if inner == 1 and kind == BYTES:
                        node = _node(cursor, cursor.at + size)
                        # A node stands behind those that make its inputs.
                        if node.op in _SCORING or (node.op in _FORMING and scores & set(node.inputs[:1])):
                            scores.update(node.outputs)
    return output in scores


class _Node(NamedTuple):
    inputs: list[str]
    outputs: list[str]
    op: str


def _node(cursor: Cursor, end: int) -> _Node:
    names: dict[int, list[str]] = {1: [], 2: [], 4: []}
    for number, wire, length in fields(cursor, end):
        if wire == BYTES and number in names and length <= 1024:
            names[number].append(cursor.take(length).decode("utf-8", "replace"))
    return _Node(names[1], names[2], names[4][0] if names[4] else "")


def _model_of(files: Mapping[str, Path], wanted: str, *, is_choice_open: bool) -> str:
    if len(files) == 1 and not wanted:
        name = next(iter(files))
        if (kind := kind_of_file(files[name])) is not Kind.ONNX:
            raise ArtifactInvalidError(
                f"The artifact is not an ONNX file: it is {kind}. The engine 'onnx' loads ONNX; a BERT in safetensors "
                "becomes one by: modelyard models convert SOURCE DEST --to onnx"
            )
        return name
    if wanted:
        if wanted not in files or not is_plain_path(wanted):
            raise ArtifactInvalidError(f"The artifact has no file '{wanted[:200]}', which the option 'file' names.")
        return wanted
    models = sorted(name for name in files if name.lower().endswith(".onnx"))
    for name in _PREFERRED:
        if name in models:
            return name
    if models and (len(models) == 1 or is_choice_open):
        return models[0]
    if not models:
        raise ArtifactInvalidError(
            "The artifact has no .onnx file. A BERT in safetensors becomes one by: "
            "modelyard models convert SOURCE DEST --to onnx"
        )
    raise ArtifactInvalidError(
        f"The artifact has several ONNX files ({', '.join(models)[:200]}): name one by the option 'file'."
    )


def _refuse_others(files: Mapping[str, Path]) -> None:
    """Refuse libraries of operators by name: nothing here would load them, and whoever sends one expects it to."""
    for name in files:
        if name.lower().endswith((".so", ".dll", ".dylib")):
            raise ArtifactInvalidError(f"The artifact has '{name[:200]}'; libraries of operators are not loaded.")


def _json(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        return _decode(_content(files[name], name, JSON_BYTES_MAX))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ArtifactInvalidError(f"The file '{name}' is no JSON object: {error}.") from error


def _content(file: Path, name: str, most: int) -> bytes:
    size = file.stat().st_size
    if size > most:
        raise ArtifactInvalidError(f"The file '{name}' has {size:,} bytes; the most is {most:,}.")
    return file.read_bytes()


def _modules(files: Mapping[str, Path]) -> tuple[str, ...]:
    if "modules.json" not in files:
        return ()
    try:
        found = _decode_list(_content(files["modules.json"], "modules.json", JSON_BYTES_MAX))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ArtifactInvalidError(f"The file 'modules.json' is no list of modules: {error}.") from error
    return tuple(str(one.get("type", "")).rpartition(".")[2] for one in found)


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label")
    if not isinstance(named, dict) or not named:
        return ()
    count = len(named)
    if count > LABELS_MAX or set(named) != {str(index) for index in range(count)}:
        raise ArtifactInvalidError("'id2label' in config.json does not name each of 0, 1, 2 … once.")
    return tuple(str(named[str(index)])[:256] for index in range(count))


def _tokenizer(files: Mapping[str, Path]) -> Path | None:
    file = files.get("tokenizer.json")
    if file is not None and file.stat().st_size > TOKENIZER_BYTES_MAX:
        raise ArtifactInvalidError(f"The file 'tokenizer.json' is larger than {TOKENIZER_BYTES_MAX:,} bytes.")
    return file


def _max_tokens(files: Mapping[str, Path], config: Mapping[str, Any]) -> int:
    """Return the least of what the files allow. RoBERTa's positions begin behind its padding index."""
    positions = _whole(config.get("max_position_embeddings"))
    if config.get("model_type") in ("roberta", "xlm-roberta", "camembert") and positions:
        positions -= (_whole(config.get("pad_token_id")) or 1) + 1
    given = [
        positions,
        _whole(_json(files, "sentence_bert_config.json").get("max_seq_length")),
        _whole(_json(files, "tokenizer_config.json").get("model_max_length")),
    ]
    return min((one for one in given if 0 < one <= 1_048_576), default=0)


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
