"""S30: bodies that are not what they should be, on every JSON route of inference."""

import json
from typing import Any

import pytest
from tests.support.refusals import assert_refused, error_of

BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "sim", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "sim", "prompt": "hi", "max_tokens": 4},
    "/v1/embeddings": {"model": "sim", "input": "hi"},
}
TEXT_FIELD = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input"}
DEEP = 5000


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * depth + b"1" + closing * depth


def spliced(path: str, addition: bytes) -> bytes:
    """Return the base body of a route with raw bytes added as further members."""
    return json.dumps(BASES[path]).encode()[:-1] + b", " + addition + b"}"


BODIES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"  \n\t ",
    "null": b"null",
    "number": b"17",
    "text": b'"hello"',
    "array": b"[]",
    "array of objects": b'[{"model": "sim"}]',
    "cut short": b'{"model": "sim", "messages": [{"role": "us',
    "trailing garbage": b'{"model": "sim"} x',
    "two objects": b"{}{}",
    "trailing comma": b'{"model": "sim",}',
    "single quotes": b"{'model': 'sim'}",
    "comment": b'{"model": "sim" /* hello */}',
    "form": b"model=sim&prompt=hi",
    "html": b"<html></html>",
    "BOM": b'\xef\xbb\xbf{"model": "sim"}',
    "UTF-16": '{"model": "sim"}'.encode("utf-16"),
    "invalid UTF-8": b'{"model": "si\xffm"}',
    "overlong UTF-8": b'{"model": "\xc0\xae"}',
    "UTF-8 surrogate": b'{"model": "\xed\xa0\x80"}',
    "NUL bytes": b"\0\0\0\0",
    "control character in text": b'{"model": "a\nb"}',
    "deep arrays": nested(DEEP),
    "deep objects": nested(DEEP, b'{"a":', b"}"),
    "deep, never closed": b"[" * 200_000,
    "many keys": b"{" + b",".join(b'"k%d": 1' % n for n in range(20_000)) + b', "model": 1}',
}


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_request_is_400(ask: Any, path: str, name: str) -> None:
    assert_refused(ask(path, BODIES[name]))


ADDITIONS: dict[str, bytes] = {
    "NaN": b'"temperature": NaN',
    "Infinity": b'"temperature": Infinity',
    "-Infinity": b'"temperature": -Infinity',
    "NaN in an unknown field": b'"whatever": NaN',
    "deep unknown field": b'"whatever": ' + nested(DEEP),
    "deep unknown object": b'"whatever": ' + nested(DEEP, b'{"a":', b"}"),
    "deep known field": b'"user": ' + nested(DEEP),
    "lone surrogate": b'"user": "\\ud800"',
    "reversed surrogates": b'"user": "\\udc00\\ud800"',
    "lone surrogate in an unknown field": b'"whatever": "\\ud800"',
    "bad escape": b'"user": "\\x41"',
    "hexadecimal number": b'"seed": 0x10',
    "leading zero": b'"seed": 007',
    "plus sign": b'"seed": +1',
    "bare point": b'"temperature": .5',
}


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize("name", ADDITIONS)
def test_a_body_with_a_member_that_json_does_not_allow_is_400(ask: Any, path: str, name: str) -> None:
    assert_refused(ask(path, spliced(path, ADDITIONS[name])))


NUMBER_FIELDS = {
    "/v1/chat/completions": ["temperature", "seed"],
    "/v1/completions": ["temperature", "seed"],
    "/v1/embeddings": ["dimensions"],
}


@pytest.mark.parametrize(
    "number", [b"1e999", b"-1e999", b"9" * 5000, b"1." + b"0" * 5000], ids=lambda raw: raw[:8].decode()
)
@pytest.mark.parametrize(("path", "field"), [(path, field) for path, names in NUMBER_FIELDS.items() for field in names])
def test_a_number_beyond_all_bounds_is_400_and_named(ask: Any, path: str, field: str, number: bytes) -> None:
    if field == "temperature" and number.startswith(b"1."):
        pytest.skip("1.000… is a temperature")
    assert_refused(ask(path, spliced(path, b'"%b": %b' % (field.encode(), number))), param=field)


@pytest.mark.parametrize("place", ["parameters", "schema"])
def test_a_schema_nested_5000_deep_never_reaches_an_engine(ask: Any, place: str) -> None:
    deep = b'{"type": "object", "properties": ' + nested(DEEP, b'{"a":', b"}") + b"}"
    additions = {
        "parameters": b'"tools": [{"type": "function", "function": {"name": "f", "parameters": ' + deep + b"}}]",
        "schema": b'"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": ' + deep + b"}}",
    }
    assert_refused(ask("/v1/chat/completions", spliced("/v1/chat/completions", additions[place])))


@pytest.mark.parametrize("path", BASES)
def test_a_lone_surrogate_in_the_text_is_400(ask: Any, path: str) -> None:
    raw = json.dumps(BASES[path]).encode().replace(b'"hi"', b'"hi \\ud83d"')
    assert_refused(ask(path, raw))


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize("field", ["model", "text"])
def test_a_missing_required_field_is_named(ask: Any, path: str, field: str) -> None:
    name = TEXT_FIELD[path] if field == "text" else field
    body = {key: value for key, value in BASES[path].items() if key != name}
    assert_refused(ask(path, body), param=name, code="missing_required_parameter")


@pytest.mark.parametrize("path", BASES)
def test_of_duplicate_keys_the_last_counts_for_every_check(ask: Any, path: str) -> None:
    raw = spliced(path, b'"model": "no-such-model"')
    answer = ask(path, raw)
    error_of(answer)
    assert answer.status in (400, 404), "a second 'model' must not slip past the check of the first"
    raw = spliced(path, b'"user": "fine", "user": 17')
    assert_refused(ask(path, raw))


@pytest.mark.parametrize("path", BASES)
def test_a_body_over_the_limit_is_413(ask: Any, path: str) -> None:
    body = b'{"model": "sim", "prompt": "' + b"x" * (33 * 1024 * 1024) + b'"}'
    assert_refused(ask(path, body), status=413, code="request_too_large")
