"""Running a test suite that others wrote, as it is, and judging it by a table of what is not offered here.

Every test of the chosen files runs. One that fails must be covered by a
refusal: a pattern, the words that the failure must hold, and the reason. One
that a refusal covers must fail, so that the table shrinks with what is built.
"""

import fnmatch
import os
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tools.conformance import is_prepared, python_of, source_of

SUITE_WITHIN_S = 500


@dataclass(frozen=True, slots=True)
class Refusal:
    """Tests of a suite that fail here on purpose."""

    tests: str
    """Pattern of ``file::test[variant]``; tests of empty path parameters never leave the client and are not meant."""
    says: str
    """Words of the error, so that another failure is not taken for this one."""
    reason: str

    def covers(self, test: str) -> bool:
        """Say whether a test is meant."""
        return "::test_path_params" not in test and fnmatch.fnmatchcase(test, self.tests.replace("[", "[[]"))


@dataclass(frozen=True, slots=True)
class Run:
    """What became of each test: "" for a pass, else the failure."""

    results: dict[str, str]

    @property
    def passed(self) -> list[str]:
        """Return the tests that passed."""
        return [test for test, failure in self.results.items() if not failure]

    def surprises(self, refusals: Sequence[Refusal]) -> list[str]:
        """Return what the table does not say: failures without a refusal, refusals without a failure."""
        found = []
        for test, failure in self.results.items():
            covering = [refusal for refusal in refusals if refusal.covers(test)]
            if failure and not any(refusal.says in failure for refusal in covering):
                found.append(f"{test} failed: {failure[:400]}")
            if covering and not failure:
                found.append(f"{test} passes now, take it out of the table: {covering[0].tests}")
        idle = [refusal.tests for refusal in refusals if not any(map(refusal.covers, self.results))]
        return found + [f"the table has {pattern}, and the suite has not" for pattern in idle]


def require(*names: str) -> None:
    """Skip the tests of a module where these environments are not prepared."""
    for name in names:
        if not is_prepared(name):
            target = "conformance-setup" if name in ("suites", "fuzz") else "conformance-all"
            pytest.skip(f"outside suites not prepared ({name}): run make {target}", allow_module_level=True)


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what would change a client's or a suite's mind."""
    dropped = ("OPENAI_", "ANTHROPIC_", "COHERE_", "CO_API", "PYTEST_", "PYTHON", "MODELYARD", "LITELLM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "CI": "true", "NO_PROXY": "127.0.0.1", "PYTHONDONTWRITEBYTECODE": "1", **more}


def run_suite(package: str, files: Iterable[str], url: str, scratch: Path) -> Run:
    """Run the synchronous tests of some files of a package's own suite against a URL."""
    report = scratch / f"{package}.xml"
    command = [str(python_of("suites")), "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", "."]
    command += ["-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    command += ["-o", "asyncio_default_fixture_loop_scope=session", "-k", "not TestAsync", "--tb=line"]
    command += ["--junitxml", str(report), *(f"tests/api_resources/{file}" for file in files)]
    done = subprocess.run(
        command,
        cwd=source_of(package),
        env=environment(TEST_API_BASE_URL=url),
        check=False,
        capture_output=True,
        text=True,
        timeout=SUITE_WITHIN_S,
    )
    assert done.returncode in (0, 1), f"the suite of {package} did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return Run(results_of(report))


def results_of(report: Path) -> dict[str, str]:
    """Read a JUnit report: the outcome of each test by ``file::test[variant]``; what the suite skips is left out."""
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            continue
        file = "/".join(str(case.get("classname")).split(".")[2:-1]) + ".py"
        failure = case.find("failure") if case.find("failure") is not None else case.find("error")
        said = "" if failure is None else f"{failure.get('message')}\n{failure.text}"
        found[f"{file}::{case.get('name')}"] = said or ("" if failure is None else "failed")
    return found
