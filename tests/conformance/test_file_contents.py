"""Every ``FileContents`` shows whole content or none, whatever fails or is killed when."""

import asyncio
import errno
import hashlib
import os
import signal
import sys
from pathlib import Path

import pytest

from modelyard.ids import new_id
from modelyard.stores import ContentMissingError, FileContents
from modelyard.stores.contents import BLOCK_BYTES, DiskContents


@pytest.fixture(params=["disk"])
def contents(tmp_path: Path) -> FileContents:
    return DiskContents(tmp_path / "files")


async def put(contents: FileContents, content: bytes) -> str:
    file_id = new_id("file-")
    writer = await contents.create(file_id)
    await writer.write(content)
    await writer.keep()
    return file_id


async def whole(contents: FileContents, file_id: str, **part: int) -> bytes:
    return b"".join([block async for block in contents.read(file_id, **part)])


async def test_content_comes_back_whole_and_in_parts(contents: FileContents) -> None:
    content = os.urandom(2 * BLOCK_BYTES + 17)
    file_id = await put(contents, content)
    assert await whole(contents, file_id) == content
    assert (
        await whole(contents, file_id, start=BLOCK_BYTES - 1, length=BLOCK_BYTES + 5)
        == content[BLOCK_BYTES - 1 : 2 * BLOCK_BYTES + 4]
    )
    assert await whole(contents, file_id, start=5, length=0) == b""
    assert await whole(contents, file_id, start=len(content) - 1, length=10) == content[-1:]
    assert contents.path_of(file_id).read_bytes() == content


async def test_a_writer_knows_what_it_wrote(contents: FileContents) -> None:
    writer = await contents.create(new_id("file-"))
    await writer.write(b"two ")
    await writer.write(memoryview(b"blocks"))
    assert writer.size_bytes == 10
    assert writer.digest == "sha256:" + hashlib.sha256(b"two blocks").hexdigest()
    await writer.abandon()


async def test_nothing_is_there_before_it_is_kept_nor_after_it_is_abandoned(contents: FileContents) -> None:
    file_id = new_id("file-")
    writer = await contents.create(file_id)
    await writer.write(b"half")
    with pytest.raises(ContentMissingError):
        await whole(contents, file_id)
    await writer.abandon()
    await writer.abandon()
    with pytest.raises(ContentMissingError):
        await whole(contents, file_id)
    assert await contents.settled_ids(before=float("inf")) == []
    assert await contents.clear_drafts() == 0


async def test_abandoning_what_was_kept_changes_nothing(contents: FileContents) -> None:
    file_id = new_id("file-")
    writer = await contents.create(file_id)
    await writer.write(b"kept")
    await writer.keep()
    await writer.abandon()
    assert await whole(contents, file_id) == b"kept"


async def test_removed_content_is_gone_at_once_and_goes_on_for_who_reads_it(contents: FileContents) -> None:
    content = os.urandom(2 * BLOCK_BYTES)
    file_id = await put(contents, content)
    reading = contents.read(file_id)
    got = await anext(reading)
    await contents.remove(file_id)
    await contents.remove(file_id)
    async for block in reading:
        got += block
    assert got == content
    with pytest.raises(ContentMissingError):
        await whole(contents, file_id)


async def test_a_draft_of_another_hand_is_adopted(contents: FileContents) -> None:
    await put(contents, b"so that there is a folder")
    file_id = new_id("file-")
    draft = contents.path_of(file_id).parent.parent / "made-elsewhere"
    draft.write_bytes(b"output")
    os.utime(draft, (1_000, 1_000))
    await contents.adopt(file_id, draft)
    assert file_id not in await contents.settled_ids(before=2_000.0), "its row may still come"
    assert await whole(contents, file_id) == b"output"
    assert not draft.exists()


async def test_settled_content_is_told_by_its_age(contents: FileContents) -> None:
    old, new = await put(contents, b"old"), await put(contents, b"new")
    os.utime(contents.path_of(old), (1_000, 1_000))
    assert await contents.settled_ids(before=2_000.0) == [old]
    assert set(await contents.settled_ids(before=float("inf"))) == {old, new}


