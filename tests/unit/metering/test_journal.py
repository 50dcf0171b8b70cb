"""The journal: what was written is read back, whatever happened in between."""

import asyncio
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelyard.clock import ManualClock
from modelyard.domain.usage import Intent, Mark, Price, Settle, UsageStatus
from modelyard.metering import journal as journals
from modelyard.metering.journal import Journal, JournalLockedError, open_work, read_records, segments


def intent(request_id: str = "r1") -> Intent:
    return Intent(request_id, 1.0, "t", "k", "ep", "m", "v", "/v1/chat/completions", True, 3, 50, Price(1, 2, 3))


def settled(request_id: str = "r1") -> Settle:
    return Settle(request_id, 2.0, 3, 0, 4, UsageStatus.SUCCESS, 200, "", 5.0, 9.0, "rep", 1, False)


def at_once(flush: Callable[[], None]) -> None:
    """Every record is a turn of its own."""
    flush()


def journal(folder: Path, **options: int) -> Journal:
    return Journal(folder, sync_s=0.01, clock=ManualClock(), soon=at_once, **options)


def begin(book: Journal, record: Intent) -> bool:
    """Record an intent; say whether its request may be dispatched."""
    said: list[bool] = []
    book.begin(record, said.append)
    (is_written,) = said
    return is_written


def nothing() -> None:
    """Answer nobody."""


def read_all(folder: Path) -> list[object]:
    return [record for path in segments(folder) for record in read_records(path, 0)[0]]


async def test_records_are_on_file_the_moment_they_are_written(tmp_path: Path) -> None:
    book = journal(tmp_path)
    assert begin(book, intent())
    book.mark(Mark("r1", 3, 2))
    book.settle(settled(), nothing)
    assert read_all(tmp_path) == [intent(), Mark("r1", 3, 2), settled()]
    book.close()


async def test_an_unfinished_record_is_left_for_the_next_read(tmp_path: Path) -> None:
    book = journal(tmp_path)
    assert begin(book, intent())
    book.close()
    path = segments(tmp_path)[0]
    whole = path.read_bytes()
    torn = tmp_path / "torn.journal"
    for size in range(len(whole)):
        torn.write_bytes(whole[:size])
        assert read_records(torn, 0) == ([], 0)


async def test_a_damaged_record_costs_only_itself(tmp_path: Path) -> None:
    book = journal(tmp_path)
    assert begin(book, intent("a"))
    first_size = segments(tmp_path)[0].stat().st_size
    assert begin(book, intent("b"))
    book.close()
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[first_size - 2] ^= 0xFF
    path.write_bytes(data)
    records, offset = read_records(path, 0)
    assert records == [intent("b")]
    assert offset == len(data)


