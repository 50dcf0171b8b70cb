"""Asking the gateways of this machine, in the name of whoever made a batch.

Each worker has a unix socket in one folder; those that are there take turns.
A worker that is gone is passed over, and where all are, that is said: nothing
of a batch fails because a gateway restarts.
"""

import asyncio
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp
import msgspec

from modelyard.domain.batches import CALLER_HEADER, Caller
from modelyard.domain.tenants import INTERNAL_TOKEN_HEADER
from modelyard.errors.shape import RESERVED_HEADER

SOCKETS = "c-*.sock"
"""What the sockets are called, as ``config/directory.py`` has it."""
CONNECT_TIMEOUT_S = 5.0
RESERVED_S = 0.5
"""After which a line looks again whether those under way have left it room in its quota."""

_encode = msgspec.json.Encoder().encode


class GatewayAwayError(Exception):
    """No gateway answered. ``was_sent``: one may have had the request."""

    def __init__(self, reason: str, *, was_sent: bool) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


class Reply(NamedTuple):
    """What a gateway answered."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None
    should_retry: bool
    queued_s: float
    gave_way: bool


class Gateways:
    """The gateways whose sockets are in ``folder``; ``timeout_s`` is the longest that an answer may take."""

    def __init__(self, folder: Path, token: str, *, timeout_s: float) -> None:
        self._folder = folder
        self._token = token
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_TIMEOUT_S)
        self._sessions: dict[Path, aiohttp.ClientSession] = {}
        self._turn = 0

    def __repr__(self) -> str:
        return f"<Gateways in {self._folder}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            await session.close()

    async def ask(self, method: str, path: str, caller: Caller, body: bytes = b"") -> Reply:
        """Return the answer, whatever its status.

        Raises:
            GatewayAwayError: there was none.
        """
        places = self._places()
        reason = "no gateway runs"
        for place in places:
            try:
                return await self._ask(place, method, path, caller, body)
            except aiohttp.ClientConnectorError as error:
                reason = str(error)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise GatewayAwayError(str(error) or "no answer in time", was_sent=True) from error
        await self._forget(places)
        raise GatewayAwayError(reason, was_sent=False)

    def _places(self) -> list[Path]:
        places = sorted(self._folder.glob(SOCKETS))
        self._turn += 1
        at = self._turn % len(places) if places else 0
        return places[at:] + places[:at]

    async def _ask(self, place: Path, method: str, path: str, caller: Caller, body: bytes) -> Reply:
        session = self._sessions.get(place)
        if session is None:
            # No bound of its own: whoever asks knows how much may be under way.
            connector = aiohttp.UnixConnector(str(place), limit=0)
            session = self._sessions[place] = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        headers = {
            INTERNAL_TOKEN_HEADER: self._token,
            CALLER_HEADER: _encode(caller).decode(),
            "content-type": "application/json",
        }
        url = f"http://gateway{path}"
        async with session.request(method, url, data=body or None, headers=headers, timeout=self._timeout) as answer:
            content = await answer.read()
            told = answer.headers
            # A client had better not try again at once, and a line has time: those under way end, and may cost less.
            is_reserved = RESERVED_HEADER in told
            return Reply(
                answer.status,
                told.get("x-request-id", ""),
                content,
                RESERVED_S if is_reserved else _number(told.get("retry-after")),
                is_reserved or told.get("x-should-retry") != "false",
                (_number(told.get("x-modelyard-queued-ms")) or 0.0) / 1000,
                bool(_number(told.get("x-modelyard-gave-way"))),
            )

    async def _forget(self, places: list[Path]) -> None:
        """Drop the sessions of sockets that are gone."""
        for place in [place for place in self._sessions if place not in places]:
            await self._sessions.pop(place).close()


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


async def pause(seconds: float, stop: asyncio.Event) -> None:
    """Wait, but no longer than until ``stop`` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
