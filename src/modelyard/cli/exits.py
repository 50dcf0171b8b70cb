"""Exit codes, in one place: what a script may rely on.

``docs/reference/cli.md`` shows this table. A refusal of the platform becomes
an exit code by its HTTP status, and nowhere else.
"""

from enum import IntEnum


class Exit(IntEnum):
    """How a command ended."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3
    AUTH = 4
    LIMIT = 5
    UNAVAILABLE = 6
    INTERRUPTED = 130


_BY_STATUS = {
    400: Exit.USAGE,
    401: Exit.AUTH,
    402: Exit.LIMIT,
    403: Exit.AUTH,
    404: Exit.NOT_FOUND,
    422: Exit.USAGE,
    429: Exit.LIMIT,
    502: Exit.UNAVAILABLE,
    503: Exit.UNAVAILABLE,
    504: Exit.UNAVAILABLE,
}


def exit_for(status: int) -> Exit:
    """Return the exit code for an HTTP status that is not a success."""
    return _BY_STATUS.get(status, Exit.FAILURE)


class Failure(Exception):
    """Why a command failed: one line that says what, why and the fix."""

    def __init__(self, message: str, exit_code: Exit = Exit.FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Refused(Failure):
    """The platform answered with an error object. ``code`` is the error's own, like ``model_not_found``."""

    def __init__(self, message: str, *, status: int, code: str | None, request_id: str | None = None) -> None:
        super().__init__(f"{message} (request id {request_id})" if request_id else message, exit_for(status))
        self.message = message
        self.status = status
        self.code = code
        self.request_id = request_id

    def reworded(self, theirs: str, ours: str) -> "Refused":
        """Return the same refusal with what is written otherwise on a command line."""
        message = self.message.replace(theirs, ours)
        return Refused(message, status=self.status, code=self.code, request_id=self.request_id)

    def with_hint(self, hint: str) -> "Refused":
        """Return the same refusal with another sentence, before the request id."""
        return Refused(f"{self.message} {hint}", status=self.status, code=self.code, request_id=self.request_id)
