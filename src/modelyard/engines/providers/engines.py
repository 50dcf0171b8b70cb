"""The ``Engine`` contract for models of others: ``openai`` (any API like OpenAI's) and ``anthropic``."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.engines import EngineCommand, EngineLoad, LaunchSpec, Options, OptionsError, Settings
from modelyard.engines.defaults import EngineDefaults
from modelyard.engines.options import read_options
from modelyard.engines.pages import count_of, read_samples, total_of
from modelyard.engines.providers.keys import KeyFault, ProviderKeys
from modelyard.policy.addresses import UrlError, is_private_network, may_connect, networks, read_url

_MEMORY_BYTES = 60 * 1024 * 1024
"""Measured: 39 MB of a process that serves, and what is in flight."""
_LOAD_S = 1.5
_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_ROUTES = {"chat": _CHAT, "completions": _COMPLETIONS, "embeddings": _EMBEDDINGS}
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,199}")

Slots = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Tokens = Annotated[int, msgspec.Meta(ge=256, le=10_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=1, le=3600)]


class ProviderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a deploy may set for any provider."""

    url: str = ""
    """Base URL of the API. https; http only into ``fetch.private_networks``."""
    model: str = ""
    """The provider's name of the model."""
    key_env: str = ""
    """Variable of the controller's environment with the key; its name begins with ``MODELYARD_PROVIDER_``."""
    key_file: str = ""
    """File with the key in the folder ``secrets/providers`` of the data directory; read anew when it is refused."""
    slots: Slots = 32
    """Requests that are sent at once."""
    context_length: Tokens = 128_000
    """Most tokens of prompt and answer together."""
    timeout_s: Seconds = 600.0
    """Longest time of a request at the provider."""
    silence_s: Seconds = 120.0
    """Longest time without a byte from the provider."""
    check_model: bool = True
    """Be ready only when the provider's list of models has this one; ``false`` where it has no list, or serves more
    than is on it."""


class OpenAIOptions(ProviderOptions, frozen=True, forbid_unknown_fields=True):
    """What a deploy may set for an API like OpenAI's."""

    routes: str = "chat"
    """What the model serves, separated by commas: ``chat``, ``completions``, ``embeddings``."""
    limit_field: Literal["", "max_tokens", "max_completion_tokens"] = ""
    """Field that bounds the answer of a chat; empty: ``max_completion_tokens`` for OpenAI itself, ``max_tokens`` for
    all others."""


class AnthropicOptions(ProviderOptions, frozen=True, forbid_unknown_fields=True):
    """What a deploy may set for Anthropic's API."""

    context_length: Tokens = 200_000
    """Most tokens of prompt and answer together."""
    version: Annotated[str, msgspec.Meta(pattern=r"\A\d{4}-\d\d-\d\d\Z")] = "2023-06-01"
    """The API's version."""
    sampling: bool = False
    """Send ``temperature`` (or ``top_p``) on: older models take one of them, the API of today names neither."""


