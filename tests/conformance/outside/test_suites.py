"""The suites that OpenAI and Anthropic wrote for their own SDKs, unmodified, against a running platform.

First the platform is fuzzed from OpenAI's specification and then the suites
run on it, since what fuzzing got past a check would break them. Every test of
the files below runs, in its loose and its strict variant; the tables say which
fail and why.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.outside.fuzz import ANTHROPIC, BASELINES, COHERE, OPENAI, Specification, fuzz
from tests.conformance.outside.proxy import key_proxy
from tests.conformance.outside.suites import Refusal, require, run_suite
from tests.support.ledger import gather, violations
from tests.support.waiting import eventually
from tests.support.yard import Yard
from tools.conformance import OUTSIDE

require("suites", "fuzz")
pytestmark = pytest.mark.timeout(600)

SETTINGS: dict[str, object] = {"gateway.total_timeout_s": 30}
MODELS = (
    "claude-mythos-preview",
    "claude-opus-4-5",
    "claude-opus-4-5-20251101",
    "claude-opus-5-5",
    "claude-sonnet-4-5",
    "claude-sonnet-4-5-20250929",
    "gpt-3.5-turbo-instruct",
    "gpt-4o-transcribe",
    "gpt-6-astra",
    "gpt-image-1.5",
    "gpt-image-2.5-flare",
    "model_id",
    "omni-moderation-2024-09-26",
    "omni-moderation-latest",
    "text-embedding-3-small",
    "tts-1",
    "whisper-1",
)
"""The names that the suites ask for; each is a simulated engine."""

OPENAI_FILES = (
    "chat/test_completions.py",
    "test_completions.py",
    "test_embeddings.py",
    "test_models.py",
    "test_moderations.py",
    "test_responses.py",
    "responses/test_input_items.py",
    "responses/test_input_tokens.py",
    "test_images.py",
    "audio/test_speech.py",
    "audio/test_transcriptions.py",
    "audio/test_translations.py",
    "test_files.py",
    "test_batches.py",
)
NO_ROUTE = "Invalid URL"
NO_MODEL = "Missing required parameter: 'model'"
NO_DEFAULT = "asks without a model, and there is no default model"
NOT_STORED = "answers are not stored here, so there are none to list, read, change or delete"
NO_FILE = "No such file 'file_id'"
NO_BATCH = "No batch found with id 'batch_id'"
NEVER_MADE = "asks for the batch 'batch_id', which nobody has made"
NEVER_SENT = "asks for the file 'file_id', which nobody has sent"
OPENAI_REFUSALS = (
    Refusal(
        "chat/test_completions.py::test_method_create_with_all_params_overload_*",
        "cannot be used beside 'tools'",
        "sends 'functions' beside 'tools', which replaced it; we do not guess which is meant",
    ),
    Refusal("chat/test_completions.py::*_list*", "does not accept GET", NOT_STORED),
    Refusal("chat/test_completions.py::*_retrieve[*", NO_ROUTE, NOT_STORED),
    Refusal("chat/test_completions.py::*_update[*", NO_ROUTE, NOT_STORED),
    Refusal("chat/test_completions.py::*_delete[*", NO_ROUTE, NOT_STORED),
    Refusal(
        "test_completions.py::test_method_create_with_all_params_overload_*",
        "Unsupported parameter 'suffix'",
        "asks for fill-in-the-middle, which the simulated engine does not declare",
    ),
    Refusal(
        "test_embeddings.py::*_create[strict]",
        "invalid for expected schema",
        "artefact: the SDK asks for base64 and its strict check then allows only numbers",
    ),
    Refusal("test_models.py::*_delete[*", NO_ROUTE, "a caller cannot remove a model; who deployed it can"),
    Refusal("test_responses.py::*_create_overload_*", NO_MODEL, NO_DEFAULT),
    Refusal(
        "test_responses.py::test_method_create_with_all_params_overload_*",
        "max_tool_calls",
        "asks for 0 calls of tools, and for stored conversations and prompts beside",
    ),
    Refusal("test_responses.py::*_retrieve_*", NO_ROUTE, NOT_STORED),
    Refusal("test_responses.py::*_delete[*", NO_ROUTE, NOT_STORED),
    Refusal("test_responses.py::*_cancel[*", NO_ROUTE, "there are no background answers to cancel"),
    Refusal("test_responses.py::*_compact*", NO_ROUTE, "compaction is the engine maker's own model; none is offered"),
    Refusal("responses/test_input_items.py::*", NO_ROUTE, NOT_STORED),
    Refusal("responses/test_input_tokens.py::*_count[*", NO_MODEL, NO_DEFAULT),
    Refusal(
        "responses/test_input_tokens.py::test_method_count_with_all_params*",
        "Unsupported parameter 'previous_response_id'",
        NOT_STORED,
    ),
    Refusal("test_images.py::*_create_variation*", NO_ROUTE, "only DALL-E 2 has variations"),
    Refusal("test_images.py::*_edit_overload_*", NO_MODEL, NO_DEFAULT),
    Refusal("test_images.py::*_generate_overload_*", NO_MODEL, NO_DEFAULT),
    Refusal(
        "test_images.py::*_with_all_params_overload_2*",
        "Unsupported parameter 'stream'",
        "asks for partial pictures, which the simulated engine does not declare",
    ),
    Refusal(
        "audio/test_transcriptions.py::*overload_1*",
        "no WAV",
        "sends the words 'Example data' as sound; the simulated engine reads WAV, as a real one would",
    ),
    Refusal(
        "audio/test_transcriptions.py::*overload_2*",
        "Unsupported parameter 'stream'",
        "asks for a transcript as a stream, which the simulated engine does not declare",
    ),
    Refusal("audio/test_translations.py::*", "no WAV", "sends the words 'Example data' as sound"),
    *(
        Refusal(f"test_files.py::*_{verb}[*", NO_FILE, NEVER_SENT)
        for verb in ("retrieve", "retrieve_content", "delete")
    ),
    Refusal("test_files.py::*_list_with_all_params*", "Invalid 'limit'", "asks for 0 files; OpenAI names 1 to 10,000"),
    *(Refusal(f"test_batches.py::*_{verb}[*", NO_BATCH, NEVER_MADE) for verb in ("retrieve", "cancel")),
    Refusal("test_batches.py::*_list_with_all_params*", "Invalid 'limit'", "asks for 0 batches; OpenAI names 1 to 100"),
)
ANTHROPIC_FILES = ("test_messages.py", "test_models.py")
ANTHROPIC_REFUSALS = (
    Refusal(
        "test_messages.py::test_method_create_with_all_params_overload_*",
        "Unsupported parameter 'container'",
        "asks for a container on Anthropic's servers",
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _deployed(yard: Yard) -> None:
    for name in MODELS:
        yard.deploy(name, options={"slots": 8, "ttft_ms": 1, "itl_ms": 0.1}, wait=False)
    for name in MODELS:
        yard.wait_ready(name, within_s=60)


@pytest.fixture(scope="module")
def url(yard: Yard) -> Iterator[str]:
    with key_proxy(yard.url, yard.new_key()) as found:
        yield found


@pytest.mark.parametrize("of", [OPENAI, ANTHROPIC, COHERE], ids=lambda of: of.maker)
def test_fuzzing_from_the_specification_finds_nothing_new(yard: Yard, of: Specification, tmp_path: Path) -> None:
    found = fuzz(of, yard.url, yard.new_key(), tmp_path)
    if not found.answers.keys() & {(path, 200) for path in of.models}:
        # On a busy machine the time can be over before the first request is made.
        found = fuzz(of, yard.url, yard.new_key(), tmp_path, patience=5)
    assert not found.failures, "\n".join(found.failures)
    asked = {path for path, _ in found.answers} & of.models.keys()  # a slow machine may not get round to all of them
    assert asked
    silent = [path for path in asked if not found.answers[path, 200]]
    assert not silent, f"no request got through to an answer: {found.answers}"
    broken = {key: count for key, count in found.answers.items() if key[1] >= 500}
    assert not broken, broken


def test_every_false_finding_is_explained() -> None:
    page = (OUTSIDE.parents[2] / "docs" / "reference" / "conformance.md").read_text()
    entries = [entry for file in BASELINES.glob("*.json") for entry in json.loads(file.read_text())["entries"]]
    assert entries
    assert [entry for entry in entries if f"`{entry['id']}`" not in page] == []


def test_openais_suite_passes_on_the_platform_that_was_fuzzed(url: str, tmp_path: Path) -> None:
    run = run_suite("openai", OPENAI_FILES, f"{url}/v1", tmp_path)
    surprises = run.surprises(OPENAI_REFUSALS)
    assert not surprises, "\n".join(surprises)
    assert len(run.passed) >= 80


def test_anthropics_suite_passes_on_the_platform_that_was_fuzzed(url: str, tmp_path: Path) -> None:
    run = run_suite("anthropic", ANTHROPIC_FILES, url, tmp_path)
    surprises = run.surprises(ANTHROPIC_REFUSALS)
    assert not surprises, "\n".join(surprises)
    assert len(run.passed) >= 38


def test_the_ledger_agrees_with_the_engines_about_all_of_it(yard: Yard) -> None:
    def disagreements() -> list[str]:
        # Others' programs made the requests, so that no history of a client is here to compare.
        return [found for found in violations(gather(yard, [])) if "rows of unknown requests" not in found]

    eventually(lambda: not disagreements(), 40, "the ledger, the roll-ups and the engines agree")
    assert len(yard.rows()) > 100
