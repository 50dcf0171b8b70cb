"""What a deploy may say of a provider, where keys may come from, and what the process is started with."""

from pathlib import Path
from typing import Any

import pytest

from modelyard.engines import EngineLoad, LaunchSpec, OptionsError
from modelyard.engines.providers.engines import (
    AnthropicProviderEngine,
    OpenAIProviderEngine,
    ProviderEngine,
    provider_engines,
)
from modelyard.engines.providers.keys import KeyFault, ProviderKeys

KEY = "sk-secret-1234567890"
ENVIRONMENT = {"MODELYARD_PROVIDER_X": KEY, "MODELYARD_PROVIDER_BAD": "two words", "HOME": "/root"}
OPENAI: dict[str, Any] = {"url": "https://api.example.com/v1", "model": "gpt-x", "key_env": "MODELYARD_PROVIDER_X"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys = tmp_path / "secrets" / "providers"
    keys.mkdir(parents=True)
    (keys / "good").write_text(f"{KEY}\n")
    (keys / "empty").write_text("\n")
    (tmp_path / "secrets" / "admin-key").write_text("the platform's own")
    (keys / "folder").mkdir()
    return keys


def engines(folder: Path, *private: str) -> dict[str, ProviderEngine]:
    found = provider_engines(ENVIRONMENT, folder, private_networks=private, authorities="")
    return {engine.name: engine for engine in found}


def spec(**options: Any) -> LaunchSpec:
    return LaunchSpec("r-1", "acme/ours", None, "127.0.0.1", 4000, "replica-secret", 4, 9, 1, options, Path("/work"))


@pytest.mark.parametrize("where", [{"key_env": "MODELYARD_PROVIDER_X"}, {"key_env": "", "key_file": "good"}])
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_the_key_is_in_no_argument(folder: Path, where: dict[str, str], kind: str) -> None:
    engine = engines(folder)[kind]
    command = engine.command(spec(**{**OPENAI, **where}))
    assert KEY not in " ".join(command.argv)
    assert "replica-secret" not in " ".join(command.argv)
    assert command.env["ENGINE_SECRET"] == "replica-secret"
    if "key_file" in where:
        assert command.argv[command.argv.index("--key-file") + 1] == str(folder / "good")
        assert KEY not in command.env.values()
    else:
        assert command.env["PROVIDER_KEY"] == KEY
    assert KEY not in repr(engine) + repr(ProviderKeys(ENVIRONMENT, folder))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"key_env": "HOME"}, "key_env"),
        ({"key_env": "MODELYARD__FETCH__S3__SECRET_KEY"}, "key_env"),
        ({"key_env": "MODELYARD_PROVIDER_NONE"}, "key_env"),
        ({"key_env": "MODELYARD_PROVIDER_BAD"}, "key_env"),
        ({"key_env": ""}, "key_env"),
        ({"key_file": "good"}, "key_env"),
        ({"key_env": "", "key_file": "../admin-key"}, "key_file"),
        ({"key_env": "", "key_file": "/etc/passwd"}, "key_file"),
        ({"key_env": "", "key_file": "missing"}, "key_file"),
        ({"key_env": "", "key_file": "empty"}, "key_file"),
        ({"key_env": "", "key_file": "folder"}, "key_file"),
        ({"url": "http://api.example.com"}, "url"),
        ({"url": "https://10.0.0.1/v1"}, "url"),
        ({"url": "https://[::ffff:127.0.0.1]/v1"}, "url"),
        ({"url": "https://127.1/v1"}, "url"),
        ({"url": "https://u:p@example.com"}, "url"),
        ({"url": "https://example.com/v1?key=x"}, "url"),
        ({"url": "file:///etc/passwd"}, "url"),
        ({"model": ""}, "model"),
        ({"model": "a b"}, "model"),
        ({"slots": 0}, "slots"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_a_bad_option_is_named_and_the_key_never_told(folder: Path, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(OptionsError) as refused:
        engines(folder)["openai"].settings({**OPENAI, **options}, artifact_bytes=0)
    assert list(refused.value.faults) == [fault]
    assert KEY not in str(refused.value)
    assert "two words" not in str(refused.value)


def test_networks_of_the_operator_may_be_reached_also_without_tls(folder: Path) -> None:
    engine = engines(folder, "10.0.0.0/8")["openai"]
    for url in ("http://10.1.2.3:8000/v1", "https://10.1.2.3/v1", "http://inside.example/v1"):
        engine.settings({**OPENAI, "url": url}, artifact_bytes=0)
    command = engine.command(spec(**{**OPENAI, "url": "http://10.1.2.3:8000/v1/"}))
    assert command.argv[command.argv.index("--private-network") + 1] == "10.0.0.0/8"
    assert command.argv[command.argv.index("--url") + 1] == "http://10.1.2.3:8000/v1"
    with pytest.raises(OptionsError):
        engine.settings({**OPENAI, "url": "http://11.1.2.3/v1"}, artifact_bytes=0)


def test_defaults_are_the_vendors_own(folder: Path) -> None:
    own = {"model": "m", "key_env": "MODELYARD_PROVIDER_X"}
    openai, anthropic = engines(folder)["openai"], engines(folder)["anthropic"]
    argv = openai.command(spec(**own)).argv
    assert "https://api.openai.com/v1" in argv
    assert argv[argv.index("--limit-field") + 1] == "max_completion_tokens"
    argv = openai.command(spec(**OPENAI)).argv
    assert argv[argv.index("--limit-field") + 1] == "max_tokens"
    for url in ("", "https://api.anthropic.com/v1/", "https://api.anthropic.com"):
        argv = anthropic.command(spec(**own, **{"url": url} if url else {})).argv
        assert argv[argv.index("--url") + 1] == "https://api.anthropic.com"
    settings = anthropic.settings(own, artifact_bytes=0)
    assert (settings.slots, settings.context_length) == (32, 200_000)
    assert settings.memory_bytes < 100 * 1024 * 1024


def test_routes_are_those_that_are_named(folder: Path) -> None:
    openai = engines(folder)["openai"]
    assert openai.routes_for({}) == {"/v1/chat/completions"}
    named = {**OPENAI, "routes": "embeddings, completions"}
    openai.settings(named, artifact_bytes=0)
    assert openai.routes_for(named) == {"/v1/embeddings", "/v1/completions"}
    assert AnthropicProviderEngine().routes_for({}) == {"/v1/chat/completions"}


@pytest.mark.parametrize("engine", [OpenAIProviderEngine(), AnthropicProviderEngine()])
def test_without_a_page_nothing_is_known_and_without_keys_nothing_runs(engine: ProviderEngine) -> None:
    assert engine.read_load("") == EngineLoad()
    assert engine.is_remote
    assert not engine.needs_artifact
    with pytest.raises(OptionsError, match="key_env"):
        engine.settings(
            {"model": "m", "url": "https://example.com", "key_env": "MODELYARD_PROVIDER_X"}, artifact_bytes=0
        )


def test_a_platform_without_a_folder_says_so() -> None:
    with pytest.raises(KeyFault, match="key_env"):
        ProviderKeys({}, None).file("good")
