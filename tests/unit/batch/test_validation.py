"""Each bad line of a batch's file is told by its number, and of the good ones no more is kept than where they are."""

import io
import json
import tracemalloc

import pytest

from modelyard.batch import validation
from modelyard.batch.validation import Checked, check

CHAT = "/v1/chat/completions"


def line(custom_id: object = "a", **changes: object) -> bytes:
    body = {"model": "smol", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    whole = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes}
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode()


def body_with(**changes: object) -> dict[str, object]:
    body = {"model": "smol", "messages": [{"role": "user", "content": "hi"}], **changes}
    return {name: value for name, value in body.items() if value is not ...}


def checked(*lines: bytes, endpoint: str = CHAT, body_bytes_max: int = 100_000, shard_lines: int = 2) -> Checked:
    file = io.BytesIO(b"\n".join(lines))
    return check(file, "batch_1", endpoint, shard_lines=shard_lines, body_bytes_max=body_bytes_max)


def faults(result: Checked) -> list[tuple[str, str | None, int | None]]:
    return [(error.code, error.param, error.line) for error in result.errors]


@pytest.mark.parametrize(
    ("story", "bad", "expected"),
    [
        ("no JSON", b"{", ("invalid_json_line", None)),
        ("no object", b"[1]", ("invalid_json_line", None)),
        ("not UTF-8", b'{"custom_id": "\xff"}', ("invalid_json_line", None)),
        ("a number that is none", line(x=float("nan")), ("invalid_json_line", None)),
        ("nested without end", b'{"custom_id": ' + b"[" * 50_000, ("invalid_json_line", None)),
        ("no custom_id", line(...), ("missing_required_parameter", "custom_id")),
        ("custom_id null", line(None), ("missing_required_parameter", "custom_id")),
        ("custom_id a number", line(7), ("invalid_type", "custom_id")),
        ("custom_id twice", line("first"), ("duplicate_custom_id", "custom_id")),
        ("no method", line(method=...), ("missing_required_parameter", "method")),
        ("another method", line(method="GET"), ("invalid_method", "method")),
        ("no url", line(url=...), ("missing_required_parameter", "url")),
        ("another url", line(url="/v1/embeddings"), ("invalid_url", "url")),
        ("no body", line(body=...), ("missing_required_parameter", "body")),
        ("body a text", line(body="x"), ("invalid_type", "body")),
        ("no model", line(body=body_with(model=...)), ("invalid_request", "body.model")),
        ("model a number", line(body=body_with(model=1)), ("invalid_type", "body.model")),
        ("another model", line(body=body_with(model="large")), ("model_mismatch", "body.model")),
        ("no messages", line(body=body_with(messages=...)), ("invalid_request", "body.messages")),
        ("a stream", line(body=body_with(stream=True)), ("streaming_unsupported", "body.stream")),
        ("too long", line(body=body_with(x="y" * 200_000)), ("line_too_long", None)),
        ("a body too long", line(body=body_with(x="y" * 110_000)), ("line_too_long", "body")),
    ],
)
def test_a_bad_line_is_told_with_its_number(story: str, bad: bytes, expected: tuple[str, str | None]) -> None:
    result = checked(line("first"), b"", bad, line("last"))
    assert faults(result) == [(*expected, 3)], story


def test_what_is_unusual_and_no_fault_passes() -> None:
    result = checked(
        b"\xef\xbb\xbf" + line("ä \ud83d\ude00"),
        line("b", body=body_with(stream=False)) + b"\r",
        b"",
        line("c", body=body_with(stream=None, temperature="what a model makes of it is not judged here")),
    )
    assert (result.errors, result.lines, result.model) == ([], 3, "smol")


def test_all_bad_lines_are_told_and_no_more_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "ERRORS_MAX", 3)
    result = checked(b"1", line(), b"2", b"3", b"4")
    assert [error.line for error in result.errors] == [1, 3, 4]


