"""Requests whose answer is kept: those of a caller who does not wait, and those with an idempotency key.

Such a request is authenticated, decoded and limited like any other. Then it
is claimed at the controller, and only then admitted: so that its record can be
polled before anybody is told of it, and so that of two with one key a single
one runs. A ``KeptCall`` (``kept_call.py``) stands where the client's connection
stands otherwise. Nothing of this touches other requests.
"""

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, cast

from modelyard.domain.requests import SYNC_PATH, Sync, SyncReply
from modelyard.gateway.control_calls import ControlAwayError, ControlCalls, ControlRefusedError
from modelyard.gateway.kept_call import KeptCall
from modelyard.gateway.preferences import Preferences

if TYPE_CHECKING:
    from modelyard.gateway.exchange import Exchange
    from modelyard.gateway.flow import Gateway
    from modelyard.gateway.server import ClientConnection, Request

SYNC_S = 0.5
"""Pause between two signs of life to the controller, while requests are kept."""
SYNC_TIMEOUT_S = 10.0
CLOSE_S = 3.0

_log = logging.getLogger(__name__)


class KeptRequests:
    """The kept requests of this gateway, and its talk with the controller about them."""

    def __init__(self, gateway: "Gateway", socket: Path, token: str) -> None:
        self.gateway = gateway
        self.calls = ControlCalls(socket, token)
        self.active: dict[str, KeptCall] = {}
        self.instance = gateway.ids.prefix
        """Names this process; another one under the same name has another."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._sync_due_s = 0.0
        self._is_syncing = False

    def __repr__(self) -> str:
        return f"<KeptRequests: {len(self.active)} active>"

    def begin(
        self, client: "ClientConnection", request: "Request", exchange: "Exchange", preferences: Preferences
    ) -> None:
        """Claim a request that is decoded and limited; it is admitted, or answered otherwise, later."""
        call = KeptCall(self, client, request, exchange, preferences)
        client.current = call
        exchange.client = cast("ClientConnection", call)  # it has what an exchange uses of one
        self.active[exchange.request_id] = call
        self.spawn(call.claim())

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Run ``work``, owned by this."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def check_time(self, now_s: float) -> None:
        """Let callers go whose time of waiting is over, and give a sign of life."""
        if not self.active:
            return
        for call in list(self.active.values()):
            if now_s >= call.release_s:
                call.accept()
        if now_s >= self._sync_due_s and not self._is_syncing:
            self._is_syncing = True
            self._sync_due_s = now_s + SYNC_S
            self.spawn(self._sync())

    def refuse_waiting(self) -> None:
        """Let go those who wait for the end of a request that runs elsewhere: this gateway stops."""
        for call in list(self.active.values()):
            call.refuse_waiting()

    async def close(self) -> None:
        """Let what is being stored be stored, then stop."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=CLOSE_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sync(self) -> None:
        begun = [call for call in self.active.values() if call.has_news]
        sync = Sync(self.instance, [call.exchange.request_id for call in begun], list(self.active))
        try:
            reply = await self.calls.ask(SYNC_PATH, sync, SyncReply, timeout_s=SYNC_TIMEOUT_S)
        except (ControlAwayError, ControlRefusedError) as error:
            _log.warning("the controller does not hear of kept requests: %s", error)
            return
        finally:
            self._is_syncing = False
        for call in begun:
            call.is_told = True
        for request_id in reply.cancelled:
            if (cancelled := self.active.get(request_id)) is not None:
                cancelled.cancel()
