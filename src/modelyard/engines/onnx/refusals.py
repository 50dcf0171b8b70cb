"""What the server answers instead of a result: status, code and a line for the caller."""


class Refused(Exception):
    """An error object with its HTTP status."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, object]:
        """Return OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "code": self.code, "param": self.param}}


def wrong_request(message: str, param: str | None = None, code: str = "invalid_value") -> Refused:
    """Return the refusal of what a caller can mend."""
    return Refused(400, code, message, param)


def bad_output(model: str) -> Refused:
    """Return the failure of a model that gave numbers that are none."""
    return Refused(
        500,
        "invalid_output",
        f"The model '{model}' gave NaN or infinite numbers for this input; it cannot be used for it.",
    )
