"""Server-sent events for the management API."""

import asyncio
from collections.abc import AsyncIterator, Callable

import anyio
from starlette.responses import StreamingResponse

KEEP_ALIVE_S = 5.0
"""Pause after which a comment is sent, so that no proxy takes a quiet stream for a dead one."""


def event_stream(lines: AsyncIterator[str], shown: Callable[[str], str] = str) -> StreamingResponse:
    """Return a response with one event, ``shown(line)``, a line; it ends when ``lines`` does or the client leaves."""
    return StreamingResponse(
        _events(lines, shown),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def _events(lines: AsyncIterator[str], shown: Callable[[str], str]) -> AsyncIterator[bytes]:
    upcoming: asyncio.Task[str | None] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.create_task(_next(lines))
            done, _ = await asyncio.wait({upcoming}, timeout=KEEP_ALIVE_S)
            if not done:
                yield b": keep-alive\n\n"
                continue
            line, upcoming = upcoming.result(), None
            if line is None:
                return
            yield event(shown(line))
    finally:
        # A client that leaves cancels us, and would cancel each wait below again: its readers must end all the same.
        with anyio.CancelScope(shield=True):
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.wait({upcoming})
            close = getattr(lines, "aclose", None)
            if close is not None:
                await close()


def event(text: str) -> bytes:
    """Return one event; a line break inside ``text`` cannot end it early."""
    body = "".join(f"data: {part}\n" for part in text.splitlines() or [""])
    return f"{body}\n".encode("utf-8", "replace")


async def _next(lines: AsyncIterator[str]) -> str | None:
    return await anext(lines, None)
