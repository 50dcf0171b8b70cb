"""The routes beside chats: what is sent to the engine, what comes back, what is billed, what is refused."""

import json
import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.usage import Unit
from modelyard.errors import ApiError
from modelyard.gateway.openai import Call, decoder_of
from modelyard.gateway.openai.audio import seconds_of
from modelyard.gateway.openai.multipart import read_form
from modelyard.gateway.sse import Usage

USAGE = Usage(prompt_tokens=7, total_tokens=7)


@dataclass
class Asked:
    """A request as a decoder sees it."""

    path: str
    body: bytes
    headers: dict[bytes, bytes] = field(default_factory=dict)

    def header(self, name: bytes) -> bytes | None:
        return self.headers.get(name)


def ask(path: str, **fields: object) -> Call:
    decoder = decoder_of(path)
    assert decoder is not None
    return decoder(Asked(path, json.dumps({"model": "m", **fields}).encode()))


def form(*parts: tuple[str, str | None, bytes], boundary: str = "x") -> Asked:
    body = b""
    for name, file_name, content in parts:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"'
        head += f'; filename="{file_name}"\r\nContent-Type: audio/wav' if file_name is not None else ""
        body += head.encode() + b"\r\n\r\n" + content + b"\r\n"
    return Asked(
        "",
        body + f"--{boundary}--\r\n".encode(),
        {b"content-type": f"multipart/form-data; boundary={boundary}".encode()},
    )


def post(path: str, asked: Asked) -> Call:
    decoder = decoder_of(path)
    assert decoder is not None
    asked.path = path
    return decoder(asked)


def refused(path: str, asked: Asked) -> ApiError:
    with pytest.raises(ApiError) as caught:
        post(path, asked)
    assert caught.value.status == 400
    return caught.value


def sent(call: Call) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.json.encode(call.request))
    return found


def test_what_is_no_inference_route_has_no_decoder() -> None:
    for path in ("/v1/assistants", "/v2/models//infer", "/v2/models/infer", "/v1/videos", "/v2/models/m/ready"):
        assert decoder_of(path) is None


# --- rerank, score, classify, moderations ---


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_both_forms_of_documents_reach_the_engine_as_texts(path: str) -> None:
    call = ask(path, query="q", documents=["a", {"text": "b"}], top_n=1, return_documents=True, priority=5)
    assert sent(call) == {"model": "m", "query": "q", "documents": ["a", "b"], "top_n": 1}
    assert call.engine_route == "/v1/rerank"


