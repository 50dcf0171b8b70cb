"""S1: no artifact leads to a neighbour of the platform, however its URL is spelled; no file of the host to a tenant."""

import pytest
from tests.support.canary import Canary
from tests.support.refusals import assert_refused, post
from tests.support.wire import Answer
from tests.support.yard import Yard

DEPLOY = "/v1/models/deploy"


@pytest.fixture(scope="module")
def tenant(yard: Yard) -> str:
    """Return a key of a tenant that may deploy."""
    made = yard.call("POST", "/v1/tenants", {"name": "acme"}).json()
    reply = yard.call("POST", "/v1/keys", {"name": "m", "scopes": ["manage"], "tenant_id": made["id"]})
    return str(reply.json()["key"])


def deploy(yard: Yard, artifact: str, key: str) -> Answer:
    return post(yard, DEPLOY, {"model_name": "m", "framework": "llamacpp", "model_artifact": artifact}, key=key)


@pytest.mark.parametrize("scheme", ["http", "https", "HTTPS"])
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "0",
        "0.0.0.0",
        "localhost",
        "LOCALHOST.",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "192.0.0.8",
        "user@127.0.0.1",
        "example.com@127.0.0.1",
        "①②⑦.⓪.⓪.①",
        "127。0。0。1",
    ],
)
def test_no_artifact_leads_to_a_neighbour(yard: Yard, tenant: str, canary: Canary, scheme: str, host: str) -> None:
    answer = deploy(yard, f"{scheme}://{host}:{canary.port}/model.gguf", tenant)
    assert_refused(answer, status=400, param="model_artifact", code="invalid_value", host=host.strip("[]"))
    assert canary.hits == 0
    assert yard.get("/v1/endpoints")["data"] == [], "nothing was stored"


@pytest.mark.parametrize(
    "artifact",
    [
        "file:///etc/passwd",
        "/etc/passwd",
        "FILE:///etc/passwd",
        "file://localhost/etc/passwd",
        "s3://models/private/model.gguf",
        "s3://models/private/",
        "S3://models/private/x.gguf",
        "gopher://127.0.0.1:70/x",
        "ftp://example.com/x",
        "data:text/plain,x",
        "//example.com/x",
        "oci://registry/x",
        "../../etc/passwd",
        "",
        "hf://org/../../etc",
        "pypi:../../x",
    ],
)
def test_what_the_platform_reads_with_its_own_rights_is_not_for_tenants(yard: Yard, tenant: str, artifact: str) -> None:
    answer = deploy(yard, artifact, tenant)
    assert_refused(answer, status=400, param="model_artifact", code="invalid_value")
    assert "root:" not in str(bytes(answer.body))
    assert yard.get("/v1/endpoints")["data"] == []
