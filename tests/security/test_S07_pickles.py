"""S6 and S7: pickles, archives and whatever else is no model are refused by content, whatever they are called."""

import io
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import models
from tests.support.models import gguf, llama

from modelyard.formats import ArtifactInvalidError
from modelyard.formats.folder import facts_of
from modelyard.formats.sniff import Kind, kind_of

WEIGHTS = models.safetensors({"w": ("F32", [2], bytes(8))})
CONFIG = b'{"model_type": "llama", "num_hidden_layers": 2}'


class Touches:
    """Unpickling it would make a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._file,)


def zipped(*, is_broken: bool = False) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"w": 1}))
    content = out.getvalue()
    return content.replace(pickle.dumps({"w": 1}), b"\xff" * len(pickle.dumps({"w": 1}))) if is_broken else content


def tarred(mode: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        evil = tarfile.TarInfo("../evil")
        archive.addfile(evil, io.BytesIO())
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    return out.getvalue()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "pytorch_model.bin", "vocab.txt"])
def test_a_pickle_is_refused_under_any_name_and_never_run(tmp_path: Path, protocol: int, name: str) -> None:
    touched = tmp_path / "touched"
    file = tmp_path / name
    file.write_bytes(pickle.dumps(Touches(touched), protocol=protocol))
    with pytest.raises(ArtifactInvalidError, match="a pickle, which could run code"):
        facts_of({name: file})
    with pytest.raises(ArtifactInvalidError, match=f"'{name}', which is a pickle"):
        facts_of({name: file, **beside(tmp_path)})
    assert not touched.exists()


def beside(folder: Path) -> dict[str, Path]:
    """Return the rest of a folder that is fine."""
    (folder / "weights").write_bytes(WEIGHTS)
    (folder / "config.json").write_bytes(CONFIG)
    return {"weights.safetensors": folder / "weights", "config.json": folder / "config.json"}


@pytest.mark.parametrize("protocol", [0, 1])
@pytest.mark.parametrize(
    "value",
    [{"a": 1}, [1, 2, 3], ("x", 2.5), OrderedDict(w=[1.0, 2.0]), "text", {"weights": [0.5] * 100}, 7, None, 1 << 80],
)
def test_pickles_without_a_magic_number_are_known_by_what_they_would_do(protocol: int, value: object) -> None:
    content = pickle.dumps(value, protocol=protocol)
    assert kind_of(content, len(content)) is Kind.PICKLE


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'id'\ntR.",
        b"(S'id'\nios\nsystem\n.",
        b"c__builtin__\neval\n(Vprint(1)\ntR.",
        # What scanners have missed: an end, then bytes that are no pickle.
        b"cposix\nsystem\n(S'id'\ntR.\x00\xff\xfe broken",
    ],
)
def test_programs_in_protocol_0_are_known_even_when_they_are_cut_or_broken(content: bytes) -> None:
    assert kind_of(content, len(content)) is Kind.PICKLE


@pytest.mark.parametrize(
    "content",
    [
        b"[PAD]\n[UNK]\nthe\nof\n",
        b"#version: 0.2\n\xc4\xa0 t\nh e\ni n\n",
        b"(the model) is good. It (mostly) speaks.\n",
        b"Not a pickle.\nIt says so.\n",
        b"the\ncat\nis\non\nthe\nmat\n",
        b"---\nlicense: mit\n---\n# A model\n```python\nimport os\n```\nimport is a word.\n",
        b"IQ== 0\nIg== 1\nIw== 2\n",
        b"{% for message in messages %}{{ message }}{% endfor %}",
        b"]\n}\n)\n.\n",
    ],
)
def test_texts_that_stand_beside_models_are_no_pickles(content: bytes) -> None:
    assert kind_of(content, len(content)) in (Kind.TEXT, Kind.JSON)


def test_vocabularies_and_pictures_may_stand_beside_weights(tmp_path: Path) -> None:
    piece = models.field(1, "<unk>") + b"\x15\x00\x00\x00\x00" + models.field(3, 2)
    for content, kind in (
        (models.field(1, piece) * 3, Kind.SENTENCEPIECE),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), Kind.PICTURE),
        (b"", Kind.EMPTY),
    ):
        assert kind_of(content, len(content)) is kind
        file = tmp_path / "other"
        file.write_bytes(content)
        assert facts_of({"tokenizer.model": file, **beside(tmp_path)}).layers == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (zipped(), "a zip file"),
        (zipped(is_broken=True), "a zip file"),
        (tarred("w"), "an archive"),
        (tarred("w:gz"), "an archive"),
        (tarred("w:bz2"), "an archive"),
        (tarred("w:xz"), "an archive"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(50), "an archive"),
        (b"Rar!\x1a\x07\x01\x00" + bytes(50), "an archive"),
        (b"\x28\xb5\x2f\xfd" + bytes(50), "an archive"),
        (b"\x89HDF\r\n\x1a\n" + bytes(50), "an HDF5 file"),
        (b"\x93NUMPY\x01\x00", "a NumPy array"),
        (b"\x7fELF\x02\x01\x01" + bytes(50), "a program"),
        (b"MZ\x90\x00" + bytes(50), "a program"),
        (b"#!/bin/sh\nid\n", "a script"),
        (b"import os\nos.system('id')\n", "a script"),
        (b"<!DOCTYPE html><title>404</title>", "a web page"),
        (b"\n  <html><body>Sign in</body></html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a Git LFS pointer"),
        (b"FUGG\x00\x00\x00\x03" + bytes(50), "a big-endian GGUF file"),
        (b"lmgg" + bytes(50), "an old GGML file"),
        (b"\xde\xad\xbe\xef" * 20, "of an unknown kind"),
        (b"", "empty"),
        (b'{"error": "not found"}', "JSON"),
        (b"Access denied.", "text"),
    ],
)
def test_what_is_no_model_is_refused_and_named(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ArtifactInvalidError, match=f"it is {said}"):
        facts_of({"model.safetensors": file})
    if said not in ("JSON", "text", "empty"):
        with pytest.raises(ArtifactInvalidError, match=f"'data.bin', which is {said}"):
            facts_of({"data.bin": file, **beside(tmp_path)})


@pytest.mark.parametrize(
    "location", ["../../etc/shadow", "/etc/shadow", "a/../../b", "..\\b", "C:b", "a\x00b", "", "./a", "a//b"]
)
def test_onnx_data_outside_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    initializer = models.onnx(models.onnx_tensor("w", [2], location=location))
    node = models.field(4, "Constant") + models.field(
        5, models.field(1, "value") + models.field(5, models.onnx_tensor("c", [2], location=location))
    )
    sparse = models.field(7, models.field(15, models.field(1, models.onnx_tensor("s", [2], location=location))))
    function = models.field(25, models.field(7, node))
    training = models.field(20, models.field(1, models.field(5, models.onnx_tensor("t", [2], location=location))))
    good = models.onnx()
    for content in (initializer, models.onnx(nodes=[node]), good + sparse, good + function, good + training):
        file = tmp_path / "model.onnx"
        file.write_bytes(content)
        with pytest.raises(ArtifactInvalidError, match="no plain path beside the model"):
            facts_of({"model.onnx": file})


def test_onnx_data_beside_the_model_must_be_there_and_whole(tmp_path: Path) -> None:
    model, data = tmp_path / "model.onnx", tmp_path / "weights.bin"
    model.write_bytes(models.onnx(models.onnx_tensor("w", [256], location="weights.bin", offset="16", length="1024")))
    files = {"sub/model.onnx": model, "sub/weights.bin": data}
    with pytest.raises(ArtifactInvalidError, match=r"'weights\.bin', which is not there"):
        facts_of({"model.onnx": model})
    data.write_bytes(b"\xff" * 1039)
    with pytest.raises(ArtifactInvalidError, match="has 1,039 bytes; the ONNX file reads 1,040"):
        facts_of(files)
    data.write_bytes(b"\xff" * 1040)
    assert facts_of(files).parameters == 256
    with pytest.raises(ArtifactInvalidError, match=r"'other\.bin', which is of an unknown kind"):
        facts_of({**files, "other.bin": data})


def test_onnx_offsets_must_be_numbers(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    for offset in ("-1", "1e3", "9" * 30, "²", ""):
        file.write_bytes(models.onnx(models.onnx_tensor("w", [2], location="weights.bin", offset=offset)))
        with pytest.raises(ArtifactInvalidError, match="a place that is no number"):
            facts_of({"model.onnx": file})


def test_a_model_is_a_model_under_any_name(tmp_path: Path) -> None:
    for content, kind in ((gguf(llama()), "gguf"), (WEIGHTS, "safetensors"), (models.onnx(), "onnx")):
        file = tmp_path / "evil.tar.gz"
        file.write_bytes(content)
        assert facts_of({"evil.tar.gz": file}).format == kind