class ProviderEngine(EngineDefaults):
    """What both have in common: ``python -m modelyard.engines.providers``.

    ``keys`` are those that the operator gives; ``private_networks`` and ``authorities`` are the fetcher's settings,
    which hold for every URL that somebody else chose.
    """

    needs_artifact = False
    is_remote = True
    default_url = ""
    options_kind: type[ProviderOptions] = ProviderOptions

    def __init__(
        self, keys: ProviderKeys | None = None, *, private_networks: Sequence[str] = (), authorities: str = ""
    ) -> None:
        self._keys = keys or ProviderKeys()
        self._private = tuple(private_networks)
        self._authorities = authorities

    def settings(self, options: Options, *, artifact_bytes: int, facts: ModelFacts | None = None) -> Settings:
        """Check the options, the URL and that there is a key; a replica takes the memory of a small process.

        Raises:
            OptionsError: an unknown option or a bad value, naming each, or no key.
        """
        read = self._read(options)
        if faults := {**self._faults(read), **self._more_faults(read)}:
            raise OptionsError(self.name, faults)
        return Settings(
            slots=read.slots, context_length=read.context_length, memory_bytes=_MEMORY_BYTES, load_s=_LOAD_S
        )

    def command(self, spec: LaunchSpec) -> EngineCommand:
        """Return the process to start; the provider's key travels in the environment, or by the name of its file.

        Raises:
            OptionsError: there is no key any more.
        """
        read = self._read(spec.options)
        if faults := self._faults(read):
            raise OptionsError(self.name, faults)
        argv = [sys.executable, "-P", "-m", "modelyard.engines.providers", "--kind", self.name]
        argv += ["--host", spec.host, "--port", str(spec.port), "--model-name", spec.model_name]
        argv += ["--url", self._base_of(read), "--model", read.model]
        argv += ["--timeout-s", f"{read.timeout_s:g}", "--silence-s", f"{read.silence_s:g}"]
        for network in self._private:
            argv += ["--private-network", network]
        if self._authorities:
            argv += ["--authorities", self._authorities]
        if not read.check_model:
            argv += ["--unchecked"]
        argv += self._more_words(read)
        environment = {"ENGINE_SECRET": spec.secret, "PYTHONUNBUFFERED": "1"}
        if read.key_file:
            argv += ["--key-file", str(self._keys.file(read.key_file))]
        else:
            environment["PROVIDER_KEY"] = self._keys.from_variable(read.key_env)
        return EngineCommand(argv=tuple(argv), env=environment)

    def read_load(self, page: str) -> EngineLoad:
        """Parse the metrics page. What is under way waits for a machine of somebody else's: nothing runs here, and
        so no silence of theirs makes this process look hung."""
        samples = read_samples(page)
        return EngineLoad(
            running=count_of(samples, "provider:requests_running"),
            waiting=count_of(samples, "provider:requests_waiting"),
            prompt_tokens_total=samples.get("provider:prompt_tokens_total"),
            generation_tokens_total=samples.get("provider:generation_tokens_total"),
            progress_total=total_of(samples, "provider:prompt_tokens_total", "provider:generation_tokens_total"),
        )

    def _read(self, options: Options) -> ProviderOptions:
        return read_options(self.options_kind, options, engine=self.name)

    def _faults(self, read: ProviderOptions) -> dict[str, str]:
        faults: dict[str, str] = {}
        if why := self._url_fault(read.url or self.default_url):
            faults["url"] = why
        if not _MODEL.fullmatch(read.model):
            faults["model"] = "give the provider's name of the model"
        if bool(read.key_env) == bool(read.key_file):
            faults["key_env"] = "give one of key_env and key_file: where the provider's key is, never the key itself"
            return faults
        try:
            if read.key_file:
                self._keys.file(read.key_file)
            else:
                self._keys.from_variable(read.key_env)
        except KeyFault as error:
            faults["key_file" if read.key_file else "key_env"] = str(error)
        return faults

    def _url_fault(self, url: str) -> str:
        """Return why ``url`` cannot be used, "" if it may; names are resolved, and judged, by the process."""
        if not url:
            return "give the base URL of the API, like https://api.openai.com/v1"
        try:
            parts = read_url(url)
        except UrlError as error:
            return str(error)
        if "?" in url or "#" in url:
            return "give the base of the API alone, without '?' and '#'"
        private = networks(self._private)
        if parts.address is not None and not may_connect(parts.address, private):
            return f"'{parts.host}' is no public address, and no network of fetch.private_networks"
        is_plain = parts.scheme == "http"
        if is_plain and not (is_private_network(parts.address, private) if parts.address is not None else private):
            return "use https; http is only for networks in fetch.private_networks"
        return ""

    def _base_of(self, read: ProviderOptions) -> str:
        return (read.url or self.default_url).rstrip("/")

    def _more_faults(self, read: ProviderOptions) -> Mapping[str, str]:
        return {}

    def _more_words(self, read: ProviderOptions) -> list[str]:
        return []


class OpenAIProviderEngine(ProviderEngine):
    """Any API like OpenAI's: OpenAI itself, Azure, Gemini, Mistral, OpenRouter, another Modelyard, a vLLM elsewhere."""

    name = "openai"
    routes = frozenset(_ROUTES.values())
    request_extras = frozenset({"n", "dimensions"})
    default_url = "https://api.openai.com/v1"
    options_kind = OpenAIOptions

    def routes_for(self, options: Options) -> frozenset[str]:
        """Return what the option ``routes`` says."""
        names = str(options.get("routes", OpenAIOptions().routes)).split(",")
        return frozenset(_ROUTES[name] for one in names if (name := one.strip()) in _ROUTES)

    def _more_faults(self, read: ProviderOptions) -> Mapping[str, str]:
        assert isinstance(read, OpenAIOptions), "read as its kind"
        names = {one.strip() for one in read.routes.split(",")}
        return {} if names <= _ROUTES.keys() else {"routes": f"name some of {', '.join(_ROUTES)}, with commas"}

    def _more_words(self, read: ProviderOptions) -> list[str]:
        assert isinstance(read, OpenAIOptions), "read as its kind"
        host = read_url(read.url or self.default_url).host
        own = "max_completion_tokens" if host == "api.openai.com" else "max_tokens"
        return ["--limit-field", read.limit_field or own]


class AnthropicProviderEngine(ProviderEngine):
    """Anthropic's Messages API: Anthropic itself, or another platform that speaks it."""

    name = "anthropic"
    routes = frozenset({_CHAT})
    default_url = "https://api.anthropic.com"
    options_kind = AnthropicOptions

    def _base_of(self, read: ProviderOptions) -> str:
        return super()._base_of(read).removesuffix("/v1")  # its own SDK leaves it out

    def _more_words(self, read: ProviderOptions) -> list[str]:
        assert isinstance(read, AnthropicOptions), "read as its kind"
        return ["--api-version", read.version, *(["--sampling"] if read.sampling else [])]


def provider_engines(
    environment: Mapping[str, str], folder: Path, *, private_networks: Sequence[str], authorities: str
) -> list[ProviderEngine]:
    """Return both engines, with the keys of the operator."""
    keys = ProviderKeys(environment, folder)
    kinds = (OpenAIProviderEngine, AnthropicProviderEngine)
    return [kind(keys, private_networks=private_networks, authorities=authorities) for kind in kinds]
