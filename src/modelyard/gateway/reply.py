"""What a client gets of a stream: the engine's own events, another API's, or the rest of an answer begun elsewhere.

One ``StreamReply`` lives as long as its request; each engine that works on the
request gets a ``StreamRelay`` of its own.
"""

from modelyard.errors import ApiError
from modelyard.gateway import aliases, failover
from modelyard.gateway.dialects import StreamTranslation
from modelyard.gateway.openai.call import Call
from modelyard.gateway.relay import StreamRelay
from modelyard.gateway.sse import Usage


class StreamReply:
    """The client's side of one stream.

    ``keeps_text`` says whether the text is kept for going on elsewhere.
    """

    __slots__ = (
        "_alias",
        "_call",
        "_has_begun",
        "_is_chat",
        "_name",
        "_sample",
        "_texts",
        "_tokens",
        "_translation",
        "transcript",
    )

    def __init__(self, call: Call, request_id: str, *, is_chat: bool, keeps_text: bool) -> None:
        self._call = call
        self._is_chat = is_chat
        self._translation: StreamTranslation | None = None
        if call.translation is not None:
            self._translation = call.translation.stream(request_id)
        self._has_begun = False
        self._alias = self._name = ""
        self._sample = b""
        self._tokens = 0
        self._texts: list[str] = []
        self.transcript: list[bytes] | None = [] if keeps_text else None

    @property
    def is_continued(self) -> bool:
        """Say whether an earlier engine has begun the answer."""
        return bool(self._sample)

    def relay(self, *, is_chunked: bool, alias: str = "", name: str = "") -> StreamRelay:
        """Return the relay for the engine's stream that begins now; an engine that calls itself ``alias`` is ``name``.

        "" is an engine that knows the name.
        """
        self._alias, self._name = alias, name
        is_plain = self._translation is None and not self._sample and not alias
        return StreamRelay(
            is_chunked=is_chunked,
            is_chat=self._is_chat,
            wants_usage=self._call.wants_usage and self._translation is None,
            transform=None if is_plain else self._transform,
            transcript=self.transcript,
            tokens=self._tokens,
            choices=self._call.choices,
        )

    def fold(self, relay: StreamRelay) -> None:
        """Keep the text of what was relayed so far instead of its events; called now and then."""
        if self.transcript:
            try:
                self._texts.append(failover.text_of(b"".join(self.transcript)))
                self.transcript.clear()
            except failover.NotResumableError:
                self.transcript = relay.transcript = None

    def interrupt(self, relay: StreamRelay) -> str | None:
        """Return the text that the client has, for another engine to go on with; None when that cannot be."""
        if self.transcript is None:
            return None
        try:
            text = "".join(self._texts) + failover.text_of(b"".join(self.transcript))
        except failover.NotResumableError:
            self.transcript = None
            return None
        self._sample = self._sample or relay.sample
        self._tokens = relay.tokens
        return text

    def cut_off(self, relay: StreamRelay) -> bytes | None:
        """Return the end of an answer that has all the tokens it may have; None when text does not tell it."""
        if self.transcript is None:
            return None
        event = failover.end_of(self._sample or relay.sample)
        return event + b"\n\n" if self._translation is None else self._begin() + self._translation.feed(event)

    def usage(self, relay: StreamRelay) -> Usage | None:
        """Return the usage of the whole answer from what the engine behind ``relay`` told, None if it told none."""
        told, before = relay.usage, relay.tokens_before
        return failover.whole_usage(told, before) if told is not None and before else told

    def finish(self, relay: StreamRelay, usage: Usage) -> bytes:
        """Return the last events of a complete answer."""
        if self._translation is None:
            if self._sample:
                relay.sample = self._sample
            return relay.finish(usage)
        return self._begin() + self._translation.finish(usage)

    def fail(self, error: ApiError) -> bytes:
        """Return the last events of a stream that broke."""
        if self._translation is None:
            return b"data: " + error.body() + b"\n\n"
        return self._translation.fail(error)

    def _transform(self, event: bytes) -> bytes:
        event = aliases.for_client(event, self._name, self._alias)
        if self._sample:
            event = failover.renamed(event, self._sample)
        if self._translation is None:
            return event + b"\n\n"
        return self._begin() + self._translation.feed(event)

    def _begin(self) -> bytes:
        if self._has_begun or self._translation is None:
            return b""
        self._has_begun = True
        return self._translation.begin()
