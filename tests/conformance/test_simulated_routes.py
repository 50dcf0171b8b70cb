"""The simulated engine's other routes answer in the form of real engines, with true counts, from a real socket."""

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest
from tests.support.simulated import SECRET, Sim, end, launch, ready


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sim]:
    found = launch(tmp_path_factory.mktemp("sim"), slots=2, context_length=256)
    yield ready(found)
    end(found)


def post(sim: Sim, path: str, body: object, *, status: int = 200, rid: str = "r") -> dict[str, Any]:
    with sim.send(body, path=path, rid=rid) as response:
        raw = response.read()
        assert response.status == status, raw
        found: dict[str, Any] = json.loads(raw)
        return found


def upload(sim: Sim, path: str, fields: dict[str, str], files: dict[str, bytes]) -> tuple[int, bytes, str]:
    body = b""
    for name, text in fields.items():
        body += f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'.encode()
    for name, content in files.items():
        body += (
            f'--b\r\ncontent-disposition: form-data; name="{name}"; filename="f"\r\n\r\n'.encode() + content + b"\r\n"
        )
    with closing(HTTPConnection("127.0.0.1", sim.port, timeout=10)) as connection:
        headers = {"authorization": f"Bearer {SECRET}", "content-type": "multipart/form-data; boundary=b"}
        connection.request("POST", path, body + b"--b--\r\n", {**headers, "x-request-id": "form"})
        with connection.getresponse() as response:
            return response.status, response.read(), response.headers["content-type"]


def test_the_best_document_has_most_of_the_query(sim: Sim) -> None:
    documents = ["nothing", "the capital of France", "capital of Spain"]
    found = post(sim, "/v1/rerank", {"query": "capital of France", "documents": documents, "top_n": 2}, rid="rank")
    assert [entry["index"] for entry in found["results"]] == [1, 2]
    assert found["results"][0]["relevance_score"] == 1.0
    assert found["usage"]["prompt_tokens"] == sim.last("rank")["prompt_tokens"] > 12
    short = post(sim, "/v1/rerank", {"query": "a", "documents": ["b a"], "max_tokens_per_doc": 1})
    assert short["results"][0]["relevance_score"] == 0.0


