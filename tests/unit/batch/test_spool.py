"""A spool has every whole line once, whoever wrote before and whatever was killed."""

from pathlib import Path

import pytest

from modelyard.batch.spool import newest, open_spool, records_of
from modelyard.domain.batches import Progress, Tokens

USED = Tokens(3, 0, 2, 0)


def add(folder: Path, token: int, *ordinals: int) -> None:
    spool = open_spool(folder, 0, token)
    for ordinal in ordinals:
        spool.add(ordinal, b'{"n":%d}' % ordinal, is_error=ordinal % 2 == 1, tokens=USED)
    spool.close()


def texts(folder: Path) -> dict[int, bytes]:
    file = newest(folder, 0)
    assert file is not None
    data = file.read_bytes()
    with file.open("rb") as opened:
        return {one.ordinal: data[one.offset : one.offset + one.size] for one in records_of(opened)}


def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    add(tmp_path, 1, 4, 2, 7)
    assert texts(tmp_path) == {4: b'{"n":4}\n', 2: b'{"n":2}\n', 7: b'{"n":7}\n'}
    spool = open_spool(tmp_path, 0, 2)
    assert (spool.done, spool.progress) == ({2, 4, 7}, Progress(2, 1, Tokens(9, 0, 6, 0)))
    spool.close()


def test_the_next_lease_goes_on_from_the_whole_lines_of_the_one_before(tmp_path: Path) -> None:
    add(tmp_path, 1, 0, 1)
    with (tmp_path / "0.000000000001").open("ab") as file:
        file.write(b'2 o {"input":3} {"n":')  # killed in the middle of a line
    add(tmp_path, 5, 2)
    assert list(texts(tmp_path)) == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["0.000000000005"], "what is older is gone"


def test_one_that_comes_back_writes_where_nobody_reads(tmp_path: Path) -> None:
    zombie = open_spool(tmp_path, 0, 1)
    zombie.add(0, b"{}", is_error=False, tokens=USED)
    add(tmp_path, 2, 1)
    zombie.add(2, b"{}", is_error=False, tokens=USED)
    zombie.sync()
    zombie.close()
    assert list(texts(tmp_path)) == [0, 1]


def test_one_killed_while_it_takes_over_loses_nothing(tmp_path: Path) -> None:
    add(tmp_path, 1, 0, 1, 2)
    (tmp_path / "0.000000000002.draft").write_bytes(b'0 o {"input":3,"cached":0,"output":2,"reasoning":0} {}\n')
    add(tmp_path, 3, 3)
    assert list(texts(tmp_path)) == [0, 1, 2, 3]


def test_shards_with_alike_numbers_are_apart(tmp_path: Path) -> None:
    add(tmp_path, 1, 0)
    other = open_spool(tmp_path, 10, 1)
    other.add(100, b"{}", is_error=False, tokens=USED)
    other.close()
    assert list(texts(tmp_path)) == [0]


def test_a_line_is_never_answered_twice(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, 0, 1)
    spool.add(0, b"{}", is_error=False, tokens=USED)
    with pytest.raises(AssertionError, match="twice"):
        spool.add(0, b"{}", is_error=False, tokens=USED)
    spool.close()
