"""A stream of which every chunk is rewritten and sent on: what the forms that differ by a field or two share."""

from typing import Any

import msgspec

from modelyard.errors import ApiError
from modelyard.gateway.relay import DONE, EngineStreamError
from modelyard.gateway.sse import Usage, split_fields, usage_event

_any = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode


class RewrittenChunks:
    """One stream of chunks; a subclass says in ``_rewrite`` what changes in each."""

    __slots__ = ("_sample", "_wants_usage")

    def __init__(self, *, wants_usage: bool) -> None:
        self._wants_usage = wants_usage
        self._sample = b""

    def begin(self) -> bytes:
        """Return nothing: the first chunk begins the stream."""
        return b""

    def feed(self, event: bytes) -> bytes:
        """Translate one chunk.

        Raises:
            EngineStreamError: it has a form that nobody knows.
        """
        self._sample = self._sample or event
        chunk = _any.decode(split_fields(event)[1])
        try:
            self._rewrite(chunk)
        except ValueError as error:
            raise EngineStreamError(str(error)) from None
        if self._wants_usage:
            chunk["usage"] = None
        return b"data: " + _encode(chunk) + b"\n\n"

    def finish(self, usage: Usage) -> bytes:
        """Return the usage, if it was asked for, and the end."""
        if self._wants_usage and self._sample:
            return usage_event(self._sample, usage) + b"\n\n" + DONE
        return DONE

    def fail(self, error: ApiError) -> bytes:
        """Return the error event."""
        return b"data: " + error.body() + b"\n\n"

    def _rewrite(self, chunk: Any) -> None:
        raise NotImplementedError