async def test_settled_content_is_removed_unless_other_took_its_place(contents: FileContents) -> None:
    file_id = await put(contents, b"old")
    os.utime(contents.path_of(file_id), (1_000, 1_000))
    draft = contents.path_of(file_id).parent / "again"
    draft.write_bytes(b"new")
    await contents.adopt(file_id, draft)
    await contents.remove_settled(file_id, before=2_000.0)
    assert await whole(contents, file_id) == b"new"
    os.utime(contents.path_of(file_id), (1_000, 1_000))
    for _ in range(2):
        await contents.remove_settled(file_id, before=2_000.0)
        with pytest.raises(ContentMissingError):
            await whole(contents, file_id)


async def test_a_full_disk_leaves_nothing(contents: FileContents, monkeypatch: pytest.MonkeyPatch) -> None:
    file_id = new_id("file-")
    writer = await contents.create(file_id)
    await writer.write(b"fits")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        await writer.keep()
    await writer.abandon()
    with pytest.raises(ContentMissingError):
        await whole(contents, file_id)
    assert await contents.clear_drafts() == 0


async def test_a_caller_that_is_cancelled_in_a_write_can_abandon_it(contents: FileContents) -> None:
    file_id = new_id("file-")
    writer = await contents.create(file_id)
    for _ in range(20):
        writing = asyncio.ensure_future(writer.write(bytes(BLOCK_BYTES)))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
    await writer.abandon()
    with pytest.raises(ContentMissingError):
        await whole(contents, file_id)
    assert await contents.clear_drafts() == 0


_MORTAL = """
import asyncio, os, sys
from pathlib import Path
from modelyard.stores.contents import DiskContents

left = int(sys.argv[3])

def mortal(module, name):
    real = getattr(module, name)
    def call(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return real(*arguments, **options)
    setattr(module, name, call)

async def main():
    contents = DiskContents(Path(sys.argv[1]))
    for module, name in ((os, "open"), (os, "write"), (os, "fsync"), (os, "utime"), (Path, "mkdir"), (Path, "rename")):
        mortal(module, name)
    writer = await contents.create(sys.argv[2])
    for _ in range(2):
        await writer.write(b"half")
    await writer.keep()

asyncio.run(main())
"""


async def test_a_process_that_is_killed_at_any_step_leaves_it_whole_or_not_there(tmp_path: Path) -> None:
    contents = DiskContents(tmp_path / "files")

    async def killed_after(steps: int) -> tuple[int, bytes | None]:
        file_id = new_id("file-")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _MORTAL, str(tmp_path / "files"), file_id, str(steps)
        )
        async with asyncio.timeout(60):
            code = await process.wait()
        place = contents.path_of(file_id)
        return code, place.read_bytes() if place.exists() else None

    outcomes: list[bytes | None] = []
    for steps in range(100):
        code, content = await killed_after(steps)
        outcomes.append(content)
        if code == 0:
            break
        assert code == 9
    assert len(outcomes) > 8, "it is killed at every step"
    first_whole = outcomes.index(b"halfhalf")
    assert outcomes[:first_whole] == [None] * first_whole
    assert set(outcomes[first_whole:]) == {b"halfhalf"}
    await contents.clear_drafts()
    assert not list((tmp_path / "files" / "drafts").iterdir())


_WRITER = """
import asyncio, sys
from pathlib import Path
from modelyard.stores.contents import DiskContents

async def main():
    writer = await DiskContents(Path(sys.argv[1])).create(sys.argv[2])
    await writer.write(b"half")
    print("written", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_draft_lives_as_long_as_the_process_that_writes_it(tmp_path: Path) -> None:
    contents = DiskContents(tmp_path / "files")
    file_id = new_id("file-")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WRITER, str(tmp_path / "files"), file_id, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            assert await process.stdout.readline() == b"written\n"
        assert await contents.clear_drafts() == 0, "its writer lives"
        process.send_signal(signal.SIGKILL)
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert await contents.clear_drafts() == 1
    with pytest.raises(ContentMissingError):
        await whole(contents, file_id)
