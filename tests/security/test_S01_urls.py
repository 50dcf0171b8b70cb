"""S1: the one URL that a caller may give, of a webhook, leads nowhere near this machine, however it is spelled."""

import pytest
from tests.security.conftest import Ask
from tests.support.canary import Canary
from tests.support.refusals import assert_refused
from tests.support.yard import Yard

CHAT = "/v1/chat/completions"


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
        "user@127.0.0.1",
        "example.com@127.0.0.1",
        "127.0.0.1%2f@example.com",
        "\xe2\x91\xa0\xe2\x91\xa1\xe2\x91\xa6.0.0.1",
    ],
)
def test_no_webhook_leads_to_a_neighbour(
    yard: Yard, model: str, ask: Ask, canary: Canary, scheme: str, host: str
) -> None:
    url = f"{scheme}://{host}:{canary.port}/in"
    body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    answer = ask(CHAT, body, headers=[("Prefer", "respond-async"), ("X-Modelyard-Webhook", url)])
    assert_refused(answer, status=400, param="X-Modelyard-Webhook", code="invalid_value", host=host.strip("[]"))
    assert canary.hits == 0
    assert yard.get("/v1/requests")["data"] == [], "nothing is kept of it"


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "gopher://127.0.0.1:70/", "ftp://example.com/", "//example.com/", "example.com", " "]
)
def test_only_https_is_a_webhook(model: str, ask: Ask, url: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    answer = ask(CHAT, body, headers=[("Prefer", "respond-async"), ("X-Modelyard-Webhook", url)])
    assert_refused(answer, status=400, param="X-Modelyard-Webhook", code="invalid_value")
