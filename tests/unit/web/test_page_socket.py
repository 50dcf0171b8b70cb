"""A page that is told to whoever connects."""

import asyncio
from pathlib import Path

from modelyard.web.page_socket import PageSocket


async def asked(path: Path) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    page = await reader.read()
    writer.close()
    await writer.wait_closed()
    return page


def left(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_it_is_told_anew_to_each_who_asks(tmp_path: Path) -> None:
    pages = iter((b"one", b"two"))
    socket = PageSocket(tmp_path, "control", lambda: next(pages))
    await socket.start()
    assert (socket.path.stat().st_mode & 0o777, socket.path.name) == (0o600, "m-control.sock")
    assert [await asked(socket.path), await asked(socket.path)] == [b"one", b"two"]
    await socket.close()
    assert left(tmp_path) == []


async def test_one_that_goes_leaves_the_next_one_of_its_name_its_socket(tmp_path: Path) -> None:
    """A controller that another one relieved closes after that one has begun."""
    before, after = (PageSocket(tmp_path, "control", lambda text=text: text) for text in (b"old", b"new"))
    await before.start()
    await after.start()
    await before.close()
    assert await asked(after.path) == b"new"
    await after.close()


async def test_where_no_socket_can_be_made_nothing_fails(tmp_path: Path) -> None:
    socket = PageSocket(tmp_path / "no" / "folder", "control", lambda: b"")
    await socket.start()
    await socket.close()
