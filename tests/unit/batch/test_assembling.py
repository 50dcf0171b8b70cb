"""The files of a batch have each line once, in the order of the input, and the same bytes whoever makes them."""

import io
import json
from pathlib import Path

from modelyard.batch import answers
from modelyard.batch.assembling import Assembled, assemble
from modelyard.batch.shard import INPUT
from modelyard.batch.spool import open_spool
from modelyard.batch.validation import check
from modelyard.domain.batches import Batch, Counts, Shard, Tokens

CHAT = "/v1/chat/completions"
BATCH = Batch("batch_1", "ten", "key", CHAT, "file-in", "24h", 1.0, 2.0, "file-out", "file-err", model="m")


def a_folder(folder: Path, count: int) -> list[Shard]:
    lines = [
        json.dumps({"custom_id": f"id-{at}", "method": "POST", "url": CHAT, "body": {"model": "m", "messages": []}})
        for at in range(count)
    ]
    data = "\n".join(lines).encode()
    (folder / INPUT).write_bytes(data)
    return check(io.BytesIO(data), "batch_1", CHAT, shard_lines=3, body_bytes_max=1000).shards


def answer(folder: Path, shard: Shard, ordinals: list[int], *, token: int = 1) -> None:
    spool = open_spool(folder, shard.number, token)
    for ordinal in ordinals:
        made = answers.answered(answers.line_id("batch_1", ordinal), f"id-{ordinal}", 200, "req", b"{}")
        spool.add(ordinal, made.text, is_error=ordinal == 1, tokens=Tokens(1, 0, 2, 0))
    spool.close()


def made(folder: Path, shards: list[Shard], name: str = "one", *, is_wanted: bool = True) -> Assembled | None:
    return assemble(
        BATCH, folder, shards, answers.EXPIRED, name=name, line_bytes_max=10_000, is_wanted=lambda: is_wanted
    )


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def test_lines_stand_in_the_order_of_the_input_and_those_without_an_answer_are_errors(tmp_path: Path) -> None:
    shards = a_folder(tmp_path, 8)
    answer(tmp_path, shards[0], [2, 0, 1])
    answer(tmp_path, shards[1], [5, 3])
    result = made(tmp_path, shards)
    assert result is not None
    assert ids(result.output.path) == ["id-0", "id-2", "id-3", "id-5"]
    assert ids(result.errors.path) == ["id-1", "id-4", "id-6", "id-7"]
    assert (result.counts, result.unanswered, result.tokens) == (Counts(8, 4, 4), 3, Tokens(5, 0, 10, 0))
    assert result.output.size_bytes == result.output.path.stat().st_size


def test_making_them_again_gives_the_same_bytes(tmp_path: Path) -> None:
    shards = a_folder(tmp_path, 5)
    answer(tmp_path, shards[0], [2, 0])
    one, two = made(tmp_path, shards, "one"), made(tmp_path, shards, "two")
    assert one is not None
    assert two is not None
    assert (one.output.digest, one.errors.digest) == (two.output.digest, two.errors.digest)


def test_no_file_is_made_that_would_be_empty(tmp_path: Path) -> None:
    shards = a_folder(tmp_path, 3)
    answer(tmp_path, shards[0], [0, 2])
    answer(tmp_path, shards[0], [1], token=2)
    result = made(tmp_path, shards)
    assert result is not None
    assert result.errors.path.exists()
    none = made(tmp_path, [], "none")
    assert none is not None
    assert (none.output.path.exists(), none.errors.path.exists(), none.counts) == (False, False, Counts())


def test_it_stops_when_its_lease_is_lost(tmp_path: Path) -> None:
    assert made(tmp_path, a_folder(tmp_path, 3), is_wanted=False) is None
