"""BERT and its kin in safetensors as an ONNX graph, built node by node: ``--to onnx``. No torch, no model code.

The graph gives what the class in ``config.json`` gives (``last_hidden_state``, or ``logits`` of a classifier,
reranker or tagger); pooling and scores are left to the engine, which reads them from the files beside it.

Positions are a ``Slice`` of their table: a ``Range`` into a ``Gather``, as exporters write it, trips a fusion of ONNX
Runtime 1.32 ("Starts must be a 1-D array"). Padding is expected behind the text, as the engine pads.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from modelyard.formats import ArtifactInvalidError
from modelyard.formats.convert import ConvertError, Progress
from modelyard.formats.convert.bert_graph import Shape, build
from modelyard.formats.folder import FILES_MAX, facts_of

PACKAGES = ("numpy", "onnx", "safetensors")
"""What it imports beside the platform's own."""
ONE_FILE_BYTES = 1_500_000_000
"""A protocol buffer ends at 2 GiB; the numbers of larger models stand in a file beside it."""
BERT, ROBERTA, DISTILBERT = "bert", "roberta", "distilbert"
_FAMILIES = {"bert": BERT, "roberta": ROBERTA, "xlm-roberta": ROBERTA, "camembert": ROBERTA, "distilbert": DISTILBERT}
_HEADS = {"ForSequenceClassification": "classify", "ForTokenClassification": "token_classify"}
_BESIDE = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "modules.json",
    "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json", "README.md", "LICENSE",
)  # fmt: skip
_CONFIG_BYTES_MAX = 4 * 1024 * 1024


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Fill the empty ``folder`` from the folder ``source`` of a model in safetensors.

    Raises:
        ConvertError: it is of an architecture that is not converted, or lacks tensors.
        ArtifactInvalidError: it is no sound model.
    """
    import onnx

    files = _files(source)
    facts = facts_of(files)
    if facts.format != "safetensors":
        raise ConvertError(f"'{source}' is {facts.format}; '--to onnx' converts a folder with safetensors.")
    config = _config(files)
    shape = _shape(config)
    tensors = dict(_tensors(files, facts.weights_bytes, progress))
    model = build(shape, tensors)
    size = sum(array.nbytes for array in tensors.values())
    target = folder / "model.onnx"
    if size < ONE_FILE_BYTES:
        onnx.save_model(model, str(target))
    else:
        onnx.save_model(
            model, str(target), save_as_external_data=True, all_tensors_to_one_file=True, location="model.onnx_data"
        )
    for name in _BESIDE:
        if name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(files[name].read_bytes())


def _files(source: Path) -> dict[str, Path]:
    if not source.is_dir():
        raise ConvertError(f"'{source}' is no folder; '--to onnx' converts a folder with config.json and safetensors.")
    found: dict[str, Path] = {}
    for folder, _, names in os.walk(source):
        found |= {Path(folder, name).relative_to(source).as_posix(): Path(folder, name) for name in names}
        if len(found) > FILES_MAX:
            raise ConvertError(f"'{source}' has more than {FILES_MAX:,} files.")
    # What a repository holds beside of the model (checkpoints of other frameworks) is not read and must not refuse it.
    kept = {
        name: file
        for name, file in found.items()
        if name in _BESIDE
        or name == "model.safetensors.index.json"
        or (name.endswith(".safetensors") and "/" not in name)
    }
    if "config.json" not in kept:
        raise ConvertError(f"'{source}' has no config.json.")
    if not any(name.endswith(".safetensors") for name in kept):
        is_done = any(name.endswith(".onnx") for name in found)
        fix = "it has ONNX already: deploy it as it is" if is_done else "save the model with safe_serialization=True"
        raise ConvertError(f"'{source}' has no .safetensors file; {fix}.")
    return kept


def _config(files: dict[str, Path]) -> dict[str, Any]:
    file = files["config.json"]
    if file.stat().st_size > _CONFIG_BYTES_MAX:
        raise ConvertError("The file config.json is too large.")
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConvertError(f"The file config.json is no JSON object: {error}.") from error


def _shape(config: dict[str, Any]) -> Shape:
    """Return what the graph is built from.

    Raises:
        ConvertError: it is a model of another kind, or one with an option that the graph does not have.
    """
    kind = str(config.get("model_type"))
    family = _FAMILIES.get(kind)
    if family is None:
        known = ", ".join(_FAMILIES)
        raise ConvertError(f"The architecture '{kind[:64]}' is not converted to ONNX; these are: {known}.")
    for name, plain in (("position_embedding_type", "absolute"), ("is_decoder", False), ("add_cross_attention", False)):
        if config.get(name, plain) != plain:
            raise ConvertError(f"A model with {name} = {config[name]!r} is not converted.")
    named = config.get("architectures") or ["Model"]
    architecture = str(named[0])
    head = next((head for ending, head in _HEADS.items() if architecture.endswith(ending)), "")
    if not head and not architecture.endswith(("Model", "ForMaskedLM", "ForPreTraining")):
        raise ConvertError(f"The class '{architecture[:64]}' is not converted; models, classifiers and taggers are.")
    names = {"hidden": "dim", "layers": "n_layers", "heads": "n_heads", "act": "activation"}
    if family != DISTILBERT:
        names = {
            "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "act": "hidden_act",
        }  # fmt: skip
    try:
        shape = Shape(
            family=family,
            head=head,
            layers=int(config[names["layers"]]),
            heads=int(config[names["heads"]]),
            hidden=int(config[names["hidden"]]),
            activation=str(config.get(names["act"], "gelu")),
            epsilon=float(config.get("layer_norm_eps", 1e-12)),
            # RoBERTa counts positions from behind its padding index.
            first_position=int(config.get("pad_token_id", 1)) + 1 if family == ROBERTA else 0,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConvertError(f"The file config.json lacks a number: {error}.") from error
    if shape.heads < 1 or shape.hidden % shape.heads or not 0 < shape.layers <= 512:
        raise ConvertError("The numbers in config.json do not fit each other.")
    return shape


def _tensors(files: dict[str, Path], whole: int, progress: Progress) -> Iterator[tuple[str, Any]]:
    """Give all tensors in 32 bits."""
    import numpy as np
    import safetensors

    done = 0
    for name in sorted(name for name in files if name.endswith(".safetensors")):
        try:
            found = safetensors.deserialize(files[name].read_bytes())  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as error:
            raise ArtifactInvalidError(f"The file '{name}' is no safetensors file: {error}.") from error
        for key, tensor in found:
            kind, raw = tensor["dtype"], tensor["data"]
            if kind == "BF16":
                array = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
            elif kind in ("F32", "F16", "F64"):
                array = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[kind]).astype(np.float32)
            else:
                continue  # positions and masks that old versions saved; what is needed and is not there is told later
            yield key, array.reshape(tensor["shape"])
            done += len(raw)
            progress(min(done, whole), whole)
