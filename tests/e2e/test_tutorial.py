"""The five-minute tutorial works: its blocks are run as they stand, in order, in one shell.

Comments before a block say what a reader does otherwise: ``ci: skip``, ``ci: background`` (a second terminal),
``ci: the output before contains`` (lines in which ``…`` stands for anything). Only the port and the data
directory differ from what the reader has.
"""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.waiting import eventually

from modelyard.fleet.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial" / "five-minutes.md"
PORT_OF_THE_TEXT = "8484"
BLOCK = re.compile(
    r"(?:<!-- ci: (?P<note>[^>]*) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One fenced block; ``note`` is the comment right before it."""

    language: str
    code: str
    note: str


def blocks() -> list[Block]:
    found = [Block(one["language"], one["code"], one["note"] or "") for one in BLOCK.finditer(TUTORIAL.read_text())]
    return [block for block in found if not block.note.startswith("skip")]


def script_of(block: Block) -> str:
    return f"python <<'THE_TUTORIAL'\n{block.code}THE_TUTORIAL\n" if block.language == "python" else block.code


def matches(expected: str, output: str) -> bool:
    return re.search(re.escape(expected).replace("…", ".*"), output) is not None


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    port = free_port(())  # of those that no connection of another test is given meanwhile
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("MODELYARD", "OPENAI"))}
    return mine | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{mine['PATH']}",
        "MODELYARD_DATA_DIR": str(tmp_path / "data"),
        "MODELYARD__GATEWAY__PORT": str(port),
    }


@pytest.fixture
def platform(environment: dict[str, str], tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """What runs in the reader's first terminal; ended after the test, whatever happened."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as error:
        error.close()
        return False


def run_in_one_shell(parts: list[Block], environment: dict[str, str], folder: Path) -> list[str]:
    """Return the output of each block; fails with what was printed when one fails."""
    port = environment["MODELYARD__GATEWAY__PORT"]
    marked = [f"{script_of(block)}\necho; echo '=== end of block {at}'\n" for at, block in enumerate(parts)]
    script = "set -euo pipefail\n" + "".join(marked).replace(f"127.0.0.1:{PORT_OF_THE_TEXT}", f"127.0.0.1:{port}")
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=200,
        check=False,
    )
    output = done.stdout.decode()
    assert done.returncode == 0, f"a block failed with {done.returncode}; all output:\n{output}"
    return re.split(r"\n=== end of block \d+\n", output)[: len(parts)]


@pytest.mark.timeout(300)
def test_every_command_of_the_tutorial_works(
    environment: dict[str, str], platform: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    all_blocks = blocks()
    at = next(at for at, block in enumerate(all_blocks) if block.note.startswith("background"))
    before, rest = all_blocks[:at], all_blocks[at + 1 :]
    run_in_one_shell(before, environment, tmp_path)
    with (tmp_path / "first-terminal.txt").open("wb") as terminal:
        command = ["bash", "-c", f"exec {all_blocks[at].code}"]
        platform.append(
            subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=terminal, stderr=subprocess.STDOUT)
        )
    url = f"http://127.0.0.1:{environment['MODELYARD__GATEWAY__PORT']}/readyz"
    eventually(lambda: is_ready(url), 60, f"{url} is 200")
    # The gateway is ready before the controller is; a reader goes on when the first terminal says so.
    said = tmp_path / "first-terminal.txt"
    eventually(lambda: "Stop it with" in said.read_text(), 60, "the platform says how to stop it")

    commands = [block for block in rest if block.language in ("sh", "python")]
    outputs = run_in_one_shell(commands, environment, tmp_path)

    for here, block in enumerate(rest):
        if block.note.startswith("the output before contains"):
            output = outputs[commands.index(rest[here - 1])]
            for line in block.code.splitlines():
                assert matches(line, output), f"'{line}' is not in the output:\n{output}"
    assert "demo" in outputs[-2], "the bill shows the model that was asked"
    assert platform[0].wait(60) == 0, "modelyard down ends what runs in the first terminal"