def test_scores_and_classes_have_one_entry_for_each_text(sim: Sim) -> None:
    found = post(sim, "/v1/score", {"text_1": "a b", "text_2": ["a", "b a"]})
    assert [entry["score"] for entry in found["data"]] == [0.5, 1.0]
    post(sim, "/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, status=400)
    classes = post(sim, "/v1/classify", {"input": ["a", "b"]})["data"]
    assert [entry["index"] for entry in classes] == [0, 1]
    assert sum(classes[0]["probs"]) == pytest.approx(1)


def test_a_text_is_flagged_for_what_it_names(sim: Sim) -> None:
    found = post(sim, "/v1/moderations", {"input": ["a lamb", "so much violence"]})["results"]
    assert [result["flagged"] for result in found] == [False, True]
    assert len(found[1]["categories"]) == 13
    parts = [{"type": "text", "text": "hate"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    [result] = post(sim, "/v1/moderations", {"input": parts})["results"]
    assert result["categories"]["hate"]


def test_many_texts_need_no_more_memory_than_the_longest(sim: Sim) -> None:
    found = post(sim, "/v1/embeddings", {"input": ["one two three"] * 500})
    assert found["usage"]["prompt_tokens"] == 1500
    assert len(found["data"]) == 500
    post(sim, "/v1/embeddings", {"input": "x " * 300}, status=400)


def test_counting_tokens_agrees_with_the_bill(sim: Sim) -> None:
    messages = [{"role": "user", "content": "count me, please"}]
    counted = post(sim, "/tokenize", {"messages": messages})
    billed = post(sim, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert counted["count"] == billed["usage"]["prompt_tokens"] == len(counted["tokens"])
    assert post(sim, "/tokenize", {"prompt": "a b c"})["count"] == 3


def test_speech_is_a_wav_that_is_heard_again(sim: Sim) -> None:
    with sim.send({"input": "hello there, 你", "voice": "x"}, path="/v1/audio/speech") as response:
        sound = response.read()
        assert (response.status, response.headers["content-type"]) == (200, "audio/wav")
    assert sound[:4] == b"RIFF"
    assert struct.unpack("<I", sound[4:8])[0] == len(sound) - 8
    status, body, kind = upload(sim, "/v1/audio/transcriptions", {"model": "m"}, {"file": sound})
    assert (status, kind) == (200, "application/json")
    heard = json.loads(body)
    assert heard["text"] == "hello there, 你"
    assert heard["usage"] == {"type": "duration", "seconds": 1}
    _, body, kind = upload(sim, "/v1/audio/translations", {"response_format": "vtt"}, {"file": sound})
    assert body.startswith(b"WEBVTT\n\n00:00:00.000 --> 00:00:00.140\n")
    assert kind.startswith("text/vtt")
    assert upload(sim, "/v1/audio/transcriptions", {}, {"file": b"\r\n\0\xff no sound\n"})[0] == 400
    assert sim.records("form")[0]["body_keys"] == ["model", "file"]


def colour_of(picture: bytes) -> tuple[int, int, bytes]:
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    at = picture.index(b"IDAT")
    length = struct.unpack(">I", picture[at - 4 : at])[0]
    rows = zlib.decompress(picture[at + 4 : at + 4 + length])
    assert len(rows) == (width * 3 + 1) * height
    return width, height, rows[1:4]


def test_pictures_are_pngs_that_follow_from_their_prompt(sim: Sim) -> None:
    data = post(sim, "/v1/images/generations", {"prompt": "a cat", "n": 2, "size": "16x8"})["data"]
    first, second = (colour_of(base64.b64decode(entry["b64_json"])) for entry in data)
    assert (first[:2], first[2] != second[2]) == ((16, 8), True)
    post(sim, "/v1/images/generations", {"prompt": "x", "size": "9999x1"}, status=400)
    status, body, _ = upload(sim, "/v1/images/edits", {"prompt": "a cat", "size": "16x8"}, {"image": b"\x89PNG\r\n"})
    assert status == 200
    assert colour_of(base64.b64decode(json.loads(body)["data"][0]["b64_json"]))[2] not in (first[2], second[2])


def test_tensors_come_back(sim: Sim) -> None:
    tensor = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2], [3, 4]]}
    found = post(sim, "/v2/models/m/infer", {"id": "7", "inputs": [tensor]})
    assert found == {"model_name": "m", "model_version": "1", "id": "7", "outputs": [tensor]}
    post(sim, "/v2/models/m/infer", {"inputs": [{**tensor, "shape": [3]}]}, status=400)
    post(sim, "/v2/models/m/infer", {"inputs": [tensor], "outputs": [{"name": "y"}]}, status=400)
    post(sim, "/v2/models/other/infer", {"inputs": [tensor]}, status=404)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "q", "documents": ["a [[sim: http_error=503]]"]}),
        ("/v1/audio/speech", {"input": "a [[sim: http_error=503]]"}),
        ("/v1/images/generations", {"prompt": "a [[sim: http_error=503]]"}),
        ("/v1/moderations", {"input": "a [[sim: http_error=503]]"}),
    ],
)
def test_faults_hit_every_route(sim: Sim, path: str, body: object) -> None:
    post(sim, path, body, status=503)


def test_log_probabilities_follow_the_text_streamed_or_not(sim: Sim) -> None:
    body = {"messages": [{"role": "user", "content": "a b c"}], "logprobs": True, "top_logprobs": 2}
    whole = post(sim, "/v1/chat/completions", body)["choices"][0]
    entries = whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == whole["message"]["content"]
    with sim.send({**body, "stream": True}) as response:
        chunks = [json.loads(line[6:]) for line in response.read().split(b"\n\n") if line.startswith(b"data: {")]
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == entries
    text = post(sim, "/v1/completions", {"prompt": "d e", "logprobs": 1, "echo": True})["choices"][0]
    assert "".join(text["logprobs"]["tokens"]) == text["text"] == "d ed e"
    assert text["logprobs"]["token_logprobs"][0] is None
    assert text["logprobs"]["text_offset"] == [0, 1, 3, 4]
