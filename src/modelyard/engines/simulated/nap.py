"""An engine that sleeps and wakes when it is told to, with vLLM's calls (``POST /sleep``, ``POST /wake_up``)."""

import asyncio

from modelyard.engines.http import Connection, Request
from modelyard.engines.simulated.batching import Batch
from modelyard.engines.simulated.options import SimulatedOptions
from modelyard.engines.simulated.requests import Refused

LOOK_S = 0.01
_AWAY = frozenset({"/sleep", "/wake_up", "/sim/faults"})
"""What one that sleeps does all the same, besides telling of itself."""


class Nap:
    """Whether it sleeps. Calls are carried out one after the other; each may be repeated."""

    def __init__(self, options: SimulatedOptions, batch: Batch) -> None:
        self._options = options
        self._batch = batch
        self._turn = asyncio.Lock()
        self.is_asleep = False

    @property
    def is_offered(self) -> bool:
        """Whether it can be told to."""
        return self._options.sleep

    def check(self, request: Request) -> None:
        """Refuse what an engine that sleeps cannot do.

        Raises:
            Refused: it sleeps.
        """
        if self.is_asleep and request.method == "POST" and request.path not in _AWAY:
            raise Refused(500, "The engine sleeps: its weights are not on its accelerators.", "InternalServerError")

    async def sleep(self, _request: Request, connection: Connection) -> None:
        """Answer ``POST /sleep?level=1&mode=wait``: once nothing runs any more."""
        self._check_offered()
        async with self._turn:
            if not self.is_asleep:
                await self._idle()
                await asyncio.sleep(self._options.sleep_s)
                self.is_asleep = True
        connection.respond(200, b"")

    async def wake(self, _request: Request, connection: Connection) -> None:
        """Answer ``POST /wake_up``."""
        self._check_offered()
        async with self._turn:
            if self.is_asleep:
                await asyncio.sleep(self._options.wake_s)
                if self._options.fail_wake:
                    raise Refused(500, "it cannot wake, as option fail_wake asks", "InternalServerError")
                self.is_asleep = False
        connection.respond(200, b"")

    async def _idle(self) -> None:
        while self._batch.running or self._batch.waiting:  # noqa: ASYNC110 - the batch tells nobody, and is soon empty
            await asyncio.sleep(LOOK_S)

    def _check_offered(self) -> None:
        if not self.is_offered:
            raise Refused(404, "Not Found", "NotFoundError")
