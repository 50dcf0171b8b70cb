"""The desk of files: whatever fails or stops between the first byte and the row, a file is there whole or not."""

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.files import CONTENT_TYPE, file_form, left_of_files, pieces_of

from modelyard.clock import ManualClock
from modelyard.config import Config, GatewayConfig
from modelyard.control import files
from modelyard.control.files import ORPHANS_S, SETTLED_S, FileDesk, Sender
from modelyard.domain.files import File
from modelyard.domain.tenants import Tenant
from modelyard.errors import ApiError
from modelyard.ids import new_id
from modelyard.stores import StoreUnavailableError
from modelyard.stores.contents import DiskContents
from modelyard.stores.sql import Database, SqlControlStore, SqlFileStore, open_database

WHO = Sender("ten-acme", "key-1")
CONTENT = os.urandom(3_000_000)


class Failing:
    """A store or disk whose next calls of a name fail."""

    def __init__(self, inner: Any, failures: dict[str, list[Exception]]) -> None:
        self._inner = inner
        self._failures = failures

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._failures:
            return found

        async def call(*args: Any, **options: Any) -> Any:
            if waiting := self._failures[name]:
                raise waiting.pop(0)
            return await found(*args, **options)

        return call


@dataclass
class Place:
    """A desk on a real database and disk, and what fails of them next."""

    desk: FileDesk
    clock: ManualClock
    root: Path
    database: Database
    fails: dict[str, list[Exception]]

    def left(self) -> list[str]:
        return [file.name for file in left_of_files(self.root)]

    async def send(self, body: bytes | None = None, who: Sender = WHO, length: int | None = None) -> File:
        form = file_form(CONTENT) if body is None else body
        return await self.desk.receive(
            who, pieces(form), content_type=CONTENT_TYPE, length=len(form) if length is None else length
        )

    async def known(self) -> list[File]:
        return await self.desk.store.files(tenant_id=None, now=self.clock.unix_s(), limit=100)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    database = open_database(f"sqlite:///{tmp_path / 'x.sqlite'}", timeout_s=5.0)
    await SqlControlStore(database).add_tenant(Tenant("ten-acme", "acme", 1_000))
    clock, root = ManualClock(start_s=float(int(time.time()))), tmp_path / "files"
    fails: dict[str, list[Exception]] = {
        "add_file": [],
        "remove_file": [],
        "held_files": [],
        "remove": [],
        "create": [],
    }
    store: Any = Failing(SqlFileStore(database), fails)
    contents: Any = Failing(DiskContents(root), fails)
    config = Config(gateway=GatewayConfig(file_bytes_max=10_000_000))
    yield Place(FileDesk(store=store, contents=contents, config=config, clock=clock), clock, root, database, fails)
    await database.close()


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for piece in pieces_of(body, 65_536):
        yield piece


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_file_is_stored_as_it_came(place: Place) -> None:
    file = await place.send()
    assert place.desk.contents.path_of(file.id).read_bytes() == CONTENT
    assert await place.known() == [file]
    assert repr(place.desk) == "<FileDesk: <FileRoom: 0 uploads, 0 bytes to come>>"


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir"])
async def test_a_disk_that_is_full_is_507_and_keeps_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path if call in ("rename", "mkdir") else os, call, full)
        with pytest.raises(ApiError) as refused:
            await place.send()
    assert (refused.value.status, refused.value.code) == (507, "storage_full")
    assert (place.left(), await place.known()) == ([], [])
    await place.send()


async def test_a_broken_disk_is_503_and_keeps_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(ApiError) as refused:
            await place.send()
    assert (refused.value.status, refused.value.code) == (503, "storage_unavailable")
    assert "put" not in refused.value.message, "nothing of the system's own words"
    assert (place.left(), await place.known()) == ([], [])


async def test_a_disk_without_room_is_told_before_a_byte_is_written(place: Place) -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("nothing is read")
        yield b""

    async def none() -> int:
        return 1_000

    place.desk.contents = Failing(place.desk.contents, {})  # type: ignore[assignment]
    place.desk.contents.free_bytes = none  # type: ignore[method-assign]
    with pytest.raises(ApiError) as refused:
        await place.desk.receive(WHO, never(), content_type=CONTENT_TYPE, length=2_000)
    assert (refused.value.status, refused.value.code) == (507, "storage_full")
    assert "needs up to 2000 bytes, 1000 are free" in refused.value.message


async def test_a_store_that_fails_at_the_row_keeps_nothing(place: Place) -> None:
    place.fails["add_file"] = [StoreUnavailableError("locked")]
    with pytest.raises(StoreUnavailableError):
        await place.send()
    assert (place.left(), await place.known()) == ([], [])
    await place.send()


