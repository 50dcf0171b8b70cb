"""S1: a link to a picture leads nowhere near this machine, however it is spelled, and no engine follows one."""

from collections.abc import Iterator

import pytest
from tests.support.canary import Canary
from tests.support.yard import Yard

pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")

from tests.support.smallmodels import text_direction


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder = text_direction(tmp_path_factory.mktemp("model"))
    with Yard(tmp_path_factory.mktemp("yard"), {"gateway.image_links": "true"}) as started:
        order = {
            "model_name": "seeing",
            "framework": "onnx",
            "model_artifact": f"file://{folder}",
            "options": {"task": "image_classify"},
            "hardware": {"min_replicas": 1, "max_replicas": 1},
        }
        assert started.call("POST", "/v1/models/deploy", order).status == 202
        started.wait_ready("seeing")
        yield started


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    running = Canary()
    yield running
    running.close()


@pytest.mark.parametrize("scheme", ["http", "https", "HTTP"])
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0.0.0.0",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "user@127.0.0.1",
        "169.254.169.254",
    ],
)
def test_no_picture_is_fetched_from_a_neighbour(yard: Yard, canary: Canary, scheme: str, host: str) -> None:
    url = f"{scheme}://{host}:{canary.port}/x.png"
    body = {"model": "seeing", "input": [{"type": "image_url", "image_url": {"url": url}}]}
    reply = yard.call("POST", "/v1/classify", body)
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "link_not_fetched", "input[0].image_url.url")
    assert canary.hits == 0


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://example.com/x.png", "//example.com/x.png", "x.png", ""])
def test_only_https_is_fetched(yard: Yard, url: str) -> None:
    body = {"model": "seeing", "input": [{"type": "image_url", "image_url": {"url": url}}]}
    assert yard.call("POST", "/v1/classify", body).status == 400
