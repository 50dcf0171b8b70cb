"""How far a stream is: its first token, its marks in the journal, its deadline.

A mark says what would be billed if this process died now. Marks are made every
``mark_tokens`` tokens as they come, and every ``mark_s`` seconds by the sweep,
which also moves the deadline of a stream that went on: a relayed token itself
costs one comparison.
"""

from typing import TYPE_CHECKING

from modelyard.domain.usage import Mark
from modelyard.gateway.relay import StreamRelay

if TYPE_CHECKING:
    from modelyard.gateway.exchange import Exchange


FIRST_TOKEN = "first token"  # noqa: S105 - no secret
NEXT_TOKEN = "next token"  # noqa: S105 - no secret


class StreamProgress:
    """The progress of one exchange; ``next_mark`` is the token count at which ``note`` is due."""

    __slots__ = ("_is_awaited", "_marked_at_s", "_marked_tokens", "_swept_tokens", "first_token_s", "next_mark")

    def __init__(self, now_s: float) -> None:
        self.first_token_s: float | None = None
        self.next_mark = 1
        self._is_awaited = True
        self._marked_tokens = 0
        self._marked_at_s = now_s
        self._swept_tokens = 0

    def note(self, exchange: "Exchange", relay: StreamRelay) -> None:
        """Take note of an engine's first token, and of each ``mark_tokens`` more."""
        if not self._is_awaited:
            self._mark(exchange, relay)
            return
        self._is_awaited = False
        gateway = exchange.gateway
        now_s = gateway.clock.monotonic_s()
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.next_mark = relay.tokens + gateway.settings.mark_tokens
            gateway.metrics.began(model=exchange.endpoint.route.name, seconds=now_s - exchange.arrived_s)
        else:
            self._mark(exchange, relay)
        self.wait(exchange)
        exchange.began(now_s)

    def interrupt(self, relay: StreamRelay) -> None:
        """Await the first token of another engine, which goes on behind what ``relay`` has relayed."""
        self._is_awaited = True
        self._swept_tokens = relay.tokens
        self.next_mark = relay.tokens + 1

    def wait(self, exchange: "Exchange") -> None:
        """Expect the next token within its time, from now on: what nobody read meanwhile was not late."""
        patience = exchange.endpoint.patience
        if self._is_awaited:
            exchange.wait_for(FIRST_TOKEN, patience.first_token_s)
        else:
            exchange.wait_for(NEXT_TOKEN, patience.token_s)

    def check(self, exchange: "Exchange", relay: StreamRelay, now_s: float) -> None:
        """Move the deadline of a stream that went on since the last sweep; mark what is ``mark_s`` old."""
        if relay.tokens == self._swept_tokens:
            return
        settings = exchange.gateway.settings
        self._swept_tokens = relay.tokens
        exchange.deadline_s = now_s + exchange.endpoint.patience.token_s
        if relay.tokens != self._marked_tokens and now_s - self._marked_at_s >= settings.mark_s:
            self._mark(exchange, relay)

    def _mark(self, exchange: "Exchange", relay: StreamRelay) -> None:
        gateway = exchange.gateway
        self._marked_tokens, self._marked_at_s = relay.tokens, gateway.clock.monotonic_s()
        self.next_mark = relay.tokens + gateway.settings.mark_tokens
        prompt = exchange.endpoint.prompt_tokens(exchange.call.text_length)
        if relay.transcript is not None and exchange.reply is not None:
            exchange.reply.fold(relay)
        exchange.grew(relay.tokens)
        gateway.journal.mark(Mark(exchange.request_id, prompt, relay.tokens))


NO_STREAM = StreamProgress(0.0)
"""The progress of everything that is no stream: it has none, so all may share one, which nothing changes."""
