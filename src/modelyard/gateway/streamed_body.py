"""Bodies that are passed on while they come: files, and parts of uploads.

All other requests are read whole before anything is done with them. These are
not: they go to the controller piece by piece, and a controller that is behind
holds the client back, so that a worker with a hundred uploads holds a hundred
reads and not fifty gigabytes.
"""

from typing import TYPE_CHECKING

from modelyard import errors
from modelyard.errors import ApiError
from modelyard.gateway.control_proxy import ANSWER_TIMEOUT_S, ControlExchange, ControlProxy
from modelyard.gateway.head import Request

if TYPE_CHECKING:
    from modelyard.gateway.server import ClientConnection

_WRITE_HIGH_WATER = 256 * 1024
"""Unsent bytes to the controller above which its client is held back; one more read may come on top."""


class StreamedExchange(ControlExchange):
    """A forwarded request whose body still comes."""

    def __init__(self, proxy: ControlProxy, client: "ClientConnection", request: Request, request_id: str) -> None:
        super().__init__(proxy, client, request, request_id)
        self._early: list[bytes] = []
        self._left_bytes = request.length
        self._begun_s = proxy.gateway.clock.monotonic_s()
        self._held_s = 0.0
        self._held_since_s: float | None = None
        self._hold()  # until the controller is there

    def feed(self, piece: bytes) -> None:
        """Pass a piece on."""
        if self.is_over:
            return
        self._left_bytes -= len(piece)
        self.deadline_s = self._now_s() + ANSWER_TIMEOUT_S
        if self._transport is None:
            self._early.append(piece)
        elif not self._transport.is_closing():
            self._transport.write(piece)

    def send(self) -> None:
        """Write the head and what has come meanwhile, and let the client go on."""
        super().send()
        if self._transport is not None and not self.is_over:
            self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)
            early, self._early = self._early, []
            self._release()
            for piece in early:
                self._transport.write(piece)

    def pause_writing(self) -> None:
        """The controller is behind: read no more of the client."""
        self._hold()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._release()

    def check_time(self, now_s: float, stall_s: float) -> None:
        """Give up on a client that sends too slowly too."""
        if not self._is_late(now_s):
            super().check_time(now_s, stall_s)
        elif not self.is_over:
            self._finish()
            self._refuse(errors.request_timeout())

    def _is_late(self, now_s: float) -> bool:
        # The time that the controller held the client back is not its own.
        if not self._left_bytes or self._held_since_s is not None:
            return False
        settings = self._proxy.gateway.settings
        received = self.request.length - self._left_bytes
        limit_s = settings.header_read_timeout_s + received / settings.body_bytes_per_s_min
        return now_s - self._begun_s - self._held_s > limit_s

    def _hold(self) -> None:
        if self._held_since_s is None:
            self._held_since_s = self._now_s()
            self.client.hold_body(is_held=True)

    def _release(self) -> None:
        if self._held_since_s is not None:
            self._held_s += self._now_s() - self._held_since_s
            self._held_since_s = None
            self.client.hold_body(is_held=False)

    @property
    def _is_early(self) -> bool:
        return self._left_bytes > 0

    def _now_s(self) -> float:
        return self._proxy.gateway.clock.monotonic_s()

    def _end_client(self, *, is_last: bool) -> None:
        # What follows the answer on this connection is the rest of the body, and no request.
        if self._is_early:
            self.client.end_early()
        else:
            super()._end_client(is_last=is_last)

    def _refuse(self, refusal: ApiError) -> None:
        if self._is_early:
            self.client.refuse_body(refusal)
        else:
            super()._refuse(refusal)

    def _finish(self) -> None:
        super()._finish()
        self._early.clear()
        self._release()
