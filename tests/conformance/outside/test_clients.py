"""Clients that others wrote, each in its own environment and as it is, against a running platform.

A script per client makes the calls and asserts what it sees; it runs in the
client's environment and prints the names of the checks that it went through.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.conformance.outside.suites import environment, require
from tests.support.ledger import gather, violations
from tests.support.waiting import eventually
from tests.support.yard import Yard
from tools.conformance import CACHE, CLIENTS, OUTSIDE, is_prepared, python_of

if not any(map(is_prepared, (*CLIENTS, "node"))):
    pytest.skip("outside clients not prepared: run make conformance-all", allow_module_level=True)

MODEL = "sim"
CLIENT_WITHIN_S = 200


@pytest.fixture(scope="module", autouse=True)
def _deployed(yard: Yard) -> None:
    yard.deploy(MODEL, options={"slots": 8, "ttft_ms": 1, "itl_ms": 1, "embedding_dimensions": 16})


def went_through(yard: Yard, command: list[str], folder: Path) -> list[str]:
    """Run a client's script and return its checks."""
    done = subprocess.run(
        [*command, yard.url, yard.new_key(), MODEL],
        cwd=folder,
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=CLIENT_WITHIN_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_is_answered_as_by_its_maker(yard: Yard, client: str, tmp_path: Path) -> None:
    require(client)
    script = OUTSIDE / "clients" / f"use_{client}.py"
    checks = went_through(yard, [str(python_of(client)), str(script)], tmp_path)
    assert checks == re.findall(r"^@check\ndef (\w+)", script.read_text(), re.MULTILINE)


def test_the_clients_of_npm_are_answered_as_by_their_makers(yard: Yard) -> None:
    require("node")
    script = shutil.copy(OUTSIDE / "node" / "clients.mjs", CACHE / "node" / "clients.mjs")  # where node finds packages
    assert len(went_through(yard, ["node", script], CACHE / "node")) == 20


def test_the_ledger_agrees_with_the_engines_about_the_clients(yard: Yard) -> None:
    def disagreements() -> list[str]:
        return [found for found in violations(gather(yard, [])) if "rows of unknown requests" not in found]

    eventually(lambda: not disagreements(), 40, "the ledger, the roll-ups and the engines agree")
    assert yard.rows()
