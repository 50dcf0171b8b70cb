"""/v1/reconciliation, /v1/exports and /v1/organization/gpu-costs: for admins, and true."""

import json

import pytest
from tests.support.journals import intent_of, named, settle_of, write_run
from tests.support.management import Management

from modelyard.cli.costs import _show_free
from modelyard.cli.status import _problems, _sink
from modelyard.config.books import StripeConfig
from modelyard.control.books import Books
from modelyard.domain.books import MeterEvent, MeterStatus, ReplicaHour
from modelyard.domain.nodes import Accelerator, Node, NodeSeen
from modelyard.domain.tenants import Identity, Tenant
from modelyard.metering.delivery import Delivery
from modelyard.metering.events import SinkStatus
from modelyard.metering.stripe_reports import StripeReports
from modelyard.stores import JournalPosition
from modelyard.stores.stripe import StripeMeters

HOUR_S = 3600
USD = 1_000_000_000
PATHS = [
    ("GET", "/v1/reconciliation"),
    ("POST", "/v1/reconciliation"),
    ("GET", "/v1/exports"),
    ("GET", "/v1/organization/gpu-costs"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_they_are_of_all_tenants_and_so_for_admins_only(
    api: Management, manager: Identity, method: str, path: str
) -> None:
    answer = await api.call(manager, method, path, {} if method == "POST" else None)
    assert answer.status_code == 403


async def books_of(api: Management) -> None:
    root = api.context.data.journal
    write_run(root, "gateway-0", named("a", 20), api.clock)
    await Delivery(root, api.context.usage, 0.01).drain()


async def test_books_that_agree_balance(api: Management, admin: Identity) -> None:
    await books_of(api)
    answer = (await api.call(admin, "GET", "/v1/reconciliation")).json()
    assert answer["balances"] is True
    assert [(one["name"], one["found"]) for one in answer["checks"]] == [
        ("journal and ledger", 0),
        ("rows and roll-ups of the ledger", 0),
        ("ledger and engines", 0),
    ]
    assert answer["checks"][0]["compared"] == 20


async def test_the_stream_tells_each_comparison_and_then_the_whole(api: Management, admin: Identity) -> None:
    await books_of(api)
    line = {"day": "", "model": "gpt-x", "prompt_tokens": 5, "completion_tokens": 5, "nanousd": 9}
    answer = await api.call(admin, "POST", "/v1/reconciliation", {"invoice": [line]})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(one.removeprefix("data: ")) for one in answer.text.splitlines() if one.startswith("data: ")]
    assert [one["type"] for one in events] == ["checking", "checked"] * 4 + ["result"]
    assert events[-1]["result"]["balances"] is False
    (difference,) = events[-2]["check"]["differences"]
    assert (difference["subject"], difference["tokens"]) == ("gpt-x", -10)


@pytest.mark.parametrize("query", ["since=2&until=1", "until=500000000&since=0", "since=x", "tolerance=2"])
async def test_times_that_make_no_sense_are_refused(api: Management, admin: Identity, query: str) -> None:
    assert (await api.call(admin, "GET", f"/v1/reconciliation?{query}")).status_code == 400


async def test_costs_have_their_customers_margin_and_waste(api: Management, admin: Identity) -> None:
    await books_of(api)
    hour = int(api.clock.unix_s() // HOUR_S * HOUR_S)
    booked = ReplicaHour(hour, "rep-1", "ep-1", "ten-a", "smol", "h100", 1800, 1800, 450, 1800, 2 * USD)
    await api.context.books.store.put_lives([], [booked])
    answer = (await api.call(admin, "GET", "/v1/organization/gpu-costs")).json()
    assert (answer["cost_usd"], answer["accelerator_hours"], answer["utilisation"]) == ("2", 0.5, 0.25)
    (endpoint,) = answer["endpoints"]
    assert (endpoint["idle_nanousd"], endpoint["tokens"]) == (1_500_000_000, 600)
    assert endpoint["margin_nanousd"] == endpoint["revenue_nanousd"] - 2 * USD
    assert answer["free"] == [], "nobody has looked at the fleet"
    (customer,) = answer["customers"]
    assert (customer["tenant_id"], customer["cost_nanousd"]) == ("ten-a", 2 * USD)


async def test_what_has_no_replica_now_is_told_by_the_hour(
    api: Management, admin: Identity, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node("n", (Accelerator(0, "h100", 1), Accelerator(1, "h100", 1)), price_nanousd=4 * USD)
    api.context.nodes = lambda: {"n": NodeSeen(node=node)}
    answer = (await api.call(admin, "GET", "/v1/organization/gpu-costs")).json()
    (free,) = answer["free"]
    assert (free["accelerator"], free["total"], free["free"], free["hourly_nanousd"]) == ("h100", 2, 2, 8 * USD)
    assert answer["cost_usd"] == "0"
    _show_free(answer["free"])
    assert "2.0 of 2 h100 have no replica now" in capsys.readouterr().out


async def test_alarms_of_sinks_are_on_the_page_of_the_status_for_admins(
    api: Management, admin: Identity, manager: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarm = SinkStatus(sink="kafka", alarm="Kafka has been behind for 20 minutes")
    monkeypatch.setattr(Books, "statuses", lambda _: [alarm])
    seen = (await api.call(admin, "GET", "/v1/status")).json()
    assert [(one["sink"], one["alarm"]) for one in seen["sinks"]] == [("kafka", alarm.alarm)]
    assert (await api.call(manager, "GET", "/v1/status")).json()["sinks"] is None
    balance = (await api.call(admin, "GET", "/v1/reconciliation")).json()
    assert balance["balances"] is False
    assert balance["checks"][-1]["differences"][0]["what"] == alarm.alarm
    assert _problems(seen) == ["no gateway is connected", "Kafka needs somebody"]
    assert _sink(seen["sinks"][0]) == alarm.alarm


async def test_what_was_billed_by_hand_needs_a_stripe_and_a_name(
    api: Management, admin: Identity, manager: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = "/v1/exports/stripe/billed-by-hand", {"identifiers": ["modelyard-x"]}
    assert (await api.call(manager, "POST", path, body)).status_code == 403
    assert (await api.call(admin, "POST", path, body)).status_code == 409

    async def tenants() -> list[Tenant]:
        return []

    store = api.context.books.store
    meters = StripeMeters("sk_test_x")
    stripe = StripeReports(books=store, meters=meters, settings=StripeConfig(), clock=api.clock, tenants=tenants)
    monkeypatch.setattr(api.context, "books", Books(store, stripe=stripe))
    answer = await api.call(admin, "POST", path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "identifiers")
    event = MeterEvent("ten-a", "modelyard_cost", HOUR_S, 0, 7, 1.0, MeterStatus.ALARM)
    await store.add_meter_events([event])
    answer = await api.call(admin, "POST", path, {"identifiers": [event.identifier]})
    assert (answer.status_code, answer.json()["data"][0]["sink"]) == (200, "stripe")
    (noted,) = await store.meter_events(since=0, until=2**40)
    assert noted.status is MeterStatus.BY_HAND
    await meters.close()


async def test_without_sinks_none_is_shown(api: Management, admin: Identity) -> None:
    assert (await api.call(admin, "GET", "/v1/exports")).json()["data"] == []


async def test_a_settlement_that_the_ledger_changed_is_a_difference(api: Management, admin: Identity) -> None:
    await books_of(api)
    now = api.clock.unix_s() + 5
    api.clock.advance(5)
    write_run(api.context.data.journal, "gateway-0", [], api.clock, pairs=[(intent_of("x", now), settle_of("x", now))])
    # The ledger learns of it otherwise than the journal has it, and once it has a row nothing changes that.
    await api.context.usage.apply(
        [intent_of("x", now), settle_of("x", now, completion=19)], JournalPosition("elsewhere", "1.journal", 1)
    )
    await Delivery(api.context.data.journal, api.context.usage, 0.01).drain()
    answer = (await api.call(admin, "GET", "/v1/reconciliation")).json()
    assert answer["balances"] is False
    assert answer["checks"][0]["differences"][0]["request_ids"] == ["x"]
    assert answer["checks"][0]["tokens"] == 1
