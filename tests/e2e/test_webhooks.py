"""Webhooks by the command line, on real processes: from the first event to a replay."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from standardwebhooks import Webhook as Verifier
from tests.support.load import chat
from tests.support.receivers import Receiver, receiving
from tests.support.refusals import post
from tests.support.waiting import eventually
from tests.support.yard import Yard

from modelyard.cli.main import main

Run = Callable[..., str]


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder: Path = tmp_path_factory.mktemp("yard")
    settings = folder / "modelyard.toml"
    settings.write_text('[fetch]\nprivate_networks = ["127.0.0.0/8"]\n')
    with Yard(folder, options=("--config", str(settings))) as running:
        yield running


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture
def run(yard: Yard, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``modelyard webhooks`` and return what it printed."""

    def call(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        ended = main(["webhooks", *arguments, "--data-dir", str(yard.data)])
        printed = capsys.readouterr()
        assert ended == code, printed.err
        return printed.out if code == 0 else printed.err

    return call


def types(receiver: Receiver) -> list[str]:
    return [json.loads(body)["type"] for _, body in receiver.got]


def page_that_says(yard: Yard, words: str) -> str:
    """Return the metrics if they say so, else nothing."""
    page = yard.call("GET", "/metrics").body.decode()
    return page if words in page else ""


def test_from_the_first_event_to_a_replay(yard: Yard, run: Run, receiver: Receiver) -> None:
    assert run() == ""
    new = json.loads(run("add", receiver.url, "--on", "deployment.*", "--on", "request.*", "--json"))
    webhook_id = new["id"]
    assert run("-q").split() == [webhook_id]

    assert "Taken: HTTP 200" in run("test", webhook_id)
    receiver.answers, receiver.body = [503], b"\x1b[31mnot now"
    assert "did not take it: HTTP 503: [31mnot now" in run("test", webhook_id, code=1)
    receiver.body = b""

    yard.deploy("sim", options={"slots": 4, "ttft_ms": 1, "itl_ms": 1})
    eventually(lambda: "deployment.ready" in types(receiver), 30, "the deployment is told")
    answer = post(yard, "/v1/chat/completions", chat("sim", "hello"), headers=[("Prefer", "respond-async")])
    eventually(lambda: "request.succeeded" in types(receiver), 30, "the end of the request is told")
    headers, body = receiver.got[-1]
    assert Verifier(new["secret"]).verify(body, headers)["data"]["id"] == answer.json()["id"]
    assert "hello" not in body.decode()

    shown = eventually(
        lambda: found if "pending" not in (found := run("deliveries", webhook_id)) else None, 20, "all is known"
    )
    assert [line.split()[1] for line in shown.splitlines()[1:]] == [
        "request.succeeded",
        "deployment.ready",
        "webhook.test",
        "webhook.test",
    ]
    assert "webhook.test" in run("deliveries", webhook_id, "--status", "failed")
    ready = run("deliveries", webhook_id, "-q").split()[1]

    before = len(receiver.got)
    run("redeliver", webhook_id, ready)
    eventually(lambda: len(receiver.got) == before + 1, 30, "it comes again")
    assert types(receiver)[-1] == "deployment.ready"
    eventually(lambda: "pending" not in run("deliveries", webhook_id), 20, "it is known")
    assert run("replay", webhook_id, "--since", "1h", "-q").strip() == "0"
    assert run("replay", webhook_id, "--since", "1h", "--delivered-too", "-q").strip() == "2"
    eventually(lambda: len(receiver.got) == before + 3, 30, "both come again")
    assert len({headers["webhook-id"] for headers, _ in receiver.got[2:]}) == 2, "under their ids"
    run("redeliver", webhook_id, "dlv_none", code=3)
    # Each counts as waiting until its receiver's answer is noted.
    page = eventually(lambda: page_that_says(yard, "\nmodelyard_webhook_waiting 0.0"), 20, "nothing waits")
    assert 'modelyard_webhook_deliveries_total{outcome="delivered"}' in page
    assert "\nmodelyard_requests_total{" in page, "beside the gateway's"


def test_a_webhook_is_changed_rotated_and_removed(yard: Yard, run: Run, receiver: Receiver) -> None:
    secret = run("add", "http://127.0.0.1:9/in", "--on", "budget.*", "--description", "money", "-q").strip()
    webhook_id = run("-q").split()[-1]
    new = run("rotate", webhook_id, "--overlap", "1h", "-q").strip()
    assert new.startswith("whsec_")
    assert new != secret
    assert run("set", webhook_id, "--to", receiver.url, "--on", "*", "-q").strip() == "enabled"
    shown = run("show", webhook_id)
    assert "Old secret signs until" in shown
    assert receiver.url in shown
    assert "money" in shown
    run("test", webhook_id)
    headers, body = receiver.got[0]
    for one in (secret, new):
        Verifier(one).verify(body, headers)
    assert run("set", webhook_id, "--disable", "-q").strip() == "disabled"
    assert "Its owner disabled it" in run("show", webhook_id)
    assert "Enable it first" in run("replay", webhook_id, "--since", "1h", code=1)
    assert "Nothing to change" in run("set", webhook_id, code=2)
    assert "There are:" in run("set", webhook_id, "--on", "money.gone", code=2)
    run("rm", webhook_id)
    run("show", webhook_id, code=3)


def test_no_webhook_leads_to_a_neighbour(run: Run) -> None:
    for url in ("https://169.254.169.254/", "http://10.0.0.1/", "https://[::ffff:10.0.0.1]/", "file:///etc/passwd"):
        assert "Invalid 'url'" in run("add", url, code=2), url


def test_secrets_are_in_no_log(yard: Yard, run: Run, receiver: Receiver) -> None:
    secret = run("add", receiver.url, "-q").strip()
    run("test", run("-q").split()[-1])
    for file in (yard.data / "logs").glob("*.log"):
        assert secret not in file.read_text()