def test_a_ranking_comes_back_best_first_in_the_union_of_both_shapes() -> None:
    call = ask("/v2/rerank", query="q", documents=["a", "b", "c"], top_n=2, return_documents=True)
    engine = {"model": "m", "results": [{"index": i, "relevance_score": s} for i, s in ((0, 0.1), (1, 0.9), (2, 0.5))]}
    assert call.translation is not None
    found = json.loads(call.translation.answer(json.dumps(engine).encode(), USAGE, "req_1"))
    assert found["results"] == [
        {"index": 1, "relevance_score": 0.9, "document": {"text": "b"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
    ]
    assert found["meta"]["billed_units"] == {"search_units": 1}
    assert (found["usage"]["total_tokens"], found["id"], found["model"]) == (7, "rerank-req_1", "m")
    for bad in (
        b"{}",
        b'{"results":[{"index":3,"relevance_score":1}]}',
        b'{"results":[{"index":-1,"relevance_score":1}]}',
    ):
        with pytest.raises((ValueError, msgspec.MsgspecError)):
            call.translation.answer(bad, USAGE, "req_1")


@pytest.mark.parametrize(("documents", "searches"), [(1, 1), (100, 1), (101, 2), (2048, 21)])
def test_a_search_is_a_query_over_a_hundred_documents(documents: int, searches: int) -> None:
    call = ask("/v1/rerank", query="q", documents=["d"] * documents)
    assert call.units_of(b"") == (searches, Unit.SEARCHES)
    assert call.units_max == searches


def test_pairs_of_texts_and_texts_to_classify_pass_as_they_are() -> None:
    scores = ask("/score", text_1="a", text_2=["b", "c"])
    assert sent(scores)["text_2"] == ["b", "c"]
    assert (scores.units_of(b""), scores.units_max) == ((2, Unit.PAIRS), 2)
    call = ask("/v1/classify", input=["a", "b"])
    assert (call.engine_route, call.choices, call.units_of(b"{}")) == ("/v1/classify", 2, (0.0, Unit.NONE))
    assert sent(ask("/v1/moderations", input="x")) == {"model": "m", "input": "x"}


def picture(url: str = "data:image/png;base64,eA==") -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def test_pictures_to_classify_are_billed_each_and_need_an_engine_that_sees() -> None:
    call = ask("/v1/classify", input=[picture(), picture()])
    assert (call.choices, call.units_of(b"{}"), call.links) == (2, (2, Unit.IMAGES), ())
    assert call.lacking(frozenset()) == "input"
    assert call.lacking(frozenset({"classify.pictures"})) is None
    assert sent(call)["input"][0] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}


def test_a_picture_behind_a_link_is_one_to_fetch() -> None:
    call = ask("/v1/classify", input=[picture(), picture("https://example.com/cat.png")])
    [link] = call.links
    assert link.param == "input[1].image_url.url"
    link.target.url = "data:image/png;base64,eQ=="
    assert sent(call)["input"][1]["image_url"]["url"] == "data:image/png;base64,eQ=="


def test_a_form_with_pictures_is_the_same_request() -> None:
    call = post("/v1/classify", form(("file[]", "a.png", b"one"), ("file[]", "b", b"two"), MODEL))
    assert [part["image_url"]["url"] for part in sent(call)["input"]] == [
        "data:image/png;base64,b25l",
        "data:image/png;base64,dHdv",
    ]
    assert (call.model, call.content_type) == ("m", b"application/json")


def test_texts_to_tag_pass_with_the_strategy() -> None:
    call = ask("/v1/token_classify", input="a", aggregation_strategy="first")
    assert sent(call) == {"model": "m", "input": "a", "aggregation_strategy": "first"}
    assert (call.engine_route, call.units_of(b"{}")) == ("/v1/token_classify", (0.0, Unit.NONE))


def test_a_moderation_without_a_model_is_for_the_model_that_openai_would_take() -> None:
    decoder = decoder_of("/v1/moderations")
    assert decoder is not None
    call = decoder(Asked("/v1/moderations", b'{"input":["a"]}'))
    assert (call.model, sent(call)["model"]) == ("omni-moderation-latest", "omni-moderation-latest")


IMAGE = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/x"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["d"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": "q", "documents": [1]}, "documents[0]"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "cache_salt": "x"}, "cache_salt"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/classify", {"input": ["a", ""]}, "input[1]"),
        ("/v1/classify", {"input": ["a", IMAGE]}, "input"),
        ("/v1/classify", {"input": [IMAGE] * 17}, "input"),
        ("/v1/token_classify", {"input": []}, "input"),
        ("/v1/token_classify", {"input": "a", "aggregation_strategy": "most"}, "aggregation_strategy"),
        ("/v1/moderations", {"input": []}, "input"),
        ("/v1/moderations", {"input": ["a", {"type": "text", "text": "b"}]}, "input"),
        ("/v1/moderations", {"input": [IMAGE]}, "input[0].image_url.url"),
        ("/v1/audio/speech", {"input": "x"}, "voice"),
        ("/v1/audio/speech", {"input": "x" * 4097, "voice": "v"}, "input"),
        ("/v1/audio/speech", {"input": "x", "voice": "v", "speed": 5}, "speed"),
        ("/v1/images/generations", {"prompt": "x", "n": 11}, "n"),
        ("/v1/images/generations", {"n": 1}, "prompt"),
    ],
)
def test_a_bad_field_is_named(path: str, fields: dict[str, object], param: str) -> None:
    asked = Asked(path, json.dumps({"model": "m", **fields}).encode())
    assert (refused(path, asked).param or "").startswith(param)


