"""What a provider's API is to the server: what to send for a request of OpenAI's, and what the answer means in it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

Json = dict[str, Any]

decode_any = msgspec.json.Decoder().decode
encode = msgspec.json.Encoder().encode


class Refused(Exception):
    """Why a request is not passed on, or what the provider said of it, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = ""

    def body(self) -> bytes:
        """Return the error as OpenAI tells one."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return encode({"error": error})


class Asked(NamedTuple):
    """What goes to the provider."""

    path: str
    body: Json


class Counted(NamedTuple):
    """Tokens of an answer, as the provider counts them."""

    prompt: int = 0
    generated: int = 0


class StreamReader(Protocol):
    """Turns the events of one stream into OpenAI's."""

    @property
    def counted(self) -> Counted:
        """Tokens so far."""
        ...

    @property
    def is_done(self) -> bool:
        """Say whether the stream has said that it is whole."""
        ...

    def feed(self, name: str, data: bytes) -> bytes:
        """Return what to send for an event.

        Raises:
            Refused: the event is an error.
            ValueError: it makes no sense.
        """
        ...


class Dialect(Protocol):
    """One kind of API."""

    models_path: str
    """GET tells whether the key is good, at no cost."""

    def headers(self, key: str) -> Mapping[str, str]:
        """Return what proves the key."""
        ...

    def asked(self, route: str, body: Json) -> Asked:
        """Return what to send for a request of OpenAI's at ``route``.

        Raises:
            Refused: the provider cannot do that.
        """
        ...

    def answered(self, route: str, body: bytes) -> tuple[bytes, Counted]:
        """Return a whole answer in OpenAI's form.

        Raises:
            ValueError: it is none.
        """
        ...

    def reader(self, route: str) -> StreamReader:
        """Return what reads a stream."""
        ...

    def refusal(self, status: int, body: Json) -> Refused:
        """Return what the provider said with an error status."""
        ...


def read_object(raw: bytes) -> Json:
    """Return a JSON object.

    Raises:
        ValueError: it is none.
    """
    try:
        found = decode_any(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError("no JSON") from error
    if not isinstance(found, dict):
        raise ValueError("no JSON object")  # noqa: TRY004 - the peer's fault, not a caller's type
    return found


def whole_number(value: object) -> int:
    """Return a count of the provider's; 0 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
