"""Anthropic's Messages API for those who speak OpenAI's: the opposite of what the gateway's ``/v1/messages`` does."""

from collections.abc import Callable, Mapping

from modelyard.engines.providers.anthropic_answer import AnthropicReader, chat_of, refusal_of
from modelyard.engines.providers.anthropic_request import messages_body
from modelyard.engines.providers.dialect import Asked, Counted, Json, Refused, encode, read_object


class AnthropicDialect:
    """``model`` is the provider's name, ``name`` ours; ``now`` gives the unix time of an answer; ``has_sampling``:
    the model takes a temperature."""

    models_path = "/v1/models"

    def __init__(
        self, *, model: str, name: str, version: str, now: Callable[[], float], has_sampling: bool = False
    ) -> None:
        self._model = model
        self._name = name
        self._version = version
        self._has_sampling = has_sampling
        self._now = now

    def headers(self, key: str) -> Mapping[str, str]:
        """Return the key and the version of the API."""
        return {"x-api-key": key, "anthropic-version": self._version}

    def asked(self, route: str, body: Json) -> Asked:
        """Return the chat as a message request."""
        return Asked("/v1/messages", messages_body(body, self._model, has_sampling=self._has_sampling))

    def answered(self, route: str, body: bytes) -> tuple[bytes, Counted]:
        """Return the message as a chat completion."""
        chat, counted = chat_of(read_object(body), self._name, int(self._now()))
        return encode(chat), counted

    def reader(self, route: str) -> AnthropicReader:
        """Return what turns events into chunks."""
        return AnthropicReader(self._name, int(self._now()))

    def refusal(self, status: int, body: Json) -> Refused:
        """Return the error in OpenAI's words."""
        return refusal_of(status, body)