async def test_a_store_that_stays_away_leaves_content_for_the_sweep_and_a_row_its_content(place: Place) -> None:
    # Whether the row was added is not known: if it was, it must not be a file without content.
    place.fails["add_file"] = [StoreUnavailableError("gone")]
    place.fails["remove_file"] = [StoreUnavailableError("gone")]
    with pytest.raises(StoreUnavailableError):
        await place.send()
    assert len(place.left()) == 1
    await place.desk.sweep()
    assert len(place.left()) == 1, "its row may still come"
    os.utime(left_of_files(place.root)[0], (place.clock.unix_s() - SETTLED_S - 1,) * 2)
    place.clock.advance(ORPHANS_S)
    await place.desk.sweep()
    assert place.left() == []


async def test_a_store_that_does_not_tell_what_a_tenant_has_lets_nothing_in(place: Place) -> None:
    place.fails["held_files"] = [StoreUnavailableError("locked")]
    with pytest.raises(StoreUnavailableError):
        await place.send()
    assert place.left() == []
    await place.send()


async def test_a_sender_that_leaves_or_is_cut_off_leaves_nothing(place: Place) -> None:
    begun = asyncio.Event()

    async def hanging() -> AsyncIterator[bytes]:
        yield file_form(CONTENT)[:2_000_000]
        begun.set()
        await asyncio.Event().wait()

    sending = asyncio.ensure_future(place.desk.receive(WHO, hanging(), content_type=CONTENT_TYPE, length=len(CONTENT)))
    await begun.wait()
    assert len(place.left()) == 1
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert place.left() == []
    with pytest.raises(ApiError) as refused:
        await place.send(file_form(CONTENT)[:-10])
    assert refused.value.code == "invalid_form"
    assert (place.left(), await place.known()) == ([], [])
    assert repr(place.desk) == "<FileDesk: <FileRoom: 0 uploads, 0 bytes to come>>"


async def test_a_body_that_stops_to_come_is_ended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent() -> AsyncIterator[bytes]:
        yield file_form(CONTENT)[:2_000_000]
        await asyncio.Event().wait()

    monkeypatch.setattr(files, "SILENCE_S_MAX", 0.02)
    with pytest.raises(ApiError) as refused:
        await place.desk.receive(WHO, silent(), content_type=CONTENT_TYPE, length=len(CONTENT))
    assert (refused.value.status, refused.value.code) == (408, "request_timeout")
    assert place.left() == []


async def test_an_announced_size_above_the_limit_is_refused_by_itself(place: Place) -> None:
    with pytest.raises(ApiError) as refused:
        await place.send(b"", length=11_000_000)
    assert (refused.value.status, refused.value.param) == (413, "file")


async def test_two_controllers_make_one_file_of_an_idempotency_key(place: Place) -> None:
    other = FileDesk(
        store=place.desk.store, contents=place.desk.contents, config=Config(), clock=place.clock
    )  # the other one knows nothing of what this one has under way
    who = WHO._replace(idempotency_key="once")
    body = file_form(b"{}\n")
    sent = await asyncio.gather(
        place.send(body, who),
        other.receive(who, pieces(body), content_type=CONTENT_TYPE, length=len(body)),
    )
    assert sent[0] == sent[1]
    assert place.left() == [sent[0].id]


async def test_the_sweep_takes_expired_files_and_what_was_cut_off_and_nothing_else(place: Place) -> None:
    kept = await place.send(file_form(b"x", purpose="vision"))
    await place.send(file_form(b"x", anchor="created_at", seconds="3600"))
    orphan = new_id("file-")
    writer = await place.desk.contents.create(orphan)
    await writer.write(b"x")
    await writer.keep()
    os.utime(place.desk.contents.path_of(orphan), (1_000, 1_000))
    os.utime(place.desk.contents.path_of(kept.id), (1_000, 1_000))
    draft = place.root / "drafts" / f"{new_id('file-')}.dead"
    draft.write_bytes(b"half")
    (place.root / "somebody elses").mkdir()
    (place.root / "somebody elses" / "file-x").write_bytes(b"")
    place.clock.advance(3600)
    await place.desk.sweep()
    assert set(place.left()) == {kept.id, "file-x"}
    assert [file.id for file in await place.known()] == [kept.id]


async def test_content_that_cannot_be_removed_now_goes_with_the_next_sweep(place: Place) -> None:
    file = await place.send(file_form(b"x"))
    place.fails["remove"] = [OSError(errno.EIO, "Input/output error")]
    assert await place.desk.remove(file)
    assert not await place.desk.remove(file), "it is gone for everybody"
    assert place.left() == []
    again = await place.send(file_form(b"x"))
    place.fails["remove"] = [OSError(errno.EIO, "Input/output error")]
    await place.desk.remove(again)
    assert place.left() == [again.id]
    os.utime(place.desk.contents.path_of(again.id), (1_000, 1_000))
    await place.desk.sweep()
    assert place.left() == []


async def test_the_loop_goes_on_after_a_failure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = asyncio.Event()
    outcomes: list[Exception | None] = [StoreUnavailableError("locked"), OSError(errno.EIO, "broken"), None]

    async def sweep() -> None:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome
        swept.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(place.desk, "sweep", sweep)
    monkeypatch.setattr(files, "SWEEP_S", 0.0)
    running = asyncio.ensure_future(place.desk.run())
    await asyncio.wait_for(swept.wait(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
