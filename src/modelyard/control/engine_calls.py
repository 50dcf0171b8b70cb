"""Requests of the controller to running engines: to take a guest in, to forget one.

aiohttp costs a third of a second to import, so it comes with the first call and
in a thread.
"""

import asyncio
import importlib
from typing import TYPE_CHECKING

import msgspec

from modelyard.domain.fleet import Replica
from modelyard.engines import EngineCall
from modelyard.fleet import FleetError

if TYPE_CHECKING:
    import aiohttp

ANSWER_BYTES_MAX = 64 * 1024
TOLD_MAX = 300
_MESSAGES = ("message", "error_message", "error", "detail")


class EngineCallError(FleetError):
    """A replica did not do what it was asked; ``status`` is 0 where it did not answer."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class EngineCalls:
    """Makes calls over pooled connections; ``close`` gives them back."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def make(self, replica: Replica, call: EngineCall) -> None:
        """Make ``call`` of ``replica``; when this returns it is done.

        Raises:
            EngineCallError: it said something else than 200, or nothing in time.
        """
        session = await self._open()
        from aiohttp import ClientError

        url = f"http://{replica.host}:{replica.port}{call.path}"
        headers = {"authorization": f"Bearer {replica.secret}"}
        try:
            async with (
                asyncio.timeout(call.timeout_s),
                session.post(url, json=call.body, headers=headers, allow_redirects=False) as response,
            ):
                said = await response.content.read(ANSWER_BYTES_MAX)
                if response.status != 200:
                    raise EngineCallError(_reason(response.status, said), response.status)
        except TimeoutError:
            raise EngineCallError(f"{replica.id} did not answer within {call.timeout_s:g} s") from None
        except (ClientError, OSError) as error:
            raise EngineCallError(f"{replica.id} cannot be reached: {error}") from error

    async def close(self) -> None:
        """Give connections back."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _open(self) -> "aiohttp.ClientSession":
        aiohttp = await asyncio.to_thread(importlib.import_module, "aiohttp") if self._session is None else None
        if self._session is None and aiohttp is not None:  # another call may have opened it meanwhile
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        assert self._session is not None, "opened above"
        return self._session


def _reason(status: int, said: bytes) -> str:
    """Return what an engine said, without its wrapping; its text is not ours, so that it is cut and made printable.

    Of an object only its message: some engines list beside it all adapters that they have, with their files.
    """
    try:
        text = _message_of(msgspec.json.decode(said))
    except (msgspec.MsgspecError, RecursionError, ValueError):
        text = said.decode("utf-8", "replace")
    text = "".join(char if char.isprintable() else " " for char in text)[:TOLD_MAX].strip()
    return f"the engine refused it ({status}): {text}" if text else f"the engine refused it ({status})"


def _message_of(said: object) -> str:
    """Return the message in what an engine said, "" where there is none."""
    if isinstance(said, dict):
        return next((text for name in _MESSAGES if (text := _message_of(said.get(name)))), "")
    return said if isinstance(said, str) else ""