# --- sound ---


def test_speech_is_billed_by_the_character_and_its_answer_passes() -> None:
    call = ask("/v1/audio/speech", input="héllo", voice="alloy", response_format="wav")
    assert (call.is_passthrough, call.units_of(b"RIFF"), call.units_max) == (True, (5, Unit.CHARACTERS), 5)
    assert ask("/v1/audio/speech", input="x", voice={"id": "v"}, stream_format="sse").lacking(frozenset())
    assert sent(call) == {"model": "m", "input": "héllo", "voice": "alloy", "response_format": "wav"}


FILE = ("file", "a.wav", b"\x00\r\n--y\r\nsound")
MODEL = ("model", None, b"m")


def test_a_form_goes_on_with_its_file_as_it_came_and_without_what_is_unknown() -> None:
    call = post("/v1/audio/transcriptions", form(FILE, MODEL, ("language", None, b"de"), ("server_url", None, b"evil")))
    assert call.ignored == ("server_url",)
    assert call.model == "m"
    assert call.payload_for is not None
    again = read_form(call.payload_for("other"), call.content_type)
    assert {part.name: bytes(part.content) for part in again.parts} == {
        "model": b"other",
        "file": b"\x00\r\n--y\r\nsound",
        "language": b"de",
    }
    assert b"evil" not in call.payload_for("m")


@pytest.mark.parametrize(
    ("wanted", "passes"), [("json", False), ("verbose_json", False), ("text", True), ("srt", True)]
)
def test_transcripts_that_are_no_json_pass_as_they_are(wanted: str, passes: bool) -> None:
    call = post("/v1/audio/transcriptions", form(FILE, MODEL, ("response_format", None, wanted.encode())))
    assert call.is_passthrough is passes


def wav(seconds: float, rate: int = 8000) -> bytes:
    data = b"\0\0" * int(seconds * rate)
    head = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, rate, rate * 2, 2, 16) + b"data" + struct.pack("<I", len(data))
    return b"RIFF" + struct.pack("<I", 4 + len(head) + len(data)) + b"WAVE" + head + data


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (b'{"text":"x","usage":{"type":"duration","seconds":9}}', 9.0),
        (b'{"text":"x","duration":3.5}', 3.5),
        (b'{"text":"x","duration":"3.5"}', 3.5),
        (b'{"text":"x","usage":{"type":"tokens","input_tokens":3}}', 2.0),
        (b"just text", 2.0),
        (b'{"duration":-5}', 2.0),
        (b'{"duration":1e300}', 32.044),
    ],
)
def test_listening_is_billed_by_the_second_as_told_or_as_the_file_says(answer: bytes, seconds: float) -> None:
    call = post("/v1/audio/transcriptions", form(("file", "a.wav", wav(2)), MODEL))
    units, unit = call.units_of(answer)
    assert units == pytest.approx(seconds)
    assert unit is Unit.SECONDS


