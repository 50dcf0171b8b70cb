"""Other people's gateways, installed on demand: ``python -m bench.gateway --install litellm,smg``.

Each goes into a folder of its own under ``.cache/bench/peers``, at the version
that the recorded figures are of, so that none of them shares a dependency with
this project or with another one. Nothing is installed unasked.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from bench import tools

FOLDER = tools.BUILD / "peers"
PYTHON = {
    "litellm": "litellm[proxy]==1.108.0",
    "smg": "smg==1.13.0",
    "vllm-router": "vllm-router==0.1.17",
    "sglang-router": "sglang-router==0.3.2",
}
NODE = {"portkey": "@portkey-ai/gateway@1.15.2"}


def folder(name: str) -> Path:
    """Return where the gateway called ``name`` is, or would be."""
    return FOLDER / name


def how_to(name: str) -> str:
    """Return how to get ``name``, as a reason why it is missing."""
    tool = "npm" if name in NODE else "pip"
    return f"not installed ({tool}): python -m bench.gateway --install {name}"


def install(names: str) -> None:
    """Install the gateways of a comma-separated list, or ``all``."""
    wanted = [*PYTHON, *NODE] if names == "all" else [name for name in names.split(",") if name]
    for name in wanted:
        print(f"bench: installing {name} into {folder(name)}", file=sys.stderr)
        shutil.rmtree(folder(name), ignore_errors=True)
        if name in PYTHON:
            subprocess.run([sys.executable, "-m", "venv", folder(name)], check=True)
            pip = str(folder(name) / "bin" / "pip")
            subprocess.run([pip, "install", "--quiet", "--only-binary", ":all:", PYTHON[name]], check=True)
        elif name in NODE:
            npm = shutil.which("npm")
            if npm is None:
                raise tools.fail(f"{name} needs Node.js with npm")
            folder(name).mkdir(parents=True)
            where = ["--prefix", str(folder(name))]
            subprocess.run([npm, "install", *where, "--no-audit", "--no-fund", "--silent", NODE[name]], check=True)
            _mend_portkey()
        else:
            raise tools.fail(f"no gateway called {name}; there are {', '.join([*PYTHON, *NODE])}")


def _mend_portkey() -> None:
    """Let it stream: as npm installs it, it answers every stream with 500 ("TypeError: immutable").

    Its HTTP server replaces ``Response`` by one that shares the headers of the response it is made of, and those of
    ``fetch`` cannot be changed; the real ``Response`` copies them.
    """
    server = folder("portkey") / "node_modules/@hono/node-server/dist/index.mjs"
    shared, copied = "headers || init?.headers]", "headers || new Headers(init?.headers)]"
    server.write_text(server.read_text().replace(shared, copied))
