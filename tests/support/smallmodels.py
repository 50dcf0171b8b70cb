"""Small real models for the engine ``onnx``, and a plain BERT in numpy to compare with: nothing of it is ours."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tools.onnxmodels import ROOT, model_folder
from tools.smollm import ModelMissing, locked

Floats = NDArray[Any]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "anna", "lives", "in", "new", "york", "and", "works", "for", "acme",
              "good", "bad", "day", "##s", "##ly", "the", "a", "."]  # fmt: skip


def packed_model(name: str) -> Path:
    """Return the folder of a real model; the test is skipped where it cannot be had."""
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    try:
        return model_folder(name)
    except ModelMissing as error:
        pytest.skip(str(error))


def minilm_onnx() -> Path:
    """Return MiniLM as our converter makes it; made once, and anew when the converter was changed."""
    pytest.importorskip("onnx", reason="needs the extra 'convert'")
    from modelyard.formats.convert import bert_graph, onnx_bert

    source = packed_model("minilm")
    age = max(Path(str(module.__file__)).stat().st_mtime for module in (bert_graph, onnx_bert))
    folder = ROOT / "minilm-onnx"
    with locked(ROOT / "lock"):
        if not folder.is_dir() or folder.stat().st_mtime < age:
            shutil.rmtree(folder, ignore_errors=True)
            draft = ROOT / "minilm-onnx.draft"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            onnx_bert.convert(source, draft, lambda done, whole: None)
            draft.rename(folder)
    return folder


def tiny_bert(folder: Path, architecture: str, *, labels: list[str] | None = None, seed: int = 7, **more: Any) -> Path:
    """Write a small random BERT with its tokenizer into ``folder``, as Hugging Face's libraries would."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [architecture], "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 64, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
        "max_position_embeddings": 64, "type_vocab_size": 2, "vocab_size": len(VOCABULARY), "pad_token_id": 0, **more,
    }  # fmt: skip
    if labels is not None:
        config["id2label"] = {str(index): label for index, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_random_weights(config, len(labels or ()), seed), str(folder / "model.safetensors"))
    (folder / "tokenizer.json").write_text(_tokenizer())
    return folder


def converted(source: Path, folder: Path) -> Path:
    """Return ``folder`` with the ONNX model of ``source``."""
    from modelyard.formats.convert import onnx_bert

    folder.mkdir(parents=True)
    onnx_bert.convert(source, folder, lambda done, whole: None)
    return folder


def text_direction(folder: Path) -> Path:
    """Return RapidOCR's classifier as a folder that says how its pictures are prepared and what its classes are."""
    folder.mkdir(exist_ok=True)
    source = packed_model("rapidocr") / "ch_ppocr_mobile_v2.0_cls_mobile.onnx"
    (folder / "model.onnx").write_bytes(source.read_bytes())
    config = {"architectures": ["PPForImageClassification"], "id2label": {"0": "upright", "1": "upside down"}}
    (folder / "config.json").write_text(json.dumps(config))
    preparation = {
        "size": {"height": 48, "width": 192},
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_flip_channel_order": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preparation))
    return folder


def png_line(*, is_turned: bool = False) -> bytes:
    """Return a picture of a line of text, upright or upside down."""
    import io

    from PIL import Image, ImageDraw, ImageFont

    line = Image.new("RGB", (192, 48), "white")
    ImageDraw.Draw(line).text((8, 6), "Reading 2026", fill="black", font=ImageFont.load_default(28))
    out = io.BytesIO()
    (line.rotate(180) if is_turned else line).save(out, "PNG")
    return out.getvalue()


@cache
def weights_of(folder: Path) -> dict[str, Floats]:
    """Return the tensors of a folder."""
    from safetensors.numpy import load_file

    return dict(load_file(str(folder / "model.safetensors")))


def bert_forward(weights: dict[str, Floats], config: dict[str, Any], ids: list[int], types: list[int]) -> Floats:
    """Return the last hidden states of one text, without padding: the paper's formulas and nothing else."""
    w = {name.removeprefix("bert."): array for name, array in weights.items()}
    heads = config["num_attention_heads"]
    hidden = w["embeddings.word_embeddings.weight"][ids].astype(np.float64)
    hidden = hidden + w["embeddings.position_embeddings.weight"][: len(ids)]
    hidden = _norm(hidden + w["embeddings.token_type_embeddings.weight"][types], w, "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        base = f"encoder.layer.{layer}"
        parts = [_dense(hidden, w, f"{base}.attention.self.{one}") for one in ("query", "key", "value")]
        query, key, value = (part.reshape(len(ids), heads, -1).transpose(1, 0, 2) for part in parts)
        mixed = _softmax(query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1])) @ value
        joined = mixed.transpose(1, 0, 2).reshape(len(ids), -1)
        hidden = _norm(
            hidden + _dense(joined, w, f"{base}.attention.output.dense"), w, f"{base}.attention.output.LayerNorm"
        )
        wide = _gelu(_dense(hidden, w, f"{base}.intermediate.dense"))
        hidden = _norm(hidden + _dense(wide, w, f"{base}.output.dense"), w, f"{base}.output.LayerNorm")
    return np.asarray(hidden)


