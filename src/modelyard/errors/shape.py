"""The shape of a failure: OpenAI's error object on every route, and the one line of a command that cannot start."""

import msgspec

RESERVED_HEADER = "x-modelyard-reserved"
"""Tells of a refused request that it may fit its quota when what is under way has ended."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inner object; all four keys are always present (OpenAI's schema ``Error``)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A refusal or failure to be shown to the caller.

    ``retry_after_s`` becomes ``retry-after`` (whole seconds, at least 1);
    ``should_retry=False`` becomes ``x-should-retry: false``, which stops the
    OpenAI SDKs from repeating what cannot succeed.
    """

    def __init__(
        self,
        status: int,
        *,
        code: str | None,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.type = type
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self.is_of_worker = False
        """Another gateway worker may answer the request: the connection ends with it, for the next may meet another."""
        self.is_reserved = False
        """Only requests under way are in the way of a quota, at their worst case. It may fit when they have ended."""
        self.limits = b""
        """``x-ratelimit-*`` header lines to send with it."""
        self.facts: dict[str, str | int | float] | None = None
        """The numbers behind it, for whoever asks why (``policy/stories.py`` knows their names)."""

    def body(self) -> bytes:
        """Return the JSON body."""
        return _encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers that belong to this error, lower case."""
        found: list[tuple[str, str]] = []
        if self.retry_after_s is not None:
            found.append(("retry-after", str(max(1, round(self.retry_after_s + 0.499)))))
        if self.should_retry is not None:
            found.append(("x-should-retry", "true" if self.should_retry else "false"))
        if self.is_reserved:
            found.append((RESERVED_HEADER, "true"))
        return found


_encode = msgspec.json.Encoder().encode


class StartupError(Exception):
    """Why a command cannot start: one line that says what, why and the fix; exit code 1 or ``exit_code``."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