def test_shards_are_ranges_that_hold_every_line_once() -> None:
    lines = [line(f"id-{at}") for at in range(5)]
    data = b"\n\n".join(lines)
    result = check(io.BytesIO(data), "batch_1", CHAT, shard_lines=2, body_bytes_max=1000)
    assert [(one.number, one.first, one.lines) for one in result.shards] == [(0, 0, 2), (1, 2, 2), (2, 4, 1)]
    again = b"".join(data[one.offset : one.offset + one.size] for one in result.shards)
    assert [text for text in again.split(b"\n") if text] == lines


def test_an_empty_file_and_one_with_too_many_lines_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(checked(b"", b"  ")) == [("empty_file", None, None)]
    monkeypatch.setattr(validation, "LINES_MAX", 3)
    assert checked(*(line(str(at)) for at in range(3))).errors == []
    result = checked(*(line(str(at)) for at in range(4)))
    assert faults(result) == [("too_many_tasks", None, None)]


def test_inputs_of_embeddings_are_counted_over_all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "EMBEDDINGS_MAX", 5)
    url = "/v1/embeddings"

    def embed(custom_id: str, text: object) -> bytes:
        return line(custom_id, url=url, body={"model": "e", "input": text})

    good = checked(
        embed("a", ["x", "y"]),
        embed("b", "x"),
        embed("c", [1, 2, 3, 4]),
        embed(
            "d",
            [
                [1],
            ],
        ),
        endpoint=url,
    )
    assert (good.inputs, good.errors) == (5, [])
    bad = checked(embed("a", ["x"] * 6), endpoint=url)
    assert faults(bad) == [("too_many_inputs", "body.input", None)]


def test_what_it_asks_for_is_known_if_every_line_says_it() -> None:
    both = checked(line("a"), line("b", body=body_with(max_completion_tokens=7, n=2)))
    assert both.work.output_max == 5 + 14
    assert checked(line("a"), line("b", body=body_with())).work.output_max is None
    some = checked(line("a"), line("b", body=body_with()), line("c", body=body_with(max_tokens=900)), line("d"))
    assert (some.work.output_max, sorted(some.work.bounded)) == (None, [(1, 900), (2, 10)])
    text = {"model": "m", "prompt": "x"}
    completions = checked(line("a", url="/v1/completions", body=text), endpoint="/v1/completions")
    assert completions.work.output_max == 16
    assert not checked(line("a", url="/v1/rerank", body={"model": "r"}), endpoint="/v1/rerank").work.generates


def test_fifty_thousand_lines_are_checked_without_keeping_them() -> None:
    before, after = line("AT", body=body_with(x="x" * 600)).split(b"AT")

    class Lines(io.RawIOBase):
        at = 0

        def seek(self, *_: int) -> int:
            return 0

        def read(self, size: int = -1) -> bytes:
            first, self.at = self.at, min(50_000, self.at + size // 1_000)
            return b"".join(b"%bid-%d%b\n" % (before, at, after) for at in range(first, self.at))

    tracemalloc.start()
    try:
        result = check(Lines(), "b", CHAT, shard_lines=500, body_bytes_max=10_000)  # type: ignore[arg-type]  # it reads
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (result.lines, result.errors, len(result.shards)) == (50_000, [], 100)
    assert most < 20_000_000, "a file of 37 MB, of which hashes of the ids are kept"


def test_it_stops_when_nobody_wants_it_any_more() -> None:
    file = io.BytesIO(b"\n".join(line(str(at)) for at in range(5_000)))
    result = check(file, "b", CHAT, shard_lines=500, body_bytes_max=10_000, is_wanted=lambda: False)
    assert result.lines == 1_000


def test_the_tokens_of_an_input_are_not_taken_apart_to_count_it_as_one() -> None:
    url = "/v1/embeddings"
    text = line("a", url=url, body={"model": "e", "input": [7] * 500_000})
    file = io.BytesIO(text)
    tracemalloc.start()
    try:
        result = check(file, "b", url, shard_lines=500, body_bytes_max=10_000_000)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (result.inputs, result.errors) == (1, [])
    assert most < 8 * len(text), "some copies of the line, and no object a token"