@pytest.mark.parametrize("place", range(8))
async def test_a_flipped_bit_in_the_head_of_a_record_costs_only_that_record(tmp_path: Path, place: int) -> None:
    book = journal(tmp_path)
    for name in "abc":
        assert begin(book, intent(name))
    book.close()
    path = segments(tmp_path)[0]
    whole = path.read_bytes()
    for bit in range(8):
        data = bytearray(whole)
        data[len(whole) // 3 + place] ^= 1 << bit
        path.write_bytes(data)
        assert read_records(path, 0) == ([intent("a"), intent("c")], len(whole)), bit


async def test_a_record_of_a_later_version_does_not_stop_the_start(tmp_path: Path) -> None:
    book = journal(tmp_path)
    assert begin(book, intent("a"))
    book.close()
    body = msgspec.msgpack.encode([99, "something new"])
    with segments(tmp_path)[0].open("ab") as file:
        file.write(len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body)
    second = journal(tmp_path)
    assert second.recovered == 1
    second.close()


async def test_a_torn_write_that_cannot_be_undone_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = journal(tmp_path)
    real = os.write

    def refuse(*_: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", lambda fd, data: real(fd, data[:20]))
        broken.setattr(os, "ftruncate", refuse)
        assert not begin(book, intent("a"))
    assert begin(book, intent("b"))
    book.close()
    assert read_all(tmp_path) == [intent("b")]


async def test_a_restart_settles_what_was_open_at_its_last_mark(tmp_path: Path) -> None:
    book = journal(tmp_path)
    for request_id in ("streamed", "silent", "done"):
        assert begin(book, intent(request_id))
    book.mark(Mark("streamed", 3, 64))
    book.mark(Mark("streamed", 3, 128))
    book.settle(settled("done"), nothing)
    book.close()
    second = journal(tmp_path)
    assert second.recovered == 2
    second.close()
    found = {r.request_id: r for r in read_all(tmp_path) if isinstance(r, Settle) and r.request_id != "done"}
    assert {name: (r.prompt_tokens, r.completion_tokens) for name, r in found.items()} == {
        "streamed": (3, 128),
        "silent": (0, 0),
    }
    assert all(r.status is UsageStatus.INTERRUPTED for r in found.values())
    third = journal(tmp_path)
    assert third.recovered == 0
    third.close()


async def test_only_one_writer_may_have_a_folder(tmp_path: Path) -> None:
    book = journal(tmp_path)
    with pytest.raises(JournalLockedError):
        journal(tmp_path)
    book.close()
    journal(tmp_path).close()


async def test_a_full_segment_is_rotated_and_open_work_is_carried_over(tmp_path: Path) -> None:
    book = journal(tmp_path, segment_bytes=10)
    running = asyncio.get_running_loop().create_task(book.run())
    assert begin(book, intent("long"))
    book.mark(Mark("long", 3, 7))
    async with asyncio.timeout(20):
        while len(segments(tmp_path)) < 2:
            await asyncio.sleep(0)
    running.cancel()
    book.close()
    first, second = segments(tmp_path)[:2]
    assert read_records(first, 0)[0] == [intent("long"), Mark("long", 3, 7)]
    first.unlink()
    assert open_work(read_records(second, 0)[0]) == {"long": (intent("long"), Mark("long", 3, 7))}


async def test_a_full_disk_refuses_new_work_and_keeps_settlements_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = journal(tmp_path)
    assert begin(book, intent("before"))
    real_write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert not begin(book, intent("refused"))
    book.settle(settled("before"), nothing)
    assert not book.is_writable
    monkeypatch.setattr(os, "write", real_write)
    assert not begin(book, intent("still refused"))
    running = asyncio.get_running_loop().create_task(book.run())
    async with asyncio.timeout(20):
        while not book.is_writable:
            await asyncio.sleep(0.01)
    running.cancel()
    book.close()
    assert read_all(tmp_path) == [intent("before"), settled("before")]


async def test_a_torn_write_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = journal(tmp_path)
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, bytes(data)[:5]))
    assert not begin(book, intent("torn"))
    monkeypatch.setattr(os, "write", real_write)
    assert begin(book, intent("whole"))
    book.close()
    assert read_all(tmp_path) == [intent("whole")]


async def test_a_folder_that_was_lost_does_not_repeat_numbers_that_were_delivered(tmp_path: Path) -> None:
    clock = ManualClock()
    first = Journal(tmp_path / "a", sync_s=0.01, clock=clock, soon=at_once)
    first.close()
    clock.advance(1)
    again = Journal(tmp_path / "restored", sync_s=0.01, clock=clock, soon=at_once)
    again.close()
    assert segments(tmp_path / "restored")[0].name > segments(tmp_path / "a")[0].name


async def test_a_segment_is_numbered_behind_all_that_arrived_before_it(tmp_path: Path) -> None:
    """Also behind a clock that was ahead for a while: what arrived then stands in none that seems to be older."""
    clock = ManualClock()
    for at in (5e6, 7.0, 8.0):
        book = Journal(tmp_path, sync_s=0.01, clock=clock, soon=at_once)
        assert begin(book, msgspec.structs.replace(intent(f"r{at}"), at=at))
        book.settle(settled(f"r{at}"), nothing)
        book._rotate()
        book.close()
    numbers = [int(path.stem) for path in segments(tmp_path)]
    assert numbers[0] == int(clock.unix_s())
    assert all(number > 5e6 for number in numbers[1:])