def classifier(weights: dict[str, Floats], hidden: Floats) -> Floats:
    """Return the logits of a classifier's head over the last hidden states."""
    w = {name.removeprefix("bert."): array.astype(np.float64) for name, array in weights.items()}
    return np.asarray(_dense(np.tanh(_dense(hidden[0], w, "pooler.dense")), w, "classifier"))


def tagger(weights: dict[str, Floats], hidden: Floats) -> Floats:
    """Return the logits of a tagger's head."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    return np.asarray(_dense(hidden, w, "classifier"))


def softmax(values: Floats) -> Floats:
    """Return softmax along the last axis."""
    return np.asarray(_softmax(values))


def _dense(values: Any, w: dict[str, Any], base: str) -> Any:
    return values @ w[f"{base}.weight"].T + w[f"{base}.bias"]


def _norm(values: Any, w: dict[str, Any], base: str) -> Any:
    centred = values - values.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
    return scaled * w[f"{base}.weight"] + w[f"{base}.bias"]


def _softmax(values: Any) -> Any:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _gelu(values: Any) -> Any:
    from math import erf

    return values * 0.5 * (1 + np.vectorize(erf)(values / np.sqrt(2)))


def _random_weights(config: dict[str, Any], labels: int, seed: int) -> dict[str, Floats]:
    random = np.random.default_rng(seed)
    size, wide = config["hidden_size"], config["intermediate_size"]
    out: dict[str, Floats] = {}

    def dense(name: str, rows: int, columns: int) -> None:
        out[f"{name}.weight"] = random.normal(0, 0.4, (rows, columns)).astype(np.float32)
        out[f"{name}.bias"] = random.normal(0, 0.2, rows).astype(np.float32)

    def norm(name: str) -> None:
        out[f"{name}.weight"] = random.uniform(0.5, 1.5, size).astype(np.float32)
        out[f"{name}.bias"] = random.normal(0, 0.2, size).astype(np.float32)

    for table, rows in (("word", config["vocab_size"]), ("position", 64), ("token_type", 2)):
        out[f"bert.embeddings.{table}_embeddings.weight"] = random.normal(0, 1, (rows, size)).astype(np.float32)
    norm("bert.embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        base = f"bert.encoder.layer.{layer}"
        for one in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            dense(f"{base}.{one}", size, size)
        norm(f"{base}.attention.output.LayerNorm")
        dense(f"{base}.intermediate.dense", wide, size)
        dense(f"{base}.output.dense", size, wide)
        norm(f"{base}.output.LayerNorm")
    dense("bert.pooler.dense", size, size)
    if labels:
        dense("classifier", labels, size)
    return out


def _tokenizer() -> str:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return str(tokenizer.to_str())