def test_what_is_no_whole_wav_is_estimated_by_its_bytes() -> None:
    assert seconds_of(memoryview(wav(1)[:1000])) == pytest.approx((1000 - 44) / 16000)
    assert seconds_of(memoryview(b"x" * 64_000)) == 2.0
    assert seconds_of(memoryview(b"RIFF\0\0\0\0WAVEdata\xff\xff\xff\xff")) < 1


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (form(MODEL), "file"),
        (form(FILE), "model"),
        (form(FILE, MODEL, MODEL), "model"),
        (form(FILE, FILE, MODEL), "file"),
        (form(("file", None, b"text"), MODEL), "file"),
        (form(("file", "a.wav", b""), MODEL), "file"),
        (form(FILE, ("model", "m.txt", b"m")), "model"),
        (form(FILE, MODEL, ("temperature", None, b"2")), "temperature"),
        (form(FILE, MODEL, ("response_format", None, b"html")), "response_format"),
        (form(FILE, MODEL, ("prompt", None, b"\xff")), "prompt"),
        (form(FILE, MODEL, ("prompt", None, b"x" * 65537)), "prompt"),
        (form(FILE, MODEL, ("timestamp_granularities[]", None, b"hour")), "timestamp_granularities"),
    ],
)
def test_a_bad_field_of_a_form_is_named(asked: Asked, param: str) -> None:
    assert (refused("/v1/audio/transcriptions", asked).param or "").startswith(param)


WHOLE = form(FILE, MODEL)
X = b"multipart/form-data; boundary=x"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (WHOLE.body, b"application/json"),
        (WHOLE.body, b"multipart/form-data"),
        (WHOLE.body, b"multipart/form-data; boundary=" + b"x" * 71),
        (WHOLE.body, b'multipart/form-data; boundary="a b\r\nc"'),
        (WHOLE.body[:-7], X),
        (b"preamble" + WHOLE.body, X),
        (b"", X),
        (b"--x\r\n\r\ncontent\r\n--x--", X),
        (b"--x\r\nContent-Disposition: attachment; name=a\r\n\r\nc\r\n--x--", X),
        (
            b'--x\r\nContent-Disposition: form-data; name="a"; name="b"\r\n\r\nc\r\n--x--',
            X,
        ),
        (b"--x\r\n" + b"A: b\r\n" * 1000 + b"\r\nc\r\n--x--", X),
        (form(*[("a", None, b"")] * 65).body, X),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, kind: bytes) -> None:
    asked = Asked("", body, {b"content-type": kind})
    assert refused("/v1/audio/transcriptions", asked).code in ("invalid_form", "invalid_content_type")


def test_a_file_name_is_not_a_path_and_a_type_is_one_word() -> None:
    asked = form(("file", "..\\..\\/etc/pass wd\u00e9.wav", b"x"), MODEL)
    asked.body = asked.body.replace(b"audio/wav", b"audio/wav; x=\x01")
    call = post("/v1/audio/translations", asked)
    assert call.payload_for is not None
    assert b'filename="pass_wd_.wav"\r\ncontent-type: audio/wav\r\n' in call.payload_for("m")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5))
def test_any_content_comes_through_unchanged(contents: list[bytes]) -> None:
    asked = form(*[(f"f{i}", "n", content) for i, content in enumerate(contents)], boundary="bound-ary'1")
    found = read_form(asked.body, asked.header(b"content-type"))
    assert [bytes(part.content) for part in found.parts] == contents
    again = read_form(found.encode(), found.content_type)
    assert [part._replace(content=memoryview(bytes(part.content))) for part in again.parts] == list(found.parts)


# --- pictures ---


def test_engines_are_asked_for_pictures_and_links_hold_them() -> None:
    call = ask("/v1/images/generations", prompt="a cat", n=2, response_format="url", output_format="webp", user="u")
    assert sent(call)["response_format"] == "b64_json"
    assert "user" not in sent(call)
    assert call.translation is not None
    engine = b'{"created":1,"data":[{"b64_json":"QQ=="},{"b64_json":"Qg=="}]}'
    found = json.loads(call.translation.answer(engine, USAGE, "r"))
    assert found["data"][0] == {"url": "data:image/webp;base64,QQ=="}
    with pytest.raises(ValueError, match="pictures"):
        call.translation.answer(b'{"data":[{"url":"http://10.0.0.1/x.png"}]}', USAGE, "r")
    assert call.units_of(engine) == (2, Unit.IMAGES)
    assert call.units_max == 2
    assert call.units_of(b'{"data":[1,2,3,4,5]}') == (2, Unit.IMAGES), "never more than was asked"
    assert ask("/v1/images/generations", prompt="x", stream=True).lacking(frozenset()) == "stream"


