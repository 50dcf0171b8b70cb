"""Small models through the whole platform: deployed from a folder, called with SDKs and plain HTTP, billed."""

import base64
import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from tests.support.origin import Origin, origin
from tests.support.yard import Reply, Yard

pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
pytest.importorskip("onnx", reason="needs the extra 'convert'")

from tests.support.smallmodels import converted, minilm_onnx, png_line, text_direction, tiny_bert

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
SETTINGS = {"gateway.image_links": "true", "fetch.private_networks": "127.0.0.1/32"}


@pytest.fixture(scope="module")
def web() -> Iterator[Origin]:
    with origin() as running:
        running.put("/line.png", png_line(), headers={"content-type": "image/png"})
        running.put("/page.html", b"<html>", headers={"content-type": "text/html"})
        running.put("/large.png", bytes(11 * 1024 * 1024), headers={"content-type": "image/png"})
        yield running


def deploy(yard: Yard, name: str, folder: Path, options: dict[str, object]) -> None:
    order = {
        "model_name": name,
        "framework": "onnx",
        "model_artifact": f"file://{folder}",
        "options": options,
        "hardware": {"min_replicas": 1, "max_replicas": 1},
    }
    reply = yard.call("POST", "/v1/models/deploy", order)
    assert reply.status == 202, reply.body


@pytest.fixture(scope="module", autouse=True)
def _deployed(yard: Yard, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("models")
    tagger = converted(tiny_bert(root / "source", "BertForTokenClassification", labels=TAGS), root / "tagger")
    deploy(yard, "minilm", minilm_onnx(), {"task": "embeddings"})
    deploy(yard, "tagger", tagger, {"task": "token_classify"})
    deploy(yard, "upside", text_direction(root / "upside"), {"task": "image_classify"})
    for name in ("minilm", "tagger", "upside"):
        yard.wait_ready(name)


def classify(yard: Yard, url: str) -> Reply:
    body = {"model": "upside", "input": [{"type": "image_url", "image_url": {"url": url}}]}
    return yard.call("POST", "/v1/classify", body)


def test_the_sdk_embeds_and_is_billed_by_the_token(yard: Yard) -> None:
    with OpenAI(base_url=f"{yard.url}/v1", api_key=yard.new_key(), max_retries=0, timeout=15) as client:
        raw = client.embeddings.with_raw_response.create(model="minilm", input=["one text", "another"], dimensions=32)
    found = raw.parse()
    assert [len(one.embedding) for one in found.data] == [32, 32]
    row = yard.row_of(raw.headers["x-request-id"])
    assert row["prompt_tokens"] == found.usage.prompt_tokens == 7


def test_documents_are_ranked(yard: Yard) -> None:
    body = {"model": "minilm", "query": "What do cats drink?", "documents": ["Shares fell.", "Cats like milk."]}
    reply = yard.call("POST", "/v2/rerank", body)
    assert [one["index"] for one in reply.json()["results"]] == [1, 0]


def test_a_text_is_tagged(yard: Yard) -> None:
    reply = yard.call("POST", "/v1/token_classify", {"model": "tagger", "input": "Anna lives in New York."})
    assert reply.status == 200, reply.body
    [one] = reply.json()["data"]
    assert set(one["entities"][0]) == {"entity_group", "score", "word", "start", "end"}
    assert yard.row_of(reply.headers["x-request-id"])["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"] == 8


def test_a_picture_comes_as_data_as_a_form_and_by_a_link(yard: Yard, web: Origin) -> None:
    data = classify(yard, "data:image/png;base64," + base64.b64encode(png_line()).decode())
    assert data.status == 200, data.body
    [wanted] = data.json()["data"]
    assert wanted["label"] == "upright"
    link = classify(yard, f"{web.url}/line.png")
    assert link.json()["data"] == [wanted], link.body
    row = yard.row_of(link.headers["x-request-id"])
    assert (row["unit"], row["units_micro"]) == ("images", 1_000_000)
    body = (
        b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nupside\r\n--x\r\ncontent-disposition: form-data;'
    )
    body += b' name="file"; filename="line.png"\r\ncontent-type: image/png\r\n\r\n' + png_line() + b"\r\n--x--\r\n"
    connection = http.client.HTTPConnection("127.0.0.1", yard.port, timeout=10)
    headers = {"Authorization": f"Bearer {yard.admin_key}", "Content-Type": "multipart/form-data; boundary=x"}
    connection.request("POST", "/v1/classify", body, headers)
    assert json.loads(connection.getresponse().read())["data"] == [wanted]
    connection.close()


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/gone.png", "404"), ("/page.html", "content type"), ("/large.png", "larger")],
)
def test_a_link_that_leads_to_no_picture_is_refused(yard: Yard, web: Origin, path: str, reason: str) -> None:
    reply = classify(yard, web.url + path)
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "link_not_fetched", "input[0].image_url.url")
    assert reason in error["message"]


def test_what_the_model_is_not_for_is_refused(yard: Yard) -> None:
    reply = yard.call("POST", "/v1/classify", {"model": "minilm", "input": "x"})
    assert (reply.status, reply.json()["error"]["code"]) == (400, "route_unsupported")
    reply = yard.call("POST", "/v1/classify", {"model": "upside", "input": "a text"})
    assert reply.status == 400


def test_tensors_go_through(yard: Yard) -> None:
    ids = {"shape": [1, 3], "datatype": "INT64"}
    inputs = [
        {"name": "input_ids", "data": [101, 7592, 102], **ids},
        {"name": "attention_mask", "data": [1, 1, 1], **ids},
        {"name": "token_type_ids", "data": [[0, 0, 0]], **ids},
    ]
    reply = yard.call("POST", "/v2/models/minilm/infer", {"inputs": inputs})
    assert reply.status == 200, reply.body
    assert reply.json()["outputs"][0]["shape"] == [1, 3, 384]
