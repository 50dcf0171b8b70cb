"""Other APIs than OpenAI's chat completions, answered by one.

A dialect decodes its own request into a ``Call`` whose ``request`` is a
``ChatRequest`` for the engine, and whose ``translation`` turns the engine's
answer (or stream) back. All of it is pure: bytes in, bytes out. So every
engine that can chat serves ``/v1/responses`` and ``/v1/messages``, metered and
limited like everything else.
"""

from typing import Protocol

from modelyard.errors import ApiError
from modelyard.gateway.sse import Usage


class StreamTranslation(Protocol):
    """One stream on its way back. What it returns are whole SSE events with their blank lines, or nothing."""

    def begin(self) -> bytes:
        """Return the events before any content; called once, when the first content is there."""
        ...

    def feed(self, event: bytes) -> bytes:
        """Translate one event of the chat stream (``data: {…}`` without its blank line; never usage or ``[DONE]``)."""
        ...

    def finish(self, usage: Usage) -> bytes:
        """Return the last events of a complete answer."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """Return the last events of a stream that broke; also right when ``begin`` was never called."""
        ...


class Translation(Protocol):
    """One request of another API. ``request_id`` is the platform's, for ids that are derived from it."""

    def answer(self, chat: bytes, usage: Usage, request_id: str) -> bytes:
        """Return the body for a whole chat completion.

        Raises:
            ValueError: ``chat`` is no chat completion.
        """
        ...

    def stream(self, request_id: str) -> StreamTranslation:
        """Return a new translation of a stream."""
        ...