async def test_a_start_reads_the_newest_segments_only_and_a_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka may be away for days, and all of its spool stay; a worker that is killed then must start all the same."""
    for number in range(9):
        book = journal(tmp_path)
        for part in range(300):
            assert begin(book, intent(f"r{number}-{part}"))
            if (number, part) != (8, 7):
                book.settle(settled(f"r{number}-{part}"), nothing)
        book.close()
    read: list[tuple[Path, int]] = []

    def noted(path: Path, offset: int, bytes_max: int = -1) -> tuple[list[Any], int]:
        read.append((path, bytes_max))
        return read_records(path, offset, bytes_max)

    monkeypatch.setattr(journals, "read_records", noted)
    monkeypatch.setattr(journals, "READ_BYTES", 10_000)
    book = journal(tmp_path)
    assert book.recovered == 1
    assert {path for path, _ in read} == set(segments(tmp_path)[5:9])
    assert {size for _, size in read} == {10_000}
    book.close()


async def test_a_turn_is_one_write_and_nothing_happens_before_it(tmp_path: Path) -> None:
    turn: list[Callable[[], None]] = []
    book = Journal(tmp_path, sync_s=0.01, clock=ManualClock(), soon=turn.append)
    happened: list[str] = []
    book.begin(intent("a"), lambda is_written: happened.append(f"a {is_written}"))
    book.begin(intent("b"), lambda is_written: happened.append(f"b {is_written}"))
    book.settle(settled("a"), lambda: happened.append("answer a"))
    assert happened == []
    assert read_all(tmp_path) == []
    (flush,) = turn
    flush()
    assert happened == ["a True", "b True", "answer a"]
    assert read_all(tmp_path) == [intent("a"), intent("b"), settled("a")]
    book.close()


async def test_what_follows_a_record_may_record_again_and_may_fail_alone(tmp_path: Path) -> None:
    turn: list[Callable[[], None]] = []
    book = Journal(tmp_path, sync_s=0.01, clock=ManualClock(), soon=turn.append)
    happened: list[str] = []

    def breaks(is_written: bool) -> None:
        raise ValueError("a bug")

    book.begin(intent("a"), breaks)
    book.begin(intent("b"), lambda is_written: book.settle(settled("b"), lambda: happened.append("answer b")))
    turn.pop()()
    turn.pop()()
    assert happened == ["answer b"]
    book.close()
    assert settled("b") in read_all(tmp_path)


async def test_a_disk_that_is_full_at_a_rotation_keeps_the_old_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = journal(tmp_path, segment_bytes=10)
    assert begin(book, intent("long"))
    real_write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    book._rotate()
    monkeypatch.setattr(os, "write", real_write)
    book.settle(settled("long"), nothing)
    book.close()
    assert len(segments(tmp_path)) == 1
    assert read_all(tmp_path) == [intent("long"), settled("long")]


# --- positions ---


async def test_a_position_is_where_all_that_was_recorded_ends(tmp_path: Path) -> None:
    turn: list[Callable[[], None]] = []
    book = Journal(tmp_path, sync_s=0.01, clock=ManualClock(), soon=turn.append)
    assert (book.source, book.position) == (tmp_path.name, ("", 0))
    told: list[object] = []
    book.on_written = lambda: told.append(book.position)
    book.settle(settled(), nothing)
    assert book.position is None, "it is not written yet"
    turn.pop()()
    (path,) = segments(tmp_path)
    assert told == [(path.name, path.stat().st_size)] == [book.position]
    book.close()


async def test_a_new_life_begins_where_the_last_whole_record_ends(tmp_path: Path) -> None:
    first = journal(tmp_path)
    begin(first, intent())
    first.settle(settled(), nothing)
    end = first.position
    first.close()
    (path,) = segments(tmp_path)
    with path.open("ab") as file:
        file.write(b"\x40")  # a record that was never finished
    second = journal(tmp_path)
    assert second.position == end, "what a delivery of everything reaches"
    begin(second, intent("r2"))
    second.close()
    third = journal(tmp_path)  # settles r2 as interrupted, in its own segment
    assert third.position is not None
    assert third.position > ("0000000001.journal", 10**9) or len(segments(tmp_path)) == 3
    assert third.position[0] == segments(tmp_path)[-1].name
    third.close()


async def test_a_position_only_grows_over_a_rotation(tmp_path: Path) -> None:
    book = journal(tmp_path, segment_bytes=1)
    places = [book.position]
    for number in range(5):
        book.settle(settled(f"r{number}"), nothing)
        places.append(book.position)
        book._rotate()
        places.append(book.position)
    assert None not in places
    assert places == sorted(places)  # type: ignore[type-var]
    book.close()
