"""Holding the tokens of a stream for a moment."""

import asyncio

from modelyard.gateway.coalescing import Coalescer


async def test_first_bytes_go_at_once_and_what_comes_close_together_in_one_write() -> None:
    written: list[bytes] = []
    is_written = asyncio.Event()

    def write(data: bytes) -> None:
        written.append(data)
        if len(written) > 1:
            is_written.set()

    coalescer = Coalescer(write, 0.01)
    coalescer.add(b"a")
    assert written == [b"a"]
    coalescer.add(b"b")
    coalescer.add(b"c")
    assert written == [b"a"]
    async with asyncio.timeout(20):
        await is_written.wait()
    assert written == [b"a", b"bc"]


async def test_flush_writes_what_is_held_now_and_once() -> None:
    written: list[bytes] = []
    coalescer = Coalescer(written.append, 3600)
    for data in (b"a", b"b", b"c"):
        coalescer.add(data)
    coalescer.flush()
    coalescer.flush()
    assert written == [b"a", b"bc"]
    coalescer.add(b"d")
    assert written == [b"a", b"bc"], "the first of all, not of each group"
    coalescer.drop()
    coalescer.flush()
    assert written == [b"a", b"bc"]
