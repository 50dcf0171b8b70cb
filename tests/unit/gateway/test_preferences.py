"""What ``Prefer`` asks for is read as RFC 7240 says; keys and webhooks are taken whole or refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.errors import ApiError
from modelyard.gateway.preferences import NONE, Preferences, fingerprint, read

HOOK = "https://hooks.example/in"


def read_all(*headers: tuple[str, str], is_stream: bool = False) -> Preferences:
    return read([(name.encode(), value.encode("latin-1")) for name, value in headers], is_stream=is_stream)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["respond-async"], (True, None)),
        (["Respond-Async"], (True, None)),
        (["respond-async, wait=10"], (True, 10.0)),
        (["wait=10 , respond-async"], (True, 10.0)),
        (["wait=10", "respond-async"], (True, 10.0)),
        (['respond-async; foo="a, b;c", wait="7"'], (True, 7.0)),
        (["foo; respond-async"], (False, None)),
        (['foo="respond-async"'], (False, None)),
        (["respond-async=yes"], (False, None)),
        (["wait=5, wait=9"], (False, 5.0)),
        (["wait = 5"], (False, 5.0)),
        (["wait=0"], (False, 0.0)),
        (["wait=99999999"], (False, 3600.0)),
        (["wait=-1"], (False, None)),
        (["wait=1.5"], (False, None)),
        (["wait=1e3"], (False, None)),
        (["wait"], (False, None)),
        (["wait=²"], (False, None)),
        ([""], (False, None)),
        ([",,;;"], (False, None)),
        (['"'], (False, None)),
        (['foo="bar, respond-async'], (True, None)),
        (["return=minimal, handling=lenient"], (False, None)),
    ],
)
def test_preferences(values: list[str], expected: tuple[bool, float | None]) -> None:
    asked = read_all(*(("prefer", value) for value in values))
    assert (asked.is_async, asked.wait_s) == expected
    assert asked.is_kept == expected[0]


def test_keys_and_webhooks() -> None:
    assert not NONE.is_kept
    assert read_all(("idempotency-key", "a" * 255)) == Preferences(idempotency_key="a" * 255)
    asked = read_all(("prefer", "respond-async"), ("x-modelyard-webhook", HOOK), ("idempotency-key", "k 1"))
    assert asked == Preferences(is_async=True, idempotency_key="k 1", webhook_url=HOOK)


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ([("idempotency-key", "")], "Idempotency-Key"),
        ([("idempotency-key", "a" * 256)], "Idempotency-Key"),
        ([("idempotency-key", "é")], "Idempotency-Key"),
        ([("idempotency-key", "a\tb")], "Idempotency-Key"),
        ([("idempotency-key", "a"), ("idempotency-key", "a")], "Idempotency-Key"),
        ([("x-modelyard-webhook", HOOK)], "X-Modelyard-Webhook"),
        ([("prefer", "respond-async"), ("x-modelyard-webhook", "")], "X-Modelyard-Webhook"),
        ([("prefer", "respond-async"), ("x-modelyard-webhook", "h" * 3000)], "X-Modelyard-Webhook"),
        ([("prefer", "respond-async")] + [("x-modelyard-webhook", HOOK)] * 2, "X-Modelyard-Webhook"),
    ],
)
def test_mistakes_are_named(headers: list[tuple[str, str]], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_all(*headers)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("header", [("prefer", "respond-async"), ("idempotency-key", "k")])
def test_streams_are_not_kept(header: tuple[str, str]) -> None:
    with pytest.raises(ApiError) as refused:
        read_all(header, is_stream=True)
    assert refused.value.param == "stream"
    assert read_all(("prefer", "wait=3"), is_stream=True).wait_s == 3


@given(st.text(st.sampled_from('respond-async,wait=1 ;"\\\t'), max_size=200))
@settings(deadline=None, max_examples=60)
def test_no_header_is_too_strange(text: str) -> None:
    read_all(("prefer", text))


@pytest.mark.parametrize("piece", ['"', "; ", ";  ", 'a="', "a=\\", '"\\"', ", ;", "a ="])
def test_a_long_strange_header_takes_no_time(piece: str) -> None:
    read_all(("prefer", (piece * 16_384)[:16_384]))


def test_what_makes_two_requests_the_same() -> None:
    one = fingerprint("/v1/completions", b"application/json", b"{}", is_async=False)
    assert one == fingerprint("/v1/completions", b"", b"{}", is_async=False)
    assert one != fingerprint("/v1/completions", b"", b"{ }", is_async=False)
    assert one != fingerprint("/v1/embeddings", b"", b"{}", is_async=False)
    assert one != fingerprint("/v1/completions", b"", b"{}", is_async=True)


def test_a_form_that_is_sent_again_under_another_boundary_is_the_same() -> None:
    def form(boundary: bytes, text: bytes) -> str:
        body = b'--%b\r\ncontent-disposition: form-data; name="a"\r\n\r\n%b\r\n--%b--\r\n' % (boundary, text, boundary)
        content_type = b'multipart/form-data; boundary="%b"' % boundary
        return fingerprint("/v1/audio/transcriptions", content_type, body, is_async=False)

    assert form(b"abc", b"text") == form(b"xyz123", b"text")
    assert form(b"abc", b"text") != form(b"abc", b"other")
