"""The unmodified ``openai`` SDK of npm; one run of ``node/sdk.mjs`` tells what it saw, the tests judge it."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.yard import Yard

VERSION = "6.49.0"
"""The last line that runs on Node 20."""
ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / f"node-openai-{VERSION}"
SCRIPT = Path(__file__).parent / "node" / "sdk.mjs"


def install() -> None:
    """Install the package once into ``.cache``; skip where that is not possible."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    if (CACHE / "node_modules" / "openai" / "package.json").exists():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / "package.json").write_text('{"private": true, "type": "module"}')
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", f"openai@{VERSION}"]
    try:
        subprocess.run(command, cwd=CACHE, check=True, capture_output=True, text=True, timeout=90)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        shutil.rmtree(CACHE, ignore_errors=True)
        pytest.skip(f"npm could not install openai@{VERSION}: {str(error.stderr or error)[-200:]}")


@pytest.fixture(scope="module")
def found(yard: Yard) -> dict[str, Any]:
    install()
    yard.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1, "embedding_dimensions": 16})
    script = shutil.copy(SCRIPT, CACHE / "sdk.mjs")  # where node finds the package
    limited = yard.new_key(limits={"requests_per_minute": 1})
    done = subprocess.run(
        ["node", script, f"{yard.url}/v1", yard.new_key(), limited, "sim"],
        check=False,
        cwd=CACHE,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_chat_answers(found: dict[str, Any]) -> None:
    assert found["chat"]["text"] == "hello big world"
    assert found["chat"]["usage"]["completion_tokens"] == 3
    assert found["chat"]["requestId"]


def test_streams_show_usage_only_when_asked(found: dict[str, Any]) -> None:
    for stream in (found["stream"], found["streamWithUsage"]):
        assert (stream["text"], stream["finish"]) == ("hello big world", "stop")
    assert (found["stream"]["usage"], found["stream"]["empty"]) == (None, 0)
    assert found["streamWithUsage"]["usage"]["completion_tokens"] == 3
    assert found["streamWithUsage"]["empty"] == 1


def test_completions_embeddings_and_models(found: dict[str, Any]) -> None:
    assert found["completion"].strip() == "once upon a time"
    assert found["embeddings"] == [16, 16]
    assert "sim" in found["models"]
    assert found["retrieved"] == "sim"


def test_files_go_their_whole_way(found: dict[str, Any]) -> None:
    files = found["files"]
    sent = files["sent"]
    assert (sent["filename"], sent["bytes"], sent["status"]) == ("größe.txt", 40_000_000, "processed")
    assert sent["expires_at"] - sent["created_at"] == 3600
    assert (files["listed"], files["same"], files["deleted"]) == (True, True, True)
    assert (files["gone"]["name"], files["gone"]["code"]) == ("NotFoundError", "not_found")


@pytest.mark.parametrize(
    ("case", "name", "status", "code", "param"),
    [
        ("wrongKey", "AuthenticationError", 401, "invalid_api_key", None),
        ("unknownModel", "NotFoundError", 404, "model_not_found", "model"),
        ("badValue", "BadRequestError", 400, "invalid_value", "temperature"),
        ("overLimit", "RateLimitError", 429, "rate_limit_exceeded", None),
    ],
)
def test_errors_become_their_classes(
    found: dict[str, Any], case: str, name: str, status: int, code: str, param: str | None
) -> None:
    error = found[case]
    assert (error["name"], error["status"], error["code"]) == (name, status, code)
    assert error["param"] == param
    assert error["requestId"]


def test_the_limit_says_when_to_come_back(found: dict[str, Any]) -> None:
    assert 1 <= int(found["overLimit"]["retryAfter"]) <= 61


def test_an_error_in_a_stream_is_thrown(found: dict[str, Any]) -> None:
    assert found["streamError"]["name"] == "APIError"
    assert found["streamError"]["code"]
