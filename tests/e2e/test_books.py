"""A platform whose books go to Kafka and Stripe: the command line says that they agree, or which request does not."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.test_cli_commands import out, run
from tests.support.kafka import MockKafka, mock_kafka
from tests.support.processes import holders_of
from tests.support.stripe_stub import KEY, stripe_stub
from tests.support.waiting import eventually
from tests.support.yard import Yard

from modelyard.clock import SystemClock

WITHIN_S = 90.0
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "count to a hundred please"}], "max_tokens": 40}


@pytest.fixture(scope="module")
def kafka() -> Iterator[MockKafka]:
    with mock_kafka() as cluster:
        cluster.add_topic("modelyard.usage", 2)
        yield cluster


@pytest.fixture(scope="module")
def books(kafka: MockKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder = tmp_path_factory.mktemp("books")
    with stripe_stub(SystemClock.unix_s) as stub:
        settings = {
            "kafka.brokers": ",".join(kafka.brokers),
            "kafka.interval_s": 0.1,
            "stripe.enabled": "true",
            "stripe.api_base": stub.url,
            "stripe.interval_s": 0.5,
        }
        secrets = folder / "data" / "secrets"
        secrets.mkdir(mode=0o700, parents=True)
        (secrets / "stripe").write_text(KEY)
        with Yard(folder, settings) as yard:
            yard.deploy("sim")
            yield yard


def serve_some(yard: Yard) -> None:
    """Answer some requests, and some whose client leaves in the middle."""
    for _ in range(6):
        assert yard.call("POST", "/v1/chat/completions", CHAT).status == 200
    for _ in range(3):
        connection = yard._connection(10.0)
        with contextlib.closing(connection):
            body = json.dumps({**CHAT, "stream": True, "max_tokens": 2000, "ignore_eos": True})
            headers = {"authorization": f"Bearer {yard.admin_key}", "content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            assert connection.getresponse().readline()
    eventually(yard.is_booked, 40.0, "all of them are settled")


def test_all_books_of_a_running_platform_agree(books: Yard, kafka: MockKafka) -> None:
    serve_some(books)
    for pid in books.plane_pids("control"):
        books.kill(pid)
    eventually(lambda: books.call("GET", "/v1/status").status == 200, WITHIN_S, "the controller is back")
    serve_some(books)
    told = eventually(
        lambda: text if "ledger and engines: agrees (1 replicas)" in (text := out(books, "reconcile")) else None,
        WITHIN_S,
        "the engine's counters are known",
    )
    assert "journal and ledger: agrees (18 requests)" in told
    assert "ledger and Stripe: agrees" in told
    assert "The books balance" in told
    events = kafka.events("modelyard.usage", at_least=18)
    rows = {row["request_id"]: row for row in books.query("SELECT * FROM inference_requests")}
    assert {key for key, _ in events} == rows.keys()
    assert all(one["data"]["cost_nanousd"] == rows[key]["cost_nanousd"] for key, one in events)
    assert "events sent" in out(books, "status")
    sinks = {one["sink"]: one for one in books.get("/v1/exports")["data"]}
    assert {name: one["alarm"] for name, one in sinks.items()} == {"kafka": "", "stripe": ""}


def test_costs_name_hours_and_price_of_a_million_tokens(books: Yard) -> None:
    report = eventually(
        lambda: found if (found := json.loads(out(books, "costs", "--json")))["endpoints"] else None,
        WITHIN_S,
        "replicas are booked",
    )
    (cost,) = [one for one in report["endpoints"] if one["model"] == "sim"]
    assert cost["accelerator"] == "cpu"
    assert cost["ready_hours"] > 0
    assert "PER 1M TOKENS" in out(books, "costs")
    assert "CUSTOMER" in out(books, "costs", "--by", "customer")


def test_an_invoice_that_says_more_is_told_with_exit_code_1(books: Yard, tmp_path: Path) -> None:
    file = tmp_path / "invoice.csv"
    file.write_text("model,input_tokens,output_tokens,cost\ngpt-x,1000,500,1.50\n")
    done = run(books, "reconcile", "--invoice", str(file))
    assert done.returncode == 1
    assert "gpt-x: the ledger has 0 prompt and 0 generated tokens, the invoice 1000 and 500" in done.stdout
    assert "-1500 tokens, -$1.50" in done.stdout
    assert "do not balance" in done.stderr
    file.write_text("month,total\n11,1.50\n")
    done = run(books, "reconcile", "--invoice", str(file))
    assert done.returncode == 2
    assert "no column for model" in done.stderr


def test_the_key_of_stripe_is_shown_nowhere(books: Yard) -> None:
    assert holders_of(KEY.encode(), books.data) == [books.data / "secrets" / "stripe"]
    assert KEY not in books.output.read_text()


def test_a_row_that_somebody_changed_is_named_with_exit_code_1(books: Yard) -> None:
    """Last: these books do not balance any more."""
    (row,) = books.query("SELECT request_id FROM inference_requests WHERE status = 'success' LIMIT 1")
    with contextlib.closing(sqlite3.connect(books.data / "control.sqlite", timeout=10)) as database, database:
        database.execute(
            "UPDATE inference_requests SET completion_tokens = completion_tokens - 7 WHERE request_id = ?",
            (row["request_id"],),
        )
    done = run(books, "reconcile", "--json")
    assert done.returncode == 1
    result = json.loads(done.stdout)
    check = next(one for one in result["checks"] if one["name"] == "journal and ledger")
    assert [one["request_ids"] for one in check["differences"]] == [[row["request_id"]]]
    assert check["tokens"] == 7
