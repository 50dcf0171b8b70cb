"""APIs like OpenAI's: the same shapes, so fields are chosen and names exchanged, nothing else.

What is not listed here is not sent on: an engine's extras (``top_k``, ``cache_salt``) would be refused, and what
callers should not hear of their provider (``system_fingerprint``, ``service_tier``) is not passed back.
"""

from collections.abc import Callable, Mapping

from modelyard.engines.providers.dialect import Asked, Counted, Json, Refused, encode, read_object, whole_number

_SAMPLING = frozenset(
    {
        "temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "seed",
        "logprobs", "stream",
    }
)  # fmt: skip
SENT: dict[str, frozenset[str]] = {
    "/v1/chat/completions": _SAMPLING
    | {
        "messages", "max_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "response_format",
        "reasoning_effort", "verbosity",
    },
    "/v1/completions": _SAMPLING | {"prompt", "max_tokens", "echo", "suffix", "best_of"},
    "/v1/embeddings": frozenset({"input", "dimensions", "encoding_format"}),
}  # fmt: skip
"""Fields that are sent on, by route."""
_KEPT = ("id", "object", "created", "choices", "data", "usage")
"""Fields of an answer that are passed back."""


class OpenAIDialect:
    """``model`` is the provider's name, ``name`` ours; ``limit_field`` bounds the answer of a chat."""

    models_path = "/models"

    def __init__(self, *, model: str, name: str, limit_field: str = "max_tokens") -> None:
        self._model = model
        self._name = name
        self._limit_field = limit_field

    def headers(self, key: str) -> Mapping[str, str]:
        """Return a bearer token."""
        return {"authorization": f"Bearer {key}"}

    def asked(self, route: str, body: Json) -> Asked:
        """Return the known fields, with the provider's name of the model; a stream tells its usage."""
        sent: Json = {"model": self._model}
        sent |= {name: value for name, value in body.items() if name in SENT[route] and value is not None}
        if sent.get("stream"):
            sent["stream_options"] = {"include_usage": True}
        if route == "/v1/chat/completions" and "max_tokens" in sent:
            sent[self._limit_field] = sent.pop("max_tokens")
        return Asked(route.removeprefix("/v1"), sent)

    def answered(self, route: str, body: bytes) -> tuple[bytes, Counted]:
        """Return the answer under our name of the model."""
        found = read_object(body)
        if not isinstance(found.get("data" if route == "/v1/embeddings" else "choices"), list):
            raise ValueError("not an answer")  # noqa: TRY004 - the provider's fault, not a caller's type
        return encode(self._ours(found)), counted(found.get("usage"))

    def reader(self, route: str) -> "OpenAIReader":
        """Return what reads a stream of chunks."""
        return OpenAIReader(self._ours)

    def refusal(self, status: int, body: Json) -> Refused:
        """Return the error as it was told."""
        error = body.get("error")
        found: Json = error if isinstance(error, dict) else {"message": error}
        message = str(found.get("message") or "The provider refused the request as invalid.")
        param, code = found.get("param"), found.get("code")
        return Refused(
            status,
            message,
            param=param if isinstance(param, str) else None,
            code=code if isinstance(code, str) else None,
        )

    def _ours(self, found: Json) -> Json:
        return {name: found[name] for name in _KEPT if name in found} | {"model": self._name}


class OpenAIReader:
    """Passes chunks on under our name. ``ours`` makes one of the provider's."""

    def __init__(self, ours: Callable[[Json], Json]) -> None:
        self._ours = ours
        self.counted = Counted()
        self.is_done = False

    def feed(self, name: str, data: bytes) -> bytes:
        """Return the chunk.

        Raises:
            Refused: it is an error.
            ValueError: it is none.
        """
        if data == b"[DONE]":
            self.is_done = True
            return b"data: [DONE]\n\n"
        found = read_object(data)
        if found.get("error") or name == "error":
            raise Refused(500, "The provider reported an error in its answer.", kind="server_error")
        if found.get("usage"):
            self.counted = counted(found["usage"])
        elif not isinstance(found.get("choices"), list):
            raise ValueError("not a chunk")
        return b"data: %b\n\n" % encode(self._ours({"choices": [], **found}))


def counted(usage: object) -> Counted:
    """Return the tokens that a usage object tells."""
    if not isinstance(usage, dict):
        return Counted()
    return Counted(whole_number(usage.get("prompt_tokens")), whole_number(usage.get("completion_tokens")))
