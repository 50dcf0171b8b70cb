"""S2: a redirect of an artifact is judged like a URL of its own, at the look and at the fetch, and reaches no other."""

from collections.abc import Iterator

import pytest
from tests.support.canary import Canary
from tests.support.origin import Origin, origin
from tests.support.refusals import post
from tests.support.waiting import eventually
from tests.support.yard import Yard

SETTINGS = {"fetch.private_networks": "127.0.0.1/32", "fetch.part_bytes": 65_536}
GGUF = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(300_000)


@pytest.fixture(scope="module")
def web() -> Iterator[Origin]:
    with origin() as running:
        yield running


def order(web: Origin, path: str, name: str = "m") -> dict[str, object]:
    return {"model_name": name, "framework": "llamacpp", "model_artifact": f"{web.url}{path}"}


def targets(canary: Canary, port: int) -> list[str]:
    return [
        "http://169.254.169.254/latest/meta-data/iam/security-credentials/",
        "file:///etc/passwd",
        f"http://127.0.0.1:{canary.port}/other-port",
        f"http://127.0.0.2:{port}/other-address",
        f"http://localhost.:{canary.port}/",
        f"http://[::1]:{canary.port}/",
        f"//2130706433:{canary.port}/x",
        "gopher://127.0.0.1/x",
    ]


@pytest.mark.parametrize("number", range(8))
def test_redirect_at_the_look_leads_nowhere(yard: Yard, web: Origin, canary: Canary, number: int) -> None:
    target = targets(canary, web.port)[number]
    web.put("/model.gguf", b"", redirect=target)
    answer = post(yard, "/v1/models/deploy", order(web, "/model.gguf"))
    assert answer.status == 400, bytes(answer.body)
    assert answer.json()["error"]["param"] == "model_artifact"
    assert canary.hits == 0
    assert "root:" not in bytes(answer.body).decode()


def test_redirect_that_appears_after_the_look_leads_nowhere(yard: Yard, web: Origin, canary: Canary) -> None:
    served = web.put("/late.gguf", GGUF)

    def turn(seen: object) -> None:
        if sum(one.path == "/late.gguf" for one in web.seen) > 3:
            served.redirect = f"http://127.0.0.1:{canary.port}/secret"

    served.on_request = turn
    assert post(yard, "/v1/models/deploy", order(web, "/late.gguf", "late")).status == 202

    def failure() -> str:
        return str(yard.get("/v1/endpoints/late")["failure"] or "")

    assert "redirects to another port" in eventually(failure, 30, "the fetch failed")
    assert canary.hits == 0
    assert not list((yard.data / "artifacts" / "sha256").glob("*"))


def test_endless_redirects_end(yard: Yard, web: Origin) -> None:
    web.put("/round.gguf", b"", redirect="/round.gguf")
    before = len(web.seen)
    answer = post(yard, "/v1/models/deploy", order(web, "/round.gguf"))
    assert answer.status == 400
    assert "redirects" in answer.json()["error"]["message"]
    assert len(web.seen) - before == 6, "the first, and five that were followed"