def test_an_edit_is_a_form_with_pictures() -> None:
    call = post(
        "/v1/images/edits", form(MODEL, ("prompt", None, b"p"), ("image[]", "a.png", b"1"), ("image[]", "b.png", b"2"))
    )
    assert call.payload_for is not None
    again = read_form(call.payload_for("m"), call.content_type)
    assert [part.name for part in again.parts].count("image[]") == 2
    assert [bytes(part.content) for part in again.parts if part.name == "response_format"] == [b"b64_json"]
    assert refused("/v1/images/edits", form(MODEL, ("prompt", None, b"p"))).param == "image"


# --- tensors ---

TENSOR = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}


@pytest.mark.parametrize(
    ("path", "model"), [("/v2/models/a/infer", "a"), ("/v2/models/a%2Fb/infer", "a/b"), ("/v2/models/a/b/infer", "a/b")]
)
def test_the_model_of_an_inference_is_in_the_path(path: str, model: str) -> None:
    decoder = decoder_of(path)
    assert decoder is not None
    call = decoder(Asked(path, json.dumps({"id": "1", "inputs": [TENSOR], "outputs": [{"name": "y"}]}).encode()))
    assert (call.model, call.engine_route) == (model, "/v2/models/{model}/infer")
    assert (call.units_of(b"{}"), call.units_max) == ((1, Unit.REQUESTS), 1)
    assert json.loads(call.payload or b"") == {"id": "1", "inputs": [TENSOR], "outputs": [{"name": "y"}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"datatype": "FP31"}, "inputs[0].datatype"),
        ({"data": "AAAA"}, "inputs[0].data"),
        ({"shape": [-1]}, "inputs[0].shape[0]"),
        ({"shape": [2**20, 2**20]}, "inputs[0].shape"),
        ({"parameters": {"shared_memory_region": "x"}}, "inputs[0].parameters"),
    ],
)
def test_a_bad_tensor_is_refused(change: dict[str, object], param: str) -> None:
    decoder = decoder_of("/v2/models/m/infer")
    assert decoder is not None
    with pytest.raises(ApiError) as caught:
        decoder(Asked("/v2/models/m/infer", json.dumps({"inputs": [{**TENSOR, **change}]}).encode()))
    assert (caught.value.param or "").startswith(param)


@pytest.mark.parametrize(
    "asked",
    [{"outputs": [{"name": "y", "parameters": {"binary_data": True}}]}, {"parameters": {"binary_data_output": True}}],
)
def test_outputs_are_given_as_json_and_who_asks_for_that_gets_it(asked: dict[str, Any]) -> None:
    decoder = decoder_of("/v2/models/m/infer")
    assert decoder is not None
    body = {"inputs": [TENSOR], **asked}
    with pytest.raises(ApiError, match="JSON only"):
        decoder(Asked("/v2/models/m/infer", json.dumps(body).encode()))
    wanted = json.loads(json.dumps(body).replace("true", "false"))
    sent = json.loads(decoder(Asked("/v2/models/m/infer", json.dumps(wanted).encode())).payload or b"")
    assert "parameters" not in json.dumps(sent), "engines need not know it"
    assert sent.get("outputs") == ([{"name": "y"}] if "outputs" in asked else None)


def test_tensors_behind_the_json_are_refused() -> None:
    decoder = decoder_of("/v2/models/m/infer")
    assert decoder is not None
    headers = {b"inference-header-content-length": b"10"}
    with pytest.raises(ApiError) as caught:
        decoder(Asked("/v2/models/m/infer", json.dumps({"inputs": [TENSOR]}).encode(), headers))
    assert caught.value.param == "Inference-Header-Content-Length"
