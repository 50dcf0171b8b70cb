"""Whatever a caller sends to an inference route, its decoder makes a call of it or names what is wrong."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.errors import ApiError
from modelyard.gateway.openai import Call, decoder_of

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "parameters": {}}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}],
        "functions": [FUNCTION],
        "function_call": "auto",
        "modalities": ["text"],
        "metadata": {"k": "v"},
        "prediction": None,
        "tool_choice": None,
        "tools": None,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    },
    "/v1/completions": {"model": "m", "prompt": ["a"], "best_of": 1, "n": 1, "suffix": "", "logprobs": 1},
    "/v1/embeddings": {"model": "m", "input": [[1]], "dimensions": 1, "encoding_format": "float"},
    "/v1/rerank": {"model": "m", "query": "q", "documents": [{"text": "a"}], "top_n": 1, "return_documents": True},
    "/v1/score": {"model": "m", "text_1": "a", "text_2": ["b"]},
    "/v1/classify": {"model": "m", "input": [{"type": "image_url", "image_url": {"url": "https://a.b/c"}}]},
    "/v1/token_classify": {"model": "m", "input": ["a"], "aggregation_strategy": "first"},
    "/v1/moderations": {"model": "m", "input": [{"type": "text", "text": "a"}]},
    "/v1/audio/speech": {"model": "m", "input": "a", "voice": {"id": "v"}, "speed": 1},
    "/v1/images/generations": {"model": "m", "prompt": "a", "n": 1, "response_format": "url", "stream": False},
    "/v2/models/m/infer": {"inputs": [{"name": "x", "shape": [1], "datatype": "BOOL", "data": [True]}], "outputs": []},
}
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False) | st.text(max_size=6)
NAMES = st.sampled_from(["role", "content", "type", "name", "text", "url", "model", "data", "0"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


class Asked:
    """A request as a decoder sees it."""

    def __init__(self, path: str, body: bytes, kind: bytes | None = None) -> None:
        self.path = path
        self.body = body
        self._kind = kind

    def header(self, name: bytes) -> bytes | None:
        return self._kind if name == b"content-type" else None


def decided(path: str, body: bytes, kind: bytes | None = None) -> Call | None:
    decoder = decoder_of(path)
    assert decoder is not None
    try:
        return decoder(Asked(path, body, kind))
    except ApiError as refusal:
        if refusal.status != 400 or not refusal.code:
            pytest.fail(f"refused with {refusal.status} {refusal.code}")
        return None


@pytest.mark.parametrize("path", BASES)
def test_the_base_of_each_route_is_good(path: str) -> None:
    assert decided(path, msgspec.json.encode(BASES[path])) is not None


@pytest.mark.parametrize("path", BASES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_value_in_any_place_is_taken_or_refused(path: str, data: st.DataObject) -> None:
    body: Any = msgspec.json.decode(msgspec.json.encode(BASES[path]))
    place = body
    for _ in range(data.draw(st.integers(0, 3))):
        inner = [
            value
            for value in (place.values() if isinstance(place, dict) else place)
            if isinstance(value, dict | list) and value
        ]
        if not inner:
            break
        place = data.draw(st.sampled_from(inner))
    key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(VALUES)
    call = decided(path, msgspec.json.encode(body))
    if call is not None:
        # What was taken can be sent, and billed.
        assert call.payload or msgspec.json.encode(call.request)
        assert call.units_max >= 0
        assert call.text_length >= 0


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_form_with_any_bytes_changed_is_taken_or_refused(path: str, data: st.DataObject) -> None:
    file = "image" if "images" in path else "file"
    parts = [("model", b"m"), ("prompt", b"p"), ("response_format", b"url" if file == "image" else b"text")]
    body = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (n.encode(), c) for n, c in parts
    )
    head = b'--x\r\nContent-Disposition: form-data; name="%b"; filename="a.wav"\r\nContent-Type: a/b\r\n\r\n'
    body += head % file.encode() + b"RIFF\r\n--x--\r\n"
    kind = b"multipart/form-data; boundary=x"
    assert decided(path, body, kind) is not None
    at = data.draw(st.integers(0, len(body)))
    changed = body[:at] + data.draw(st.binary(max_size=6)) + body[at + data.draw(st.integers(0, 6)) :]
    call = decided(path, changed, kind)
    assert call is None or (call.payload_for is not None and call.payload_for("m"))
