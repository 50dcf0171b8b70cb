"""Chats of many kilobytes go another way, to the same end."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.errors import ApiError
from modelyard.gateway.openai.chat import decode_chat
from modelyard.gateway.openai.large_chat import LARGE_BYTES, decode_large

PADDING = {"role": "system", "content": "x" * LARGE_BYTES}
PART = st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})
CONTENT = st.text() | st.lists(PART, min_size=1, max_size=3)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "developer", "user"]), "content": CONTENT}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": CONTENT}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": CONTENT, "tool_call_id": st.text(max_size=9)}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.text(), "name": st.text(max_size=9)}),
)


def engine_body(request: msgspec.Struct) -> Any:
    return json.loads(msgspec.json.encode(request))


def small(messages: list[Any], **fields: Any) -> Any:
    """Return what the ordinary way makes of the same chat."""
    return decode_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


@given(st.lists(MESSAGE, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_an_engine_gets_the_same_whichever_way_a_chat_goes(messages: list[Any]) -> None:
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 5}, ensure_ascii=False).encode()
    large = decode_large(body)
    if large is not None:
        assert engine_body(large) == json.loads(body)
    call = small(messages, max_tokens=5)
    assert engine_body(call.request) == json.loads(body)
    assert decode_chat(body).text_length == call.text_length


def test_a_large_chat_is_measured_and_keeps_what_belongs_to_the_platform_back() -> None:
    body = json.dumps({"model": "m", "messages": [PADDING, {"role": "user", "content": "hi"}], "user": "u"}).encode()
    call = decode_chat(body)
    assert isinstance(call.request.messages[0].content, msgspec.Raw)  # type: ignore[attr-defined]
    assert call.text_length == LARGE_BYTES + 2
    assert call.user == "u"
    assert "user" not in engine_body(call.request)


def test_a_chat_in_any_script_has_as_many_characters_as_a_small_one() -> None:
    content = "你好, é 🙂" * 9
    body = json.dumps({"model": "m", "messages": [PADDING, {"role": "user", "content": content}]}, ensure_ascii=False)
    assert decode_chat(body.encode()).text_length == LARGE_BYTES + len(content)


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "nobody", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]},
         "messages[1].content[0].image_url.url"),
        ({"role": "assistant"}, "messages[1].content"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_large_chat_is_named_as_in_a_small_one(bad: Any, param: str) -> None:
    body = json.dumps({"model": "m", "messages": [PADDING, bad]}).encode()
    with pytest.raises(ApiError) as caught:
        decode_chat(body)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe", b"\xed\xa0\x80", b"\\x", b"\\u12", b"\\ud83d", b"\\uD83Dabc", b"\x01", b"\n"],
    ids=repr,
)
def test_a_text_that_is_no_text_never_reaches_an_engine(text: bytes) -> None:
    padding = json.dumps(PADDING).encode()
    body = b'{"model":"m","messages":[%b,{"role":"user","content":"a%bb"}]}' % (padding, text)
    with pytest.raises(ApiError) as caught:
        decode_chat(body)
    assert caught.value.status == 400


def test_a_field_nobody_listed_does_not_reach_an_engine() -> None:
    message = {"role": "user", "content": "hi", "prompt_embeds": "x"}
    body = json.dumps({"model": "m", "messages": [PADDING, message], "odd": 1}).encode()
    call = decode_chat(body)
    assert b"prompt_embeds" not in msgspec.json.encode(call.request)
    assert call.ignored == ("odd",)
    with pytest.raises(ApiError):
        decode_chat(json.dumps({"model": "m", "messages": [PADDING], "api_base": "http://x"}).encode())
